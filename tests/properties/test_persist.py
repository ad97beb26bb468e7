"""Any order of writes, restores, damage and restarts, against a model that only compares lists of tokens."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from quickdraft.state.segment_file import Segment, next_key, root_key
from quickdraft.state.tokens import token_bytes
from tests.support.disk import KEY, POISON, Memory, file_bytes, opened, segment_files

BUDGET = file_bytes(256, Memory()) + file_bytes(150, Memory())
TAIL = st.lists(st.integers(0, 1), max_size=20)


@dataclass(eq=False)
class Stored:
    """A segment as the model sees it: all tokens up to its end, and where it begins."""

    tokens: list[int]
    start: int
    used: tuple[int, int]
    damaged: set[int] = field(default_factory=set)  # token blocks, counted from position 0

    @property
    def size(self) -> int:
        return file_bytes(len(self.tokens) - self.start, Memory())

    def common(self, tokens: list[int]) -> int:
        """Up to which position it holds `tokens`; 0 when it follows other ones."""
        if tokens[: self.start] != self.tokens[: self.start]:
            return 0
        end = next(
            (at for at, pair in enumerate(zip(tokens, self.tokens, strict=False)) if pair[0] != pair[1]),
            min(len(tokens), len(self.tokens)),
        )
        return end if end > self.start else 0

    def holds(self, tokens: list[int], block: int) -> int:
        """How many tokens of a token block it holds."""
        if not self.start <= block * 16 < len(self.tokens):
            return 0
        return min(max(0, self.common(tokens) - block * 16), 16)

    @property
    def path(self) -> Path:
        key = root_key(KEY)
        for at in range(0, self.start, 16):
            key = next_key(key, token_bytes(self.tokens[at : at + 16]))
        own = token_bytes(self.tokens[self.start :])
        return Path(KEY.hex()[:16]) / Segment(key, self.start, own, ()).name


class Disk(RuleBasedStateMachine):
    """One store, one model of it, and a growing set of token lists that share beginnings."""

    texts = Bundle("texts")

    def __init__(self) -> None:
        super().__init__()
        self.folder, self.memory = Path(tempfile.mkdtemp()), Memory()
        self.store = opened(self.folder, self.memory, budget=BUDGET)
        self.stored: list[Stored] = []
        self.now = 0

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    # -- the model ----------------------------------------------------------------------------
    def matched(self, tokens: list[int]) -> int:
        return max((each.common(tokens) for each in self.stored), default=0)

    def holder(self, tokens: list[int], block: int) -> Stored:
        return max(self.stored, key=lambda each: (each.holds(tokens, block), each.used))

    def before(self, tokens: list[int], blocks: int) -> list[Stored]:
        return list({id(h): h for h in (self.holder(tokens, b) for b in range(blocks))}.values())

    def is_leaf(self, one: Stored) -> bool:
        return not any(
            other.start > one.start and self.holder(other.tokens, other.start // 16 - 1) is one
            for other in self.stored
        )

    def touch(self, path: list[Stored]) -> None:
        self.now += 1
        for each in path:
            each.used = (self.now, -each.start)

    def drop(self, one: Stored) -> None:
        def below(other: Stored) -> bool:
            return any(one.holds(other.tokens, block) == 16 for block in range(other.start // 16))

        self.stored = [each for each in self.stored if each is not one and not below(each)]

    def model_write(self, tokens: list[int], start: int) -> bool:
        matched = self.matched(tokens)
        if matched == len(tokens) or matched < start:
            return matched == len(tokens)
        first = matched // 16
        new = Stored(tokens, first * 16, (0, 0))
        path = self.before(tokens, first)
        if new.size + sum(each.size for each in path) > BUDGET:
            return False
        while new.size + sum(each.size for each in self.stored) > BUDGET:
            leaves = [each for each in self.stored if self.is_leaf(each) and each not in path]
            self.stored.remove(min(leaves, key=lambda each: each.used))
        self.touch([*path, new])
        self.stored = [
            each
            for each in self.stored
            if each.start != new.start or each.tokens != tokens[: len(each.tokens)]
        ]
        self.stored.append(new)
        return True

    # -- what may happen ----------------------------------------------------------------------
    @rule(target=texts, words=st.lists(st.integers(0, 2), max_size=24), tail=TAIL)
    def text(self, words, tail):
        return [token for word in words for token in [word] * 16] + tail

    @rule(target=texts, text=texts, keep=st.floats(0, 1), aligned=st.booleans(), words=TAIL, tail=TAIL)
    def branch(self, text, keep, aligned, words, tail):
        cut = round(keep * len(text))
        cut -= cut % 16 if aligned else 0
        return (text[:cut] + [token for word in words for token in [word] * 16] + tail)[:600]

    @rule(text=texts)
    def write_missing(self, text) -> None:
        for start in range(self.store.missing(text) // 16 * 16, len(text), 256):
            self.write(text[: start + 256], start)

    @rule(text=texts, where=st.floats(0, 1), length=st.integers(1, 256))
    def write_anywhere(self, text, where: float, length: int) -> None:
        start = round(where * len(text)) // 16 * 16
        if start < len(text):
            self.write(text[: start + length], start)

    def write(self, tokens: list[int], start: int) -> None:
        blocks = list(range(-(-(len(tokens) - start) // 16)))
        self.memory.compute(tokens, start // 16, blocks)
        assert self.store.write(tokens, start, blocks) == self.model_write(tokens, start)

    @rule(text=texts, first=st.integers(0, 3), count=st.integers(0, 64))
    def restore(self, text, first: int, count: int) -> None:
        matched = self.matched(text)
        right, bad = 0, None
        while right < count and (first + right) * 16 < matched and bad is None:
            holder = self.holder(text, first + right)
            bad = holder if first + right in holder.damaged else None
            right += bad is None
        path = self.before(text, first + right) if right else []
        self.memory.data[:] = POISON
        blocks = list(range(count))[::-1]
        assert self.store.restore(text, first, blocks) == right
        self.memory.assert_right(text, matched, first, blocks[:right])
        if bad is not None:
            self.drop(bad)
        if path:
            self.touch([each for each in path if each in self.stored])

    @rule(pick=st.integers(0, 30), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def damage(self, pick: int, where: float, bit: int) -> None:
        if not self.stored:
            return
        one = self.stored[pick % len(self.stored)]
        data = bytearray((self.folder / one.path).read_bytes())
        blocks = -(-(len(one.tokens) - one.start) // 16)
        payload = len(data) - blocks * self.memory.bytes_per_block
        at = payload + int(where * (len(data) - payload))
        stat = (self.folder / one.path).stat()
        block = one.start // 16 + (at - payload) // self.memory.bytes_per_block
        if block in one.damaged:
            return  # a second flip might be the first one undone
        data[at] ^= 1 << bit
        (self.folder / one.path).write_bytes(data)
        os.utime(self.folder / one.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        one.damaged.add(block)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = opened(self.folder, self.memory, budget=BUDGET)
        assert self.store.counters.rejected_files == 0

    @rule(text=texts)
    def look_up(self, text) -> None:
        matched = self.matched(text)
        assert self.store.match(text) == matched
        assert self.store.missing(text) == (matched if matched == len(text) else matched // 16 * 16)

    @invariant()
    def files_are_those_of_the_model(self) -> None:
        files = segment_files(self.folder)
        assert {path.relative_to(self.folder) for path in files} == {each.path for each in self.stored}
        counters = self.store.counters
        assert counters.bytes_on_disk == sum(path.stat().st_size for path in files) <= BUDGET
        assert (counters.segments, counters.not_writing) == (len(files), "")


Disk.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestDisk = Disk.TestCase

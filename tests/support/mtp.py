"""Drafts of an MTP module: recorded as an engine makes them, computed over a text from nothing, and
compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quickdraft.engine.llm import LLM, Completion
from quickdraft.engine.mtp_opening import with_mtp
from quickdraft.models.interface import Taps
from quickdraft.models.mtp import MODULE_ROWS
from quickdraft.models.registry import load_model
from quickdraft.ops.select import select
from quickdraft.speculate.draft import Draft
from quickdraft.types import SamplingParams, Speculation
from tests.support.drafting import OneByOne

BLOCKS = 24
SOURCES = ("mtp", "lookup", "")
Drafts = dict[tuple[int, ...], tuple[int, ...]]


class Recorder(OneByOne):
    """Drafts by turns from `sources` ("" is none) of an LLM's drafters, at full length, and keeps what mtp
    drafted: text -> draft."""

    def __init__(self, llm: LLM, sources: Sequence[str] = ("mtp",)) -> None:
        drafters = llm.opened.engine.drafting._drafters
        super().__init__(list(drafters.values()))
        self.turns = sources
        self.made: Drafts = {}
        llm.opened.engine.drafting = self

    def propose(self, view: Any, speculation: Any, budget: int) -> Draft:
        source = "" if speculation.off else self.turns[len(view.tokens) % len(self.turns)]
        if not source or not budget:
            return Draft()
        draft = self._drafters[source].propose(view, min(budget, 15))
        if source == "mtp" and draft.tokens:
            self.made[tuple(view.tokens)] = draft.tokens
        return draft


class Scratch:
    """Greedy drafts over a text from nothing: target, module and caches of their own, NaN where unused."""

    def __init__(
        self, path: Path, kv_dtype: str, drafter: Path | None = None, vocab: Path | None = None
    ) -> None:
        ops = select(1)
        limits: Any = {"max_rows": 16 * BLOCKS, "max_wanted": 1, "taps": Taps(hidden=True), "mtp": True}
        loaded = load_model(path, ops, **limits, mtp_folder=drafter is not None)
        loaded = with_mtp(loaded, drafter, vocab, ops)
        self.model: Any = loaded.model
        self.module: Any = loaded.mtp
        self.kv: Any = self.model.kv_cache(BLOCKS, kv_dtype)
        self.kv.keys[...] = self.kv.values[...] = np.nan
        self.states: Any = self.model.recurrent_cache(1, 1, 1)
        vocabulary = self.model.config.vocabulary_size
        self.batch = ops.batch(16 * BLOCKS, 1, BLOCKS, BLOCKS, vocabulary)
        self.rows = ops.batch(MODULE_ROWS, 1, BLOCKS, BLOCKS, vocabulary)
        self.program: Any = self.model.program(self.batch, self.kv, self.states)
        self.program_of_rows: Any = self.module.draft(self.rows, self.kv)

    def drafts(self, text: Sequence[int], count: int) -> tuple[int, ...]:
        """`count` chained drafts after `text`."""
        known = len(text) - 1
        slots = {}
        if self.states is not None:
            self.states.clear(0)
            slots["slots"] = np.zeros(1, np.int32)
        self._set(self.batch, text[:known], 0, **slots)
        self.program.run()
        self.run(text[1:], 1, np.array(self.model.hidden[:known]))
        tokens: list[int] = []
        while True:
            best = int(self.module.best[0])
            tokens.append(best if self.module.vocab is None else int(self.module.vocab.ids[best]))
            if len(tokens) == count:
                return tuple(tokens)
            self.run(tokens[-1:], known + len(tokens), np.array(self.module.last))

    def run(self, tokens: Sequence[int], first: int, previous: Any) -> Any:
        """Rows of the module; the hidden states of all."""
        found = []
        for at in range(0, len(tokens), MODULE_ROWS):
            part = tokens[at : at + MODULE_ROWS]
            self.module.previous[: len(part)] = previous[at : at + len(part)]
            self._set(self.rows, part, first + at, seen_from=np.ones(1, np.int32))
            self.program_of_rows.run()
            found.append(np.array(self.module.hidden[: len(part)]))
        return np.concatenate(found)

    @staticmethod
    def _set(batch: Any, tokens: Sequence[int], first: int, **more: Any) -> None:
        count = len(tokens)
        arrays = (tokens, range(first, first + count), [0, count], [range(BLOCKS)], [count - 1])
        batch.set(*(np.array(array, np.int32) for array in arrays), **more)


def poison_freed(llm: LLM) -> None:
    """Fill the KV cache and the slots with NaN, and whatever is freed from now on; free blocks say that they
    have every row."""
    scheduler, kv = llm.opened.engine.scheduler, llm.opened.runner.kv
    drafter: Any = llm.opened.engine.drafting._drafters["mtp"]
    runs = drafter._rows._runs
    kv.keys[...] = kv.values[...] = np.nan
    runs[...] = (0, 16)

    def block(number: int) -> None:
        kv.keys[:, number] = kv.values[:, number] = np.nan
        runs[number] = (0, 16)

    def slot(number: int) -> None:
        assert scheduler.slots is not None
        for view in scheduler.slots.storage.views(number):
            np.frombuffer(view, np.float32)[:] = np.nan

    scheduler.pool._on_free = block
    if scheduler.slots is None:
        return
    scheduler.slots._on_free = slot
    for number in range(scheduler.slots.storage.slots):
        slot(number)


def plain(params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, speculation=Speculation())


def same(found: Completion, wanted: Completion) -> None:
    assert found.ids == wanted.ids and found.logprobs == wanted.logprobs
    assert found.finish_reason == wanted.finish_reason


def agree(one: Drafts, other: Drafts, least: int) -> None:
    """Two runs drafted the same after the same texts; checkpoints clip drafts differently."""
    both = one.keys() & other.keys()
    assert len(both) >= least
    for text in both:
        assert all(a == b for a, b in zip(one[text], other[text], strict=False))


def check_from_nothing(
    llm: LLM, scratch: Scratch, prompts: Sequence[list[int]], params: SamplingParams, turns: Sequence[str]
) -> Drafts:
    """Every draft, by `turns` of sources that were accepted in whole, in part and not at all, equals one
    computed over the same text from nothing; ids equal plain decoding's. Returns the drafts."""
    recorder, accepted, drafted = Recorder(llm, turns), 0, 0
    for prompt in prompts:
        found = llm.generate(prompt, params)
        same(found, llm.generate(prompt, plain(params)))
        accepted += found.timings.accepted.get("mtp", 0)
        drafted += found.timings.drafted["mtp"]
    assert 30 < accepted < drafted - 30, f"{accepted} of {drafted}: not both right and wrong"
    for text, draft in recorder.made.items():
        assert scratch.drafts(text, len(draft)) == draft
    return recorder.made


def check_alone_and_ragged(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, turns: Sequence[str], least: int
) -> None:
    """Alone, all at once and without drafts the ids are equal, and so are at least `least` drafts."""
    cache: Any = llm.opened.engine.scheduler.cache
    expected = [llm.generate(prompt, plain(params)) for prompt in prompts]
    cache.clear()
    recorder, accepted = Recorder(llm, turns), 0
    for prompt, wanted in zip(prompts, expected, strict=True):
        found = llm.generate(prompt, params)
        same(found, wanted)
        accepted += found.timings.accepted.get("mtp", 0)
    assert accepted > 10, "hardly a draft was right"
    alone, recorder.made = recorder.made, {}
    cache.clear()
    for found, wanted in zip(llm.generate_many([(p, params) for p in prompts]), expected, strict=True):
        same(found, wanted)
    agree(alone, recorder.made, least)
    assert llm.free_blocks == llm.total_blocks

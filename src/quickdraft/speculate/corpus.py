"""Source `corpus`: a read-only file of tokenized texts, and what follows the last tokens in them.

It owns the file (docs/reference/lookup-corpus.md): written whole under another name and renamed, mapped
when opened, and checked entirely then, so that nothing in it can lead outside of it or to an id the
model has not. Of the tokenizer it knows a digest. Requests leave nothing in it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from quickdraft.errors import ConfigError, ModelFormatError
from quickdraft.speculate.draft import CORPUS, Draft, SequenceView, Verdict
from quickdraft.speculate.suffix_order import (
    ID_BYTES,
    SEPARATOR,
    Order,
    SuffixOrder,
    backwards,
    sorted_positions,
)

MIN_MATCH: Final = 3
MAX_CORPUS_TOKENS: Final = 1 << 28
MAGIC: Final = b"qdcorpus"
VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIIII32sI")  # magic, version, vocabulary, tokens, places, digest, CRC-32
_HEADER_BYTES: Final = _HEADER.size + 32  # then SHA-256 of these
_HINT: Final = "make one for this model with: quickdraft prepare lookup-corpus"
_PIECE: Final = 1 << 22  # numbers checked at a time


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Whose ids a corpus holds: how many there are, and a 32-byte digest of what each stands for."""

    size: int
    digest: bytes


class Corpus:
    """An opened corpus file, which must not be written to while it is open."""

    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        """ConfigError when the file cannot be opened; ModelFormatError when it is damaged, no corpus, or one
        of another vocabulary."""
        self.path = path
        self._map = _mapped(path)
        self.tokens, places = _header(path, self._map, vocabulary)
        order: Order = np.frombuffer(self._map, "<u4", places, _HEADER_BYTES + ID_BYTES * self.tokens)
        _check(path, self._map, vocabulary, self.tokens, order)
        self._search = SuffixOrder(self._map, self.tokens, order, _HEADER_BYTES)

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """SuffixOrder.find, for matches of at least MIN_MATCH tokens."""
        length, position = self._search.find(tokens)
        return (length, position) if length >= MIN_MATCH else (0, 0)

    def following(self, position: int, count: int) -> tuple[int, ...]:
        """At most `count` tokens of the same text."""
        return self._search.following(position, count)


class CorpusInMemory:
    """The same search over texts that are at hand, each a list of ids, at least one of them not empty."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        content, tokens, order = _ordered(texts)
        self._search = SuffixOrder(content, tokens, order)

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """See Corpus."""
        length, position = self._search.find(tokens)
        return (length, position) if length >= MIN_MATCH else (0, 0)

    def following(self, position: int, count: int) -> tuple[int, ...]:
        """See Corpus."""
        return self._search.following(position, count)


class CorpusDrafter:
    """speculate.draft.Drafter over one corpus, the same for all requests."""

    source = CORPUS

    def __init__(self, corpus: Corpus | CorpusInMemory) -> None:
        self._corpus = corpus

    def propose(self, view: SequenceView, budget: int) -> Draft:
        """What follows the longest match, `budget` tokens of it; empty without a match."""
        length, position = self._corpus.find(view.tokens)
        if not length or budget <= 0:
            return Draft()
        return Draft(self._corpus.following(position, budget), self.source, (), length)

    def observe(self, view: SequenceView, verdict: Verdict, taps: Any) -> None:
        """Nothing to learn."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""


def write_corpus(path: Path, texts: Sequence[Sequence[int]], vocabulary: Vocabulary) -> int:
    """Write a corpus of these texts, each a list of ids; returns the tokens it holds.

    ConfigError where there are none or too many, or the file cannot be written.
    """
    count = sum(len(text) + 1 for text in texts)
    if not any(texts) or count > MAX_CORPUS_TOKENS:
        raise ConfigError("a corpus of no use", got=f"{count} tokens", expected=f"1 to {MAX_CORPUS_TOKENS}")
    content, _, places = _ordered(texts)
    order = places.astype("<u4").tobytes()
    crc = zlib.crc32(order, zlib.crc32(content))
    header = _HEADER.pack(MAGIC, VERSION, vocabulary.size, count, len(places), vocabulary.digest, crc)
    temporary = path.with_name(f"{path.name}.part")
    try:
        with temporary.open("wb") as file:
            for part in (header, hashlib.sha256(header).digest(), content, order):
                file.write(part)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return count - len(texts)


def _ordered(texts: Sequence[Sequence[int]]) -> tuple[bytes, int, Order]:
    """The texts with a separator after each, backwards, their tokens, and their positions in order."""
    count = sum(len(text) + 1 for text in texts)
    ids = np.full(count, SEPARATOR, np.uint32)
    at = 0
    for text in texts:
        ids[at : at + len(text)] = text
        at += len(text) + 1
    content = backwards(ids)
    return content, count, sorted_positions(content)


def _mapped(path: Path) -> Any:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: the lookup corpus cannot be read", got=cause) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size < _HEADER_BYTES:
            raise ModelFormatError(f"{path}: no lookup corpus", got="no file of its length", hint=_HINT)
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def _header(path: Path, data: Any, vocabulary: Vocabulary) -> tuple[int, int]:
    """(tokens, places), the file being exactly as long as they say."""
    raw = data[: _HEADER.size]
    magic, version, size, tokens, places, digest, _ = _HEADER.unpack(raw)
    if magic != MAGIC or version != VERSION:
        raise ModelFormatError(
            f"{path}: no lookup corpus", got=f"{magic!r} version {version}",
            expected=f"{MAGIC!r} version {VERSION}", hint=_HINT,
        )  # fmt: skip
    if hashlib.sha256(raw).digest() != data[_HEADER.size : _HEADER_BYTES]:
        raise ModelFormatError(f"{path}: the lookup corpus is damaged", got="a header of another digest")
    length = _HEADER_BYTES + ID_BYTES * (tokens + places)
    if not 0 < tokens <= MAX_CORPUS_TOKENS or places >= tokens or len(data) != length:
        raise ModelFormatError(
            f"{path}: the lookup corpus is damaged", got=f"{len(data)} bytes",
            expected=f"{length} for {tokens} tokens and {places} places",
        )  # fmt: skip
    if (size, digest) != (vocabulary.size, vocabulary.digest):
        raise ModelFormatError(
            f"{path}: a lookup corpus of another tokenizer",
            got=f"{size} tokens, digest {digest.hex()[:16]}",
            expected=f"{vocabulary.size} tokens, digest {vocabulary.digest.hex()[:16]}", hint=_HINT,
        )  # fmt: skip
    return tokens, places


def _check(path: Path, data: Any, vocabulary: Vocabulary, tokens: int, order: Order) -> None:
    """Every byte is the one that was written, and every number leads somewhere."""
    ids = np.frombuffer(data, ">u4", tokens, _HEADER_BYTES)
    crc = 0
    for part in (ids, order):
        for first in range(0, len(part), _PIECE):
            crc = zlib.crc32(part[first : first + _PIECE].view(np.uint8).data, crc)
    wrong_id = any(
        bool(((piece >= vocabulary.size) & (piece != SEPARATOR)).any())
        for piece in (ids[first : first + _PIECE] for first in range(0, tokens, _PIECE))
    )
    wrong_place = len(order) > 0 and not (int(order.min()) > 0 and int(order.max()) < tokens)
    if crc != _HEADER.unpack(data[: _HEADER.size])[-1] or wrong_id or wrong_place:
        what = "an id or place outside" if wrong_id or wrong_place else "bytes of another checksum"
        raise ModelFormatError(f"{path}: the lookup corpus is damaged", got=what, hint=_HINT)

"""Segment files: the format of KV blocks on disk, and moving them between a file and the cache.

A file holds one segment: at most 16 blocks after an exact token prefix. In order, little-endian:
fixed header (magic, version, start, token count, bytes per block, compatibility key, prefix key),
token ids (int32), one CRC-32 per block, SHA-256 of all that, then the blocks one after another.
Knows no index and no budget.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.file_io import checksum, read_into, reading, write_all, writing
from quickdraft.state.sequence import blocks_for
from quickdraft.state.tokens import TOKEN_BYTES

SEGMENT_BLOCKS: Final = 16
SEGMENT_TOKENS: Final = SEGMENT_BLOCKS * BLOCK_TOKENS
SEGMENT_NAME: Final = re.compile(r"[0-9a-f]{64}\.kv")

_MAGIC: Final = b"qdkvseg\n"
_VERSION: Final = 1
_FIXED: Final = struct.Struct("<8sIIIQ32s32s")
_DIGEST_BYTES: Final = 32


class BlockStorage(Protocol):
    """Where blocks live in memory (the KV cache of a backend)."""

    @property
    def bytes_per_block(self) -> int: ...
    def views(self, block: int) -> list[memoryview]:
        """One-dimensional byte views; joined, they are the content of the block, to read.

        Layer by layer, keys then values: the order is the same for every block.
        """

    def room(self, block: int) -> list[memoryview]:
        """Writable ones of a block that is about to be filled, whatever it holds now; one at a time."""

    def filled(self, block: int) -> None:
        """Its content is in `room(block)`."""


def root_key(compatibility: bytes) -> bytes:
    """The prefix key of position 0 under a compatibility key."""
    return hashlib.sha256(compatibility).digest()


def next_key(key: bytes, block_tokens: bytes) -> bytes:
    """The prefix key one full block of tokens further: SHA-256 of the last key and its tokens."""
    return hashlib.sha256(key + block_tokens).digest()


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of 1 to 256 tokens whose KV is in one file."""

    prefix: bytes  # key of the tokens before it
    start: int  # how many those are, a multiple of 16
    tokens: bytes  # int32, little-endian
    checksums: tuple[int, ...]  # one per block

    @property
    def count(self) -> int:
        """How many tokens it holds."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def name(self) -> str:
        """Its file's name: SHA-256 over prefix key and tokens."""
        return hashlib.sha256(self.prefix + self.tokens).hexdigest() + ".kv"


def _header_bytes(count: int) -> int:
    return _FIXED.size + TOKEN_BYTES * count + 4 * blocks_for(count) + _DIGEST_BYTES


class SegmentFiles:
    """Reads and writes the segment files of one folder (a descriptor) for one compatibility key."""

    def __init__(self, folder: int, compatibility: bytes, storage: BlockStorage) -> None:
        self._folder, self._compatibility, self._storage = folder, compatibility, storage

    def size(self, count: int) -> int:
        """Bytes of a file that holds this many tokens."""
        return _header_bytes(count) + blocks_for(count) * self._storage.bytes_per_block

    def read_header(self, name: str, size: int) -> Segment | None:
        """The segment a file of `size` bytes says it holds; None for another compatibility key.

        ValueError when it is damaged, of another version or of the wrong size; OSError.
        """
        with reading(self._folder, name) as file:
            data = os.pread(file, _header_bytes(SEGMENT_TOKENS), 0)
        segment, compatibility, bytes_per_block = _decode(data)
        if compatibility != self._compatibility:
            return None
        if bytes_per_block != self._storage.bytes_per_block or size != self.size(segment.count):
            raise ValueError("wrong size")
        if name != segment.name:
            raise ValueError("wrong name")
        return segment

    def read_blocks(self, segment: Segment, first: int, blocks: Sequence[int]) -> int:
        """Fill `blocks` from the segment's blocks first, first+1, ...; how many were whole.

        Stops at the first that is short or fails its checksum; what that one's memory holds then
        is undefined. OSError.
        """
        start, size = _header_bytes(segment.count), self._storage.bytes_per_block
        with reading(self._folder, segment.name) as file:
            for done, block in enumerate(blocks):
                index, views = first + done, self._storage.room(block)
                if read_into(file, views, start + index * size) != size:
                    return done
                if checksum(views) != segment.checksums[index]:
                    return done
                self._storage.filled(block)
        return len(blocks)

    def write(self, prefix: bytes, start: int, tokens: bytes, blocks: Sequence[int], used_ns: int) -> Segment:
        """Write the file of a new segment: whole under its name, or not at all (OSError)."""
        name = Segment(prefix, start, tokens, ()).name
        with writing(self._folder, name, used_ns) as file:
            checksums = self._write_blocks(file, len(tokens) // TOKEN_BYTES, blocks)
            segment = Segment(prefix, start, tokens, checksums)
            write_all(file, [memoryview(self._encode(segment))], 0)
        return segment

    def _write_blocks(self, file: int, count: int, blocks: Sequence[int]) -> tuple[int, ...]:
        position, checksums = _header_bytes(count), []
        for block in blocks:
            views = self._storage.views(block)
            checksums.append(checksum(views))
            write_all(file, views, position)
            position += self._storage.bytes_per_block
        return tuple(checksums)

    def _encode(self, segment: Segment) -> bytes:
        size = self._storage.bytes_per_block
        fixed = (_MAGIC, _VERSION, segment.start, segment.count, size, self._compatibility, segment.prefix)
        sums = struct.pack(f"<{len(segment.checksums)}I", *segment.checksums)
        head = _FIXED.pack(*fixed) + segment.tokens + sums
        return head + hashlib.sha256(head).digest()


def _decode(data: bytes) -> tuple[Segment, bytes, int]:
    """(segment, compatibility key, bytes per block) of a header; ValueError for a wrong one."""
    if len(data) < _FIXED.size:
        raise ValueError("shorter than a header")
    magic, version, start, count, size, compatibility, prefix = _FIXED.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION) or not 1 <= count <= SEGMENT_TOKENS or start % BLOCK_TOKENS:
        raise ValueError("not a segment of this version")
    end = _header_bytes(count)
    body, digest = data[: end - _DIGEST_BYTES], data[end - _DIGEST_BYTES : end]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("damaged header")
    sums = _FIXED.size + TOKEN_BYTES * count
    checksums = struct.unpack_from(f"<{blocks_for(count)}I", data, sums)
    return Segment(prefix, start, body[_FIXED.size : sums], checksums), compatibility, size

"""State files: the format of recurrent states on disk, beside the segments that hold their KV.

A file holds the state after an exact number of tokens, as SegmentFiles holds blocks: fixed header
(magic, version, position, count of tokens after the last full block, bytes, CRC-32 of the state,
compatibility key, prefix key of the full blocks), those tokens (int32), SHA-256 of all that, then the
state. Knows no index and no budget.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from dataclasses import dataclass
from typing import Final

from quickdraft.ops.interface import BLOCK_TOKENS, RecurrentCache
from quickdraft.state.file_io import checksum, read_into, reading, write_all, writing
from quickdraft.state.tokens import TOKEN_BYTES

STATE_NAME: Final = re.compile(r"[0-9a-f]{64}\.state")

_MAGIC: Final = b"qdstate\n"
_VERSION: Final = 1
_FIXED: Final = struct.Struct("<8sIIIIQ32s32s")
_DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class State:
    """The recurrent state after the full blocks that `prefix` stands for and the tokens of `tail`."""

    prefix: bytes
    tail: bytes  # int32, little-endian, less than a block
    position: int  # tokens before it
    checksum: int

    @property
    def name(self) -> str:
        """Its file's name: SHA-256 over prefix key and tokens."""
        return hashlib.sha256(self.prefix + self.tail).hexdigest() + ".state"


class StateFiles:
    """Reads and writes the state files of one folder (a descriptor) for one compatibility key."""

    def __init__(self, folder: int, compatibility: bytes, storage: RecurrentCache) -> None:
        self._folder, self._compatibility, self._storage = folder, compatibility, storage

    def size(self, tail: bytes) -> int:
        """Bytes of a file of a state with these tokens after its last full block."""
        return _FIXED.size + len(tail) + _DIGEST_BYTES + self._storage.bytes_per_slot

    def read_header(self, name: str, size: int) -> State | None:
        """The state a file of `size` bytes says it holds; None for another compatibility key.

        ValueError when it is damaged, of another version or of the wrong size; OSError.
        """
        with reading(self._folder, name) as file:
            data = os.pread(file, _FIXED.size + BLOCK_TOKENS * TOKEN_BYTES + _DIGEST_BYTES, 0)
        state, compatibility, state_bytes = _decode(data)
        if compatibility != self._compatibility:
            return None
        if state_bytes != self._storage.bytes_per_slot or size != self.size(state.tail):
            raise ValueError("wrong size")
        if name != state.name:
            raise ValueError("wrong name")
        return state

    def read(self, state: State, slot: int) -> bool:
        """Fill `slot`; False when the file does not hold what was written, and the slot is undefined then.
        OSError."""
        views = self._storage.room(slot)
        start = self.size(state.tail) - self._storage.bytes_per_slot
        with reading(self._folder, state.name) as file:
            whole = read_into(file, views, start) == self._storage.bytes_per_slot
        if not whole or checksum(views) != state.checksum:
            return False
        self._storage.filled(slot)
        return True

    def write(self, prefix: bytes, tail: bytes, position: int, slot: int, used_ns: int) -> State:
        """Write the file of a new state: whole under its name, or not at all (OSError)."""
        views = self._storage.views(slot)
        state = State(prefix, tail, position, checksum(views))
        with writing(self._folder, state.name, used_ns) as file:
            write_all(file, [memoryview(self._encode(state)), *views], 0)
        return state

    def _encode(self, state: State) -> bytes:
        count, size = len(state.tail) // TOKEN_BYTES, self._storage.bytes_per_slot
        numbers = (_VERSION, state.position, count, state.checksum, size)
        head = _FIXED.pack(_MAGIC, *numbers, self._compatibility, state.prefix) + state.tail
        return head + hashlib.sha256(head).digest()


def _decode(data: bytes) -> tuple[State, bytes, int]:
    """(state, compatibility key, bytes of it) of a header; ValueError for a wrong one."""
    if len(data) < _FIXED.size:
        raise ValueError("shorter than a header")
    magic, version, position, count, crc, size, compatibility, prefix = _FIXED.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION) or position < 1 or position % BLOCK_TOKENS != count:
        raise ValueError("not a state of this version")
    end = _FIXED.size + TOKEN_BYTES * count
    if hashlib.sha256(data[:end]).digest() != data[end : end + _DIGEST_BYTES]:
        raise ValueError("damaged header")
    return State(prefix, data[_FIXED.size : end], position, crc), compatibility, size

"""How token ids are spelled where prefixes are compared: bytes of little-endian int32, cut into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.interface import BLOCK_TOKENS

Tokens = Sequence[int] | NDArray[np.int32]
TOKEN_BYTES: Final = 4
TOKEN_BLOCK_BYTES: Final = BLOCK_TOKENS * TOKEN_BYTES


def token_bytes(tokens: Tokens) -> bytes:
    """Token ids as little-endian int32, the form they have in files and in the index."""
    return np.asarray(tokens, "<i4").tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two runs share."""
    if a == b:
        return len(a) // TOKEN_BYTES
    shortest = min(len(a), len(b))
    for at in range(0, shortest, TOKEN_BYTES):
        if a[at : at + TOKEN_BYTES] != b[at : at + TOKEN_BYTES]:
            return at // TOKEN_BYTES
    return shortest // TOKEN_BYTES

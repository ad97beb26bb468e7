"""How token ids are spelled where prefixes are compared: bytes of little-endian int32, cut into blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    for at in range(0, min(len(a), len(b)), TOKEN_BYTES):
        if a[at : at + TOKEN_BYTES] != b[at : at + TOKEN_BYTES]:
            return at // TOKEN_BYTES
    return min(len(a), len(b)) // TOKEN_BYTES


def most_common_tokens(runs: Collection[bytes], wanted: bytes) -> int:
    """The most leading tokens of `wanted` that any run shares; 0 when there are no runs.

    Sorted as bytes, the neighbours of `wanted` share most with it. There may be thousands of runs,
    and finding these two takes no Python code per run.
    """
    below, above = max(filter(wanted.__ge__, runs), default=b""), min(filter(wanted.__lt__, runs), default=b"")
    return max(common_tokens(below, wanted), common_tokens(above, wanted))

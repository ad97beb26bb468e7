"""The tensor types of GGUF: their block sizes, and decoders from blocks to ops.weights values.

A decoder changes no number: codes, scales and minimums come out as the file holds them, and the
value's formula gives the bits of the `gguf` package's own dequantisation (tests compare). Layouts
are those of ggml's ggml-common.h and ggml-quants.c. Knows blocks, not files or models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.weights import Int4Groups, Int8Groups, TwoLevel

Quantised = Int4Groups | Int8Groups
Blocks = NDArray[np.uint8]  # [N, blocks along K, bytes per block]

# tensor type -> (name, elements per block, bytes per block)
TYPES: Final = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    9: ("Q8_1", 32, 40), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
_BY_NAME: Final = {name: (elements, size) for name, elements, size in TYPES.values()}
_CHUNK_BYTES: Final = 1 << 18  # of codes decoded at a time: what comes in between stays in the cache


def decode(type_name: str, raw: NDArray[np.uint8], rows: int, columns: int) -> Quantised:
    """`raw` bytes of a [rows, columns] tensor of a type in DECODERS -> its value."""
    elements, size = _BY_NAME[type_name]
    return DECODERS[type_name](raw.reshape(rows, columns // elements, size))


def _codes(
    blocks: Blocks, elements: int, dtype: Any, fill: Callable[[Blocks, NDArray[Any]], None]
) -> NDArray[Any]:
    """Codes [N, K]; `fill(blocks, out [rows, B, elements])` is called for a few rows at a time."""
    rows, count, _ = blocks.shape
    codes = np.empty((rows, count, elements), dtype)
    step = max(1, _CHUNK_BYTES // (count * elements))
    for start in range(0, rows, step):
        fill(blocks[start : start + step], codes[start : start + step])
    return codes.reshape(rows, count * elements)


def _halves(blocks: Blocks, start: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, :, start : start + 2]).view(np.float16)[:, :, 0]


def _nibbles(packed: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Bytes [..., n] -> out [..., 2, n]: the low halves, then the high ones."""
    np.bitwise_and(packed, 15, out=out[..., 0, :])
    np.right_shift(packed, 4, out=out[..., 1, :])


def _four_bits(at: int) -> Callable[[Blocks, NDArray[Any]], None]:
    """Blocks of 32 inputs: low halves are inputs 0..15, high halves 16..31."""

    def fill(blocks: Blocks, out: NDArray[np.uint8]) -> None:
        _nibbles(blocks[:, :, at:], out.reshape(*out.shape[:2], 2, 16))

    return fill


def _five_bits(at: int, offset: int) -> Callable[[Blocks, NDArray[Any]], None]:
    """The fifth bits (a bit of four bytes each) lie before the low four; `offset` is taken off."""

    def fill(blocks: Blocks, out: NDArray[np.int8]) -> None:
        codes = out.view(np.uint8)
        _nibbles(blocks[:, :, at + 4 :], codes.reshape(*out.shape[:2], 2, 16))
        fifth = np.unpackbits(blocks[:, :, at : at + 4], axis=2, bitorder="little")
        codes |= fifth << 4
        out -= np.int8(offset)

    return fill


def _q4_0(blocks: Blocks) -> Quantised:
    return Int4Groups(_codes(blocks, 32, np.uint8, _four_bits(2)), _halves(blocks, 0))


def _q4_1(blocks: Blocks) -> Quantised:
    return Int4Groups(_codes(blocks, 32, np.uint8, _four_bits(4)), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Blocks) -> Quantised:
    return Int8Groups(_codes(blocks, 32, np.int8, _five_bits(2, 16)), _halves(blocks, 0), bits=5)


def _q5_1(blocks: Blocks) -> Quantised:
    codes = _codes(blocks, 32, np.int8, _five_bits(4, 0))
    return Int8Groups(codes, _halves(blocks, 0), _halves(blocks, 2), bits=5)


def _q8_0(blocks: Blocks) -> Quantised:
    codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(len(blocks), -1)
    return Int8Groups(codes, _halves(blocks, 0))


def _k_numbers(blocks: Blocks) -> tuple[TwoLevel, TwoLevel]:
    """Scales and minimums of Q4_K and Q5_K: two halves, then 8 + 8 steps of 6 bits in 12 bytes.

    value = (d * scale_step) * code - dmin * minimum_step; the minimum's sign goes to its half.
    """
    rows, count, _ = blocks.shape
    low, high, rest = (blocks[:, :, at : at + 4] for at in (4, 8, 12))
    scales, minimums = np.empty((2, rows, count, 2, 4), np.int8)
    scales[:, :, 0], minimums[:, :, 0] = low & 63, high & 63
    scales[:, :, 1] = (rest & 15) | (low >> 2 & 0x30)
    minimums[:, :, 1] = (rest >> 4) | (high >> 2 & 0x30)
    return (
        TwoLevel(_halves(blocks, 0), scales.reshape(rows, -1)),
        TwoLevel(-_halves(blocks, 2), minimums.reshape(rows, -1)),
    )


def _q4_k(blocks: Blocks) -> Quantised:
    def fill(blocks: Blocks, out: NDArray[np.uint8]) -> None:  # 32 bytes hold two groups of 32
        shape = out.shape[:2]
        _nibbles(blocks[:, :, 16:].reshape(*shape, 4, 32), out.reshape(*shape, 4, 2, 32))

    scales, minimums = _k_numbers(blocks)
    return Int4Groups(_codes(blocks, 256, np.uint8, fill), scales, minimums)


def _q5_k(blocks: Blocks) -> Quantised:
    def fill(blocks: Blocks, out: NDArray[np.int8]) -> None:
        shape, codes = out.shape[:2], out.view(np.uint8)
        _nibbles(blocks[:, :, 48:].reshape(*shape, 4, 32), codes.reshape(*shape, 4, 2, 32))
        for group in range(8):  # bit g of byte i is the fifth bit of input i of group g
            fifth = (blocks[:, :, 16:48] >> group & 1) << 4
            codes[:, :, 32 * group : 32 * group + 32] |= fifth

    scales, minimums = _k_numbers(blocks)
    return Int8Groups(_codes(blocks, 256, np.int8, fill), scales, minimums, bits=5)


def _q6_k(blocks: Blocks) -> Quantised:
    def fill(blocks: Blocks, out: NDArray[np.int8]) -> None:
        shape, codes = out.shape[:2], out.view(np.uint8)
        _nibbles(blocks[:, :, :128].reshape(*shape, 2, 64), codes.reshape(*shape, 2, 2, 64))
        quarters = codes.reshape(*shape, 2, 4, 32)  # of each half, all in the same 32 bytes of high bits
        high = blocks[:, :, 128:192].reshape(*shape, 2, 32)
        for quarter in range(4):
            quarters[..., quarter, :] |= (high >> 2 * quarter & 3) << 4
        out -= np.int8(32)

    steps = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8).reshape(len(blocks), -1)
    scales = TwoLevel(_halves(blocks, 208), steps)
    return Int8Groups(_codes(blocks, 256, np.int8, fill), scales, group_size=16, bits=6)


DECODERS: Final[dict[str, Callable[[Blocks], Quantised]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
READABLE: Final = ("F32", "F16", "BF16", *DECODERS)

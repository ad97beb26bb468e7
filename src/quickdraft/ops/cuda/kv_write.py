"""kv_write on the card: keys and values of the step's rows into their slots of the paged cache.

A token whose key or value is not finite in the cache's type is written as a NaN key and a value of zeros: a
key that a row does not see is selected away by attention, a value is only weighted by 0. So a NaN reaches its
own row and later ones, and attention need not look at values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quickdraft.ops.cuda.batch import CudaBatch
from quickdraft.ops.cuda.buffers import CudaKV
from quickdraft.ops.cuda.launch import Launcher, power_of_two
from quickdraft.ops.cuda.numbers import as_stored


@triton.jit
def all_finite(x):
    return tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), axis=0) == 0


@triton.jit(do_not_specialize=["sequences"])
def write_rows(
    qkv, first_key, keys, values, positions, row_starts, sequences, sequence_of, tables, table_width,
    kv_heads, dim, stride, D: tl.constexpr,
):  # fmt: skip
    """One row and kv head into its slot. keys [.., K, D, 16], values [.., K, 16, D]."""
    row, head = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(row_starts + sequences):
        return
    position = tl.load(positions + row)
    block = tl.load(tables + tl.load(sequence_of + row) * table_width + position // 16).to(tl.int64)
    d = tl.arange(0, D)
    inside = d < dim
    at = qkv + row * stride + first_key + head * dim + d
    k = as_stored(tl.load(at, mask=inside, other=0.0), keys.dtype.element_ty)
    v = as_stored(tl.load(at + kv_heads * dim, mask=inside, other=0.0), values.dtype.element_ty)
    good = all_finite(k.to(tl.float32)) & all_finite(v.to(tl.float32))
    place = (block * kv_heads + head) * dim * 16
    slot = position % 16
    tl.store(keys + place + d * 16 + slot, tl.where(good, k.to(tl.float32), float("nan")), mask=inside)
    tl.store(values + place + slot * dim + d, tl.where(good, v.to(tl.float32), 0.0), mask=inside)


@triton.jit
def codes_of(x):
    """int8 codes of x and their scale: amax / 127, division, nearest even."""
    scale = tl.div_rn(tl.max(tl.abs(x), axis=0), 127.0)
    ratio = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale))
    whole = (ratio + 12582912.0) - 12582912.0  # to the nearest integer, ties to even
    whole = tl.minimum(tl.maximum(whole, -127.0), 127.0)
    return tl.where(scale == 0.0, 0.0, whole).to(tl.int32).to(tl.uint8), scale


@triton.jit(do_not_specialize=["sequences"])
def write_codes(
    qkv, first_key, keys, values, key_scales, value_scales, positions, row_starts, sequences, sequence_of,
    tables, table_width, kv_heads, dim, stride, D: tl.constexpr,
):  # fmt: skip
    """The same for int8: blocks of 16 (D + 4) bytes per head, codes, then a float scale per slot."""
    row, head = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(row_starts + sequences):
        return
    position = tl.load(positions + row)
    block = tl.load(tables + tl.load(sequence_of + row) * table_width + position // 16).to(tl.int64)
    d = tl.arange(0, D)
    inside = d < dim
    at = qkv + row * stride + first_key + head * dim + d
    k = tl.load(at, mask=inside, other=0.0)
    v = tl.load(at + kv_heads * dim, mask=inside, other=0.0)
    good = all_finite(k) & all_finite(v)
    k_codes, k_scale = codes_of(tl.where(good, k, 0.0))
    v_codes, v_scale = codes_of(tl.where(good, v, 0.0))
    place = (block * kv_heads + head) * (dim + 4) * 16
    slot = position % 16
    tl.store(keys + place + (d // 2 * 16 + slot) * 2 + d % 2, k_codes, mask=inside)
    tl.store(values + place + (slot // 2 * dim + d) * 2 + slot % 2, v_codes, mask=inside)
    floats = (block * kv_heads + head) * (dim + 4) * 4 + dim * 4 + slot
    tl.store(key_scales + floats, tl.where(good, k_scale, float("nan")))
    tl.store(value_scales + floats, v_scale)


def start_kv_write(
    launcher: Launcher, batch: CudaBatch, qkv: torch.Tensor, query_heads: int, kv: CudaKV, layer: int
) -> None:
    """See Ops.kv_write."""
    keys, values = kv.key_tensor[layer], kv.value_tensor[layer]
    step = batch.positions, batch.row_starts, batch.sequences, batch.sequence_of
    where = *step, batch.block_tables, batch.limits[2]
    sizes = kv.kv_heads, kv.head_dim, qkv.stride(0)
    grid, first = (batch.rows.count, kv.kv_heads), query_heads * kv.head_dim
    block = power_of_two(kv.head_dim)
    if kv.dtype == "int8":
        caches = keys, values, keys.view(torch.float32), values.view(torch.float32)
        launcher.start(write_codes, grid, qkv, first, *caches, *where, *sizes, D=block, warps=1, exact=True)
        return
    launcher.start(write_rows, grid, qkv, first, keys, values, *where, *sizes, D=block, warps=1)

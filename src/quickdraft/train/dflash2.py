"""The DFlash2 block drafter for training: all slots of many blocks in one pass (formulas: models/dflash.py).

A block is [anchor, mask, ...]; slot j predicts the token at its own position. Context rows are the target's
hidden states before the anchor, blocks do not see one another, and convolutions start anew in each.
The selector's codebooks have a row per token of the draft vocabulary and one for all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quickdraft.train.form import DrafterForm
from quickdraft.train.layers import Weights, feed_forward, rms_norm, rope_tables, rotate

SELECTOR = "candidate_selector."
CODEBOOKS = (f"{SELECTOR}predecessor_codebook", f"{SELECTOR}successor_codebook")


@dataclass(frozen=True, slots=True)
class DFlash2Shape:
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float
    layers: int
    taps: int
    block: int
    window: int
    mask_id: int
    conv_group: int = 16
    rank: int = 64
    top_k: int = 16

    @classmethod
    def of(cls, form: DrafterForm) -> DFlash2Shape:
        return cls(
            form.width, form.feed_forward, form.heads, form.kv_heads, form.head_dim, form.theta, form.eps,
            form.layers, len(form.taps), form.block, form.window, form.mask_id, form.conv_group, form.rank,
            form.top_k,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one text: tokens [S], the target's taps [S, taps * C], ascending anchor positions [A]."""

    tokens: Tensor
    features: Tensor
    anchors: Tensor


def initial(shape: DFlash2Shape, vocabulary: int, seed: int) -> Weights:
    """Linears N(0, 0.02), convolutions the identity, the selector's successors 0 (it starts neutral);
    the last norm starts small, because every slot starts as the mask's own embedding."""
    generator = torch.Generator().manual_seed(seed)
    width, queries, kv = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def normal(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=generator) * 0.02

    weights: Weights = {
        "fc.weight": normal(width, shape.taps * width),
        "hidden_norm.weight": torch.ones(width),
        "norm.weight": torch.full((width,), 0.3),
    }
    for layer in range(shape.layers):
        prefix = f"layers.{layer}."
        attention = f"{prefix}self_attn."
        for name, outputs, inputs in (
            ("q", queries, width), ("k", kv, width), ("v", kv, width), ("o", width, queries),
        ):  # fmt: skip
            weights[f"{attention}{name}_proj.weight"] = normal(outputs, inputs)
        weights[f"{prefix}mlp.gate_proj.weight"] = normal(shape.feed_forward, width)
        weights[f"{prefix}mlp.up_proj.weight"] = normal(shape.feed_forward, width)
        weights[f"{prefix}mlp.down_proj.weight"] = normal(width, shape.feed_forward)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(width)
        for name in ("q_norm", "k_norm"):
            weights[f"{attention}{name}.weight"] = torch.ones(shape.head_dim)
        for name in ("attention_conv", "mlp_conv"):
            base = torch.zeros(2, 2, width)
            base[:, 0] = 1.0
            weights[f"{prefix}{name}.base_kernel"] = base
            projected = 2 * 2 * width // shape.conv_group
            weights[f"{prefix}{name}.kernel_projection.weight"] = torch.zeros(projected, width)
    weights[CODEBOOKS[0]] = normal(vocabulary + 1, shape.rank)
    weights[CODEBOOKS[1]] = torch.zeros(vocabulary + 1, shape.rank)
    weights[f"{SELECTOR}hidden_projection.weight"] = normal(shape.rank, width)
    return weights


def slots(shape: DFlash2Shape, w: Weights, texts: list[Blocks], embedding: Tensor) -> Tensor:
    """y [sum of A, B - 1, C] of slots 1 .. B-1 of all blocks, text by text."""
    block, eps = shape.block, shape.eps
    anchors = [len(text.anchors) for text in texts]
    first = torch.cat([text.tokens[text.anchors] for text in texts])
    ids = torch.full((len(first), block), shape.mask_id, device=first.device)
    ids[:, 0] = first
    x = embedding[ids]
    features = torch.cat([text.features for text in texts])
    context = rms_norm(functional.linear(features, w["fc.weight"]), w["hidden_norm.weight"], eps)
    longest = max(len(text.tokens) for text in texts) + block
    tables = rope_tables(longest, shape.head_dim, shape.theta, x.device)
    for layer in range(shape.layers):
        prefix = f"layers.{layer}."
        h = rms_norm(x, w[f"{prefix}input_layernorm.weight"], eps)
        h, out_kernel = _prepare(shape, w, f"{prefix}attention_conv.", h)
        mixed = _attend(shape, w, f"{prefix}self_attn.", h, context, texts, anchors, tables)
        x = x + _finish(shape, w, f"{prefix}attention_conv.", mixed, out_kernel)
        h = rms_norm(x, w[f"{prefix}post_attention_layernorm.weight"], eps)
        h, out_kernel = _prepare(shape, w, f"{prefix}mlp_conv.", h)
        x = x + _finish(shape, w, f"{prefix}mlp_conv.", feed_forward(h, w, f"{prefix}mlp."), out_kernel)
    return rms_norm(x[:, 1:], w["norm.weight"], eps)


def edges(w: Weights, y: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
    """Selector scores of `candidates` [..., K] after `previous` [...], both rows of the codebooks."""
    mixed = w[CODEBOOKS[0]][previous] * functional.linear(y, w[f"{SELECTOR}hidden_projection.weight"])
    return torch.einsum("...r,...kr->...k", mixed, w[CODEBOOKS[1]][candidates])


def _prepare(shape: DFlash2Shape, w: Weights, prefix: str, x: Tensor) -> tuple[Tensor, Tensor]:
    delta = functional.linear(x, w[f"{prefix}kernel_projection.weight"])
    delta = delta.view(*x.shape[:2], 2, 2, -1)
    return _conv(shape, x, w[f"{prefix}base_kernel"][0], delta[:, :, 0]), delta[:, :, 1]


def _finish(shape: DFlash2Shape, w: Weights, prefix: str, x: Tensor, delta: Tensor) -> Tensor:
    return _conv(shape, x, w[f"{prefix}base_kernel"][1], delta)


def _conv(shape: DFlash2Shape, x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """sum over taps of (base[tap] + delta[..., tap, group]) * x[t - tap], x before a block 0."""
    before = functional.pad(x, (0, 0, 1, 0))[:, :-1]
    parts = []
    for tap, shifted in enumerate((x, before)):
        kernel = base[tap].view(-1, shape.conv_group) + delta[:, :, tap, :, None]
        parts.append((kernel * shifted.reshape(kernel.shape)).flatten(-2))
    return parts[0] + parts[1]


def _attend(
    shape: DFlash2Shape, w: Weights, prefix: str, h: Tensor, context: Tensor, texts: list[Blocks],
    anchors: list[int], tables: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    block, eps, dim = shape.block, shape.eps, shape.head_dim
    rows = h.flatten(0, 1)
    both = torch.cat([context, rows])
    q = functional.linear(rows, w[f"{prefix}q_proj.weight"]).view(-1, shape.heads, dim)
    k = functional.linear(both, w[f"{prefix}k_proj.weight"]).view(-1, shape.kv_heads, dim)
    v = functional.linear(both, w[f"{prefix}v_proj.weight"]).view(-1, shape.kv_heads, dim)
    q, k = rms_norm(q, w[f"{prefix}q_norm.weight"], eps), rms_norm(k, w[f"{prefix}k_norm.weight"], eps)
    mixed, at, context_at, own = [], 0, 0, torch.arange(block, device=h.device)
    for text, count in zip(texts, anchors, strict=True):
        length = len(text.tokens)
        query_rows = slice(at * block, (at + count) * block)
        block_rows = slice(len(context) + at * block, len(context) + (at + count) * block)
        context_rows = slice(context_at, context_at + length)
        positions = (text.anchors[:, None] + own).flatten()
        own_keys = rotate(k[block_rows], *(table[positions] for table in tables))
        far_keys = rotate(k[context_rows], *(table[:length] for table in tables))
        queries = rotate(q[query_rows], *(table[positions] for table in tables))
        seen = torch.arange(length)
        far = (seen < text.anchors.repeat_interleave(block)[:, None]) & (
            positions[:, None] - seen < shape.window
        )
        index = torch.arange(count).repeat_interleave(block)
        mask = torch.cat([far, index[:, None] == index], 1)
        out = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            torch.cat([far_keys, own_keys]).transpose(0, 1)[None],
            torch.cat([v[context_rows], v[block_rows]]).transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=True,
        )
        mixed.append(out[0].transpose(0, 1).reshape(count * block, -1))
        at, context_at = at + count, context_at + length
    joined = functional.linear(torch.cat(mixed), w[f"{prefix}o_proj.weight"])
    return joined.view(h.shape)

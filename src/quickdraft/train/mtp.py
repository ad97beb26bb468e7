"""The MTP module of a llama-type target, for training: one attention layer, the token after next.

The formula is that of models/mtp.py with plain norms and no gate. A training pass unrolls the chain of
drafts as it is used: step 1 has the target's hidden states, step j its own output in their place, and
attends to step 1's keys up to where the chain began, then to its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quickdraft.train.form import DrafterForm
from quickdraft.train.layers import Weights, feed_forward, rms_norm, rope_tables, rotate

LAYER = "mtp.layers.0."


@dataclass(frozen=True, slots=True)
class MTPShape:
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float

    @classmethod
    def of(cls, form: DrafterForm) -> MTPShape:
        return cls(
            form.width, form.feed_forward, form.heads, form.kv_heads, form.head_dim, form.theta, form.eps
        )


@dataclass(frozen=True, slots=True)
class Text:
    """One text: tokens [S], the target's final hidden states [S, C], and where the answer starts."""

    tokens: Tensor
    hidden: Tensor
    start: int


def initial(shape: MTPShape, seed: int) -> Weights:
    """Linears N(0, 0.02), norms 1; what is added to the residual stream starts smaller."""
    generator = torch.Generator().manual_seed(seed)
    width, queries, kv = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def normal(outputs: int, inputs: int, scale: float = 1.0) -> Tensor:
        return torch.randn(outputs, inputs, generator=generator) * 0.02 * scale

    attention, mlp = f"{LAYER}self_attn.", f"{LAYER}mlp."
    weights = {
        "mtp.fc.weight": normal(width, 2 * width),
        f"{attention}q_proj.weight": normal(queries, width),
        f"{attention}k_proj.weight": normal(kv, width),
        f"{attention}v_proj.weight": normal(kv, width),
        f"{attention}o_proj.weight": normal(width, queries),
        f"{mlp}gate_proj.weight": normal(shape.feed_forward, width),
        f"{mlp}up_proj.weight": normal(shape.feed_forward, width),
        f"{mlp}down_proj.weight": normal(width, shape.feed_forward),
    }
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        weights[f"mtp.{name}.weight"] = torch.ones(width)
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{LAYER}{name}.weight"] = torch.ones(width)
    for name in ("q_norm", "k_norm"):
        weights[f"{attention}{name}.weight"] = torch.ones(shape.head_dim)
    return weights


def chain(shape: MTPShape, w: Weights, texts: list[Text], embedding: Tensor, steps: int) -> list[Tensor]:
    """Outputs of `steps` chained rows. Step j (from 0) has y [n_j, C] of all texts one after another: of a
    text of S tokens the rows p = 1 .. S-1-j, each begun from the hidden state of p-1, whose token is p+j
    and whose output predicts token p+j+1."""
    longest = max(len(text.tokens) for text in texts)
    tables = rope_tables(longest + steps, shape.head_dim, shape.theta, embedding.device)
    counts = [len(text.tokens) - 1 for text in texts]
    previous = torch.cat([text.hidden[:-1] for text in texts])
    keys: list[list[tuple[Tensor, Tensor]]] = [[] for _ in texts]
    outputs: list[Tensor] = []
    for step in range(steps):
        if step:
            previous = torch.cat([part[:-1] for part in torch.split(outputs[-1], counts)])
            counts = [count - 1 for count in counts]
        tokens = torch.cat([text.tokens[1 + step :] for text in texts])
        outputs.append(_rows(shape, w, embedding[tokens], previous, counts, step, tables, keys))
    return outputs


def _rows(
    shape: MTPShape, w: Weights, embedded: Tensor, previous: Tensor, counts: list[int], step: int,
    tables: tuple[Tensor, Tensor], keys: list[list[tuple[Tensor, Tensor]]],
) -> Tensor:  # fmt: skip
    eps, attention = shape.eps, f"{LAYER}self_attn."
    joint = torch.cat(
        [
            rms_norm(embedded, w["mtp.pre_fc_norm_embedding.weight"], eps),
            rms_norm(previous, w["mtp.pre_fc_norm_hidden.weight"], eps),
        ],
        -1,
    )
    x = functional.linear(joint, w["mtp.fc.weight"])
    h = rms_norm(x, w[f"{LAYER}input_layernorm.weight"], eps)
    q = functional.linear(h, w[f"{attention}q_proj.weight"]).view(-1, shape.heads, shape.head_dim)
    k = functional.linear(h, w[f"{attention}k_proj.weight"]).view(-1, shape.kv_heads, shape.head_dim)
    v = functional.linear(h, w[f"{attention}v_proj.weight"]).view(-1, shape.kv_heads, shape.head_dim)
    q = rms_norm(q, w[f"{attention}q_norm.weight"], eps)
    k = rms_norm(k, w[f"{attention}k_norm.weight"], eps)
    mixed, at = [], 0
    for index, count in enumerate(counts):
        rows = slice(at, at + count)
        cos, sin = (table[1 + step : 1 + step + count] for table in tables)
        keys[index].append((rotate(k[rows], cos, sin), v[rows]))
        mixed.append(_attend(shape, rotate(q[rows], cos, sin), keys[index]))
        at += count
    x = x + functional.linear(torch.cat(mixed), w[f"{attention}o_proj.weight"])
    h = rms_norm(x, w[f"{LAYER}post_attention_layernorm.weight"], eps)
    x = x + feed_forward(h, w, f"{LAYER}mlp.")
    return rms_norm(x, w["mtp.norm.weight"], eps)


def _attend(shape: MTPShape, q: Tensor, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Rows [n, H, D] that began at p = 1 .. n: causal over step 1's keys, then each row's own chain."""
    count, group = len(q), shape.heads // shape.kv_heads
    first_k, first_v = (part[:count].repeat_interleave(group, 1).transpose(0, 1) for part in keys[0])
    q = q.transpose(0, 1)
    if len(keys) == 1:
        mixed = functional.scaled_dot_product_attention(q[None], first_k[None], first_v[None], is_causal=True)
        return mixed[0].transpose(0, 1).reshape(count, -1)
    scale = 1.0 / math.sqrt(shape.head_dim)
    own = [
        tuple(part[:count].repeat_interleave(group, 1).transpose(0, 1) for part in pair) for pair in keys[1:]
    ]
    hidden = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ first_k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
    chained = torch.stack([(q * k).sum(-1) * scale for k, _ in own], -1)
    weights = torch.cat([scores, chained], -1).softmax(-1)
    mixed = weights[..., :count] @ first_v
    for index, (_, value) in enumerate(own):
        mixed = mixed + weights[..., count + index, None] * value
    return mixed.transpose(0, 1).reshape(count, -1)

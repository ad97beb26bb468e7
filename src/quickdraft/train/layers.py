"""Pieces both drafters' networks are made of, in torch: norms, rope, grouped attention, the feed-forward.

Weights are dicts of tensors under the names of the checkpoint layout, so export is a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

Weights = dict[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rope_tables(positions: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim / 2] of p / theta^(2i / head_dim)."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope of x [..., T, heads, D], half split; cos and sin [T, D / 2]."""
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def feed_forward(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    """down(silu(gate x) * up x)."""
    gate = functional.linear(x, weights[f"{prefix}gate_proj.weight"])
    up = functional.linear(x, weights[f"{prefix}up_proj.weight"])
    return functional.linear(functional.silu(gate) * up, weights[f"{prefix}down_proj.weight"])

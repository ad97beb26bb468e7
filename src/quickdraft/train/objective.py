"""What training asks of a drafter, whichever it is: a loss of some texts, and a report of held-out ones.

Logits are over the draft vocabulary. The label is the text's own token, mixed half and half with the
target's distribution there, which its final hidden state gives; a label outside the vocabulary is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quickdraft.train.head import Head
from quickdraft.train.layers import Weights
from quickdraft.train.rows import Features, Row


@dataclass(slots=True)
class Corpus:
    """Rows with their features and the numbers of those to train on, of those held out."""

    rows: list[Row]
    features: Features
    training: list[int]
    held_out: list[int]


@dataclass(slots=True)
class Report:
    """What drafts would have given at held-out positions: tokens per step for each longest draft, accuracy
    of each slot after right ones or not, share of labels among the candidates, counts of accepted drafts."""

    tokens_per_step: list[float]
    slot_accuracy: list[float]
    recall: list[float]
    accepted: list[int]
    positions: int

    @classmethod
    def of(cls, right: list[Tensor], recalled: list[Tensor], slots: int) -> Report:
        """From bool [positions, slots] of each text."""
        if not right:
            return cls([1.0] * slots, [0.0] * slots, [0.0] * slots, [0] * (slots + 1), 0)
        hits, found = torch.cat(right), torch.cat(recalled)
        leading = hits.int().cumprod(1)
        return cls(
            [1 + leading[:, :n].sum(1).double().mean().item() for n in range(1, slots + 1)],
            hits.double().mean(0).tolist(),
            found.double().mean(0).tolist(),
            torch.bincount(leading.sum(1), minlength=slots + 1).tolist(),
            len(hits),
        )


class Trainee(Protocol):
    """A drafter in training."""

    head: Head
    weights: Weights

    def groups(self, rate: float) -> list[dict[str, Any]]:
        """Parameter groups with their learning rates."""

    def fits(self, row: Row) -> bool:
        """Whether the row is long enough to learn from."""

    def loss(self, corpus: Corpus, chosen: Sequence[int], generator: torch.Generator) -> Tensor: ...
    def measure(self, corpus: Corpus, chosen: Sequence[int]) -> Report: ...


def mixed_loss(logits: Tensor, labels: Tensor, teacher: Tensor, head: Head) -> Tensor:
    """Per row: half cross-entropy with the label, half with softmax(teacher @ head); 0 for labels outside."""
    likely = logits.log_softmax(-1)
    with torch.no_grad():
        target = functional.linear(teacher, head.rows).softmax(-1)
    soft = -(target * likely).sum(-1)
    known = labels < len(head.ids)
    hard = -likely.gather(-1, labels.clamp(max=len(head.ids) - 1)[..., None])[..., 0]
    return torch.where(known, 0.5 * (soft + hard), 0.0)

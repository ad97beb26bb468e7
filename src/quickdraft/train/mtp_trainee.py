"""The MTP module's loss and report: chains that begin at every position of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from quickdraft.train import mtp
from quickdraft.train.head import Head
from quickdraft.train.layers import Weights
from quickdraft.train.objective import Corpus, Report, mixed_loss
from quickdraft.train.rows import Row

DEFAULT_CHAIN: Final = 3
_FADE: Final = 0.8


@dataclass(slots=True)
class MTPTrainee:
    """Chained rows; the loss of step j weighs 0.8^j."""

    shape: mtp.MTPShape
    head: Head
    weights: Weights
    steps: int = DEFAULT_CHAIN
    top_k: int = 16

    def groups(self, rate: float) -> list[dict[str, Any]]:
        return [{"params": list(self.weights.values()), "lr": rate}]

    def fits(self, row: Row) -> bool:
        """See Trainee: every step has a label."""
        return len(row.tokens) >= max(row.start, 2) + self.steps

    def _texts(self, corpus: Corpus, chosen: Sequence[int]) -> list[mtp.Text]:
        device = self.head.device
        return [
            mtp.Text(
                torch.tensor(corpus.rows[i].tokens).to(device),
                torch.from_numpy(corpus.features.hidden(i)).to(device),
                corpus.rows[i].start,
            )
            for i in chosen
        ]

    def loss(self, corpus: Corpus, chosen: Sequence[int], generator: torch.Generator) -> Tensor:
        """See Trainee; nothing is drawn from the generator."""
        texts, head = self._texts(corpus, chosen), self.head
        outputs = mtp.chain(self.shape, self.weights, texts, head.embedding, self.steps)
        total, weight = torch.zeros((), device=head.device), 0.0
        for step, y in enumerate(outputs):
            rows, labels, teacher = _chained(texts, step)
            logits = functional.linear(y[rows], head.rows)
            each = mixed_loss(logits, head.place[labels], teacher, head)
            known = (head.place[labels] < len(head.ids)).sum().clamp(min=1)
            total = total + _FADE**step * each.sum() / known
            weight += _FADE**step
        return total / weight

    @torch.no_grad()
    def measure(self, corpus: Corpus, chosen: Sequence[int]) -> Report:
        """See Trainee."""
        right, recalled = [], []
        for index in chosen:
            if not self.fits(corpus.rows[index]):
                continue
            texts = self._texts(corpus, [index])
            count = len(texts[0].tokens) - max(texts[0].start, 2) - self.steps + 1
            outputs = mtp.chain(self.shape, self.weights, texts, self.head.embedding, self.steps)
            hits, found = [], []
            for step, y in enumerate(outputs):
                rows, labels, _ = _chained(texts, step)
                logits = functional.linear(y[rows[:count]], self.head.rows)
                best = logits.topk(min(self.top_k, len(self.head.ids))).indices
                same = self.head.ids[best] == labels[:count, None]
                hits.append(same[:, 0])
                found.append(same.any(1))
            right.append(torch.stack(hits, 1))
            recalled.append(torch.stack(found, 1))
        return Report.of(right, recalled, self.steps)


def _chained(texts: Sequence[mtp.Text], step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of step `step`: rows of mtp.chain's output whose label lies in an answer, chains that begin at the
    prompt's last token first; the labels; the target's hidden states that predict them."""
    rows, labels, teacher, at = [], [], [], 0
    for text in texts:
        count = len(text.tokens) - 1 - step
        first = max(text.start - 2, 0)  # p - 1 of a chain that begins at p
        begun = torch.arange(first, max(first, count - 1), device=text.tokens.device)
        rows.append(at + begun)
        labels.append(text.tokens[begun + step + 2])
        teacher.append(text.hidden[begun + step + 1])
        at += count
    return torch.cat(rows), torch.cat(labels), torch.cat(teacher)

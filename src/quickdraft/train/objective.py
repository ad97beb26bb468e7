"""Losses and measures of both drafters: what a batch of texts costs, and how many tokens a step would emit.

Logits are over the draft vocabulary. The label is the text's own token, mixed half and half with the
target's distribution there, which its final hidden state gives; a label outside the vocabulary is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quickdraft.train import dflash2, mtp
from quickdraft.train.layers import Weights
from quickdraft.train.rows import Features, Row


@dataclass(frozen=True, slots=True)
class Head:
    """Embedding [V, C] and head rows [N, C] of the draft vocabulary `ids` [N]; `place` [V] is where an id
    stands in it, N for one that does not."""

    embedding: Tensor
    rows: Tensor
    ids: Tensor
    place: Tensor

    @classmethod
    def of(cls, embedding: Tensor, head: Tensor, ids: Sequence[int]) -> Head:
        chosen = torch.tensor(list(ids))
        place = torch.full((len(embedding),), len(chosen))
        place[chosen] = torch.arange(len(chosen))
        return cls(embedding, head[chosen].contiguous(), chosen, place)


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
    def of(cls, right: Tensor, recalled: Tensor) -> Report:
        """From bool [positions, slots]."""
        leading = right.int().cumprod(1)
        lengths = leading.sum(1)
        slots = right.shape[1]
        return cls(
            [1 + leading[:, :n].sum(1).double().mean().item() for n in range(1, slots + 1)],
            right.double().mean(0).tolist(),
            recalled.double().mean(0).tolist(),
            torch.bincount(lengths, minlength=slots + 1).tolist(),
            len(right),
        )


class Trainee(Protocol):
    """A drafter in training."""

    weights: Weights

    def groups(self, rate: float) -> list[dict[str, Any]]:
        """Parameter groups with their learning rates."""

    def loss(self, corpus: Corpus, chosen: Sequence[int], generator: torch.Generator) -> Tensor: ...
    def measure(self, corpus: Corpus, chosen: Sequence[int]) -> Report: ...


def _mixed_loss(logits: Tensor, labels: Tensor, teacher: Tensor, head: Head) -> Tensor:
    """Per row: half cross-entropy with the label, half with softmax(teacher @ head); 0 for labels outside."""
    likely = logits.log_softmax(-1)
    with torch.no_grad():
        target = functional.linear(teacher, head.rows).softmax(-1)
    soft = -(target * likely).sum(-1)
    known = labels < len(head.ids)
    hard = -likely.gather(-1, labels.clamp(max=len(head.ids) - 1)[..., None])[..., 0]
    return torch.where(known, 0.5 * (soft + hard), 0.0)


@dataclass(slots=True)
class MTPTrainee:
    """Chained rows; the loss of step j weighs 0.8^j."""

    shape: mtp.MTPShape
    head: Head
    weights: Weights
    steps: int = 3
    top_k: int = 16

    def groups(self, rate: float) -> list[dict[str, Any]]:
        return [{"params": list(self.weights.values()), "lr": rate}]

    def _texts(self, corpus: Corpus, chosen: Sequence[int]) -> list[mtp.Text]:
        return [
            mtp.Text(
                torch.tensor(corpus.rows[i].tokens), torch.from_numpy(corpus.features.hidden(i)),
                corpus.rows[i].start,
            )
            for i in chosen
        ]  # fmt: skip

    def loss(self, corpus: Corpus, chosen: Sequence[int], generator: torch.Generator) -> Tensor:
        texts = self._texts(corpus, chosen)
        outputs = mtp.chain(self.shape, self.weights, texts, self.head.embedding, self.steps)
        total, weight = torch.zeros(()), 0.0
        for step, y in enumerate(outputs):
            rows, labels, teacher = _chained(texts, step)
            logits = functional.linear(y[rows], self.head.rows)
            each = _mixed_loss(logits, self.head.place[labels], teacher, self.head)
            known = (self.head.place[labels] < len(self.head.ids)).sum().clamp(min=1)
            total = total + 0.8**step * each.sum() / known
            weight += 0.8**step
        return total / weight

    @torch.no_grad()
    def measure(self, corpus: Corpus, chosen: Sequence[int]) -> Report:
        right, recalled = [], []
        for index in chosen:
            texts = self._texts(corpus, [index])
            count = len(texts[0].tokens) - max(texts[0].start, 2) - self.steps + 1
            if count < 1:
                continue
            outputs = mtp.chain(self.shape, self.weights, texts, self.head.embedding, self.steps)
            hits, found = [], []
            for step, y in enumerate(outputs):
                rows, labels, _ = _chained(texts, step)
                best = functional.linear(y[rows[:count]], self.head.rows).topk(self.top_k).indices
                same = self.head.ids[best] == labels[:count, None]
                hits.append(same[:, 0])
                found.append(same.any(1))
            right.append(torch.stack(hits, 1))
            recalled.append(torch.stack(found, 1))
        return Report.of(torch.cat(right), torch.cat(recalled))


def _chained(texts: Sequence[mtp.Text], step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of step `step`: rows of mtp.chain's output whose label lies in an answer, chains that begin at the
    prompt's last token first; the labels; the target's hidden states that predict them."""
    rows, labels, teacher, at = [], [], [], 0
    for text in texts:
        count = len(text.tokens) - 1 - step
        begun = torch.arange(max(text.start - 2, 0), count - 1)  # p - 1 of a chain that begins at p
        rows.append(at + begun)
        labels.append(text.tokens[begun + step + 2])
        teacher.append(text.hidden[begun + step + 1])
        at += count
    return torch.cat(rows), torch.cat(labels), torch.cat(teacher)


@dataclass(slots=True)
class DFlash2Trainee:
    """Blocks at random anchors of the answers; slot j's loss weighs exp(-(j - 1) / 4)."""

    shape: dflash2.DFlash2Shape
    head: Head
    weights: Weights
    anchors: int = 32
    codebook_rate: float = 5.0
    measured_anchors: int = 24
    _decay: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._decay = torch.exp(-torch.arange(self.shape.block - 1) / 4.0)

    def groups(self, rate: float) -> list[dict[str, Any]]:
        names = dflash2.CODEBOOKS
        rest = [value for name, value in self.weights.items() if name not in names]
        books = [self.weights[name] for name in names]
        return [{"params": rest, "lr": rate}, {"params": books, "lr": rate * self.codebook_rate}]

    def _blocks(
        self, corpus: Corpus, chosen: Sequence[int], count: int, generator: torch.Generator
    ) -> tuple[list[dflash2.Blocks], Tensor]:
        """Blocks of the texts, and the final hidden states [blocks, slots, C] that predict their labels."""
        blocks, teacher = [], []
        for index in chosen:
            row = corpus.rows[index]
            possible = torch.arange(row.start, len(row.tokens) - self.shape.block + 1)
            if not len(possible):
                continue
            picked = possible[torch.randperm(len(possible), generator=generator)[:count]].sort().values
            features = torch.from_numpy(corpus.features.taps(index))
            blocks.append(dflash2.Blocks(torch.tensor(row.tokens), features, picked))
            hidden = torch.from_numpy(corpus.features.hidden(index))
            teacher.append(hidden[picked[:, None] + torch.arange(self.shape.block - 1)])
        return blocks, torch.cat(teacher) if teacher else torch.empty(0)

    def _tokens(self, blocks: list[dflash2.Blocks]) -> Tensor:
        """The text's tokens [blocks, B]."""
        return torch.cat([b.tokens[b.anchors[:, None] + torch.arange(self.shape.block)] for b in blocks])

    def loss(self, corpus: Corpus, chosen: Sequence[int], generator: torch.Generator) -> Tensor:
        blocks, teacher = self._blocks(corpus, chosen, self.anchors, generator)
        if not blocks:
            return sum((value.sum() * 0 for value in self.weights.values()), torch.zeros(()))
        y = dflash2.slots(self.shape, self.weights, blocks, self.head.embedding)
        logits = functional.linear(y, self.head.rows)
        places = self.head.place[self._tokens(blocks)]
        labels, previous = places[:, 1:], places[:, :-1]
        weight = self._decay * (labels < len(self.head.ids))
        unary = (_mixed_loss(logits, labels, teacher, self.head) * weight).sum() / weight.sum().clamp(min=1)
        values, candidates = logits.topk(self.shape.top_k)
        hit = candidates == labels[..., None]
        weight = weight * hit.any(-1)
        scores = values + dflash2.edges(self.weights, y, previous, candidates)
        chosen_loss = -scores.log_softmax(-1).masked_fill(~hit, 0.0).sum(-1)
        return unary + (chosen_loss * weight).sum() / weight.sum().clamp(min=1)

    @torch.no_grad()
    def measure(self, corpus: Corpus, chosen: Sequence[int]) -> Report:
        generator = torch.Generator().manual_seed(0)
        right, recalled = [], []
        for index in chosen:
            blocks, _ = self._blocks(corpus, [index], self.measured_anchors, generator)
            if not blocks:
                continue
            y = dflash2.slots(self.shape, self.weights, blocks, self.head.embedding)
            tokens = self._tokens(blocks)
            values, candidates = functional.linear(y, self.head.rows).topk(self.shape.top_k)
            recalled.append((self.head.ids[candidates] == tokens[:, 1:, None]).any(-1))
            right.append(self._walk(y, values, candidates, tokens))
        return Report.of(torch.cat(right), torch.cat(recalled))

    def _walk(self, y: Tensor, values: Tensor, candidates: Tensor, tokens: Tensor) -> Tensor:
        """Which slots the selector's greedy walk gets right, bool [blocks, slots]."""
        previous, right = self.head.place[tokens[:, 0]], []
        for slot in range(self.shape.block - 1):
            scores = values[:, slot] + dflash2.edges(self.weights, y[:, slot], previous, candidates[:, slot])
            previous = candidates[:, slot].gather(1, scores.argmax(-1, keepdim=True))[:, 0]
            right.append(self.head.ids[previous] == tokens[:, slot + 1])
        return torch.stack(right, 1)

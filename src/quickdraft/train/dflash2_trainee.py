"""DFlash2's loss and report: blocks at random anchors of the answers, and the selector's choice among 16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quickdraft.train import dflash2
from quickdraft.train.head import Head
from quickdraft.train.layers import Weights
from quickdraft.train.objective import Corpus, Report, mixed_loss
from quickdraft.train.rows import Row


@dataclass(slots=True)
class DFlash2Trainee:
    """Slot j's loss weighs exp(-(j - 1) / 4); the codebooks learn at `codebook_rate` times the rate. With
    `lengths`, the blocks of a step have one of these numbers of rows: shorter ones are cheaper to learn from,
    and their slots are those that matter most."""

    shape: dflash2.DFlash2Shape
    head: Head
    weights: Weights
    anchors: int = 32
    codebook_rate: float = 5.0
    measured_anchors: int = 24
    lengths: tuple[int, ...] = ()
    _decay: Tensor = field(init=False)

    def __post_init__(self) -> None:
        decay = torch.exp(-torch.arange(self.shape.block - 1) / 4.0)
        self._decay = decay.to(self.head.device)

    def groups(self, rate: float) -> list[dict[str, Any]]:
        names = dflash2.CODEBOOKS
        rest = [value for name, value in self.weights.items() if name not in names]
        books = [self.weights[name] for name in names]
        return [{"params": rest, "lr": rate}, {"params": books, "lr": rate * self.codebook_rate}]

    def fits(self, row: Row) -> bool:
        """See Trainee: there is an anchor."""
        return len(row.tokens) - self.shape.block >= row.start

    def _blocks(
        self, corpus: Corpus, chosen: Sequence[int], count: int, generator: torch.Generator
    ) -> tuple[list[dflash2.Blocks], Tensor]:
        """Blocks of the texts, and the final hidden states [blocks, slots, C] that predict their labels."""
        blocks, teacher, device = [], [], self.head.device
        for index in chosen:
            row = corpus.rows[index]
            if not self.fits(row):
                continue
            possible = torch.arange(row.start, len(row.tokens) - self.shape.block + 1)
            picked = possible[torch.randperm(len(possible), generator=generator)[:count]].sort().values
            features = torch.from_numpy(corpus.features.taps(index)).to(device)
            tokens = torch.tensor(row.tokens).to(device)
            blocks.append(dflash2.Blocks(tokens, features, picked.to(device)))
            hidden = torch.from_numpy(corpus.features.hidden(index))
            teacher.append(hidden[picked[:, None] + torch.arange(self.shape.block - 1)])
        return blocks, torch.cat(teacher).to(device) if teacher else torch.empty(0)

    def _tokens(self, blocks: list[dflash2.Blocks]) -> Tensor:
        """The text's tokens [blocks, B]."""
        within = torch.arange(self.shape.block, device=self.head.device)
        return torch.cat([each.tokens[each.anchors[:, None] + within] for each in blocks])

    def loss(self, corpus: Corpus, chosen: Sequence[int], generator: torch.Generator) -> Tensor:
        """See Trainee."""
        if self.lengths:
            block = self.lengths[int(torch.randint(len(self.lengths), (1,), generator=generator))]
            cut = replace(self, lengths=(), shape=replace(self.shape, block=block))
            return cut.loss(corpus, chosen, generator)
        blocks, teacher = self._blocks(corpus, chosen, self.anchors, generator)
        if not blocks:
            zero = torch.zeros((), device=self.head.device)
            return sum((value.sum() * 0 for value in self.weights.values()), zero)
        y = dflash2.slots(self.shape, self.weights, blocks, self.head.embedding)
        logits = functional.linear(y, self.head.rows)
        places = self.head.place[self._tokens(blocks)]
        labels, previous = places[:, 1:], places[:, :-1]
        weight = self._decay * (labels < len(self.head.ids))
        unary = (mixed_loss(logits, labels, teacher, self.head) * weight).sum() / weight.sum().clamp(min=1)
        values, candidates = logits.topk(self.shape.top_k)
        hit = candidates == labels[..., None]
        weight = weight * hit.any(-1)
        scores = values + dflash2.edges(self.weights, y, previous, candidates)
        chosen_loss = -scores.log_softmax(-1).masked_fill(~hit, 0.0).sum(-1)
        return unary + (chosen_loss * weight).sum() / weight.sum().clamp(min=1)

    @torch.no_grad()
    def measure(self, corpus: Corpus, chosen: Sequence[int]) -> Report:
        """See Trainee; the same anchors every time."""
        generator = torch.Generator().manual_seed(0)
        right, recalled = [], []
        for index in chosen:
            blocks, _ = self._blocks(corpus, [index], self.measured_anchors, generator)
            if not blocks:
                continue
            y = dflash2.slots(self.shape, self.weights, blocks, self.head.embedding)
            labels = self._tokens(blocks)[:, 1:]
            candidates = functional.linear(y, self.head.rows).topk(self.shape.top_k).indices
            recalled.append((self.head.ids[candidates] == labels[..., None]).any(-1))
            right.append(self.paths(blocks, y) == labels)
        return Report.of(right, recalled, self.shape.block - 1)

    def paths(self, blocks: list[dflash2.Blocks], y: Tensor) -> Tensor:
        """Token ids [blocks, slots] of the selector's greedy walk over the slots' outputs `y`."""
        values, candidates = functional.linear(y, self.head.rows).topk(self.shape.top_k)
        previous, path = self.head.place[self._tokens(blocks)[:, 0]], []
        for slot in range(self.shape.block - 1):
            scores = values[:, slot] + dflash2.edges(self.weights, y[:, slot], previous, candidates[:, slot])
            previous = candidates[:, slot].gather(1, scores.argmax(-1, keepdim=True))[:, 0]
            path.append(self.head.ids[previous])
        return torch.stack(path, 1)

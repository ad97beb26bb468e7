"""Head: the target's embedding and its head's rows of a draft vocabulary, as networks in training read them.

Knows no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quickdraft.train.layers import Weights


@dataclass(frozen=True, slots=True)
class Head:
    """Embedding [V, C] and head rows [N, C] of the draft vocabulary `ids` [N]; `place` [V] is where an id
    stands in it, N for one that does not."""

    embedding: Tensor
    rows: Tensor
    ids: Tensor
    place: Tensor

    @classmethod
    def of(
        cls,
        embedding: NDArray[np.float32],
        head: NDArray[np.float32],
        ids: Sequence[int],
        device: torch.device | None = None,
    ) -> Head:
        chosen = torch.tensor(list(ids))
        place = torch.full((len(embedding),), len(chosen))
        place[chosen] = torch.arange(len(chosen))
        rows = torch.from_numpy(head)[chosen].contiguous()
        whole = (torch.from_numpy(embedding), rows, chosen, place)
        return cls(*(part.to(device) for part in whole))

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def moved(weights: Weights, device: torch.device) -> Weights:
    return {name: value.to(device) for name, value in weights.items()}

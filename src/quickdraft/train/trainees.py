"""make_trainee: a drafter's network with its weights where training runs, from its form and the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from quickdraft.errors import ConfigError
from quickdraft.models.registry import TargetFile
from quickdraft.train import dflash2, mtp
from quickdraft.train.dflash2_trainee import DFlash2Trainee
from quickdraft.train.export import checkpoint_weights
from quickdraft.train.form import MTP, DrafterForm
from quickdraft.train.head import Head, moved
from quickdraft.train.layers import Weights
from quickdraft.train.mtp_trainee import MTPTrainee
from quickdraft.train.objective import Trainee
from quickdraft.train.open_target import target_tables


def device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def initial_weights(form: DrafterForm, vocabulary: int, seed: int) -> Weights:
    """Before the first step, on the CPU; `vocabulary` ids are drafted."""
    if form.kind == MTP:
        return mtp.initial(mtp.MTPShape.of(form), seed)
    return dflash2.initial(dflash2.DFlash2Shape.of(form), vocabulary, seed)


def make_trainee(
    form: DrafterForm, target: TargetFile, ids: Sequence[int], seed: int, anchors: int, chain: int,
    weights: Weights | None = None,
) -> Trainee:  # fmt: skip
    """Initial weights unless given."""
    if len(ids) < form.top_k:
        raise ConfigError("a draft vocabulary that is too small", got=len(ids), expected=f"{form.top_k} ids")
    where = device()
    head = Head.of(*target_tables(target), ids, where)
    weights = moved(weights if weights is not None else initial_weights(form, len(ids), seed), where)
    if form.kind == MTP:
        return MTPTrainee(mtp.MTPShape.of(form), head, weights, chain, form.top_k)
    return DFlash2Trainee(dflash2.DFlash2Shape.of(form), head, weights, anchors)


def start_from(trainee: Trainee, checkpoint: Path) -> None:
    """Take the weights of another checkpoint; ConfigError where a tensor is missing or has another shape."""
    found, _ = checkpoint_weights(checkpoint)
    for name, value in trainee.weights.items():
        if name not in found or found[name].shape != tuple(value.shape):
            got = found[name].shape if name in found else "no such tensor"
            raise ConfigError(f"{checkpoint}: {name} does not fit", got=got, expected=tuple(value.shape))
        value.copy_(torch.from_numpy(found[name]))

"""The training loop: batches that are a function of seed and step, a schedule, checkpoints to go on from.

A run that stops at any moment and goes on gives the same weights as one that did not (same machine, same
threads). Knows no network.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quickdraft.errors import ConfigError
from quickdraft.train.objective import Corpus, Report, Trainee

CHECKPOINT: Final = "checkpoint.safetensors"
CURVE: Final = "curve.jsonl"
_OPTIMISER: Final = 1.15  # of a step's time: the optimiser and measuring come on top
_MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast: `rate` rises over the first 4 % of `steps` and falls as a cosine to a tenth;
    `texts` rows per step."""

    steps: int
    texts: int
    rate: float
    seed: int
    save_every: int = 50
    measure_every: int = 200

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        rising = max(1, self.steps // 25)
        if step < rising:
            return self.rate * (step + 1) / rising
        done = (step - rising) / max(1, self.steps - rising)
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0))))


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of the curve."""

    step: int
    loss: float  # mean since the line before
    seconds: float  # of training, all sittings together
    report: Report | None


def batch(plan: Plan, rows: list[int], step: int) -> list[int]:
    """The rows of a step: every row once per epoch, in an order of its own."""
    first = step * plan.texts
    chosen = []
    for place in range(first, first + plan.texts):
        epoch, at = divmod(place, len(rows))
        order = np.random.default_rng((plan.seed, epoch)).permutation(len(rows))
        chosen.append(rows[int(order[at])])
    return chosen


def fit(
    trainee: Trainee, corpus: Corpus, plan: Plan, folder: Path, on_progress: Callable[[Progress], None]
) -> None:
    """Train to the plan's last step, from the checkpoint in `folder` if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    for value in trainee.weights.values():
        value.requires_grad_()
    optimiser = torch.optim.AdamW(trainee.groups(plan.rate), betas=(0.9, 0.95), weight_decay=0.0)
    ratios = [group["lr"] / plan.rate for group in optimiser.param_groups]
    step, seconds = _resume(trainee, optimiser, plan, folder)
    _cut_curve(folder, step)
    started, losses = time.monotonic() - seconds, []
    while step < plan.steps:
        for group, ratio in zip(optimiser.param_groups, ratios, strict=True):
            group["lr"] = plan.rate_at(step) * ratio
        generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
        loss = trainee.loss(corpus, batch(plan, corpus.training, step), generator)
        if not torch.isfinite(loss):
            raise ConfigError(f"the loss of step {step} is {loss.item()}", hint="give a lower --rate")
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(list(trainee.weights.values()), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        step += 1
        last = step == plan.steps
        if last or step % plan.measure_every == 0 or step % 10 == 0:
            measured = last or step % plan.measure_every == 0
            report = trainee.measure(corpus, corpus.held_out) if measured else None
            line = Progress(step, sum(losses) / len(losses), time.monotonic() - started, report)
            losses = []
            _note(folder, line)
            on_progress(line)
        if last or step % plan.save_every == 0:
            _save(trainee, optimiser, plan, folder, step, time.monotonic() - started)


def seconds_of_a_step(trainee: Trainee, corpus: Corpus, plan: Plan, tries: int = 4) -> float:
    """Of one step here, measured without taking one: the mean of all tries but the first."""
    times = []
    for step in range(tries):
        for value in trainee.weights.values():
            value.requires_grad_()
        started = time.monotonic()
        generator = torch.Generator().manual_seed(step)
        torch.autograd.backward(trainee.loss(corpus, batch(plan, corpus.training, step), generator))
        times.append(time.monotonic() - started)
    for value in trainee.weights.values():
        value.grad = None
    return sum(times[1:]) / (tries - 1) * _OPTIMISER


def _cut_curve(folder: Path, step: int) -> None:
    """Leave out what was noted after the checkpoint: it comes again."""
    path = folder / CURVE
    if path.exists():
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))


def _note(folder: Path, line: Progress) -> None:
    with open(folder / CURVE, "a") as file:
        file.write(json.dumps(asdict(line)) + "\n")


def _save(trainee: Trainee, optimiser: Any, plan: Plan, folder: Path, step: int, seconds: float) -> None:
    tensors = {f"weights.{name}": value.detach() for name, value in trainee.weights.items()}
    for index, state in optimiser.state_dict()["state"].items():
        for part in _MOMENTS:
            tensors[f"{part}.{index}"] = state[part]
    about = {"plan": asdict(plan), "step": step, "seconds": seconds}
    temporary = folder / f"{CHECKPOINT}.new"
    save_file(tensors, temporary, metadata={"about": json.dumps(about)})
    os.replace(temporary, folder / CHECKPOINT)


def _resume(trainee: Trainee, optimiser: Any, plan: Plan, folder: Path) -> tuple[int, float]:
    path = folder / CHECKPOINT
    if not path.exists():
        return 0, 0.0
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
        if about["plan"] != asdict(plan):
            raise ConfigError(f"{path} is of another plan", got=about["plan"], expected=asdict(plan))
        with torch.no_grad():
            for name, value in trainee.weights.items():
                value.copy_(file.get_tensor(f"weights.{name}"))
        whole = optimiser.state_dict()
        count = sum(len(group["params"]) for group in whole["param_groups"])
        whole["state"] = {
            index: {part: file.get_tensor(f"{part}.{index}") for part in _MOMENTS} for index in range(count)
        }
    optimiser.load_state_dict(whole)
    return about["step"], about["seconds"]

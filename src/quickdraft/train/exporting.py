"""export_checkpoint: what `quickdraft train export` does with the files beside a checkpoint.

A training folder says in recipe.json what its drafter is; for a checkpoint without one, the target and a
few options tell what its tensors do not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quickdraft.errors import ConfigError
from quickdraft.models.draft_vocab import DraftVocab
from quickdraft.train.export import DRAFT_VOCAB, checkpoint_weights, export
from quickdraft.train.form import DrafterForm, form_of_weights, read_recipe
from quickdraft.train.open_target import open_for_training
from quickdraft.train.rows import held_out, read_rows

CURVE = "curve.jsonl"


def export_checkpoint(
    checkpoint: Path, out: Path, bits: int, *, target: str | Path | None = None, vocab: Path | None = None,
    data: Path | None = None, own: Mapping[str, Any] | None = None,
) -> int:  # fmt: skip
    """Bytes of the folder. ConfigError for what is missing, or contradicts recipe.json."""
    weights, about = checkpoint_weights(checkpoint)
    folder, recipe = checkpoint.parent, read_recipe(checkpoint.parent)
    if recipe is None:
        if target is None:
            raise ConfigError(f"no recipe.json beside {checkpoint}", hint="give --target and --draft-vocab")
        opened, sha256 = open_for_training(target)
        shapes = {name: value.shape for name, value in weights.items()}
        form = form_of_weights(shapes, opened.config, sha256, **(own or {}))
    else:
        form = DrafterForm.from_json(recipe["form"], str(folder))
        if own:
            raise ConfigError("options that recipe.json already says", got=", ".join(sorted(own)))
        if target is not None and form.target_sha256 != (found := open_for_training(target)[1]):
            raise ConfigError("another target than recipe.json says", got=found, expected=form.target_sha256)
    path = vocab if vocab is not None else folder / DRAFT_VOCAB
    note = training_note(about, folder, (recipe or {}).get("data"), data)
    return export(weights, form, DraftVocab.load(path), out, bits, note)


def training_note(
    about: Mapping[str, Any], folder: Path, rows: Mapping[str, Any] | None, data: Path | None
) -> dict[str, Any]:
    """config.json's `training`: how long, on how much, and what came out on held-out rows."""
    plan = about.get("plan", {})
    note = {"steps": about.get("step")} | {key: plan.get(key) for key in ("texts", "rate", "seed")}
    if data is not None:
        every = read_rows(data)
        learnt = [row for row in every if not held_out(row)]
        rows = {"rows": len(learnt), "tokens": sum(len(row.tokens) for row in learnt)}
    note |= dict(rows or {})
    note["held_out_tokens_per_step"] = _last_measured(folder / CURVE)
    return {key: value for key, value in note.items() if value is not None}


def _last_measured(curve: Path) -> list[float] | None:
    """Tokens per step for each length, of the last line of a curve that has them."""
    if not curve.exists():
        return None
    lines = [json.loads(line) for line in curve.read_text().splitlines() if line.startswith("{")]
    reports = [line["report"] for line in lines if line.get("report")]
    return [round(value, 4) for value in reports[-1]["tokens_per_step"]] if reports else None

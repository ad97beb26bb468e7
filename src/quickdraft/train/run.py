"""train_drafter: from a target and settings to a drafter folder; the same call goes on where it stopped.

The first call writes down in recipe.json what it decided (sizes, rows, steps); later ones keep to it, so
that the weights are those of a run that was never stopped. The folder holds recipe.json, draft_vocab.json,
checkpoint.safetensors, curve.jsonl, perhaps data, and drafter/, the exported folder.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from quickdraft.errors import ConfigError
from quickdraft.models.draft_vocab import DraftVocab
from quickdraft.models.registry import TargetFile
from quickdraft.train.corpus import DEFAULT_VOCABULARY, corpus_of, read_features, rows_of, vocab_of
from quickdraft.train.data import DataPlan, make_data, open_writer
from quickdraft.train.dflash2_trainee import DFlash2Trainee
from quickdraft.train.display import Display
from quickdraft.train.export import DRAFT_VOCAB
from quickdraft.train.exporting import export_checkpoint
from quickdraft.train.fit import CHECKPOINT, Plan, fit, seconds_of_a_step
from quickdraft.train.form import DFLASH2, MTP, RECIPE, DrafterForm, read_recipe, spread_taps
from quickdraft.train.objective import Corpus, Trainee
from quickdraft.train.open_target import check_rope, mask_of, open_for_training
from quickdraft.train.rows import Row, data_layers, held_out, read_rows
from quickdraft.train.trainees import make_trainee, start_from

DRAFTER: Final = "drafter"
DATA: Final = "data"
DEFAULT_STEPS: Final = 6000
DEFAULT_TEXTS: Final = {MTP: 2, DFLASH2: 2}
DEFAULT_RATE: Final = {MTP: 1.6e-3, DFLASH2: 1.6e-3}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may ask for; None: decide. `threads` changes no decision."""

    kind: str
    target: str
    out: Path
    data: Path | None = None
    rows: int | None = None  # to make where there are fewer
    steps: int | None = None
    minutes: float | None = None  # plan as many steps as they take
    texts: int | None = None
    rate: float | None = None
    seed: int = 1
    layers: int | None = None
    block: int | None = None
    window: int | None = None
    mask_id: int | None = None
    anchors: int = 32
    lengths: tuple[int, ...] = ()  # rows of a step's blocks, drawn from these; empty: `block`
    chain: int = 3
    draft_vocab: Path | None = None
    vocab_size: int | None = None
    init: Path | None = None
    threads: int | None = None
    bits: int = 8

    @property
    def data_folder(self) -> Path:
        return self.data if self.data is not None else self.out / DATA

    def asked(self) -> dict[str, Any]:
        """What must not change while a run goes on, as JSON."""
        same = asdict(self)
        for name in ("out", "threads", "bits", "rows"):
            del same[name]
        same["lengths"] = list(self.lengths)
        return {name: str(value) if isinstance(value, Path) else value for name, value in same.items()}


@dataclass(slots=True)
class Session:
    """A run that is ready to train."""

    settings: Settings
    recipe: dict[str, Any]
    target: TargetFile
    trainee: Trainee
    corpus: Corpus
    form: DrafterForm


def train_drafter(settings: Settings, display: Display) -> Path:
    """Train to the end and export; the drafter's folder. Errors say what contradicts an earlier start."""
    session = prepare(settings, display)
    plan = _plan(session, display)
    with display.training(plan) as show:
        fit(session.trainee, session.corpus, plan, settings.out, show)
    drafter = settings.out / DRAFTER
    size = export_checkpoint(settings.out / CHECKPOINT, drafter, settings.bits)
    display.report(f"{drafter}: {size / 1e6:.2f} MB, {settings.bits} bits")
    return drafter


def prepare(settings: Settings, display: Display) -> Session:
    """Everything before the first step: data, features, vocabulary, form, weights."""
    target, sha256 = open_for_training(settings.target)
    if settings.kind == MTP:
        check_rope(target)
    recipe = read_recipe(settings.out)
    if recipe is not None and recipe["asked"] != settings.asked():
        changed = [key for key, value in settings.asked().items() if recipe["asked"].get(key) != value]
        raise ConfigError(
            f"{settings.out} holds a run with other settings", got=", ".join(changed),
            hint="give the same ones to go on, or a new --out",
        )  # fmt: skip
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    _ensure_data(settings, target, sha256, display)
    data = settings.data_folder
    taps = data_layers(data) or spread_taps(target.config.layers)
    rows = rows_of(data, target)[: recipe["rows"] if recipe is not None else None]
    features = read_features(data, rows, target, taps, settings.threads, display.counting("features"))
    settings.out.mkdir(parents=True, exist_ok=True)
    vocab = _vocab(settings, rows, target, begun=recipe is not None)
    form = _form(settings, target, sha256, taps, recipe)
    trainee = make_trainee(form, target, vocab.ids.tolist(), settings.seed, settings.anchors, settings.chain)
    if isinstance(trainee, DFlash2Trainee):
        trainee.lengths = settings.lengths
    if settings.init is not None:
        start_from(trainee, settings.init)
    if recipe is None:
        recipe = {"asked": settings.asked(), "form": form.to_json(), "rows": len(rows), "data": _noted(rows)}
        _write_recipe(settings.out, recipe)
    return Session(settings, recipe, target, trainee, corpus_of(rows, features, trainee.fits), form)


def _ensure_data(settings: Settings, target: TargetFile, sha256: str, display: Display) -> None:
    have = len(read_rows(settings.data_folder))
    if settings.rows is None or have >= settings.rows:
        if not have:
            raise ConfigError(
                f"no rows in {settings.data_folder}", hint="give --rows N to make them, or --data DATA"
            )
        return
    llm = open_writer(settings.target, settings.threads)
    try:
        make_data(llm, sha256, settings.data_folder, DataPlan(settings.rows), display.report)
    finally:
        llm.close()


def _vocab(settings: Settings, rows: list[Row], target: TargetFile, begun: bool) -> DraftVocab:
    """Chosen once: draft_vocab.json beside the checkpoint."""
    path, size = settings.out / DRAFT_VOCAB, target.config.vocabulary_size
    if begun:
        return DraftVocab.load(path, size)
    if settings.draft_vocab is not None:
        vocab = DraftVocab.load(settings.draft_vocab, size)
    else:
        vocab = vocab_of(rows, target, min(settings.vocab_size or DEFAULT_VOCABULARY, size))
    vocab.save(path)
    return vocab


def _form(
    settings: Settings, target: TargetFile, sha256: str, taps: tuple[int, ...], recipe: dict[str, Any] | None
) -> DrafterForm:
    if recipe is not None:
        form = DrafterForm.from_json(recipe["form"], str(settings.out / RECIPE))
        if form.target_sha256 != sha256:
            raise ConfigError(f"{settings.out} is for another model", got=sha256, expected=form.target_sha256)
        return form
    if settings.kind == MTP:
        return DrafterForm.of(MTP, target.config, sha256)
    own = {"layers": settings.layers, "block": settings.block, "window": settings.window}
    given = {name: value for name, value in own.items() if value is not None}
    mask_id = settings.mask_id if settings.mask_id is not None else mask_of(target)
    return DrafterForm.of(
        DFLASH2, target.config, sha256, taps=taps, mask_id=mask_id, lengths=settings.lengths, **given
    )


def _noted(rows: list[Row]) -> dict[str, int]:
    learnt = [row for row in rows if not held_out(row)]
    return {"rows": len(learnt), "tokens": sum(len(row.tokens) for row in learnt)}


def _plan(session: Session, display: Display) -> Plan:
    """The recipe's; decided and noted at the first start."""
    settings, recipe = session.settings, session.recipe
    if "plan" in recipe:
        return Plan(**recipe["plan"])
    texts = settings.texts or DEFAULT_TEXTS[settings.kind]
    rate = settings.rate if settings.rate is not None else DEFAULT_RATE[settings.kind]
    plan = Plan(settings.steps or DEFAULT_STEPS, texts, rate, settings.seed)
    if settings.minutes is not None:
        seconds = seconds_of_a_step(session.trainee, session.corpus, plan)
        plan = replace(plan, steps=max(10, int(settings.minutes * 60 / seconds)))
        display.report(f"a step takes {seconds:.3f} s: {plan.steps} steps in {settings.minutes:g} minutes")
    most = max(1, plan.steps // 10)
    plan = replace(
        plan, measure_every=min(plan.measure_every, 2 * most), save_every=min(plan.save_every, most)
    )
    recipe["plan"] = asdict(plan)
    _write_recipe(settings.out, recipe)
    return plan


def _write_recipe(folder: Path, recipe: dict[str, Any]) -> None:
    new = folder / f"{RECIPE}.new"
    new.write_text(json.dumps(recipe, indent=1) + "\n")
    os.replace(new, folder / RECIPE)

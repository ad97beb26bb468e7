"""Drafts of block drafters inside an engine: recorded as made, and computed from scratch over a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quickdraft.engine.llm import LLM
from quickdraft.models.dflash_loading import DRAFT_VOCAB
from quickdraft.models.draft_vocab import DraftVocab
from quickdraft.models.interface import Taps
from quickdraft.models.registry import load_model
from quickdraft.ops.select import select
from quickdraft.speculate.draft import Draft
from tests.support.dflash import DrafterSteps, drafter_config, drafter_tensors, write_drafter
from tests.support.drafting import OneByOne

BLOCKS = 24
Drafts = dict[tuple[int, ...], tuple[int, ...]]


class Recorder(OneByOne):
    """Drafts by turns from `sources` ("" is none) of an LLM's drafters, at full length, and keeps what
    `source` drafted: text -> draft."""

    def __init__(self, llm: LLM, source: str, turns: Sequence[str] | None = None) -> None:
        super().__init__(list(llm.opened.engine.drafting._drafters.values()))
        self.source, self.turns = source, turns or (source,)
        self.made: Drafts = {}
        llm.opened.engine.drafting = self

    def propose(self, view: Any, speculation: Any, budget: int) -> Draft:
        source = "" if speculation.off else self.turns[len(view.tokens) % len(self.turns)]
        if not source or not budget:
            return Draft()
        draft = self._drafters[source].propose(view, min(budget, 15))
        if source == self.source and draft.tokens:
            self.made[tuple(view.tokens)] = draft.tokens
        return draft


class Scratch:
    """Greedy drafts of a drafter over a text from nothing: target and caches of its own."""

    def __init__(self, target: Path, drafter: Path, layers: Sequence[int]) -> None:
        ops = select(1)
        limits: Any = {"max_rows": 16 * BLOCKS, "max_wanted": 1, "taps": Taps(layers=tuple(sorted(layers)))}
        loaded = load_model(target, ops, **limits)
        self.model: Any = loaded.model
        self.layers, self.ops, self.drafter, self.loaded = layers, ops, drafter, loaded
        self.kv: Any = self.model.kv_cache(BLOCKS, loaded.kv_dtype)
        self.states: Any = self.model.recurrent_cache(1, 1, 1)
        self.batch = ops.batch(16 * BLOCKS, 1, BLOCKS, BLOCKS, self.model.config.vocabulary_size)
        self.program: Any = self.model.program(self.batch, self.kv, self.states)
        self.steps = DrafterSteps.load(drafter, loaded, ops, kv=loaded.kv_dtype, slots=1)

    def draft(self, text: Sequence[int], count: int, seen_from: int = 0) -> tuple[int, ...]:
        """The first `count` drafts after `text`, its context beginning at `seen_from`."""
        known = len(text) - 1
        arrays = (text[:known], range(known), [0, known], [range(BLOCKS)], [known - 1])
        more = {}
        if self.states is not None:
            self.states.clear(0)
            more = {"slots": np.zeros(1, np.int32)}
        self.batch.set(*(np.array(array, np.int32) for array in arrays), **more)
        self.program.run()
        features = np.concatenate([np.array(self.model.taps[layer][:known]) for layer in self.layers], axis=1)
        self.steps.kv.keys[...] = self.steps.kv.values[...] = np.nan
        self.steps.lengths = [0]
        self.steps.append(features)
        block = self.steps.module.config.block
        self.steps.block([text[-1]], [block], [seen_from])
        return tuple(self.steps.path(text[-1], count))


def poison_freed(llm: LLM) -> None:
    """Fill the drafters' caches with NaN, and whatever block is freed from now on; such a block says that it
    has every row."""
    cars = llm.opened.memory.side_cars

    def block(number: int) -> None:
        for car in cars:
            leases = car.rows._leases
            place = number if leases is None else leases.find(number)
            if place >= 0:
                car.kv.keys[:, place] = car.kv.values[:, place] = np.nan
                car.rows._runs[number] = (0, 16)

    for car in cars:
        car.kv.keys[...] = car.kv.values[...] = np.nan
    for number in range(llm.total_blocks):
        block(number)
    llm.opened.engine.scheduler.pool._on_free = block


def knowing_drafter(
    folder: Path, target: Any, following: Mapping[int, int], version: int = 2, **changes: Any
) -> Path:
    """A random drafter for a target of config `target`, choosing among the tokens that follow others, that
    drafts following[token] after token where its selector's mood, a number made from the row, is good: right
    and wrong by turns."""
    config = drafter_config(
        version,
        vocab_size=target.vocabulary_size, hidden_size=target.width, num_target_layers=target.layers,
        dflash_config={"target_layer_ids": [0, target.layers - 1]} | changes.pop("dflash_config", {}),
        **changes,
    )  # fmt: skip
    tensors = drafter_tensors(config)
    if version == 2:
        size, rank = target.vocabulary_size, config["dflash_config"]["selector_rank"]
        random = np.random.default_rng(1)
        before = random.choice([-1.0, 1.0], (size, rank)).astype(np.float32)
        after = np.zeros((size, rank), np.float32)
        for token, successor in following.items():
            after[successor] += before[token]
        name = "candidate_selector."
        mood = random.normal(0, 1, (1, target.width)).astype(np.float32)
        tensors[f"{name}predecessor_codebook"], tensors[f"{name}successor_codebook"] = before, after
        tensors[f"{name}hidden_projection.weight"] = np.repeat(mood, rank, axis=0)
    write_drafter(folder, config, tensors)
    ids = sorted({*following.values(), *range(config["dflash_config"].get("selector_top_k", 16))})
    DraftVocab(np.array(ids), 1.0, target.vocabulary_size).save(folder / DRAFT_VOCAB)
    return folder

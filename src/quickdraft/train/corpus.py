"""From a data folder to what training reads: whole rows with features, the vocabulary, who is held out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from quickdraft.errors import ConfigError
from quickdraft.models.draft_vocab import DraftVocab
from quickdraft.models.registry import TargetFile
from quickdraft.prepare.draft_vocab import choose_vocab
from quickdraft.train.capture import Capture
from quickdraft.train.objective import Corpus
from quickdraft.train.rows import ROWS, Features, Row, held_out, read_rows

MEASURED: Final = 48  # held-out rows that are measured with while training
DEFAULT_VOCABULARY: Final = 8192


def rows_of(data: Path, target: TargetFile) -> list[Row]:
    """ConfigError where there are none, or they are not the target's tokens."""
    rows = read_rows(data)
    if not rows:
        raise ConfigError(f"no rows in {data / ROWS}", hint="quickdraft train data makes them")
    largest, most = max(max(row.tokens) for row in rows), target.config.vocabulary_size
    if largest >= most:
        raise ConfigError(f"{data}: tokens of another model", got=largest, expected=f"0..{most - 1}")
    return rows


def read_features(
    data: Path, rows: Sequence[Row], target: TargetFile, taps: Sequence[int], threads: int | None,
    progress: Callable[[Iterable[int], int], Iterable[int]],
) -> Features:  # fmt: skip
    """Features of all rows, those that are missing captured first; `progress` wraps what counts them."""
    features = Features(data, rows, taps, target.config.width)
    if features.missing:
        longest = max(len(row.tokens) for row in rows)
        capture = Capture(target.path, features.layers, longest=longest, threads=threads)
        for _ in progress(features.extend(capture), len(features.missing)):
            pass
    features.open()
    return features


def vocab_of(rows: Sequence[Row], target: TargetFile, size: int) -> DraftVocab:
    """The `size` ids that occur most in the answers that are trained on, those that end a turn among them."""
    counts = np.zeros(target.config.vocabulary_size, np.int64)
    for row in rows:
        if not held_out(row):
            np.add.at(counts, list(row.tokens[row.start :]), 1)
    return choose_vocab(counts, target.eos_ids, size, None)


def corpus_of(rows: list[Row], features: Features, fits: Callable[[Row], bool]) -> Corpus:
    """ConfigError where nothing is left to train on or to measure with."""
    usable = [number for number, row in enumerate(rows) if fits(row)]
    training = [number for number in usable if not held_out(rows[number])]
    measured = [number for number in usable if held_out(rows[number])][:MEASURED]
    if not training or not measured:
        raise ConfigError(
            "too little data", got=f"{len(training)} rows to train on, {len(measured)} held out",
            expected="at least one of each", hint="make more --rows",
        )  # fmt: skip
    return Corpus(rows, features, training, measured)

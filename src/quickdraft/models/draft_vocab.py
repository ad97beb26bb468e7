"""DraftVocab: the token ids a model drafter chooses among, so that its head reads fewer rows.

It owns the file (docs/reference/draft-vocabulary.md), read strictly, and the gathering of the target's own
head rows for these ids, in the head's format: a gathered row has the bits of the target's row. Drafts
alone are limited, never what the target may answer. Knows no drafter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ModelFormatError
from quickdraft.models.loading.inventory import TensorFile
from quickdraft.models.loading.strict_files import read_object
from quickdraft.ops.interface import Ops
from quickdraft.ops.weights import Value, take_rows

SCHEMA: Final = "quickdraft-draft-vocab-1"
MAX_VOCABULARY: Final = 1 << 24
_KEYS: Final = ("schema", "vocabulary_size", "ids", "coverage", "counted_tokens")
_HINT: Final = "count one for this model with: quickdraft prepare draft-vocab"


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """`ids` int64 [n], increasing, of a vocabulary of `vocabulary_size`; `coverage` is their share of the
    `counted_tokens` tokens they were chosen by."""

    ids: NDArray[np.int64]
    coverage: float
    vocabulary_size: int
    counted_tokens: int = 0

    def __post_init__(self) -> None:
        ids = self.ids
        if ids.ndim != 1 or not len(ids) or (np.diff(ids) <= 0).any():
            raise ValueError("ids are at least one, and increase")
        if ids[0] < 0 or ids[-1] >= self.vocabulary_size:
            raise ValueError("ids lie in the vocabulary")

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def load(cls, path: Path, vocabulary_size: int | None = None) -> Self:
        """The file's vocabulary; ModelFormatError names the file and what is wrong with it, also where it
        is not for a model of `vocabulary_size` tokens."""
        values = read_object(path)
        _check_keys(path, values)
        size = _integer(path, values, "vocabulary_size", 1, MAX_VOCABULARY)
        if vocabulary_size is not None and size != vocabulary_size:
            _fail(path, "vocabulary_size", size, f"{vocabulary_size}, the model's own", _HINT)
        coverage = values["coverage"]
        if type(coverage) not in (int, float) or not 0 <= coverage <= 1:
            _fail(path, "coverage", coverage, "a number from 0 to 1")
        counted = _integer(path, values, "counted_tokens", 0, 2**63 - 1)
        return cls(_ids(path, values["ids"], size), float(coverage), size, counted)

    def save(self, path: Path) -> None:
        """Write the file; OSError where that fails."""
        values = {
            "schema": SCHEMA,
            "vocabulary_size": self.vocabulary_size,
            "ids": self.ids.tolist(),
            "coverage": self.coverage,
            "counted_tokens": self.counted_tokens,
        }
        path.write_text(json.dumps(values, separators=(",", ":")) + "\n", encoding="utf-8")


def head_rows(tensors: TensorFile, ids: NDArray[np.int64]) -> Value:
    """Rows `ids` of the head of a model whose file this is (its embedding, where it has no other head), in
    the head's own format: [len(ids), C]."""
    name = "output.weight" if "output.weight" in tensors.tensors else "token_embd.weight"
    return take_rows(tensors.matrix(name), ids)


def packed_head(tensors: TensorFile, vocab: DraftVocab, ops: Ops) -> Any:
    """The head of `vocab`, packed: output i of a linear is the target's logit of token vocab.ids[i]."""
    return ops.pack(head_rows(tensors, vocab.ids))


def _check_keys(path: Path, values: dict[str, Any]) -> None:
    if values.get("schema") != SCHEMA:
        _fail(path, "schema", repr(values.get("schema"))[:80], SCHEMA, _HINT)
    if strange := sorted(set(values) ^ set(_KEYS)):
        is_missing = strange[0] not in values
        raise ModelFormatError(
            f"{path}: {strange[0][:80]} {'is missing' if is_missing else 'is not understood'}",
            expected=", ".join(_KEYS),
        )


def _ids(path: Path, values: Any, size: int) -> NDArray[np.int64]:
    if not isinstance(values, list) or not values:
        _fail(path, "ids", "none" if values == [] else type(values).__name__, "a list of at least one id")
    strange = next((item for item in values if type(item) is not int or not 0 <= item < size), None)
    if strange is not None:
        _fail(path, "ids", repr(strange)[:80], f"ids in 0..{size - 1}")
    ids = np.array(values, np.int64)
    falls = np.flatnonzero(np.diff(ids) <= 0)
    if len(falls):
        at = int(falls[0])
        _fail(path, "ids", f"{ids[at]} before {ids[at + 1]}", "different ids, the lowest first")
    return ids


def _integer(path: Path, values: dict[str, Any], key: str, low: int, high: int) -> int:
    value = values[key]
    if type(value) is not int or not low <= value <= high:
        _fail(path, key, repr(value)[:80], f"an integer in [{low}, {high}]")
    return int(value)


def _fail(path: Path, key: str, got: object, expected: str, hint: str = "") -> NoReturn:
    raise ModelFormatError(f"{path}: {key}", got=got, expected=expected, hint=hint)

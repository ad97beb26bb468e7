"""Training texts on disk: rows.jsonl, and the target's hidden states of them in features.f16 beside it.

A row is a prompt and an answer that the target itself wrote. Both files only grow, a row is whole or
absent, and features are appended in the order of the rows, so work can stop at any moment and go on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ConfigError
from quickdraft.train.capture import Capture

ROWS: Final = "rows.jsonl"
FEATURES: Final = "features.f16"
ABOUT: Final = "features.json"
HELD_OUT_EVERY: Final = 20
_LARGEST = 60000.0  # float16's range, nearly: the first token of a text may have larger states


@dataclass(frozen=True, slots=True)
class Row:
    """`tokens` are prompt and answer, which starts at `start`; `kind` is what the prompt asks for."""

    index: int
    kind: str
    temperature: float
    start: int
    tokens: tuple[int, ...]

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "tokens": list(self.tokens)})


def read_rows(folder: Path) -> list[Row]:
    """All whole rows of a data folder; a last line that was cut off is cut away. ConfigError names it."""
    path = folder / ROWS
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)
    rows = []
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            value = json.loads(line)
            row = Row(
                int(value["index"]), str(value["kind"]), float(value["temperature"]),
                int(value["start"]), tuple(map(int, value["tokens"])),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} line {number} is not a row", got=str(error)) from error
        if not 0 < row.start < len(row.tokens) or min(row.tokens) < 0:
            raise ConfigError(f"{path} line {number}", got=f"start {row.start}", expected="inside the tokens")
        rows.append(row)
    return rows


def held_out(row: Row) -> bool:
    """Whether a row is kept from training, to measure with."""
    return row.index % HELD_OUT_EVERY == 0


def data_layers(folder: Path) -> tuple[int, ...] | None:
    """The layers whose hidden states the folder's features have; None where it has no features."""
    about = folder / ABOUT
    return tuple(json.loads(about.read_text())["layers"]) if about.exists() else None


def append_rows(folder: Path, rows: Iterable[Row]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ROWS, "a") as file:
        file.write("".join(row.to_json() + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


class Features:
    """The hidden states of a data folder's rows: what `layers` and the final norm gave, float16."""

    def __init__(self, folder: Path, rows: Sequence[Row], layers: Sequence[int], width: int) -> None:
        self.layers, self.width = tuple(layers), width
        self._offsets = np.cumsum([0, *(len(row.tokens) for row in rows)])
        self._path, self._rows = folder / FEATURES, rows
        self._columns = (len(self.layers) + 1) * width
        about = folder / ABOUT
        wanted = {"layers": list(self.layers), "width": width}
        if about.exists() and json.loads(about.read_text()) != wanted:
            raise ConfigError(f"{about}: made for something else", got=about.read_text(), expected=wanted)
        about.write_text(json.dumps(wanted))

    @property
    def missing(self) -> range:
        """Rows that have no features yet."""
        return range(self._whole(), len(self._rows))

    def _whole(self) -> int:
        size = self._path.stat().st_size if self._path.exists() else 0
        return int(np.searchsorted(self._offsets, size // (2 * self._columns), side="right")) - 1

    def extend(self, capture: Capture) -> Iterable[int]:
        """Read what is missing, yielding after every row."""
        done = self._whole()
        with open(self._path, "ab") as file:
            file.truncate(int(self._offsets[done]) * 2 * self._columns)
            for row in self._rows[done:]:
                values = capture.read(row.tokens).clip(-_LARGEST, _LARGEST).astype(np.float16)
                file.write(values.tobytes())
                yield row.index

    def open(self) -> None:
        shape = (int(self._offsets[-1]), self._columns)
        self._states: NDArray[Any] = np.memmap(self._path, np.float16, "r", shape=shape)

    def taps(self, row: int) -> NDArray[np.float32]:
        """[tokens, len(layers) * C] of row number `row`."""
        return self._part(row)[:, : -self.width].astype(np.float32)

    def hidden(self, row: int) -> NDArray[np.float32]:
        """[tokens, C]: final hidden states of row number `row`."""
        return self._part(row)[:, -self.width :].astype(np.float32)

    def _part(self, row: int) -> NDArray[Any]:
        return self._states[self._offsets[row] : self._offsets[row + 1]]

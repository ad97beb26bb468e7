"""--explain-drafts: one JSON line per step that drafts could have been verified in.

docs/reference/explain-drafts.md is its schema. Knows decisions and verdicts, and makes none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from quickdraft.errors import ConfigError
from quickdraft.speculate.decide import Decision
from quickdraft.speculate.draft import Verdict

SCHEMA: Final = "quickdraft-explain-1"


class StepRecord:
    """The step under way; `write` gets it, as a JSON value, when it ends."""

    def __init__(self, write: Callable[[dict[str, object]], None]) -> None:
        self._write = write
        self._step = 0
        self._sequences: dict[str, dict[str, Any]] = {}

    def begin(self) -> None:
        """A step begins; one that failed before its end is written without an outcome."""
        self.end()

    def decided(self, request_id: str, room: int, decision: Decision) -> None:
        """What a request's candidates were, and the choice."""
        draft = decision.draft
        self._sequences[request_id] = {
            "request": request_id,
            "context": decision.context,
            "room": room,
            "candidates": [
                {
                    "source": one.source,
                    "match": one.match_length,
                    "tokens": len(one.odds),
                    "odds": [round(odds, 4) for odds in one.odds[:8]],
                    "credit": round(one.credit, 3),
                    "gain": round(one.gain, 4),
                }
                for one in decision.candidates
            ],
            "choice": {
                "source": draft.source,
                "tokens": len(draft.tokens),
                "extended": draft.extended,
                "gain": round(decision.gain, 4),
                "ran": decision.ran,
                "spent": round(decision.spent, 4),
                "probe": decision.probe,
            },
            "outcome": None,
        }

    def observed(self, request_id: str, verdict: Verdict, cost: float) -> None:
        """What a request's rows emitted."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence["outcome"] = {
                "verified": verdict.drafted,
                "accepted": verdict.accepted,
                "emitted": len(verdict.tokens),
                "cost": round(cost, 4),
            }

    def end(self) -> None:
        """The step is over; nothing is written where no request could draft."""
        if self._sequences:
            self._write({"schema": SCHEMA, "step": self._step, "sequences": list(self._sequences.values())})
            self._step += 1
            self._sequences = {}


class ExplainFile:
    """A file of such lines, begun anew; each line is complete when its step ends."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}", hint="--explain-drafts takes a file to be written"
            ) from error

    def __call__(self, value: dict[str, object]) -> None:
        self._file.write(json.dumps(value) + "\n")

    def close(self) -> None:
        self._file.close()

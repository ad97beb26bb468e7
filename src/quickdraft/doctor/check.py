"""Check: one question `quickdraft doctor` answers, and the report they make together.

Owns what a check's outcome is and how it reads as text and as JSON. A check that cannot run is reported
as skipped, never left out; an exception inside one is its failure, never the doctor's. Knows no model and
no check in particular.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quickdraft.errors import QuickdraftError

SCHEMA: Final = "quickdraft-doctor-1"
SKIPPED: Final = "skipped: "
_NAME_WIDTH: Final = 15


@dataclass(frozen=True, slots=True)
class Note:
    """What a check that passed has to say; the hint is what the user may want to do all the same."""

    detail: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check. A skipped one is ok, and its detail says why it did not run."""

    name: str
    ok: bool
    detail: str
    hint: str = ""

    @property
    def skipped(self) -> bool:
        return self.ok and self.detail.startswith(SKIPPED)

    def lines(self) -> list[str]:
        """For people: the outcome, then the hint below it."""
        mark = "skip" if self.skipped else "ok" if self.ok else "FAIL"
        detail = self.detail.removeprefix(SKIPPED) if self.skipped else self.detail
        head = f"{mark:<4}  {self.name:<{_NAME_WIDTH}} {detail}"
        return [head, f"{'':<{_NAME_WIDTH + 7}}hint: {self.hint}"] if self.hint else [head]

    def to_dict(self) -> dict[str, object]:
        """The JSON shape of one check."""
        return {"name": self.name, "ok": self.ok, "detail": self.detail, "hint": self.hint}


@dataclass(frozen=True, slots=True)
class Report:
    """All checks, in the order they ran."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def summary(self) -> str:
        """One line for people."""
        failed = [check.name for check in self.checks if not check.ok]
        skipped = sum(check.skipped for check in self.checks)
        passed = len(self.checks) - len(failed) - skipped
        counts = f"{passed} checks passed" + (f", {skipped} skipped" if skipped else "")
        return f"{counts}; failed: {', '.join(failed)}" if failed else f"{counts}; nothing failed"

    def to_dict(self) -> dict[str, object]:
        """The JSON shape of `doctor --output json`."""
        return {"schema": SCHEMA, "ok": self.ok, "checks": [check.to_dict() for check in self.checks]}


class Failed(Exception):
    """A check found what it looks for: `detail` in plain words, `hint` naming a command or a flag."""

    def __init__(self, detail: str, hint: str) -> None:
        self.detail, self.hint = detail, hint
        super().__init__(detail)


class Skipped(Exception):
    """A check cannot run here; the message is the reason."""


def run_check(name: str, call: Callable[[], Note], hint: str) -> Check:
    """The outcome of `call`; `hint` is for a failure that brings none of its own."""
    try:
        note = call()
    except Skipped as reason:
        return Check(name, True, f"{SKIPPED}{reason}")
    except Failed as failed:
        return Check(name, False, failed.detail, failed.hint or hint)
    except QuickdraftError as error:
        return Check(name, False, str(error).partition(". hint: ")[0], error.hint or hint)
    except Exception as error:  # a check that breaks has found something, whatever it is
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return Check(name, False, f"{type(error).__name__} in {where}: {error}", hint)
    return Check(name, True, note.detail, note.hint)

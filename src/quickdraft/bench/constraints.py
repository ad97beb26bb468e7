"""`bench constraints`: what holding an answer to a format costs per row, on the model's own vocabulary.

Each grammar is compiled anew and its example text walked token by token, as an answer would be; timed is this
thread's processor time, so that neighbours do not count. No model is run: a mask depends on tokens alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from quickdraft.bench.report import check_json_folder, say, write_json
from quickdraft.config import cached_model
from quickdraft.engine.grammar import Grammars, Kind
from quickdraft.errors import UnsupportedError
from quickdraft.models.registry import open_target
from quickdraft.speculate.constraint import Matcher
from quickdraft.text.tokenizer import Tokenizer

SCHEMA: Final = "quickdraft-constraints-1"
ROUNDS: Final = 5
_PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "occupation_category": {"enum": ["engineer", "teacher", "doctor"]},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
    },
    "required": ["name", "age", "occupation_category", "email", "tags"],
    "additionalProperties": False,
}
_EXPRESSION: Final = r"""start: term (("+"|"-") term)*
term: factor (("*"|"/") factor)*
factor: /[0-9]+(\.[0-9]+)?/ | "(" start ")" | /[a-z_][a-z0-9_]*/
"""
EXAMPLES: Final = (
    ("JSON schema", Kind.JSON_SCHEMA, json.dumps(_PERSON), json.dumps({
        "name": "Ada Lovelace and friends", "age": 36, "occupation_category": "engineer",
        "email": "ada@example.com", "tags": ["math", "poetry in the night"],
    })),
    ("any JSON object", Kind.JSON_SCHEMA, '{"type": "object"}',
     '{"story": "Once upon a time there was a king, who lived in a castle.", "n": [1, 2, {"a": null}]}'),
    ("regex", Kind.REGEX, r"[A-Z][a-z]{2,20} (lives|works) in [A-Z][a-z]+\.( [A-Za-z ,]{3,80}\.){1,5}",
     "Maria lives in Boston. She is a very good painter. The end of it."),
    ("grammar", Kind.LARK, _EXPRESSION, "(alpha+3)*beta/(12.5-gamma)*(x+y)"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one grammar: rows of its example, those that it forced, and medians in microseconds; `mask_worst` is
    the most that one mask took."""

    name: str
    rows: int
    forced: int
    compile_us: float
    allows_us: float
    mask_us: float
    mask_worst_us: float
    push_us: float
    copy_us: float

    def to_dict(self) -> dict[str, object]:
        """As JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def run(model: str, out: Path | None) -> list[Cost]:
    """Print the table; write it to `out` too. UnsupportedError for a model without a tokenizer."""
    check_json_folder(out)
    name, path = cached_model(model)
    data = open_target(path, None).tokenizer
    if data is None:
        raise UnsupportedError(f"model {name} has no tokenizer, and grammars need one")
    tokenizer = Tokenizer(data)
    Grammars(tokenizer, data.eos_ids).compile(Kind.REGEX, "a", "regex")  # imports the library
    costs = [measure(tokenizer, data.eos_ids, *example) for example in EXAMPLES]
    say(
        f"{name}: {tokenizer.vocabulary_size} tokens; processor time of one thread, median of {ROUNDS} rounds"
    )
    table = Table("form", "rows", "forced", "compile ms", "one token", "mask", "worst", "push", "copy",
                  title="microseconds per row", box=SIMPLE_HEAD)  # fmt: skip
    table.columns[0].no_wrap = True
    for cost in costs:
        times = (cost.allows_us, cost.mask_us, cost.mask_worst_us, cost.push_us, cost.copy_us)
        table.add_row(cost.name, str(cost.rows), str(cost.forced), f"{cost.compile_us / 1000:.2f}",
                      *(f"{value:.1f}" for value in times))  # fmt: skip
    Console().print(table)
    if out is not None:
        result = {"schema": SCHEMA, "model": name, "vocabulary": tokenizer.vocabulary_size}
        write_json(out, result | {"forms": [cost.to_dict() for cost in costs]})
    return costs


def measure(
    tokenizer: Tokenizer, eos_ids: tuple[int, ...], name: str, kind: Kind, source: str, text: str
) -> Cost:
    """The cost of one grammar along one text that obeys it."""
    ids, forced = tokenizer.encode(text, add_bos=False), 0
    compiled: list[float] = []
    times: dict[str, list[float]] = {"allows": [], "mask": [], "push": [], "copy": []}
    for _ in range(ROUNDS):
        grammars, forced = Grammars(tokenizer, eos_ids), 0
        grammars.compile(Kind.REGEX, "a", "regex")  # the tokenizer's tables are made once per model
        started = time.thread_time()
        matcher: Matcher = grammars.compile(kind, source, name).start()
        compiled.append(time.thread_time() - started)
        for token in ids:
            forced += bool(matcher.forced(1))
            _time(times["copy"], matcher.copy)
            fresh = matcher.copy()
            _time(times["allows"], lambda fresh=fresh, token=token: fresh.allows(token))  # type: ignore[misc]
            _time(times["mask"], fresh.allowed)
            _time(times["push"], lambda fresh=fresh, token=token: fresh.push(token))  # type: ignore[misc]
            matcher.push(token)
    one = {key: 1e6 * median(values) for key, values in times.items()}
    return Cost(
        name, len(ids), forced, 1e6 * median(compiled), one["allows"], one["mask"],
        1e6 * max(times["mask"]), one["push"], one["copy"],
    )  # fmt: skip


def _time(into: list[float], call: Callable[[], object]) -> None:
    started = time.thread_time()
    call()
    into.append(time.thread_time() - started)

"""What the text of a tool call's parameter stands for, by the JSON schema of that parameter.

A schema may allow several types (a list, anyOf, $ref, enum): the first that the text is JSON of
counts, in the order null, boolean, integer, number, object, array; text that is none of them stays
the string it is, and so does the text of a parameter without a type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

_MAX_REFERENCES: Final = 32  # schemas looked at for one parameter
_MAX_DEPTH: Final = 100
_ORDER: Final = ("null", "boolean", "integer", "number", "object", "array")
_NOTHING: Final = object()


class ToolTypes:
    """The types of the parameters of some tools (OpenAI's tool objects)."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        described = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._schemas = {name: resolved(schema, schema) for name, schema in described.items()}

    def of(self, name: str, key: str) -> frozenset[str]:
        """The types of one parameter; none for what no tool describes."""
        schema = self._schemas.get(name, {})
        properties = schema.get("properties")
        return types_of(properties.get(key), schema) if isinstance(properties, Mapping) else frozenset()


def only_text(types: frozenset[str]) -> bool:
    """A value of these types is the text that was written, whatever that is."""
    return types.isdisjoint(_ORDER)


def json_string(text: str) -> str:
    """`text` as JSON; each character by itself, so that pieces may be joined within the quotes."""
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The names of the types that `schema` allows; references are looked up in `root`."""
    found: set[str] = set()
    waiting, looked_at = [schema], 0
    while waiting and looked_at < _MAX_REFERENCES:
        one = waiting.pop()
        looked_at += 1
        if not isinstance(one, Mapping):
            continue
        kind = one.get("type")
        found.update([kind] if isinstance(kind, str) else filter(_is_text, _list(kind)))
        values = [*_list(one.get("enum")), *([one["const"]] if "const" in one else [])]
        if kind is None:
            found.update(map(_type_of_value, values))
        for key in ("anyOf", "oneOf", "allOf"):
            waiting += _list(one.get(key))
        if isinstance(one.get("$ref"), str):
            waiting.append(_referenced(one["$ref"], root))
    return frozenset(found)


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """`schema` with what its $ref says in the place of it, where that is in `root`; its own keywords win."""
    for _ in range(_MAX_REFERENCES):
        target = _referenced(schema["$ref"], root) if isinstance(schema.get("$ref"), str) else None
        if not isinstance(target, Mapping):
            break
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def value_of(text: str, types: frozenset[str]) -> Any:
    """`text` as the first of `types` it is JSON of, else the text itself."""
    for kind in _ORDER:
        if kind in types:
            value = _READERS[kind](text)
            if value is not _NOTHING:
                return value
    return text


def _constant(text: str, values: Mapping[str, Any]) -> Any:
    return values.get(text.strip().lower(), _NOTHING)


def _number(text: str) -> Any:
    value = _json(text)
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if fine else _NOTHING


def _integer(text: str) -> Any:
    value = _number(text)
    if isinstance(value, float):
        return int(value) if value.is_integer() else _NOTHING
    return value


def _json_of(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = _json(text)
        return value if isinstance(value, kind) else _NOTHING

    return read


def _json(text: str) -> Any:
    """The JSON value of `text`, or _NOTHING: also for nesting that is too deep and huge numbers."""
    try:
        value = json.loads(text, parse_constant=_reject, parse_float=_finite)
    except (ValueError, RecursionError):
        return _NOTHING
    return value if is_flat(value) else _NOTHING


def is_flat(value: Any) -> bool:
    """A JSON value without nesting that code walking it could fail on."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for one in level
            if isinstance(one, dict | list)
            for child in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return True
    return False


def _reject(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("outside the range of numbers")
    return value


_READERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "null": lambda text: _constant(text, {"null": None}),
    "boolean": lambda text: _constant(text, {"true": True, "false": False}),
    "integer": _integer,
    "number": _number,
    "object": _json_of(dict),
    "array": _json_of(list),
}


def _type_of_value(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    ):
        if isinstance(value, kind):
            return name
    return "object"


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """What "#/$defs/Name" points at; None for anything else."""
    if not reference.startswith("#/"):
        return None
    at: Any = root
    for part in reference[2:].split("/"):
        at = at.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
    return at


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)

"""JSON schemas of request bodies as clients may write them, out of the pydantic models that read them.

pydantic describes what its models hold; a client may also write what is turned into that: null for absent,
a text where parts are held, and known fields with the value that means "off". What is added here is that
difference. It knows no routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from quickdraft.server.messages import Strict

JsonSchema = dict[str, Any]
_TEXT: Final[JsonSchema] = {"type": "string"}
_IDS: Final[JsonSchema] = {"type": "array", "items": {"type": "integer"}}
_PARTS: Final[JsonSchema] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": _TEXT},
        "required": ["type", "text"],
        "additionalProperties": False,
    },
}
# (model, field) -> how it is written, where neither the model nor the rule for validators says it
_WRITTEN: Final[Mapping[tuple[str, str], JsonSchema]] = {
    ("CalledFunction", "arguments"): {**_TEXT, "description": "A JSON object."},
    ("CompletionRequest", "prompt"): {
        "anyOf": [_TEXT, _IDS, {"type": "array", "items": _TEXT}, {"type": "array", "items": _IDS}]
    },
    ("DetokenizeRequest", "tokens"): _IDS,
}
_JUST_CHECKED: Final = {("ResponsesRequest", "tools")}  # a validator that changes nothing
# values that mean "off" for some field
_OFF_VALUES: Final[tuple[Any, ...]] = (
    False, 0, 1, [], "none", "auto", "default", "disabled", "medium", "standard", "standard_only", ["text"],
    {"type": "text"},
)  # fmt: skip


def request_schemas(
    models: Mapping[type[BaseModel], Mapping[str, Callable[[Any], bool]]], prefix: str
) -> dict[str, JsonSchema]:
    """Schemas by model name, of these models and of all they hold; `prefix` is where a reference finds them.
    Each model comes with its fields that may only be off."""
    _, whole = models_json_schema(
        [(model, "validation") for model in models], ref_template=f"{prefix}{{model}}"
    )
    classes = {one.__name__: one for one in _subclasses(Strict)}
    schemas: dict[str, JsonSchema] = whole["$defs"]
    for name, schema in schemas.items():
        if name in classes:
            _as_written(classes[name], schema)
    for model, off in models.items():
        for field, accepts in off.items():
            values = [value for value in _OFF_VALUES if accepts(value)]
            if values and field not in schemas[model.__name__]["properties"]:
                schemas[model.__name__]["properties"][field] = {"enum": [*values, None]}
    return schemas


def _as_written(model: type[BaseModel], schema: JsonSchema) -> None:
    decorators = model.__pydantic_decorators__
    changed = {
        field
        for one in decorators.field_validators.values() if one.info.mode == "before"
        for field in one.info.fields
    }  # fmt: skip
    required = set(schema.get("required", ()))
    if any(one.info.mode == "before" for one in decorators.model_validators.values()):
        schema.pop("required", None)  # it fills in what is missing
    for field, held in schema.get("properties", {}).items():
        place = (model.__name__, field)
        written = _WRITTEN.get(place, held)
        if field in changed and place not in _WRITTEN and place not in _JUST_CHECKED:
            written = {"anyOf": [held, _PARTS if held.get("type") == "string" else _TEXT]}
        if field not in required and written:
            options = written.get("anyOf", [written])
            rest = {key: value for key, value in written.items() if key in ("default", "title")}
            if {"type": "null"} not in options:
                written = {"anyOf": [*options, {"type": "null"}], **rest}
        schema["properties"][field] = written


def _subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for one in model.__subclasses__():
        yield one
        yield from _subclasses(one)

"""Ways to break the folder tests/support/tiny_folder.py writes: each makes a function of the folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.interface import LoadedModel
from quickdraft.models.registry import load_model
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.tokenizer import Tokenizer
from tests.support.tiny_folder import (
    folder_tensors,
    put_json,
    safetensors_bytes,
    with_header,
    write_tiny_folder,
)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
QUERY = "model.layers.1.self_attn.q_proj.weight"
FIRST = "model.embed_tokens.weight"
Change = Callable[[Path], object]


def load(folder: Path) -> LoadedModel:
    """What opening a model does before the first request."""
    loaded = load_model(folder, ReferenceOps(), max_rows=2, max_wanted=1, kv_memory_bytes=1 << 20)
    assert loaded.tokenizer is not None
    Tokenizer(loaded.tokenizer)
    ChatTemplate.of(loaded.tokenizer)
    return loaded


def edit(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    """Change a JSON file in place."""

    def apply(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        change(values)
        put_json(folder / name, values)

    return apply


def config(**changes: Any) -> Change:
    return edit("config.json", lambda values: values.update(changes))


def write(name: str, data: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(data)


def header(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change the header of model.safetensors in place."""

    def apply(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(data[:8], "little")
        values = json.loads(data[8 : 8 + length])
        change(values)
        (folder / WEIGHTS).write_bytes(with_header(values, data[8 + length :]))

    return apply


def entry(name: str, **changes: Any) -> Change:
    return header(lambda values: values[name].update(changes))


def raw(change: Callable[[bytes], bytes]) -> Change:
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Change:
    def apply(folder: Path) -> None:
        values = folder_tensors("qwen3", 24)
        change(values)
        (folder / WEIGHTS).write_bytes(safetensors_bytes(values))

    return apply


def link(name: str, target: str) -> Change:
    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return apply


def instead(name: str, make: Callable[[Path], object]) -> Change:
    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return apply


def sharded(change: Change) -> Change:
    def apply(folder: Path) -> None:
        shutil.rmtree(folder)
        write_tiny_folder(folder, shards=2)
        change(folder)

    return apply


def home(value: Any) -> Change:
    """The index names `value` as the file of one tensor."""
    return sharded(edit(INDEX, lambda values: values["weight_map"].update({QUERY: value})))


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def pipeline(**changes: Any) -> Change:
    return edit("tokenizer.json", lambda values: values.update(changes))


def bpe(**changes: Any) -> Change:
    return edit("tokenizer.json", lambda values: values["model"].update(changes))


def added(**changes: Any) -> Change:
    return edit("tokenizer.json", lambda values: values["added_tokens"][0].update(changes))


def check(folder: Path, case: tuple[Change, str, str]) -> None:
    """The case's change makes the folder an error that names the file and the cause."""
    change, file, cause = case
    change(write_tiny_folder(folder))
    with pytest.raises((ModelFormatError, UnsupportedError)) as error:
        load(folder)
    message = str(error.value)
    assert message.startswith(str(folder)) and file in message.partition(": ")[0], message
    assert cause in message, message

"""load_model: from a file to a model over a backend, and the tokenizer's data beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quickdraft.errors import ModelFormatError
from quickdraft.models.config import config_from_gguf
from quickdraft.models.interface import LoadedModel
from quickdraft.models.llama import Llama
from quickdraft.models.loading.gguf import GGUFFile
from quickdraft.models.loading.inventory import Inventory
from quickdraft.ops.interface import BLOCK_TOKENS, KVDtype, Ops
from quickdraft.state.spec import PagedKV
from quickdraft.types import TokenizerData


def load_model(
    path: Path,
    ops: Ops,
    *,
    max_rows: int,
    max_wanted: int,
    max_context: int | None = None,
    kv_dtype: KVDtype | None = None,
    kv_memory_bytes: int | None = None,
) -> LoadedModel:
    """Read a GGUF file. ModelFormatError or UnsupportedError names the file and what is wrong.

    Tables by position reach as far as the file's context, `max_context` and the KV memory all allow,
    so the context length a file claims costs nothing.
    """
    file = GGUFFile(path)
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelFormatError(f"{path}: tensor token_embd.weight is missing or not a matrix")
    config = config_from_gguf(file.metadata, table.shape[0], str(path))
    dtype: KVDtype = kv_dtype or ("float32" if table.type_name == "F32" else "float16")
    context = min(config.context_length, max_context or config.context_length)
    if kv_memory_bytes is not None:
        block = config.layers * PagedKV(config.kv_heads, config.head_dim, dtype).bytes_per_block
        context = min(context, max(1, kv_memory_bytes // block) * BLOCK_TOKENS)
    model = Llama(
        config,
        Inventory(file),
        ops,
        max_rows=max_rows,
        max_wanted=max_wanted,
        max_positions=context,
        weight_bytes=file.tensor_bytes,
    )
    return LoadedModel(model, tokenizer_data(file), dtype, context)


def tokenizer_data(file: GGUFFile) -> TokenizerData | None:
    """The tokenizer in the metadata; None when the file has none."""
    read = _Metadata(file)
    model = read.one("tokenizer.ggml.model", str, None)
    if model is None:
        return None
    tokens = read.many("tokenizer.ggml.tokens", str)
    if len(tokens) != file.tensors["token_embd.weight"].shape[0]:
        raise ModelFormatError(
            f"{file.path}: tokenizer.ggml.tokens", got=len(tokens), expected="one for each row of token_embd"
        )
    eos = [read.one(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("eos", "eot", "eom")]
    return TokenizerData(
        model=model,
        pre_tokenizer=read.one("tokenizer.ggml.pre", str, "default"),
        tokens=tokens,
        token_types=read.many("tokenizer.ggml.token_type", int) or (1,) * len(tokens),
        merges=read.many("tokenizer.ggml.merges", str),
        scores=read.many("tokenizer.ggml.scores", float),
        bos_id=read.one("tokenizer.ggml.bos_token_id", int, None),
        eos_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        unknown_id=read.one("tokenizer.ggml.unknown_token_id", int, None),
        padding_id=read.one("tokenizer.ggml.padding_token_id", int, None),
        add_bos=read.one("tokenizer.ggml.add_bos_token", bool, False),
        add_space_prefix=read.one("tokenizer.ggml.add_space_prefix", bool, False),
        chat_template=read.one("tokenizer.chat_template", str, None),
    )


class _Metadata:
    """Typed look-ups that name the key when its type is wrong."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def one(self, key: str, kind: type, default: Any) -> Any:
        value = self._file.metadata.get(key, default)
        if value is not default and type(value) is not kind:
            raise ModelFormatError(
                f"{self._file.path}: {key}", got=type(value).__name__, expected=kind.__name__
            )
        return value

    def many(self, key: str, kind: type) -> tuple[Any, ...]:
        value = self._file.metadata.get(key, [])
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise ModelFormatError(f"{self._file.path}: {key}", expected=f"a list of {kind.__name__}")
        return tuple(value)

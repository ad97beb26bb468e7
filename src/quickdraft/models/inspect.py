"""inspect_model: what a model file or folder holds and whether it can be run, from headers alone.

Works for architectures nobody here can run: whatever stands in the way becomes a line of `problems`
instead of an error. Only a file whose header cannot be read at all is an error. No weight is read,
so values that are not finite, or a head that differs from a tied embedding, go unnoticed here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from quickdraft.errors import QuickdraftError
from quickdraft.models.config import ModelConfig, config_from_gguf
from quickdraft.models.hf_config import config_from_folder
from quickdraft.models.hf_hybrid import NESTED, text_values
from quickdraft.models.loading.folder import CONFIG, MTP, ModelFolder
from quickdraft.models.loading.gguf import GGUFFile
from quickdraft.models.loading.safetensors import READABLE as DENSE
from quickdraft.models.loading.tensor_types import READABLE as GGUF_READABLE
from quickdraft.models.loading.tokenizer_files import tokenizer_of_folder
from quickdraft.models.registry import refuse_part, tokenizer_data, with_own_module
from quickdraft.models.tensors import OPTIONAL, decoder_tensors
from quickdraft.ops.interface import BLOCK_TOKENS, KVDtype
from quickdraft.types import TokenizerData

MAX_TENSOR_PROBLEMS: Final = 3
KV_DTYPES: Final[tuple[KVDtype, ...]] = ("float32", "float16", "bfloat16", "int8")
_PARTS: Final = (  # the first pattern that a tensor's name holds
    ("norms", "norm"), ("embedding", "embd|embed"), ("head", r"^output\.|lm_head"),
    ("attention", "attn|attention"), ("feed-forward", "ffn|mlp|expert"), ("other", ""),
)  # fmt: skip
_SIZES: Final = {  # name here -> (key of a GGUF architecture, key of config.json)
    "layers": ("block_count", "num_hidden_layers"),
    "width": ("embedding_length", "hidden_size"),
    "heads": ("attention.head_count", "num_attention_heads"),
    "kv_heads": ("attention.head_count_kv", "num_key_value_heads"),
    "head_dim": ("attention.key_length", "head_dim"),
    "feed_forward": ("feed_forward_length", "intermediate_size"),
    "vocabulary": ("vocab_size", "vocab_size"),
    "context": ("context_length", "max_position_embeddings"),
}
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Inspection:
    """What headers say. `problems` is empty when the model can be run as far as headers tell."""

    path: Path
    form: str  # "GGUF file" or "folder"
    architecture: str | None
    sizes: Mapping[str, int]
    tensors: int
    weight_bytes: int
    bytes_by_part: Mapping[str, int]
    bytes_by_format: Mapping[str, int]
    config: ModelConfig | None  # None: not understood
    tokenizer: TokenizerData | None
    problems: tuple[str, ...]

    @property
    def default_kv_dtype(self) -> KVDtype:
        return "float32" if set(self.bytes_by_format) == {"F32"} else "float16"

    def kv_bytes_per_token(self, dtype: KVDtype) -> int | None:
        """Bytes of keys and values of one token over all layers; None when the sizes are not understood."""
        if self.config is None:
            return None
        return self.config.kv_bytes_per_block(dtype) // BLOCK_TOKENS

    def longest_context(self, memory_bytes: int, dtype: KVDtype) -> int | None:
        """Tokens whose KV fits `memory_bytes` beside the weights, in whole blocks, at most the model's own
        context; activations and the process itself are not counted. None when sizes are not understood."""
        per_token = self.kv_bytes_per_token(dtype)
        if self.config is None or per_token is None:
            return None
        blocks = max(0, memory_bytes - self.weight_bytes) // (per_token * BLOCK_TOKENS)
        return min(blocks * BLOCK_TOKENS, self.config.context_length)


def inspect_model(path: Path) -> Inspection:
    """Read the headers of a GGUF file or folder; ModelFormatError or UnsupportedError when that fails."""
    return _inspect_folder(path) if path.is_dir() else _inspect_gguf(path)


def _inspect_gguf(path: Path) -> Inspection:
    file = GGUFFile(path)
    problems: list[str] = []
    architecture = file.metadata.get("general.architecture")
    table = file.tensors.get("token_embd.weight")
    rows = table.shape[0] if table is not None else 0
    _attempt(problems, lambda: refuse_part(file))
    config = _attempt(problems, lambda: config_from_gguf(file.metadata, rows, str(path)))
    tokenizer = _attempt(problems, lambda: tokenizer_data(file, rows))
    if config is not None:
        problems += _tensor_problems(config, file, GGUF_READABLE)
    sizes = {
        name: file.metadata.get(f"{architecture}.{key}", rows if name == "vocabulary" else None)
        for name, (key, _) in _SIZES.items()
    }
    return _inspection(file, "GGUF file", architecture, sizes, config, tokenizer, problems)


def _inspect_folder(path: Path) -> Inspection:
    folder = ModelFolder(path)
    problems: list[str] = []
    _attempt(problems, folder.check_quantisation)
    read = _attempt(problems, lambda: config_from_folder(folder.config, str(path / CONFIG)))
    config, tied = (None, False) if read is None else read
    if config is not None:
        config = with_own_module(config, folder)  # its rows take memory too
    table = folder.tensors.get("token_embd.weight")
    tokenizer = None
    if table is not None and table.shape:
        rows = table.shape[0]
        tokenizer = _attempt(problems, lambda: tokenizer_of_folder(path, text_values(folder.config), rows))
    if config is not None:
        problems += _tensor_problems(config, folder, (*DENSE, *folder.quantised_types))
        if not tied:
            _attempt(problems, lambda: folder.check_head(False))
    sizes = {name: text_values(folder.config).get(key) for name, (_, key) in _SIZES.items()}
    kind = folder.config.get("model_type")
    return _inspection(folder, "folder", kind, sizes, config, tokenizer, problems)


def _inspection(
    file: GGUFFile | ModelFolder,
    form: str,
    architecture: Any,
    sizes: Mapping[str, Any],
    config: ModelConfig | None,
    tokenizer: TokenizerData | None,
    problems: list[str],
) -> Inspection:
    parts: Counter[str] = Counter()
    formats: Counter[str] = Counter()
    for info in file.tensors.values():
        parts[next(part for part, pattern in _PARTS if re.search(pattern, info.name))] += info.bytes
        formats[info.type_name] += info.bytes
    if config is not None:
        sizes = {**sizes, "head_dim": config.head_dim, "kv_heads": config.kv_heads}
    return Inspection(
        path=file.path,
        form=form,
        architecture=architecture if isinstance(architecture, str) else None,
        sizes={name: size for name, size in sizes.items() if type(size) is int},
        tensors=len(file.tensors),
        weight_bytes=file.tensor_bytes,
        bytes_by_part={part: parts[part] for part, _ in _PARTS if part in parts},
        bytes_by_format=dict(formats.most_common()),
        config=config,
        tokenizer=tokenizer,
        problems=tuple(problems),
    )


def _attempt(problems: list[str], call: Callable[[], _Value]) -> _Value | None:
    try:
        return call()
    except QuickdraftError as error:
        problems.append(str(error))
        return None


def _tensor_problems(
    config: ModelConfig, file: GGUFFile | ModelFolder, readable: tuple[str, ...]
) -> Iterator[str]:
    """The first few of: missing, mis-shaped, unreadable, left over."""
    # a hybrid leaves an MTP module in the file, whether or not the config speaks of it
    left = {name for name in file.tensors if config.architecture != NESTED or not name.startswith(MTP)}
    found = 0
    for name, shape in decoder_tensors(config):
        info, called = file.tensors.get(name), file.called(name)
        left.discard(name)
        if info is None and name in OPTIONAL:
            continue
        if info is None:
            yield f"tensor {called} is missing"
        elif info.shape != shape:
            yield f"tensor {called} has a wrong shape; got {info.shape}; expected {shape}"
        elif info.type_name not in (readable if len(shape) > 1 else DENSE):
            yield f"tensor {called} has a type this version cannot read; got {info.type_name}"
        else:
            continue
        found += 1
        if found >= MAX_TENSOR_PROBLEMS:
            return
    if left:
        names = sorted(map(file.called, left))
        yield f"{len(names)} tensors nobody uses; got {', '.join(names[:3])}"

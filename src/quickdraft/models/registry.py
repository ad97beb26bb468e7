"""load_model: from a file or folder to a model over a backend, and the tokenizer's data beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from quickdraft.errors import ConfigError, ModelFormatError, UnsupportedError
from quickdraft.models.config import ARCHITECTURES, ModelConfig, config_from_gguf
from quickdraft.models.hf_config import config_from_folder
from quickdraft.models.hf_hybrid import NESTED, text_values
from quickdraft.models.interface import LoadedModel, Model, Taps
from quickdraft.models.llama import Llama
from quickdraft.models.loading.folder import CONFIG, MTP, ModelFolder
from quickdraft.models.loading.gguf import GGUFFile
from quickdraft.models.loading.inventory import Inventory, TensorFile
from quickdraft.models.loading.tokenizer_files import UNUSED_TOKEN, eos_ids, tokenizer_of_folder
from quickdraft.models.qwen3_5 import Qwen35
from quickdraft.ops.interface import BLOCK_TOKENS, KVDtype, Ops, Sixteen
from quickdraft.types import TokenizerData

# Pre-tokenizers of families whose texts start with a BOS even when the file does not say so, as files
# of Llama 3 do not; llama.cpp has the same rule (llama-vocab.cpp).
_BOS_UNLESS_SAID: Final = ("llama-bpe", "llama3")


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A checked file or folder whose weights were not read yet."""

    path: Path
    file: GGUFFile | ModelFolder
    config: ModelConfig
    tokenizer: TokenizerData | None
    eos_ids: tuple[int, ...]
    files: tuple[Path, ...]  # see LoadedModel


def open_target(path: Path, head_bits: int | None = None) -> TargetFile:
    """Read and check all but the weights; errors and `head_bits` as for load_model."""
    if head_bits is not None and not path.is_dir():
        raise ConfigError("head bits for a GGUF file", got=head_bits, expected="a model folder")
    return _open_folder(path, head_bits) if path.is_dir() else _open_gguf(path)


def load_model(
    path: Path | TargetFile,
    ops: Ops,
    *,
    max_rows: int,
    max_wanted: int,
    max_context: int | None = None,
    kv_dtype: KVDtype | None = None,
    kv_memory_bytes: int | None = None,
    taps: Taps | None = None,
    head_bits: int | None = None,
    mtp: bool = False,
    mtp_folder: bool = False,
) -> LoadedModel:
    """Read a GGUF file or a Hugging Face folder, perhaps opened already.

    ModelFormatError or UnsupportedError names the file and what is wrong. `head_bits`: see ModelFolder;
    ConfigError for a GGUF file, whose head stays as it is.

    Tables by position reach as far as the file's context, `max_context` and the KV memory all allow,
    so the context length a file claims costs nothing. ConfigError when `max_context` is not within
    the model's own. `taps` asks for hidden states of every row, `mtp` for the multi-token-prediction
    module, where the file has one, and then for the final hidden states too; `mtp_folder` for these and a
    KV layer for a module that is loaded later (models/mtp_folder.py). UnsupportedError where the model
    cannot have one.
    """
    opened = open_target(path, head_bits) if isinstance(path, Path) else path
    config = _served(opened.config, max_context)
    if mtp_folder:
        check_plain(config, str(opened.path))
    if mtp:
        config = with_own_module(config, opened.file)
    if mtp_folder:
        config = replace(config, draft_kv_layers=1)
    if config.draft_kv_layers:
        taps = replace(taps or Taps(), hidden=True)
    dtype = kv_dtype or default_kv_dtype(opened.file, ops)
    if kv_memory_bytes is not None:
        reach = max(1, kv_memory_bytes // config.kv_bytes_per_block(dtype)) * BLOCK_TOKENS
        config = replace(config, context_length=min(config.context_length, reach))
    taps = taps or Taps()
    if any(not 0 <= layer < config.layers for layer in taps.layers):
        raise ConfigError("a tap after no layer", got=taps.layers, expected=f"0..{config.layers - 1}")
    sizes: dict[str, Any] = {
        "max_rows": max_rows, "max_wanted": max_wanted, "weight_bytes": opened.file.tensor_bytes,
        "taps": taps,
    }  # fmt: skip
    ops.set_activations(activation_type(opened.file))
    inventory = Inventory(opened.file)
    model: Model
    module = None
    if config.architecture == NESTED:
        addressable = _addressable(opened.tokenizer, config.vocabulary_size)
        model = hybrid = Qwen35(config, inventory, ops, addressable=addressable, **sizes)
        module = hybrid.mtp
    else:
        model = Llama(config, inventory, ops, **sizes)
    notes = tuple(opened.file.notes) if isinstance(opened.file, ModelFolder) else ()
    return LoadedModel(
        model, opened.tokenizer, dtype, opened.file, opened.eos_ids, opened.files, notes, module
    )


def default_kv_dtype(file: TensorFile, ops: Ops) -> KVDtype:
    """float32 for a file of nothing else; on a card bfloat16 for a model that has tensors of it, whose keys
    may be beyond float16; float16 for all others, and on the CPU."""
    types = {tensor.type_name for tensor in file.tensors.values()}
    if types == {"F32"}:
        return "float32"
    return "bfloat16" if "BF16" in types and ops.free_memory_bytes() is not None else "float16"


def activation_type(file: GGUFFile | ModelFolder) -> Sixteen:
    """The 16-bit type the model computes in: what config.json says, else bfloat16 where a tensor has it. A
    GGUF file does not say what it was made from; without such a tensor: float16, which has more digits."""
    values = text_values(file.config) if isinstance(file, ModelFolder) else {}
    said = values.get("dtype", values.get("torch_dtype"))
    if said in ("float16", "bfloat16"):
        return "bfloat16" if said == "bfloat16" else "float16"
    return "bfloat16" if any(t.type_name == "BF16" for t in file.tensors.values()) else "float16"


def with_own_module(config: ModelConfig, file: TensorFile) -> ModelConfig:
    """The config with a KV layer for the MTP module in the file, where there is one that can be run: of one
    layer, beside recurrent layers, whose slots keep the hidden state that its next row needs."""
    there = any(name.startswith(MTP) for name in file.tensors)
    runs = there and config.mtp_layers == 1 and config.recurrent is not None
    return replace(config, draft_kv_layers=1) if runs else config


def _open_gguf(path: Path) -> TargetFile:
    file = GGUFFile(path)
    refuse_part(file)
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelFormatError(f"{path}: tensor token_embd.weight is missing or not a matrix")
    config = config_from_gguf(file.metadata, table.shape[0], str(path))
    tokenizer = tokenizer_data(file, config.vocabulary_size)
    return TargetFile(path, file, config, tokenizer, tokenizer.eos_ids if tokenizer else (), (path,))


def _open_folder(path: Path, head_bits: int | None) -> TargetFile:
    folder = ModelFolder(path, head_bits)
    config, tied = config_from_folder(folder.config, str(path / CONFIG))
    folder.check_quantisation()
    folder.check_embedding(config.vocabulary_size)
    values = text_values(folder.config)
    tokenizer = tokenizer_of_folder(path, values, config.vocabulary_size)
    eos = tokenizer.eos_ids if tokenizer else eos_ids(path, values, None, config.vocabulary_size)
    folder.check_head(tied)
    return TargetFile(path, folder, config, tokenizer, eos, folder.files)


def _addressable(tokenizer: TokenizerData | None, vocabulary_size: int) -> int:
    """One more than the highest id that is a token; rows beyond are padding."""
    if tokenizer is None:
        return vocabulary_size
    kinds = tokenizer.token_types
    return max((i + 1 for i, kind in enumerate(kinds) if kind != UNUSED_TOKEN), default=vocabulary_size)


def check_plain(config: ModelConfig, where: str) -> None:
    """UnsupportedError for a target that cannot have an MTP module in a folder of its own."""
    if config.architecture == NESTED:
        raise UnsupportedError(
            f"an MTP drafter folder for {where}", got="a hybrid model, whose module is in its checkpoint",
            expected=" or ".join(ARCHITECTURES),
        )  # fmt: skip


def _served(config: ModelConfig, max_context: int | None) -> ModelConfig:
    if max_context is None:
        return config
    if not 1 <= max_context <= config.context_length:
        raise ConfigError(
            "bad value for 'max_context'",
            got=max_context,
            expected=f"1..{config.context_length}, the model's own",
        )
    return replace(config, context_length=max_context)


def refuse_part(file: GGUFFile) -> None:
    """UnsupportedError for a file that holds a part of a model."""
    parts = file.metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise UnsupportedError(
            f"{file.path}: one part of a split model", got=f"{parts} parts", expected="a whole file",
            hint="join the parts with llama-gguf-split --merge",
        )  # fmt: skip


def tokenizer_data(file: GGUFFile, vocabulary_size: int) -> TokenizerData | None:
    """The tokenizer in the metadata, of as many tokens as the embedding has rows; None when there is none."""
    read = _Metadata(file)
    model = read.one("tokenizer.ggml.model", str, None)
    if model is None:
        return None
    tokens = read.many("tokenizer.ggml.tokens", str)
    if len(tokens) != vocabulary_size:
        raise ModelFormatError(
            f"{file.path}: tokenizer.ggml.tokens", got=len(tokens), expected="one for each row of token_embd"
        )
    if read.one("tokenizer.ggml.add_eos_token", bool, False):
        raise UnsupportedError(f"{file.path}: tokenizer.ggml.add_eos_token", got=True, expected="false")
    pre = read.one("tokenizer.ggml.pre", str, "default")
    bos_id = read.one("tokenizer.ggml.bos_token_id", int, None)
    eos = [read.one(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("eos", "eot", "eom")]
    return TokenizerData(
        model=model,
        pre_tokenizer=pre,
        tokens=tokens,
        token_types=read.many("tokenizer.ggml.token_type", int) or (1,) * len(tokens),
        merges=read.many("tokenizer.ggml.merges", str),
        scores=read.many("tokenizer.ggml.scores", float),
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        unknown_id=read.one("tokenizer.ggml.unknown_token_id", int, None),
        padding_id=read.one("tokenizer.ggml.padding_token_id", int, None),
        add_bos=read.one(
            "tokenizer.ggml.add_bos_token", bool, pre in _BOS_UNLESS_SAID and bos_id is not None
        ),
        add_space_prefix=read.one("tokenizer.ggml.add_space_prefix", bool, False),
        chat_template=read.one("tokenizer.chat_template", str, None),
        source=str(file.path),
        template_source=str(file.path),
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

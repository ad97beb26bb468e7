"""load_dflash: a drafter's folder (docs/reference/drafter-folder.md) to a DFlashModule for one target.

Whatever would make it draft for another model, or run with a part missing, is an error that names what,
what was found and what is needed. A table of the selector stays as compact as the file has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ModelFormatError
from quickdraft.models.codebook import Codebook
from quickdraft.models.config import ModelConfig
from quickdraft.models.dflash import ConvWeights, DFlashLayer, DFlashModule, DFlashWeights, Selector
from quickdraft.models.dflash_config import CONV_TAPS, DFlashConfig
from quickdraft.models.draft_vocab import DraftVocab, packed_head
from quickdraft.models.llama import rope_table
from quickdraft.models.loading.drafter_folder import DrafterFolder
from quickdraft.models.loading.inventory import Inventory, TensorFile
from quickdraft.models.loading.strict_files import is_there
from quickdraft.ops.interface import BLOCK_TOKENS, Buffer, Ops
from quickdraft.ops.weights import Weight, concat_rows

DRAFT_VOCAB: Final = "draft_vocab.json"
MASK_ROW: Final = "mask_embedding"
_SELECTOR: Final = "candidate_selector."


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """What a drafter uses of the model it drafts for."""

    config: ModelConfig
    embedding: Any  # packed [V, C]
    head: Any  # packed [V, C]
    head_bias: Buffer | None  # [V]
    tensors: TensorFile  # its file, from which the head's rows of a draft vocabulary are taken
    sha256: Callable[[], str] | None = None  # of its weight file; asked only where a drafter names one


def load_dflash(folder: Path, target: DraftTarget, ops: Ops) -> DFlashModule:
    """The drafter in `folder`: config.json, model.safetensors and perhaps draft_vocab.json.

    ModelFormatError or UnsupportedError names file and key or tensor. Its positions reach one block beyond
    the target's context.
    """
    file = DrafterFolder(folder)
    config = DFlashConfig.read(file.config, target.config, str(file.config_path))
    _check_digest(config, target, str(file.config_path))
    file.check_quantisation()
    vocab = None
    if is_there(folder / DRAFT_VOCAB):
        vocab = DraftVocab.load(folder / DRAFT_VOCAB, config.vocabulary_size)
        if len(vocab) < config.top_k:
            raise ModelFormatError(
                f"{folder / DRAFT_VOCAB}: ids", got=f"{len(vocab)} tokens",
                expected=f"at least {config.top_k}, the candidates of a row",
            )  # fmt: skip
    return DFlashModule(config, _weights(config, file, target, vocab, ops), ops)


def _check_digest(config: DFlashConfig, target: DraftTarget, where: str) -> None:
    if config.target_sha256 is None:
        return
    found = None if target.sha256 is None else target.sha256()
    if found != config.target_sha256:
        raise ModelFormatError(
            f"{where}: target_sha256 is not that of the target's weight file",
            got=found or "an unknown digest", expected=config.target_sha256,
            hint="this drafter was made for another model",
        )  # fmt: skip


def _weights(
    config: DFlashConfig, file: DrafterFolder, target: DraftTarget, vocab: DraftVocab | None, ops: Ops
) -> DFlashWeights:
    inventory, width = Inventory(file), config.width

    def norm(name: str) -> Buffer:
        return ops.constant(inventory.vector(f"{name}.weight", width))

    head, bias = target.head, target.head_bias
    if vocab is not None:
        head = packed_head(target.tensors, vocab, ops)
        bias = None if bias is None else ops.constant(np.asarray(bias, np.float32)[vocab.ids])
    reach = -(-(target.config.context_length + config.block) // BLOCK_TOKENS) * BLOCK_TOKENS
    weights = DFlashWeights(
        embedding=target.embedding,
        head=head,
        head_bias=bias,
        token_ids=None if vocab is None else vocab.ids,
        mask_row=ops.constant(inventory.vector(MASK_ROW, width)) if inventory.has(MASK_ROW) else None,
        mix=ops.pack(inventory.matrix("fc.weight", width, len(config.target_layers) * width)),
        context_norm=norm("hidden_norm"),
        layers=tuple(_layer(config, inventory, ops, index) for index in range(config.layers)),
        norm=norm("norm"),
        rope=ops.constant(rope_table(reach, config.head_dim, config.rope_theta, None)),
        selector=_selector(config, file, inventory, vocab, ops) if config.version == 2 else None,
    )
    inventory.finish()
    return weights


def _layer(config: DFlashConfig, inventory: Inventory, ops: Ops, index: int) -> DFlashLayer:
    prefix, width, ff, dim = f"layers.{index}.", config.width, config.feed_forward, config.head_dim
    queries, keys = config.heads * dim, config.kv_heads * dim

    def norm(name: str, size: int) -> Buffer:
        return ops.constant(inventory.vector(f"{prefix}{name}.weight", size))

    def matrix(name: str, outputs: int, inputs: int) -> Weight:
        return inventory.matrix(f"{prefix}{name}.weight", outputs, inputs)

    def conv(name: str) -> ConvWeights | None:
        return _conv(config, inventory, ops, f"{prefix}{name}") if config.version == 2 else None

    query, key, value = (
        matrix(f"self_attn.{part}_proj", size, width)
        for part, size in (("q", queries), ("k", keys), ("v", keys))
    )
    return DFlashLayer(
        mix_norm=norm("input_layernorm", width),
        qkv=ops.pack(concat_rows([query, key, value])),
        kv=ops.pack(concat_rows([key, value])),
        query_norm=norm("self_attn.q_norm", dim),
        key_norm=norm("self_attn.k_norm", dim),
        output=ops.pack(matrix("self_attn.o_proj", width, queries)),
        feed_forward_norm=norm("post_attention_layernorm", width),
        gate_up=ops.pack(concat_rows([matrix(f"mlp.{part}_proj", ff, width) for part in ("gate", "up")])),
        down=ops.pack(matrix("mlp.down_proj", width, ff)),
        mix_conv=conv("attention_conv"),
        feed_forward_conv=conv("mlp_conv"),
    )


def _conv(config: DFlashConfig, inventory: Inventory, ops: Ops, name: str) -> ConvWeights:
    base = inventory.array(f"{name}.base_kernel", (2, CONV_TAPS, config.width))
    outputs = 2 * config.conv_kernel_width
    return ConvWeights(
        before=ops.constant(base[0]),
        after=ops.constant(base[1]),
        projection=ops.pack(inventory.matrix(f"{name}.kernel_projection.weight", outputs, config.width)),
    )


def _selector(
    config: DFlashConfig, file: DrafterFolder, inventory: Inventory, vocab: DraftVocab | None, ops: Ops
) -> Selector:
    successor, rows = f"{_SELECTOR}successor_codebook", config.vocabulary_size
    by_head_row = (
        vocab is not None and successor in file.tensors and file.tensors[successor].shape[:1] == (len(vocab),)
    )
    if vocab is not None and by_head_row:
        rows = len(vocab)
    every = _codebook(
        file, inventory, f"{_SELECTOR}predecessor_codebook", config.vocabulary_size, config.rank
    )
    return Selector(
        predecessor=every,
        successor=_codebook(file, inventory, successor, rows, config.rank),
        projection=ops.pack(
            inventory.matrix(f"{_SELECTOR}hidden_projection.weight", config.rank, config.width)
        ),
        by_head_row=by_head_row,
    )


def _codebook(file: DrafterFolder, inventory: Inventory, name: str, rows: int, rank: int) -> Codebook:
    """A table [rows, rank] in floats, or in int8 beside `<name>_scale` float16 [rows]."""
    inventory.claim(name, (rows, rank))
    if file.tensors[name].type_name != "I8":
        return Codebook(file.values(name))
    scale = f"{name}_scale"
    inventory.claim(scale, (rows,))
    scales: NDArray[Any] = file.values(scale)
    if scales.dtype != np.float16:
        raise ModelFormatError(
            f"{file.path}: tensor {file.called(scale)}", got=file.tensors[scale].type_name, expected="F16"
        )
    return Codebook(file.codes(name), scales)

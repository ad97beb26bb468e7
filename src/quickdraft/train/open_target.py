"""The target as training needs it: its checked file, the digest of its weights, its embedding and head.

Its numbers are those the file means, in float32, whatever they are packed to. Opens no engine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quickdraft.config import cached_model
from quickdraft.errors import ConfigError, UnsupportedError
from quickdraft.models.digest import weight_digests
from quickdraft.models.draft_vocab import HEAD, head_name
from quickdraft.models.registry import TargetFile, open_target

CONTROL = 3  # GGUF's type of a token that is never text
ROPE_FACTORS = "rope_freqs.weight"


def open_for_training(model: str | Path) -> tuple[TargetFile, str]:
    """The target and the digest of its weight file (of a folder, of the first). UnsupportedError names what
    no drafter can be trained for."""
    _, path = cached_model(model)
    target = open_target(path)
    if target.config.recurrent is not None:
        raise UnsupportedError(
            f"training a drafter for {path}", got="a model with recurrent layers", expected="a dense model"
        )
    return target, weight_digests(target.files)[0]


def check_rope(target: TargetFile) -> None:
    """UnsupportedError for a target whose MTP module would share a rope table with factors."""
    if ROPE_FACTORS in target.file.tensors:
        raise UnsupportedError(
            f"training an MTP module for {target.path}", got="rope with factors", expected="plain rope",
            hint="train dflash2, which has a rope of its own",
        )  # fmt: skip


def mask_of(target: TargetFile) -> int:
    """A token to stand for a mask: the first control token that no chat writes; without a tokenizer, 0.
    ConfigError where there is none."""
    data = target.tokenizer
    if data is None:
        return 0
    taken = {data.bos_id, data.unknown_id, data.padding_id, *target.eos_ids}
    template = data.chat_template or ""
    for token, (kind, text) in enumerate(zip(data.token_types, data.tokens, strict=True)):
        if kind == CONTROL and token not in taken and text not in template:
            return token
    raise ConfigError(f"{target.path}: no control token is free to be a mask", hint="give --mask-id")


def target_tables(target: TargetFile) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(embedding [V, C], head [V, C]): one array where the target ties them."""
    embedding = target.file.matrix("token_embd.weight").dequantised()
    name = head_name(target.file)
    head = target.file.matrix(name).dequantised() if name == HEAD else embedding
    if embedding.shape != head.shape:
        raise ConfigError(
            f"{target.path}: embedding and head differ", got=embedding.shape, expected=head.shape
        )
    return embedding, head

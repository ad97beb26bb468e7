"""An exported folder as a network of training again: its weights as they are stored, to measure with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from quickdraft.errors import ConfigError
from quickdraft.models.draft_vocab import DraftVocab
from quickdraft.models.loading.drafter_folder import DrafterFolder
from quickdraft.models.loading.strict_files import is_there
from quickdraft.models.registry import TargetFile
from quickdraft.train.dflash2 import CODEBOOKS
from quickdraft.train.export import DRAFT_VOCAB
from quickdraft.train.form import DrafterForm
from quickdraft.train.mtp_trainee import DEFAULT_CHAIN
from quickdraft.train.objective import Trainee
from quickdraft.train.trainees import make_trainee

Array = NDArray[np.float32]


def read_exported(path: Path, target: TargetFile, sha256: str) -> tuple[DrafterForm, Trainee]:
    """ConfigError for a folder that no training made."""
    folder = DrafterFolder(path)
    form = DrafterForm.from_config(folder.config, target.config, sha256)
    folder.check_quantisation()
    if not is_there(path / DRAFT_VOCAB):
        raise ConfigError(f"no {DRAFT_VOCAB} in {path}")
    vocab = DraftVocab.load(path / DRAFT_VOCAB, form.vocabulary_size)
    weights = {name: torch.from_numpy(value) for name, value in _weights(folder, vocab)}
    ids = vocab.ids.tolist()
    return form, make_trainee(form, target, ids, 0, 1, DEFAULT_CHAIN, weights)


def _weights(folder: DrafterFolder, vocab: DraftVocab) -> Iterator[tuple[str, Array]]:
    for name, info in folder.tensors.items():
        if name in CODEBOOKS:
            yield name, _book(folder, name, vocab)
        elif name.removesuffix("_scale") not in CODEBOOKS:
            if len(info.shape) == 2:
                yield name, np.array(folder.matrix(name).dequantised())
            else:
                yield name, np.array(folder.vector(name))


def _book(folder: DrafterFolder, name: str, vocab: DraftVocab) -> Array:
    """A row per id of the vocabulary and one for all others, as training has them."""
    if folder.tensors[name].type_name == "I8":
        scales = folder.values(f"{name}_scale").astype(np.float32)
        table = folder.codes(name).astype(np.float32) * scales[:, None]
    else:
        table = folder.vector(name)
    if len(table) == len(vocab):  # successors: others are never candidates
        return np.concatenate([table, np.zeros_like(table[:1])])
    others = np.setdiff1d(np.arange(len(table)), vocab.ids)
    last = table[others[:1]] if len(others) else np.zeros_like(table[:1])
    return np.concatenate([table[vocab.ids], last])

"""Opening an MTP module for an engine: the model's own or a drafter folder's, and its draft vocabulary.

Everything that was asked for and cannot be done is an error here, never a plain engine instead.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from quickdraft.errors import ConfigError
from quickdraft.models.draft_vocab import DraftVocab
from quickdraft.models.interface import LoadedModel
from quickdraft.models.loading.strict_files import is_there
from quickdraft.models.mtp import MTPModule
from quickdraft.models.mtp_folder import load_mtp_folder
from quickdraft.ops.interface import Ops

VOCAB: Final = "draft_vocab.json"  # of a drafter folder


def explain_vocab(module: MTPModule | None) -> tuple[str, ...]:
    """A line for the start of a server, where a vocabulary limits the module."""
    vocab = module.vocab if module is not None else None
    if vocab is None:
        return ()
    return (
        f"mtp drafts among {len(vocab)} of {vocab.vocabulary_size} ids, {vocab.coverage:.1%} of "
        f"{vocab.counted_tokens} tokens counted",
    )


def with_mtp(loaded: LoadedModel, folder: Path | None, vocab: Path | None, ops: Ops) -> LoadedModel:
    """The model with its module: the one in `folder`, if given, and limited to the vocabulary in the file
    `vocab`, else to the folder's own, if there is one.

    Errors as of load_mtp_folder and DraftVocab.load; ConfigError for a vocabulary without a module.
    """
    if folder is not None:
        loaded = replace(loaded, mtp=load_mtp_folder(folder, loaded, ops))
        if vocab is None and is_there(folder / VOCAB):
            vocab = folder / VOCAB
    if vocab is not None:
        if loaded.mtp is None:
            raise ConfigError(
                "a draft vocabulary, and no MTP module whose head it would limit", got=vocab,
                hint="give --drafter the folder of one",
            )  # fmt: skip
        loaded.mtp.limit(DraftVocab.load(vocab, loaded.model.config.vocabulary_size), loaded.tensors)
    return loaded

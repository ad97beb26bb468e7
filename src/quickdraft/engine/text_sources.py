"""The sources that run no model: what a constraint forces, and the texts: context, prediction, corpus.

Puts them together for a model, and says what a prediction must be. Of two that promise the same the
first drafts, so the prediction stands before the context: it was sent for this answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from quickdraft.errors import BadParameter, UnsupportedError
from quickdraft.speculate.corpus import Corpus, CorpusDrafter, Vocabulary
from quickdraft.speculate.draft import PREDICTION, Drafter, allows
from quickdraft.speculate.forced import ForcedDrafter
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.speculate.prediction import PredictionDrafter
from quickdraft.types import Speculation, TokenizerData


def text_sources(corpus: Path | None, tokenizer: TokenizerData | None) -> tuple[Drafter, ...]:
    """Drafters for a model with this tokenizer; errors as for Corpus, and UnsupportedError for a corpus
    where there is no tokenizer that could be compared."""
    always = (ForcedDrafter(), PredictionDrafter(), LookupDrafter())
    if corpus is None:
        return always
    return (*always, CorpusDrafter(Corpus(corpus, vocabulary_of(tokenizer))))


def vocabulary_of(tokenizer: TokenizerData | None) -> Vocabulary:
    """What the ids of a model stand for: two models with equal ones can share a corpus."""
    if tokenizer is None:
        raise UnsupportedError("a lookup corpus needs a tokenizer", got="a model without one")
    digest = hashlib.sha256()
    for token in tokenizer.tokens:
        data = token.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "little") + data)
    return Vocabulary(len(tokenizer.tokens), digest.digest())


def check_prediction(
    prediction: Sequence[int], speculation: Speculation, vocabulary_size: int, max_context_tokens: int
) -> None:
    """BadParameter for one that cannot be used; none at all is fine."""
    if not prediction:
        return
    if min(prediction) < 0 or max(prediction) >= vocabulary_size:
        raise BadParameter("prediction", got="a token id out of range", expected=f"0..{vocabulary_size - 1}")
    if len(prediction) > max_context_tokens:
        raise BadParameter(
            "prediction", got=f"{len(prediction)} tokens",
            expected=f"at most {max_context_tokens}, the context",
        )  # fmt: skip
    if not allows(speculation, PREDICTION, in_auto=True):
        raise BadParameter(
            "prediction", got=f"one, with speculation '{speculation}'",
            expected="auto, or sources with prediction among them",
        )  # fmt: skip

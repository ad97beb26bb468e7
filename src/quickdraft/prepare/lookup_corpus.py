"""Making a lookup corpus: text files, tokenized by a model's tokenizer, as one file to draft from.

Reads of the model its headers and tokenizer alone. The file is speculate/corpus's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from quickdraft.engine.text_sources import vocabulary_of
from quickdraft.errors import ConfigError, ModelFormatError
from quickdraft.models.loading.strict_files import read_text
from quickdraft.models.registry import open_target
from quickdraft.speculate.corpus import MAX_CORPUS_TOKENS, write_corpus
from quickdraft.text.tokenizer import Tokenizer

MAX_FILE_BYTES: Final = 4 << 30
_PIECE_CHARACTERS: Final = 1 << 20  # tokenized at a time: the tokenizer needs a hundred times their bytes


def make_corpus(model: Path, files: Sequence[Path], out: Path, report: Callable[[str], None]) -> int:
    """Write `out` from UTF-8 text files, each a text of its own; returns its tokens.

    ConfigError for files that cannot be read, hold no text or too much; errors of the model as for
    open_target, and UnsupportedError where it has no tokenizer.
    """
    data = open_target(model).tokenizer
    vocabulary = vocabulary_of(data)
    assert data is not None, "vocabulary_of refuses a model without a tokenizer"
    tokenizer = Tokenizer(data)
    texts: list[list[int]] = []
    for path in files:
        texts.append(tokenizer_ids(tokenizer, _read(path)))
        report(f"{path}: {len(texts[-1])} tokens")
        if sum(map(len, texts)) > MAX_CORPUS_TOKENS:
            raise ConfigError("too much text for a corpus", expected=f"at most {MAX_CORPUS_TOKENS} tokens")
    return write_corpus(out, [text for text in texts if text], vocabulary)


def tokenizer_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text of any length, control tokens found as in answers; cut at ends of lines, where a
    token may come out otherwise than in the whole."""
    ids: list[int] = []
    for piece in _pieces(text):
        ids += tokenizer.encode(piece, special=True, add_bos=False)
    return ids


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = start + _PIECE_CHARACTERS
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _read(path: Path) -> str:
    try:
        return read_text(path, MAX_FILE_BYTES)
    except ModelFormatError as error:
        raise ConfigError(str(error)) from error

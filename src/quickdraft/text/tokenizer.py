"""Text to token ids and back, over the `tokenizers` package, from plain TokenizerData.

Control tokens (<|im_start|>, ...) are never found in text unless the caller says `special=True`:
what a user writes must not become structure. The package's own added-token machinery is not used;
the text is split at user-defined (and, if asked, control) tokens here, leftmost and longest first,
and only the pieces between go through byte-level BPE. Nothing is mutable after construction except
the lazy byte table, so one Tokenizer serves all threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import tokenizers
from tokenizers import models

from quickdraft.errors import ModelFormatError, RequestError, UnsupportedError
from quickdraft.text.markup import SHOWN
from quickdraft.text.pretokenizers import pre_tokenizer
from quickdraft.text.source import naming
from quickdraft.types import TokenizerData

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
NFC_SHRINKS: Final = 3  # Unicode NFC never makes UTF-8 more than this many times shorter
_SILENT_TYPES: Final = frozenset({2, _CONTROL, 5})  # unknown, control, unused: never text


class Tokenizer:
    """A byte-level BPE tokenizer; `data` comes from a model file.

    Raises UnsupportedError for a tokenizer model or pre-tokenizer that is not known exactly, and
    ModelFormatError when the tables contradict each other.
    """

    def __init__(self, data: TokenizerData) -> None:
        self._data = data
        with naming(data.source):
            _check(data)
            self._bpe = _from_pipeline(data.pipeline) if data.pipeline is not None else _from_tables(data)
        # A control token of one character cannot be told from text, so it is only ever an id.
        control = [
            i for i, kind in enumerate(data.token_types) if kind == _CONTROL and len(data.tokens[i]) > 1
        ]
        user = [i for i, kind in enumerate(data.token_types) if kind == _USER_DEFINED and data.tokens[i]]
        self._control_ids = {data.tokens[i]: i for i in control}
        self._user_ids = {data.tokens[i]: i for i in user}
        self._user_pattern = _alternatives(self._user_ids)
        self._special_pattern = _alternatives(self._user_ids | self._control_ids)
        # Made now, not at the first token of the first answer.
        self._bytes_with_control = _token_bytes(data)
        eos = set(data.eos_ids)
        self._bytes = tuple(
            b"" if (kind in _SILENT_TYPES and data.tokens[i] not in SHOWN) or i in eos else raw
            for i, (kind, raw) in enumerate(zip(data.token_types, self._bytes_with_control, strict=True))
        )

    @property
    def vocabulary_size(self) -> int:
        return len(self._data.tokens)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._data.eos_ids

    @property
    def bos_id(self) -> int | None:
        return self._data.bos_id

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """The strings that `encode(..., special=True)` turns into control tokens."""
        return tuple(self._control_ids)

    def has_token(self, text: str) -> bool:
        """`text` is a control or user-defined token."""
        return text in self._control_ids or text in self._user_ids

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`; `special` finds control tokens in it; `add_bos` None follows the file.

        RequestError when the text holds a lone surrogate, which has no UTF-8 form.
        """
        return self.encode_pieces(self._split(text, special), add_bos=add_bos)

    def encode_pieces(self, pieces: Iterable[str | int], *, add_bos: bool | None = None) -> list[int]:
        """Ids of literal text pieces (no token is found in them) and ready token ids, in order.

        RequestError for text that has no tokens: a lone surrogate, or a byte that is not in the vocabulary
        where the file wants its unknown token then, which as a control token is never made of text.
        """
        encoded = self.piece_ids(list(pieces))
        ids = [self._required_bos()] if (self._data.add_bos if add_bos is None else add_bos) else []
        for part in encoded:
            ids += part
        return ids

    def piece_ids(self, pieces: Sequence[str | int]) -> list[Sequence[int]]:
        """The ids of each piece, as `encode_pieces` joins them."""
        texts = [piece for piece in pieces if isinstance(piece, str) and piece]
        for text in texts:
            _check_unicode(text)
        try:  # encode_batch_fast releases the interpreter lock; plain encode does not
            encoded = iter(self._bpe.encode_batch_fast(texts, add_special_tokens=False) if texts else [])
        except Exception as error:  # the package raises bare Exception
            raise RequestError("the tokenizer has no tokens for this text", got=error) from error
        return [
            (piece,) if isinstance(piece, int) else next(encoded).ids if piece else () for piece in pieces
        ]

    def tokens_within(self, text: str, end: int) -> int:
        """How many of the first tokens of a literal piece of text lie before its character `end`."""
        offsets = self._bpe.encode(text, add_special_tokens=False).offsets
        return next((i for i, (_, last) in enumerate(offsets) if last > end), len(offsets))

    def fewest_tokens(self, pieces: Iterable[str | int]) -> int:
        """A lower bound, found without tokenizing, on the ids `encode_pieces` makes of these pieces."""
        most = max(map(len, self._bytes_with_control)) * (
            NFC_SHRINKS if self._bpe.normalizer is not None else 1
        )
        sizes = (len(p.encode("utf-8", "replace")) if isinstance(p, str) else most for p in pieces)
        return sum(-(-size // most) for size in sizes)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`: their bytes joined, then UTF-8 with U+FFFD for what is not UTF-8."""
        table = self._bytes if skip_special else self._bytes_with_control
        return b"".join(table[token] for token in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; b"" for control, unknown and unused tokens and for EOS."""
        return self._bytes[token]

    def token_text(self, token: int) -> str:
        """The token as text for people and logprobs: control tokens by name, bytes with U+FFFD."""
        return self._bytes_with_control[token].decode("utf-8", errors="replace")

    def split_special(self, text: str) -> Iterator[str | int]:
        """`text` cut at control and user-defined tokens: literal pieces and token ids, in order."""
        return self._split(text, special=True)

    def split_plain(self, text: str) -> Iterator[str | int]:
        """`text` cut at user-defined tokens only, which are tokens wherever they stand."""
        return self._split(text, special=False)

    def _split(self, text: str, special: bool) -> Iterator[str | int]:
        pattern = self._special_pattern if special else self._user_pattern
        if pattern is None:
            yield text
            return
        start = 0
        for match in pattern.finditer(text):
            yield text[start : match.start()]
            found = match[0]
            yield self._user_ids[found] if found in self._user_ids else self._control_ids[found]
            start = match.end()
        yield text[start:]

    def _required_bos(self) -> int:
        if self._data.bos_id is None:
            raise RequestError("a BOS token was asked for, but the model file names none")
        return self._data.bos_id


def _from_tables(data: TokenizerData) -> tokenizers.Tokenizer:
    pre = pre_tokenizer(data.pre_tokenizer)
    merges = []
    for merge in data.merges:
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    merged = {left + right for left, right in merges}
    # Without control tokens BPE cannot make one out of text (one character may also be plain text).
    vocabulary = {
        text: i
        for i, (text, kind) in enumerate(zip(data.tokens, data.token_types, strict=True))
        if kind != _CONTROL or len(text) == 1 or text in merged
    }
    try:
        bpe = tokenizers.Tokenizer(
            models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignore_merges)
        )
    except Exception as error:  # the package raises bare Exception for a merge outside the vocabulary
        raise ModelFormatError("the tokenizer's merges do not fit its vocabulary", got=error) from error
    normalizer = pre.normalizer()
    if normalizer is not None:
        bpe.normalizer = normalizer
    bpe.pre_tokenizer = pre.build()
    return bpe


def _from_pipeline(pipeline: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(pipeline)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the package is no Exception
        raise ModelFormatError("the tokenizer cannot be built", got=str(error)[:200]) from error


def _check(data: TokenizerData) -> None:
    if data.model != "gpt2":
        raise UnsupportedError("the model's tokenizer is not known", got=repr(data.model), expected="gpt2")
    size = len(data.tokens)
    if len(data.token_types) != size:
        raise ModelFormatError(
            "token types do not match tokens", got=f"{len(data.token_types)} types", expected=f"{size}"
        )
    if len(set(data.tokens)) != size:
        raise ModelFormatError("the vocabulary holds the same token twice", got=f"{size} tokens")
    for name in ("bos_id", "unknown_id", "padding_id"):
        token = getattr(data, name)
        if token is not None and not 0 <= token < size:
            raise ModelFormatError(f"{name} is outside the vocabulary", got=token, expected=f"0..{size - 1}")
    for token in data.eos_ids:
        if not 0 <= token < size:
            raise ModelFormatError(
                "an EOS id is outside the vocabulary", got=token, expected=f"0..{size - 1}"
            )


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            "the text is not valid Unicode",
            got=f"a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
            hint="the text was probably cut in the middle of a character",
        ) from error


def _alternatives(tokens: Iterable[str]) -> re.Pattern[str] | None:
    ordered = sorted(tokens, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _token_bytes(data: TokenizerData) -> tuple[bytes, ...]:
    """What each token stands for; a token that is not made of byte characters is its own text."""
    table = {ord(character): byte for byte, character in enumerate(byte_characters())}
    table |= {other: 0xE000 + other for other in range(256) if other not in table}  # no byte, so no Latin-1
    result = []
    for text, kind in zip(data.tokens, data.token_types, strict=True):
        literal = kind in _SILENT_TYPES or kind == _USER_DEFINED
        try:
            result.append(text.encode() if literal else text.translate(table).encode("latin-1"))
        except UnicodeEncodeError:
            result.append(text.encode())
    return tuple(result)


def byte_characters() -> list[str]:
    """GPT-2's bijection from bytes to printable characters (bytes_to_unicode)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]

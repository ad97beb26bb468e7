"""Grammars: JSON schemas, regular expressions and Lark grammars over a model's tokens, through llguidance.

The one place that knows the library, which is imported when the first grammar is asked for. Its tokenizer
is made of the bytes that quickdraft's own gives each token, so control tokens are never part of a text.
Compiling is bounded by the library's counters and by the size of the text, lets other threads run, and its
results are kept, the least recently used going first. Any thread may compile; a matcher belongs to one
request.

Where the grammar leaves one text only, the tokens of that text as the tokenizer cuts it are the only ones
allowed: they are forced, not merely likely.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import BadParameter, CapacityError, UnsupportedError
from quickdraft.speculate.constraint import ConstraintFailed
from quickdraft.text.tokenizer import Tokenizer

T = TypeVar("T")
MAX_GRAMMAR_BYTES: Final = 64 << 10
KEPT_GRAMMARS: Final = 64
COMPILING_AT_ONCE: Final = 2
COMPILE_WAIT_SECONDS: Final = 20.0
# One space after a comma and a colon and none elsewhere: no model can lose itself in white space, and all
# that is not a value is forced.
JSON_FORM: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LIMITS: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000,
    "max_lexer_states": 50_000, "max_grammar_size": 200_000, "max_items_in_row": 20_000,
    "verbose_errors": False,
}  # fmt: skip


class Kind(StrEnum):
    """What the text of a grammar is."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    PARTS = "parts"  # llguidance's own JSON: several grammars that name each other


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """speculate.constraint.Constraint: a compiled grammar. A request starts from a copy."""

    matcher: Any  # llguidance.LLMatcher before the first token; never advanced
    vocabulary_size: int
    eos_id: int

    def start(self) -> GrammarMatcher:
        return GrammarMatcher(_guarded(self.matcher.deep_copy), self.vocabulary_size, self.eos_id)


class GrammarMatcher:
    """speculate.constraint.Matcher over one llguidance matcher. The end of an answer is one of the EOS ids,
    allowed where the text is complete; where nothing else may follow, the first of them is forced."""

    __slots__ = ("_ahead", "_eos_id", "_mask", "_matcher", "_vocabulary_size")

    def __init__(self, matcher: Any, vocabulary_size: int, eos_id: int) -> None:
        self._matcher, self._vocabulary_size, self._eos_id = matcher, vocabulary_size, eos_id
        self._ahead: tuple[int, ...] | None = None  # tokens that must come; None: not asked yet
        self._mask: NDArray[np.bool_] | None = None  # for the next token, once it was asked for

    @property
    def active(self) -> bool:
        return True

    def allows(self, token: int) -> bool:
        ahead = self._must_come()
        if ahead:
            return token == ahead[0]
        if self._mask is not None:
            return token < len(self._mask) and bool(self._mask[token])
        return token < self._vocabulary_size and self._ask(self._matcher.validate_tokens, [token]) == 1

    def allowed(self) -> NDArray[np.bool_]:
        if self._mask is None:
            ahead = self._must_come()
            if ahead:
                self._mask = np.zeros(self._vocabulary_size, np.bool_)
                self._mask[ahead[0]] = True
            else:
                bits = np.frombuffer(self._ask(self._matcher.compute_bitmask), np.uint8)
                flags = np.unpackbits(bits, count=self._vocabulary_size, bitorder="little")
                self._mask = flags.view(np.bool_)
        return self._mask

    def forced(self, most: int) -> Sequence[int]:
        ahead = self._must_come()
        # The end needs no row: the row before it has no other choice.
        count = len(ahead) - (ahead[-1:] == (self._eos_id,))
        return ahead[: min(most, count)]

    def fitting(self, tokens: Sequence[int]) -> int:
        """See Matcher. That a forced text is cut otherwise is found when it is verified."""
        ahead = self._must_come()
        for count, (token, only) in enumerate(zip(tokens, ahead, strict=False)):
            if token != only:
                return count
        known = next((at for at, one in enumerate(tokens) if one >= self._vocabulary_size), len(tokens))
        return int(self._ask(self._matcher.validate_tokens, list(tokens[:known])))

    def push(self, token: int) -> None:
        ahead = self._must_come()
        self._ask(self._matcher.consume_token, token)
        self._mask = None
        self._ahead = ahead[1:] or None

    def copy(self) -> GrammarMatcher:
        twin = GrammarMatcher(_guarded(self._matcher.deep_copy), self._vocabulary_size, self._eos_id)
        twin._ahead, twin._mask = self._ahead, self._mask
        return twin

    def _must_come(self) -> tuple[int, ...]:
        if self._ahead is None:
            if self._ask(self._matcher.is_stopped):
                self._ahead = (self._eos_id,)
            else:
                self._ahead = tuple(self._ask(self._matcher.compute_ff_tokens))
        return self._ahead

    def _ask(self, question: Callable[..., T], *arguments: Any) -> T:
        """The library's answer; it reports what went wrong beside it."""
        answer = _guarded(question, *arguments)
        if self._matcher.is_error():
            why = _what_went_wrong(self._matcher)
            raise ConstraintFailed("the grammar cannot be followed further", got=why)
        return answer


class Grammars:
    """Compiles grammars for `tokenizer`, and keeps the latest."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        self.tokenizer, self._eos_ids = tokenizer, tuple(eos_ids)
        self._lock = threading.Lock()
        self._compiling = threading.BoundedSemaphore(COMPILING_AT_ONCE)
        self._kept: OrderedDict[tuple[Kind, str], Grammar] = OrderedDict()
        self._vocabulary: Any = None  # llguidance.LLTokenizer, once it is needed

    def compile(self, kind: Kind, text: str, field: str) -> Grammar:
        """A grammar, perhaps one that is kept. BadParameter names `field` and says what the library says;
        CapacityError while others are being compiled; UnsupportedError where an answer cannot end."""
        if not self._eos_ids:
            raise UnsupportedError("grammars need a model with an end-of-text token")
        key = (kind, text)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        size = len(text.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise BadParameter(field, got=f"{size} bytes", expected=f"at most {MAX_GRAMMAR_BYTES}")
        if not self._compiling.acquire(timeout=COMPILE_WAIT_SECONDS):
            raise CapacityError("too many grammars are being compiled", hint="try again later")
        try:
            grammar = self._compile(kind, text, field)
        finally:
            self._compiling.release()
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar

    @staticmethod
    def regex_part(pattern: str) -> dict[str, Any]:
        """A regular expression as one of several grammars (Kind.PARTS)."""
        import llguidance

        part: dict[str, Any] = json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))["grammars"][0]
        return part

    def _compile(self, kind: Kind, text: str, field: str) -> Grammar:
        import llguidance

        vocabulary = self._library_tokenizer()
        try:
            made = {
                Kind.JSON_SCHEMA: lambda: llguidance.LLMatcher.grammar_from_json_schema(
                    text, overrides=JSON_FORM
                ),
                Kind.REGEX: lambda: llguidance.LLMatcher.grammar_from_regex(text),
                Kind.LARK: lambda: llguidance.LLMatcher.grammar_from_lark(text),
                Kind.PARTS: lambda: text,
            }[kind]()
        except ValueError as error:
            raise BadParameter(field, got=str(error)[:300], expected=_EXPECTED[kind]) from error
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = _guarded(lambda: llguidance.LLMatcher(vocabulary, made, log_level=0, limits=limits))
        if not matcher.is_error():  # also asked for a first token: what is too large shows there
            first = matcher.deep_copy()
            _guarded(first.compute_bitmask)
            if first.is_error():
                matcher = first
        if matcher.is_error():
            raise BadParameter(field, got=_what_went_wrong(matcher), expected=_EXPECTED[kind])
        return Grammar(matcher, self.tokenizer.vocabulary_size, self._eos_ids[0])

    def _library_tokenizer(self) -> Any:
        import llguidance

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _guarded(
                    lambda: llguidance.LLTokenizer(
                        llguidance.TokenizerWrapper(_Vocabulary(self.tokenizer, self._eos_ids)),
                        n_vocab=self.tokenizer.vocabulary_size,
                        eos_token=list(self._eos_ids),
                    )
                )
            return self._vocabulary


_EXPECTED: Final = {
    Kind.JSON_SCHEMA: "a JSON schema that can be followed token by token",
    Kind.REGEX: "a regular expression in the syntax of Rust's regex, without look-around",
    Kind.LARK: "a grammar in llguidance's form of Lark",
    Kind.PARTS: "what can be followed token by token",
}


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = eos_ids[0]
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocabulary_size)]
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]

    def __call__(self, text: bytes) -> list[int]:
        tokenizer = self._tokenizer
        pieces = [
            piece if isinstance(piece, str) or tokenizer.token_bytes(piece) else tokenizer.token_text(piece)
            for piece in tokenizer.split_special(text.decode())
        ]
        return tokenizer.encode_pieces(pieces, add_bos=False)


def _guarded(call: Callable[..., T], *arguments: Any) -> T:
    """What `call` returns; ConstraintFailed for whatever the library raises."""
    try:
        return call(*arguments)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise ConstraintFailed("the grammar's library failed", got=str(error)[:300]) from error


def _what_went_wrong(matcher: Any) -> str:
    """What went wrong, without the state or the stack that the library prints after it."""
    told = re.split(r"\s*<(?:state|backtrace|non-verbose/)>", str(matcher.get_error()))[0].strip()
    return "a grammar that no text obeys" if told == "NoExtensionBias" else told[:400]

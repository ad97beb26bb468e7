"""Values that every layer speaks: sampling parameters, speculation, finish reasons, timings.

Frozen dataclasses, standard library only. A SamplingParams that exists is valid: the checks run
in its constructor and raise BadParameter with the field's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from quickdraft.errors import BadParameter, UnsupportedError

SOURCES: Final = ("lookup", "mtp", "dflash", "dflash2", "prediction", "corpus", "forced")
MAX_ROWS: Final = 64  # longest verify block a request may ask for
MAX_LOGPROBS: Final = 20
MAX_STOP_STRINGS: Final = 16
# Below it logits / temperature could overflow float64, and noise cannot tip unequal float32 logits anyway.
LOWEST_TEMPERATURE: Final = 1e-200


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # cancelled by its client
    ERROR = "error"  # the request failed (for example NaN logits)


class Backend(StrEnum):
    """What computes: auto is cuda where a usable card and the extra are there, else cpu."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class ReasoningParser(StrEnum):
    """How reasoning is told from the answer."""

    AUTO = "auto"  # as the model's files show
    QWEN3 = "qwen3"  # <think> blocks
    NONE = "none"


class ToolCallParser(StrEnum):
    """How a model writes tool calls."""

    AUTO = "auto"  # as the chat template shows
    QWEN3_CODER = "qwen3_coder"  # <tool_call>, <function=NAME>, <parameter=KEY>
    HERMES = "hermes"  # <tool_call>{"name": NAME, "arguments": {...}}</tool_call>
    JSON = "json"  # such objects, or lists of them, at the beginning, in a code fence or after a mark
    NONE = "none"  # calls stay text


@dataclass(frozen=True, slots=True)
class Speculation:
    """Which draft sources a request may use: `off`, `auto`, or sources joined by `+` with an
    optional row cap, e.g. `lookup`, `dflash2+lookup@16`. `max_rows` counts verify rows: one row
    for the last token and one per drafted token.
    """

    sources: tuple[str, ...] = ()
    auto: bool = False
    max_rows: int | None = None

    @property
    def off(self) -> bool:
        return not self.auto and not self.sources

    @classmethod
    def parse(cls, text: str) -> Speculation:
        """Parse the grammar above; raises BadParameter("speculation")."""
        if text == "off":
            return cls()
        if text == "auto":
            return cls(auto=True)
        match = re.fullmatch(r"([a-z0-9]+(?:\+[a-z0-9]+)*)(?:@([1-9][0-9]{0,3}))?", text)
        names = tuple(match[1].split("+")) if match else ()
        rows = int(match[2]) if match and match[2] else None
        good = (
            bool(names)
            and all(name in SOURCES for name in names)
            and len(set(names)) == len(names)
            and (rows is None or rows <= MAX_ROWS)
        )
        if not good:
            raise BadParameter(
                "speculation",
                got=repr(text[:80]),
                expected=f"off, auto, or {'/'.join(SOURCES)} joined by '+', "
                f"with an optional row cap @1..@{MAX_ROWS}",
                hint="for example lookup@16",
            )
        return cls(sources=names, max_rows=rows)

    def using(self, source: str) -> Speculation:
        """The same with this source among those allowed."""
        if self.auto or source in self.sources:
            return self
        return replace(self, sources=(source, *self.sources))

    def require(self, loaded: Collection[str]) -> None:
        """Raise UnsupportedError for a source that is not among the loaded ones."""
        for name in self.sources:
            if name not in loaded:
                raise UnsupportedError(
                    f"no drafter for source '{name}' is loaded",
                    got=f"'{self}'",
                    expected=f"sources among {', '.join(loaded)}" if loaded else "off or auto",
                )

    def __str__(self) -> str:
        if self.auto:
            return "auto"
        cap = f"@{self.max_rows}" if self.max_rows is not None else ""
        return "+".join(self.sources) + cap if self.sources else "off"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop. `temperature` 0 is greedy.

    top_k 0, top_p 1 and min_p 0 are off. `max_tokens` None runs to the context limit. `logprobs`
    is the number of alternatives per token (0 is legal: only the chosen token); None is off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    speculation: Speculation = Speculation(auto=True)

    def __post_init__(self) -> None:
        _between("temperature", self.temperature, 0.0, 100.0)
        _between("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise BadParameter("top_p", got=0, expected="a number in (0, 1]")
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise BadParameter(
                    "min_tokens", got=self.min_tokens, expected=f"at most max_tokens {self.max_tokens}"
                )
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if isinstance(self.stop, str):
            raise BadParameter("stop", got=repr(self.stop)[:80], expected="a tuple of strings")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise BadParameter(
                "stop", got=f"{len(self.stop)} strings", expected=f"at most {MAX_STOP_STRINGS}"
            )
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= 1000:
                raise BadParameter("stop", got=repr(text)[:80], expected="strings of 1 to 1000 characters")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _between("logit_bias", bias, -100.0, 100.0)
        if not isinstance(self.speculation, Speculation):
            raise BadParameter(
                "speculation", got=repr(self.speculation)[:80], expected="a Speculation",
                hint='for example Speculation.parse("lookup@16")',
            )  # fmt: skip

    @property
    def greedy(self) -> bool:
        return self.temperature < LOWEST_TEMPERATURE


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Raw log-softmax (before processors) of one emitted token and its best alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far a prompt is read, under llama.cpp's names. `processed` includes `cache`, the tokens found in
    the prefix cache; `time_ms` is what reading has taken so far, without waiting in the queue."""

    total: int
    cache: int
    processed: int
    time_ms: float

    def to_dict(self) -> dict[str, int | float]:
        return {
            "total": self.total,
            "cache": self.cache,
            "processed": self.processed,
            "time_ms": round(self.time_ms, 3),
        }


@dataclass(slots=True)
class Timings:
    """Counts and times of one request; the one shape used by CLI, API and bench.

    `accepted` counts emitted tokens that came from a draft (emitted - 1 per step), so
    steps + sum(accepted.values()) == completion_tokens. `steps` are steps that emitted.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_ms: float = 0.0  # from arrival to the first step; not part of the public shape
    prompt_ms: float = 0.0
    completion_tokens: int = 0
    decode_ms: float = 0.0
    steps: int = 0
    rows: int = 0
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """The public JSON shape; milliseconds and tokens per second."""
        computed = self.prompt_tokens - self.cached_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "prompt_ms": round(self.prompt_ms, 3),
            "prompt_tokens_per_second": _rate(computed, self.prompt_ms),
            "completion_tokens": self.completion_tokens,
            "decode_ms": round(self.decode_ms, 3),
            "decode_tokens_per_second": _rate(self.completion_tokens, self.decode_ms),
            "steps": self.steps,
            "rows": self.rows,
            "drafted": dict(self.drafted),
            "accepted": dict(self.accepted),
        }


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What the prefix cache gave one request, and why it gave no more.

    `reason` is "none" (all of the prompt but its last token was cached), "end" (the cached text
    ended there; what follows was never computed), "differs" (other tokens are cached there: see
    `token` and `cached_token`), "evicted" (it was cached once), "empty" (nothing is cached), "off";
    "no_checkpoint" is for models with recurrent layers: more is cached, but no state to go on from.
    """

    cached_tokens: int  # the first position that had to be computed
    restored_tokens: int = 0  # how many of them came from disk
    reason: str = "off"
    token: int | None = None  # the request's token at that position (after what is computed again)
    cached_token: int | None = None  # the nearest cached text's token at that position
    shared_tokens: int = 0  # leading tokens of a cached text; more than cached_tokens for "no_checkpoint"
    again_tokens: int = 0  # cached ones after them that are computed again, for what a drafter lacks

    def to_dict(self) -> dict[str, object]:
        """The `prefix_cache` debug field of a response."""
        return {
            "cached_tokens": self.cached_tokens,
            "restored_tokens": self.restored_tokens,
            "reason": self.reason,
            "position": self.cached_tokens + self.again_tokens if self.reason != "none" else None,
            "token": self.token,
            "cached_token": self.cached_token,
        }


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """Everything a tokenizer needs, as plain data read from a model file."""

    model: str  # "gpt2" (byte-level BPE) or "llama" (SentencePiece BPE)
    pre_tokenizer: str  # e.g. "smollm", "llama-bpe", "qwen2", "default"
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]  # GGUF: 1 normal, 2 unknown, 3 control, 4 user-defined, 6 byte
    merges: tuple[str, ...]
    scores: tuple[float, ...] = ()
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    unknown_id: int | None = None
    padding_id: int | None = None
    add_bos: bool = False
    add_space_prefix: bool = False
    chat_template: str | None = None
    # Of model folders: a tokenizer.json without added tokens and post-processor, which then replaces
    # pre_tokenizer and merges; and the texts chat templates know as bos_token and eos_token.
    pipeline: str | None = None
    bos_token: str | None = None  # None: the text of bos_id
    eos_token: str | None = None  # None: the text of the first of eos_ids
    source: str = ""  # the files errors name
    template_source: str = ""


def _rate(tokens: int, milliseconds: float) -> float:
    return round(tokens / milliseconds * 1000.0, 3) if milliseconds > 0 else 0.0


def _between(name: str, value: object, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[operator,arg-type]
        raise BadParameter(name, got=repr(value)[:80], expected=f"a number in [{low:g}, {high:g}]")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadParameter(name, got=repr(value)[:80], expected=f"an integer in [{low}, {high}]")

"""What a draft is, and what a drafter must do. A wrong draft may cost time, never output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

from quickdraft.speculate.constraint import Matcher
from quickdraft.types import FinishReason, Speculation

LOOKUP: Final = "lookup"  # the source that reads the context alone
PREDICTION: Final = "prediction"  # the one that follows what the request says its answer will repeat
CORPUS: Final = "corpus"  # the one that reads a file of texts
TARGET: Final = "model"  # no draft source: where a token comes from that the target chose itself
# Of the models that draft a request with `auto` uses the first of these that is loaded, and no other.
AUTO_MODELS: Final = ("dflash2", "mtp", "dflash")


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed continuation of a sequence. `scores[i]` is a model's margin: the score of tokens[i] less that
    of the best other one, in its own units; empty when it has none."""

    tokens: tuple[int, ...] = ()
    source: str = ""
    scores: tuple[float, ...] = ()
    match_length: int = 0  # of a text source: how many tokens of it the proposal rests on
    extended: int = 0  # a fused draft: so many of the last tokens are of `extended_source`, not of `source`
    extended_source: str = LOOKUP
    in_output: bool = False  # what it continues stands in the output, not in the prompt


NOTHING: Final = Draft()


def cut(draft: Draft, count: int) -> Draft:
    """Its first `count` tokens."""
    if count >= len(draft.tokens):
        return draft
    if not count:
        return NOTHING
    gone = len(draft.tokens) - count
    return Draft(
        draft.tokens[:count], draft.source, draft.scores[:count], draft.match_length,
        max(0, draft.extended - gone), draft.extended_source, draft.in_output,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the walk made of one step of one sequence: `tokens` are emitted in order;
    `accepted` = len(tokens) - 1 of them stood in the draft."""

    tokens: tuple[int, ...]
    drafted: int
    finish: FinishReason | None = None

    @property
    def accepted(self) -> int:
        return len(self.tokens) - 1


def token_sources(
    verdict: Verdict, source: str, extended: int = 0, extended_source: str = LOOKUP
) -> tuple[str, ...]:
    """Where each emitted token came from, as they are counted (stats.py): accepted ones from `source`, those
    among the last `extended` drafted from `extended_source`, and the last one of the step from TARGET."""
    if not verdict.tokens:
        return ()
    own = min(verdict.accepted, verdict.drafted - extended)
    return (source,) * own + (extended_source,) * (verdict.accepted - own) + (TARGET,)


@dataclass(frozen=True, slots=True)
class StepRows:
    """What the target computed of a sequence in a step: row i is position start + i."""

    start: int
    # [rows, C], valid until the next step: numpy, or rows of a backend that read like it
    hidden: Callable[[], Any]  # after the final norm
    layer: Callable[[int], Any]  # the residual stream after a layer


class SequenceView(Protocol):
    """What a drafter may see of a sequence. `tokens` is prompt + output and only ever grows."""

    @property
    def request_id(self) -> str: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def prediction(self) -> Sequence[int]: ...  # what the output is expected to repeat; empty: unknown
    @property
    def matcher(self) -> Matcher | None: ...  # where it stands in its constraint; drafters only ask and copy


class Drafter(Protocol):
    """One source of drafts; keeps what it needs per request under request_id."""

    @property
    def source(self) -> str: ...
    def propose(self, view: SequenceView, budget: int) -> Draft:
        """At most `budget` >= 0 tokens to follow view.tokens; an empty Draft is always legal."""

    def observe(self, view: SequenceView, verdict: Verdict, taps: Any) -> None:
        """Called after every step of the sequence that emitted, also those that carried no draft of this
        source; where the target keeps hidden states (StepRows) also after those that read prompt tokens, with
        an empty verdict."""

    def forget(self, request_id: str) -> None:
        """Drop all state of a request; unknown ids are fine."""


@runtime_checkable
class ModelDrafter(Drafter, Protocol):
    """A drafter that computes: it is asked only for what is worth its time."""

    @property
    def longest(self) -> int: ...  # the most tokens it drafts
    @property
    def in_auto(self) -> bool: ...  # whether requests with `auto` may use it
    @property
    def cold_tokens(self) -> int: ...  # of prefix hits, tokens that it lacks its own rows of; a total
    def resumed(self, view: SequenceView) -> None:
        """The sequence starts, or starts again, perhaps from a prefix hit."""

    def publishing(self, view: SequenceView) -> None:
        """The sequence's blocks are about to be published, for others to go on from."""


@runtime_checkable
class ForkingDrafter(ModelDrafter, Protocol):
    """One that keeps what does not lie in the blocks and slots of a sequence."""

    def forked(self, source: SequenceView, view: SequenceView) -> None:
        """`view` is about to start from a copy of the state of `source`, between two steps."""


@runtime_checkable
class TimedDrafter(Protocol):
    """A drafter whose model can be timed before there are requests (engine/measured_costs.py)."""

    @property
    def source(self) -> str: ...
    @property
    def pass_tokens(self) -> Sequence[int]: ...  # that a pass can draft, ascending: of each length of block
    def time_pass(self, tokens: int) -> float:
        """Seconds of one pass of its model that drafts so many of these, head included, over memory of its
        own; nothing is kept."""

    def time_upkeep(self) -> float:
        """The same of following the text, per token."""


@runtime_checkable
class FollowingDrafter(ModelDrafter, Protocol):
    """A drafter whose model follows the text, which takes time whether it drafts or not."""

    def follow(self, request_id: str, followed: bool) -> None:
        """Whether a request's tokens are followed from here on; at first they are. After a gap a draft rests
        on the tokens since."""


def allows(speculation: Speculation, source: str, in_auto: bool) -> bool:
    """Whether a request may use this source."""
    return in_auto if speculation.auto else source in speculation.sources

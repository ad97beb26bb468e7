"""When a speed may be shown: the text is real text, the counts add up, the ids are plain's.

A benchmark that decodes the same four words for ever, or that loses tokens, is fast and worthless,
so a speed that fails here is never printed. Pure: token ids and counts in, a reason or None out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from quickdraft.types import Timings

NGRAM: Final = 4
MIN_DISTINCT_SHARE: Final = 0.3


@dataclass(frozen=True, slots=True)
class Output:
    """What one arm emitted for one prompt. `error` is why the request failed, None when it did not."""

    ids: tuple[int, ...]
    timings: Timings
    error: str | None = None


def distinct_share(ids: Sequence[int]) -> float | None:
    """Distinct 4-grams over all 4-grams of `ids`; None for fewer than 4 ids."""
    grams = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    return len(set(grams)) / len(grams) if grams else None


def refusal(
    outputs: Sequence[Output],
    plain: Sequence[Output],
    expected: Sequence[tuple[int, ...] | None],
    *,
    is_text: bool = True,
) -> str | None:
    """Why no speed may be shown for an arm, or None; one entry per prompt in each sequence.

    `plain` are the outputs of plain decoding (the arm itself, for plain), `expected` the stated ids
    of a prompt or None. `is_text` False (random ids) leaves out the share of distinct 4-grams.
    """
    assert len(outputs) == len(plain) == len(expected), "one entry per prompt"
    for index, (output, reference, stated) in enumerate(zip(outputs, plain, expected, strict=True)):
        reason = _broken(output, reference) or (
            _differs(output.ids, stated, "the stated ids") if stated is not None else None
        )
        if reason is None and stated is None and is_text:
            reason = _degenerate(output.ids)
        if reason is not None:
            return reason if len(outputs) == 1 else f"prompt {index + 1}: {reason}"
    unchecked = all(s is None and len(o.ids) < NGRAM for o, s in zip(outputs, expected, strict=True))
    return f"no output has {NGRAM} tokens, too short to check" if is_text and unchecked else None


def _broken(output: Output, plain: Output) -> str | None:
    """Failed requests, counts that do not add up, other ids than plain decoding."""
    if output.error is not None:
        return f"the request failed: {output.error}"
    steps, tokens = output.timings.steps, output.timings.completion_tokens
    accepted = sum(output.timings.accepted.values())
    if steps + accepted != tokens or tokens != len(output.ids):
        return f"{steps} steps + {accepted} accepted != {tokens} tokens ({len(output.ids)} ids)"
    if len(output.ids) != len(plain.ids):
        return f"{len(output.ids)} ids, plain decoding gave {len(plain.ids)}"
    return _differs(output.ids, plain.ids, "plain decoding")


def _differs(ids: Sequence[int], reference: Sequence[int], name: str) -> str | None:
    """The first position where `ids` leaves `reference`; a reference that goes on longer is fine."""
    for position, token in enumerate(ids):
        if position >= len(reference) or token != reference[position]:
            wanted = reference[position] if position < len(reference) else "the end"
            return f"token {position} is {token}, not {wanted} as in {name}"
    return None


def _degenerate(ids: Sequence[int]) -> str | None:
    share = distinct_share(ids)
    if share is not None and share < MIN_DISTINCT_SHARE:
        return f"degenerate text: {share:.2f} of its {NGRAM}-grams are distinct, below {MIN_DISTINCT_SHARE}"
    return None

"""How many ids can still win when only the high bits of a Q8_0 head are read.

`python -m tests.support.head_bounds [MODEL]`, with src in PYTHONPATH where the package is not installed.
Hidden states come from the product: a text of the benchmark read as it is, and the model's own greedy
answers. A code is step * high + low; with the low bits unread a logit is known up to a bound, and only ids
whose upper bound reaches the exact logit of the id that looks best can win. Every bound is checked
against the exact logits, and those against the ids the kernels chose. Nothing here measures time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.bench.workloads import all_workloads, encoding_of, long_document, prompt_ids
from quickdraft.config import DEFAULT_MODEL
from quickdraft.engine.llm import LLM
from quickdraft.engine.plan import PlanEntry, StepPlan
from quickdraft.models.loading.gguf import GGUFFile
from quickdraft.ops.reference.linear import quantise
from quickdraft.ops.weights import Blocks, Int8Groups
from quickdraft.state.blocks import BlockPool
from quickdraft.state.sequence import SequenceState
from quickdraft.types import SamplingParams

Floats = NDArray[np.float32]
GROUP = 32
POSITIONS = 200  # of each kind
FIRST = 40  # positions of the text that are not looked at: too little context
ANSWERS = ("chat", "summary", "rag")
EXTRA_GROUPS = (2, 4, 6)  # groups whose low bits are read as well
ROUNDING = 64 * 2.0**-24  # of the sum of |terms|: both chains of 18 terms and the bound's own


class Head:
    """Codes [V, G, 32], scales [V, G], and the activations of P positions as the kernels quantise them."""

    def __init__(self, weight: Int8Groups, hidden: Floats) -> None:
        groups = weight.codes.shape[1] // GROUP
        self.codes = weight.codes.astype(np.int16).reshape(-1, groups, GROUP)
        self.scales = weight.scales.astype(np.float32)
        codes, self.x_scales = quantise(hidden, GROUP)
        self.x = codes.astype(np.float32).reshape(len(hidden), groups, GROUP)
        self.logits = self.scores(self.codes)

    def scores(self, codes: NDArray[Any], keep: Floats | None = None) -> Floats:
        """[P, V], an fp32 chain over groups, whose dots are exact in float32; `keep` [P, G] weighs them."""
        out = np.zeros((len(self.x), len(codes)), np.float32)
        scales = self.x_scales if keep is None else self.x_scales * keep
        for g in range(codes.shape[1]):
            dots = self.x[:, g] @ codes[:, g].astype(np.float32).T
            out += dots * (scales[:, g, None] * self.scales[None, :, g])
        return out


def bounds(head: Head, low: Floats, half: float) -> dict[str, tuple[Floats, Floats]]:
    """Name -> (box [P, G], ball [P, G]): |low . x| of id n in group g is at most box + ball * |low_n|^2.

    `low` [V, G, 32] is the unread rest of the codes, each at most `half`. Of max low.x under both
    |low_i| <= half and |low|^2 <= R the dual is min over l of l R / 2 + sum_i d(x_i), with
    d = x^2 / 2l where |x| <= l half, else half |x| - l half^2 / 2: any l gives a bound, linear in R.
    """
    size = np.abs(head.x)
    typical = float(np.median((low**2).sum(2)))
    norm = np.sqrt((size**2).sum(2))
    middle = np.sqrt(typical)
    least, most = np.full(norm.shape, 1e-6), np.full(norm.shape, 1e6)
    for _ in range(50):  # the l that is best at the typical R, by bisection
        middle_l = np.sqrt(least * most)
        over = (np.minimum(half, size / middle_l[:, :, None]) ** 2).sum(2) > typical
        least, most = np.where(over, middle_l, least), np.where(over, most, middle_l)
    wide = most[:, :, None]
    dual = np.where(size <= wide * half, size**2 / (2 * wide), half * size - wide * half**2 / 2).sum(2)
    none = np.zeros_like(norm)
    return {
        "box": (half * size.sum(2), none),
        "ball": (norm * middle / 2, norm / (2 * middle)),  # |x||low| <= |x| (m + |low|^2 / m) / 2
        "box and ball": (dual.astype(np.float32), (most / 2).astype(np.float32)),
    }


def survivors(head: Head, approximate: Floats, bound: Floats) -> NDArray[np.int64]:
    """[P] ids whose upper bound reaches the exact logit of the id that looks best; checks the bound."""
    rows = np.arange(len(approximate))
    assert (np.abs(head.logits - approximate) <= bound).all(), "a bound that does not hold"
    reached = head.logits[rows, approximate.argmax(1)]
    return np.count_nonzero(approximate + bound >= reached[:, None], axis=1)


def report(head: Head, kinds: Sequence[str]) -> None:
    """A line per split of the code, bound and number of groups read whole."""
    print(
        f"{'bits read':34}{'bytes':>7}{'bound':>8}{'error':>8}",
        *(f"{kind + ': median, p90':>22}" for kind in kinds),
    )
    for bits in (4, 3, 2):
        step, half = 1 << bits, ((1 << bits) - 1) / 2
        high = (head.codes >> bits) * step + np.float32(half)
        low = head.codes - high
        squares = (low**2).sum(2)
        rest = head.scores(head.codes) - head.scores(high)
        rounding = ROUNDING * (128 * np.abs(head.x).sum(2) * head.x_scales) @ head.scales.T
        for name, (box, ball) in bounds(head, low, half).items():
            for extra in (0, *(EXTRA_GROUPS if bits == 4 and ball.any() and name != "ball" else ())):
                keep = unread(head, box + ball * np.median(squares), extra)
                scale = head.x_scales * keep
                bound = (scale * box) @ head.scales.T + (scale * ball) @ (head.scales * squares).T + rounding
                approximate = head.logits - (rest if not extra else head.scores(low, keep))
                counts = np.split(survivors(head, approximate, bound), len(kinds))
                size = (8 - bits) / 8 * 32 + 2 + (2 if ball.any() else 0) + bits * 4 * extra / keep.shape[1]
                error = float(np.sqrt(((head.logits - approximate) ** 2).mean()))
                label = f"{8 - bits} of 8, {name}" + (f", {extra} groups whole" if extra else "")
                print(f"{label:34}{size / 34:6.0%} {bound.mean():7.2f} {error:7.2f}",
                      *(f"{np.median(n):11.0f} {np.percentile(n, 90):10.0f}" for n in counts))  # fmt: skip


def unread(head: Head, bound: Floats, groups: int) -> Floats:
    """[P, G]: 0 for the `groups` groups of each position that matter most, else 1."""
    keep = np.ones_like(head.x_scales)
    worst = np.argsort(-(head.x_scales * bound), axis=1)[:, :groups]
    np.put_along_axis(keep, worst, np.float32(0), 1)
    return keep


class Reader:
    """Reads ids through the engine's own runner and keeps the head's inputs."""

    def __init__(self, llm: LLM) -> None:
        self._runner = llm.opened.runner
        self._model: Any = self._runner.model

    def hidden(self, ids: Sequence[int], start: int) -> tuple[Floats, NDArray[np.int32]]:
        """Normed hidden states of positions start.. and the ids the kernels chose there."""
        state = SequenceState(BlockPool(self._runner.kv.blocks))
        hidden, best = [], []
        while state.committed < len(ids):
            first, most = state.committed, len(self._model.best)
            rows = min(most, (start if first < start else len(ids)) - first)
            wanted = rows if first >= start else 0
            state.reserve(rows)
            entry = PlanEntry("", tuple(ids[first : first + rows]), first, wanted, (), "", state.block_table)
            self._runner.run(StepPlan((entry,)))
            hidden.append(self._model._last[:wanted].copy())
            best.append(self._model.best[:wanted].copy())
            state.commit(rows)
        return np.concatenate(hidden), np.concatenate(best)


def head_of(llm: LLM) -> Int8Groups:
    """The output head as the file holds it; SystemExit unless it is Q8_0."""
    file = GGUFFile(llm.opened.path)
    weight = file.matrix("output.weight" if "output.weight" in file.tensors else "token_embd.weight")
    value = weight.value() if isinstance(weight, Blocks) else weight
    if not isinstance(value, Int8Groups) or value.bits != 8:
        raise SystemExit(f"{llm.opened.path}: the output head is not Q8_0")
    return value


def sampled(found: Sequence[tuple[Floats, NDArray[np.int32]]]) -> tuple[Floats, NDArray[np.int32]]:
    hidden, best = (np.concatenate(part) for part in zip(*found, strict=True))
    at = np.sort(np.random.default_rng(0).permutation(len(best))[:POSITIONS])
    return hidden[at], best[at]


def main() -> None:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL, prefix_cache=False)
    encoding, reader = encoding_of(llm.opened), Reader(llm)
    assert encoding.encode is not None
    text = [reader.hidden(encoding.encode(long_document())[:1500], FIRST)]
    answers = []
    for workload in all_workloads():
        for prompt in prompt_ids(workload, encoding, 100) if workload.name in ANSWERS else ():
            made = llm.generate(list(prompt.ids), SamplingParams(temperature=0.0, max_tokens=100)).ids
            answers.append(reader.hidden([*prompt.ids, *made[:-1]], len(prompt.ids) - 1))
    parts = [sampled(text), sampled(answers)]
    head = Head(head_of(llm), np.concatenate([hidden for hidden, _ in parts]))
    assert (head.logits.argmax(1) == np.concatenate([best for _, best in parts])).all()
    report(head, ("text", "answers"))


if __name__ == "__main__":
    main()

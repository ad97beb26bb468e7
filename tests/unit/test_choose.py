"""choose against its definition: processors in order, cuts token by token, logprobs, broken logits."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest

from quickdraft.ops.reference import gumbel
from quickdraft.speculate import choose
from quickdraft.speculate.choose import NEVER, BrokenLogits, Chooser, top_of
from quickdraft.types import LOWEST_TEMPERATURE, SamplingParams
from tests.support.settings import SETTINGS
from tests.support.toy import VOCABULARY, ToyRow

PROMPT = [3, 4, 4, 9]
OUTPUT = [4, 7, 7, 7, 11]
MASKED = (0, 5)


def processed(row: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """logit_bias, penalties over the output, repetition over both, masks: one token at a time."""
    values = row.copy()
    for token in range(len(values)):
        values[token] += np.float32(params.logit_bias.get(token, 0.0))
        times = output.count(token)
        if times:
            penalty = params.presence_penalty + params.frequency_penalty * times
            values[token] = np.float32(float(values[token]) - penalty)
        if token in prompt or token in output:
            old, rate = float(values[token]), params.repetition_penalty
            values[token] = np.float32(old / rate if old > 0 else old * rate)
    if len(output) < params.min_tokens:
        values[list(MASKED)] = -np.inf
    return values


def survivors(values: np.ndarray, params: SamplingParams) -> list[int]:
    """Ids that top_k, top_p and min_p leave, by definition."""
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    order = [token for token in order if values[token] > -np.inf]
    kept = order[: params.top_k or None]
    weight = {t: math.exp((float(values[t]) - float(values[kept[0]])) / params.temperature) for t in kept}
    if params.top_p < 1.0:
        total, reached = math.fsum(weight.values()), 0.0
        for rank, token in enumerate(kept):
            reached += weight[token]
            if reached >= params.top_p * total:
                kept = kept[: rank + 1]
                break
    return [token for token in kept if weight[token] >= params.min_p]


def chooser_after(params: SamplingParams, seed: int = 99) -> Chooser:
    chooser = Chooser(params, seed, PROMPT, MASKED)
    for token in OUTPUT:
        chooser.push(token)
    return chooser


def random_params(source: random.Random) -> SamplingParams:
    def sometimes(value, off):
        return value if source.random() < 0.5 else off

    return SamplingParams(
        temperature=source.choice([0.0, 0.3, 0.8, 1.0, 1.7]),
        top_k=sometimes(source.randrange(1, 60), 0),
        top_p=sometimes(source.choice([0.1, 0.5, 0.77, 0.9, 0.999]), 1.0),
        min_p=sometimes(source.choice([0.01, 0.11, 0.6, 1.0]), 0.0),
        presence_penalty=sometimes(source.choice([-0.7, 0.9]), 0.0),
        frequency_penalty=sometimes(source.choice([-0.2, 0.4]), 0.0),
        repetition_penalty=sometimes(source.choice([0.8, 1.3]), 1.0),
        logit_bias=sometimes({4: 2.0, 7: -100.0, 12: 5.5}, {}),
        min_tokens=sometimes(9, 0),
    )


@pytest.mark.parametrize("reach", [1, 3, 256])
def test_equal_to_the_definition(reach: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the ranking is read at first; rows hold ties and masked (-inf) logits."""
    monkeypatch.setattr(choose, "_FIRST_REACH", reach)
    monkeypatch.setattr(choose, "_REACH_GROWTH", 2)
    source, noise = random.Random(reach), np.random.default_rng(reach)
    for case in range(600):
        params = random_params(source)
        row = noise.normal(0, 2, 48).astype(np.float32)
        if case % 3 == 0:
            row = np.round(row)  # many ties
        if case % 5 == 0:
            row[noise.integers(0, 48, 20)] = -np.inf
        values = processed(row, params, PROMPT, OUTPUT)
        if params.greedy:
            expected = int(values.argmax())
        else:
            ids = survivors(values, params)
            position = len(PROMPT) + len(OUTPUT)
            expected = gumbel.choice(values[ids], params.temperature, 99, position, ids)
        before = row.copy()
        assert chooser_after(params).choose(ToyRow(row)) == expected, params
        assert (row == before).all(), "the model's row was written"


def test_top_of_equals_a_full_sort() -> None:
    noise = np.random.default_rng(0)
    for size in (1, 2, 7, 300):
        for k in (1, 2, 5, 299, 300, 1000):
            values = np.round(noise.normal(0, 2, size)).astype(np.float32)
            ids, kept = top_of(values, k)
            order = sorted(range(size), key=lambda token: (-values[token], token))[:k]
            assert ids.tolist() == order
            assert kept.tolist() == values[order].tolist()


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_p": 0.5}, [1, 2]),  # reached exactly: no further token
        ({"top_p": 0.51}, [1, 2, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"top_k": 3}, [1, 2, 4]),  # ties go to the lowest ids
        ({"top_k": 3, "top_p": 0.34}, [1, 2]),  # probabilities of what top_k left: 1/3 each
        ({"min_p": 1.0}, [1, 2, 4, 5]),  # as likely as the best
        ({"top_k": 2**31 - 1, "top_p": 0.75}, [1, 2, 4]),
    ],
)
def test_the_edges_of_the_cuts(fields: dict, kept: list[int]) -> None:
    row = ToyRow(np.array([-np.inf, 2.0, 2.0, -np.inf, 2.0, 2.0], np.float32))
    ids, values = Chooser(SamplingParams(**fields), 1, [1], ())._survivors(row, None)
    assert ids.tolist() == kept
    assert values.tolist() == [2.0] * len(kept)


def test_the_order_of_the_processors_by_hand() -> None:
    row = np.array([1.0, 2.0, -1.0, 0.0], np.float32)
    params = SamplingParams(
        temperature=0.0,
        logit_bias={0: 1.5},
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=2.0,
    )
    chooser = Chooser(params, 1, [2], ())
    chooser.push(0)
    chooser.push(0)
    # 0: (1 + 1.5 - 0.5 - 2 * 0.25) / 2; 1 untouched; 2: in the prompt only, -1 * 2; 3 untouched
    assert chooser._processed_values(ToyRow(row), None).tolist() == [0.75, 2.0, -2.0, 0.0]


def test_min_tokens_masks_exactly_that_many_tokens() -> None:
    row = ToyRow(np.array([9.0, 1.0, 0.0], np.float32))
    chooser = Chooser(SamplingParams(temperature=0.0, min_tokens=2), 1, [1], (0,))
    chosen = []
    for _ in range(3):
        chosen.append(chooser.choose(row))
        chooser.push(chosen[-1])
    assert chosen == [1, 1, 0]


def test_the_noise_belongs_to_the_absolute_position() -> None:
    """A prompt of n tokens and m emitted ones draw as a prompt of n + m tokens does."""
    row = ToyRow(np.zeros(32, np.float32))
    params = SamplingParams(temperature=1.0)
    after = Chooser(params, 5, [1, 2, 3], ())
    for token in (8, 9):
        after.push(token)
    assert after.choose(row) == Chooser(params, 5, [1] * 5, ()).choose(row)
    others = {Chooser(params, 5, [1] * n, ()).choose(row) for n in range(40)}
    assert len(others) > 10


class NoRow(ToyRow):
    """A row whose values may not be read."""

    def full(self) -> np.ndarray:
        raise AssertionError("the whole row was read")


def test_greedy_and_top_k_do_not_read_the_whole_row() -> None:
    row = NoRow(np.array([1.0, 3.0, 2.0], np.float32))
    assert Chooser(SamplingParams(temperature=0.0, top_k=2, top_p=0.5), 1, [1], ()).choose(row) == 1
    assert Chooser(SamplingParams(temperature=1.0), 1, [1], ()).choose(row) in (0, 1, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("cut", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_broken_logits_are_an_error(bad: float, cut: dict) -> None:
    row = ToyRow(np.array([1.0, bad, 2.0, 0.0], np.float32))
    params = SamplingParams(temperature=0.7, logprobs=2, **cut)
    chooser = Chooser(params, 1, [1], ())
    with pytest.raises(BrokenLogits):
        chooser.logprob(row, chooser.choose(row))
    if math.isnan(bad):
        with pytest.raises(BrokenLogits):
            Chooser(dataclasses.replace(params, temperature=0.0), 1, [1], ()).choose(row)


def test_nothing_left_to_choose_is_an_error() -> None:
    row = ToyRow(np.zeros(2, np.float32))
    for temperature in (0.0, 1.0):
        chooser = Chooser(SamplingParams(temperature=temperature, min_tokens=1), 1, [1], (0, 1))
        with pytest.raises(BrokenLogits, match="masked"):
            chooser.choose(row)


@pytest.mark.parametrize("alternatives", [0, 3, 20])
def test_logprobs_are_the_raw_log_softmax(alternatives: int) -> None:
    logits = np.random.default_rng(1).normal(0, 3, 16).astype(np.float32)
    params = SamplingParams(temperature=0.3, logprobs=alternatives, logit_bias={2: 50.0})
    entry = chooser_after(params).logprob(ToyRow(logits), 2)
    total = math.log(math.fsum(math.exp(float(x)) for x in logits))
    assert entry.token == 2
    assert entry.logprob == pytest.approx(float(logits[2]) - total, abs=1e-12)
    best = sorted(range(16), key=lambda token: -logits[token])[:alternatives]
    assert [token for token, _ in entry.top] == best
    for token, logprob in entry.top:
        assert logprob == pytest.approx(float(logits[token]) - total, abs=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {}])
def test_the_smallest_temperature_takes_the_likeliest(cut: dict) -> None:
    row = ToyRow(np.array([0.5, 3.0, -2.0, 2.5], np.float32))
    for temperature in (5e-324, 1e-307, LOWEST_TEMPERATURE):
        params = SamplingParams(temperature=temperature, seed=1, **cut)
        assert Chooser(params, 1, [0], ()).choose(row) == 1


@pytest.mark.parametrize(
    "more, expected",
    [
        ({}, True),
        ({"temperature": 0.7}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"presence_penalty": 0.5}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"min_tokens": 2}, False),
    ],
)
def test_best_only_promises_that_nothing_but_the_argmax_is_read(more: dict, expected: bool) -> None:
    class OnlyBest(ToyRow):
        def full(self) -> np.ndarray:
            raise AssertionError("the whole row was read")

    chooser = Chooser(SamplingParams(**{"temperature": 0.0, **more}), 1, [4], MASKED)
    assert chooser.best_only is expected
    for token in (5, 6):  # from then on min_tokens masks nothing
        chooser.push(token)
    assert chooser.best_only is (expected or "min_tokens" in more)
    if chooser.best_only:
        assert chooser.choose(OnlyBest(np.array([1.0, 3.0, 3.0], np.float32))) == 1


@pytest.mark.parametrize(
    "more, expected",
    [
        ({}, True),
        ({"temperature": 0.0}, False),
        ({"top_k": 5}, False),
        ({"min_p": 0.1}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"frequency_penalty": 0.5}, False),
        ({"min_tokens": 2}, False),
    ],
)
def test_noise_promises_the_choice_of_the_row_as_it_stands(more: dict, expected: bool) -> None:
    class Drawn(ToyRow):
        def gumbel(self, *noise: object, **given: object) -> int:
            assert noise == (0.7, 9, 3) and given == {"values": None}
            return 2

    chooser = Chooser(SamplingParams(**{"temperature": 0.7, **more}), 9, [4], MASKED)
    assert (chooser.noise == (0.7, 9)) is expected
    for token in (5, 6):  # from then on min_tokens masks nothing
        chooser.push(token)
    assert (chooser.noise is not None) is (expected or "min_tokens" in more)
    if chooser.noise is not None:
        assert chooser.choose(Drawn(np.array([1.0, 3.0, 3.0], np.float32))) == 2


class Only:
    """A matcher that allows some ids, now and always."""

    active = True

    def __init__(self, ids: set[int], size: int) -> None:
        self.mask = np.array([token in ids for token in range(size)])
        self.pushed: list[int] = []

    def allows(self, token: int) -> bool:
        return token < len(self.mask) and bool(self.mask[token])

    def allowed(self) -> np.ndarray:
        return self.mask

    def push(self, token: int) -> None:
        self.pushed.append(token)

    def copy(self) -> Only:
        twin = Only(set(), 0)
        twin.mask, twin.pushed = self.mask, list(self.pushed)
        return twin


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("size", [20, VOCABULARY], ids=["shorter", "as long"])
def test_a_mask_is_like_logits_that_never_were(setting: str, size: int) -> None:
    """Whatever view of the row is read: what is chosen is what a row with -inf there gives."""
    params = dataclasses.replace(SETTINGS[setting], logprobs=None)
    for case in range(60):
        random = np.random.default_rng(case)
        ids = {int(one) for one in random.choice(size, 1 + case % 7, replace=False)} | {11}
        row = random.normal(0, 2, VOCABULARY).astype(np.float32)
        masked = row.copy()
        masked[[token for token in range(VOCABULARY) if token not in ids]] = NEVER
        chooser = Chooser(params, 5, [1, 2, 3], (4,), Only(ids, size))
        plain = Chooser(params, 5, [1, 2, 3], (4,))
        trial = chooser.trial()
        for _ in range(4):
            token = chooser.choose(ToyRow(row))
            assert token in ids and token == plain.choose(ToyRow(masked))
            assert trial.choose(ToyRow(row)) == token
            for one in (chooser, plain, trial):
                one.push(token)
        assert len(chooser.matcher.pushed) == len(trial.matcher.pushed) == 4


def test_a_trial_moves_no_matcher_and_a_mask_needs_the_row() -> None:
    matcher = Only({3}, VOCABULARY)
    chooser = Chooser(SamplingParams(temperature=0.0), 0, [1], (), matcher)
    chooser.trial().push(3)
    assert matcher.pushed == [] and not chooser.best_only
    matcher.active = False
    assert chooser.best_only
    matcher.active = True


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_gives_way_to_what_must_come(temperature: float) -> None:
    params, row = SamplingParams(temperature=temperature, min_tokens=9), ToyRow(np.zeros(9, np.float32))
    assert Chooser(params, 0, [1], (3,), Only({3}, 9)).choose(row) == 3
    assert Chooser(params, 0, [1], (3,), Only({3, 5}, 9)).choose(row) == 5

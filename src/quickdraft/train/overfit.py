"""The self-test of training: a few rows must be learnt by heart, or features, labels or masks are shifted.

It trains a fresh drafter, in a folder that is thrown away, and where it does not learn says what is likely
wrong: the target's own hidden states must predict the texts it wrote.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Final

import torch
from torch.nn import functional

from quickdraft.errors import EngineError
from quickdraft.train.display import Display
from quickdraft.train.fit import Plan, fit
from quickdraft.train.head import Head
from quickdraft.train.objective import Corpus
from quickdraft.train.run import DEFAULT_RATE, Settings, prepare

ROWS: Final = 8
STEPS: Final = 300
WANTED: Final = 0.9  # of slot 1
FOLDER: Final = "overfit"
_SHIFTS: Final = (-2, -1, 0, 1, 2)
_AGREES: Final = 0.9  # of greedy answers that their own hidden states predict


def overfit(settings: Settings, display: Display) -> float:
    """Accuracy of slot 1 on the rows it learnt; EngineError names a likely cause where it is too low."""
    settings = replace(settings, out=settings.out / FOLDER, data=settings.data_folder, init=None)
    shutil.rmtree(settings.out, ignore_errors=True)
    session = prepare(settings, display)
    corpus = session.corpus
    few = corpus.training[:ROWS]
    corpus = Corpus(corpus.rows, corpus.features, few, few)
    rate = settings.rate if settings.rate is not None else DEFAULT_RATE[settings.kind]
    plan = Plan(settings.steps or STEPS, min(ROWS, len(few)), rate, settings.seed, measure_every=100)
    with display.training(plan) as show:
        fit(session.trainee, corpus, plan, settings.out, show)
    reached = session.trainee.measure(corpus, few).slot_accuracy[0]
    shutil.rmtree(settings.out)
    display.report(f"slot 1 is right at {reached:.1%} of {len(few)} rows that were learnt")
    if reached <= WANTED:
        raise EngineError(
            f"overfitting {len(few)} rows failed", got=f"{reached:.1%} of slot 1",
            expected=f"more than {WANTED:.0%}", hint=likely_cause(alignment(corpus, session.trainee.head)),
        )  # fmt: skip
    return reached


def alignment(corpus: Corpus, head: Head) -> dict[int, float]:
    """Of each shift s: how often the final hidden state at p - 1 + s, through the head, gives the token at p
    of an answer. In sound data it is nearly always so for 0 in greedy rows."""
    right = dict.fromkeys(_SHIFTS, 0.0)
    total = 0
    for number in corpus.training:
        row = corpus.rows[number]
        hidden = torch.from_numpy(corpus.features.hidden(number)).to(head.device)
        best = head.ids[functional.linear(hidden, head.rows).argmax(-1)].cpu()
        for place in range(row.start + 2, len(row.tokens) - 2):
            total += 1
            for shift in _SHIFTS:
                right[shift] += float(best[place - 1 + shift] == row.tokens[place])
    return {shift: count / max(total, 1) for shift, count in right.items()}


def likely_cause(shares: dict[int, float]) -> str:
    """In words, of what `alignment` found."""
    best = max(shares, key=lambda shift: shares[shift])
    if best and shares[best] > 2 * shares[0]:
        return (
            f"the features are shifted by {best:+d} against the tokens ({shares[best]:.0%} agree there, "
            f"{shares[0]:.0%} where they should): features.f16 belongs to other rows; delete it"
        )
    if shares[0] < _AGREES:
        return (
            f"the features predict only {shares[0]:.0%} of the answers: rows or features are of another "
            "model, "
            "or the rows were not written by this target"
        )
    return "the features fit the texts, so labels or masks are shifted in the network, or --rate does not fit"

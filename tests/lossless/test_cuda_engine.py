"""The whole engine over the card's kernels in Triton's interpreter, steps captured and replayed: the golden
hybrid with its MTP module and the golden DFlash2 drafter.

The interpreter takes seconds for a step, so what to expect comes from the CPU backend: in float32 the two
differ in the seventh digit, and their choices are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quickdraft.engine.llm import LLM
from quickdraft.ops import select
from quickdraft.ops.cuda.backend import CudaOps
from quickdraft.speculate.draft import Draft
from quickdraft.types import Backend, SamplingParams, Speculation
from tests.support import interpreter as interpreter
from tests.support.drafting import OneByOne
from tests.support.fake_capture import FakeCapture, capturing_card
from tests.support.golden import FOLDER, TARGET, expected

PROMPT: list[int] = expected()["prompt"][:17]
OPENING: dict[str, Any] = {
    "threads": 1, "kv_dtype": "float32", "kv_memory_bytes": 1 << 20, "max_context": 128, "max_sequences": 1,
    "checkpoint_memory_bytes": 1 << 20, "drafters": (FOLDER / "dflash2",),
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.9, top_k=20, seed=5, max_tokens=4)
HOT = dataclasses.replace(GREEDY, temperature=1.2, seed=6, max_tokens=4)
ASKED = {"greedy": GREEDY, "top-k": SAMPLED, "all ids": HOT}
Answers = dict[str, tuple[int, ...]]
DRAFTS = Speculation.parse("mtp+dflash2+lookup")


class InTurn(OneByOne):
    """At each step the next of `turns`: a source, or "script", two tokens of the answer and a wrong one."""

    def __init__(self, llm: LLM, answer: Sequence[int], turns: Sequence[str]) -> None:
        super().__init__(list(llm.opened.engine.drafting._drafters.values()))
        self.answer, self.turns, self.proposed = answer, list(turns), dict.fromkeys(turns, 0)
        llm.opened.engine.drafting = self

    def propose(self, view: Any, speculation: Speculation, budget: int) -> Draft:
        if speculation.off or not budget or not self.turns:
            return Draft()
        turn = self.turns.pop(0)
        made = len(view.tokens) - len(PROMPT)
        if turn == "script":
            right = list(self.answer[made : made + 2])
            draft = Draft((*right, (self.answer[made + 2] + 1) % 101)[:budget], "lookup")
        else:
            draft = self._drafters[turn].propose(view, min(budget, 3))
        self.proposed[turn] += len(draft.tokens)
        return draft


@pytest.fixture(scope="module")
def answers() -> Answers:
    llm = LLM(TARGET, **OPENING, backend=Backend.CPU)
    found = {name: tuple(llm.generate(PROMPT, params).ids) for name, params in ASKED.items()}
    llm.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def capture() -> Iterator[FakeCapture]:
    """The card that models are opened on replays captured steps."""
    ops, capture = capturing_card()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "_cuda", lambda: ops)
        yield capture


@pytest.fixture(scope="module")
def llm(folder: Path, capture: FakeCapture) -> Iterator[LLM]:
    llm = LLM(TARGET, **OPENING, backend=Backend.CUDA, cache_dir=folder)
    yield llm
    llm.close()


def test_plain_then_drafts_and_rollback_behind_a_cached_prefix(llm: LLM, answers: Answers) -> None:
    short = dataclasses.replace(GREEDY, max_tokens=1, speculation=Speculation())
    plain = llm.generate(PROMPT, short)
    assert tuple(plain.ids) == answers["greedy"][:1] and plain.timings.cached_tokens == 0
    turns = InTurn(llm, answers["greedy"], ["script", "mtp", "dflash2"])
    found = llm.generate(PROMPT, dataclasses.replace(GREEDY, speculation=DRAFTS))
    assert tuple(found.ids) == answers["greedy"]
    assert found.timings.cached_tokens == 16, "the prompt but its last token"
    assert found.timings.accepted["lookup"] == 2 and min(turns.proposed.values()) > 0


@pytest.mark.parametrize("name", [pytest.param("top-k", marks=pytest.mark.full), "all ids"])
def test_sampled_with_the_same_noise(
    llm: LLM, answers: Answers, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked of a row was found for all rows of the step together."""
    monkeypatch.delattr(CudaOps, {"all ids": "gumbel_choice", "top-k": "top"}[name])
    InTurn(llm, answers[name], ["script"])
    found = llm.generate(PROMPT, dataclasses.replace(ASKED[name], speculation=DRAFTS))
    assert tuple(found.ids) == answers[name] and found.timings.cached_tokens == 16
    assert found.timings.accepted["lookup"] == 2 and found.timings.steps == 2


def test_blocks_and_states_return_from_disk(
    llm: LLM, folder: Path, answers: Answers, capture: FakeCapture
) -> None:
    while llm.opened.engine.idle():
        pass
    llm.close()
    again = LLM(TARGET, **OPENING, backend=Backend.CUDA, cache_dir=folder)
    found = again.generate(PROMPT, dataclasses.replace(GREEDY, max_tokens=1))
    assert found.ids[0] == answers["greedy"][0] and found.timings.cached_tokens == 16
    again.close()
    assert capture.replays > len(capture.starts) > 3, "of the target and of drafters"

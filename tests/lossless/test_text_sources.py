"""Predictions and corpora, right, wrong and partly right, never change a token; right ones save steps."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from quickdraft.engine.drafters import Drafting
from quickdraft.engine.llm import LLM
from quickdraft.engine.text_sources import vocabulary_of
from quickdraft.errors import BadParameter, ModelFormatError
from quickdraft.models.registry import open_target
from quickdraft.speculate.corpus import Corpus, CorpusDrafter, Vocabulary, write_corpus
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.speculate.prediction import PredictionDrafter
from quickdraft.types import SamplingParams, Speculation
from tests.lossless.test_toy import PROMPTS, params_for, truth_of
from tests.support.settings import SETTINGS
from tests.support.tiny import write_tiny_llama
from tests.support.toy import VOCABULARY, AlwaysDraft, run_all, toy_engine, toy_request

Script = Callable[[list[int]], list[int]]


def _edited(truth: list[int]) -> list[int]:
    source = random.Random(6)
    return [token if source.random() < 0.9 else 1 + token % (VOCABULARY - 1) for token in truth]


SCRIPTS: dict[str, Script] = {
    "right": lambda truth: truth,
    "wrong": lambda truth: [1 + (token + 3) % (VOCABULARY - 1) for token in truth],
    "edited": _edited,
    "begun later": lambda truth: truth[len(truth) // 2 :],
    "a part left out": lambda truth: truth[:12] + truth[24:],
    "too long": lambda truth: truth * 3,
}
ALWAYS_RIGHT = ("right", "too long")


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_scripted_prediction_changes_nothing(setting: str, script: str) -> None:
    truth = truth_of(setting)
    together = lambda: Drafting([PredictionDrafter(), LookupDrafter()])  # noqa: E731
    alone = lambda: AlwaysDraft(PredictionDrafter())  # noqa: E731
    for drafting, chunk_rows, blocks in ((alone, 64, 64), (alone, 5, 13), (together, 16, 64)):
        batch = [
            toy_request(f"r{i}", prompt, params_for(setting), prediction=SCRIPTS[script](truth[f"r{i}"]))
            for i, prompt in enumerate(PROMPTS)
        ]
        assert run_all(toy_engine(drafting(), chunk_rows=chunk_rows, blocks=blocks), batch) == truth
        if drafting is alone and blocks == 64 and script in ALWAYS_RIGHT:
            assert all(request.timings.steps <= 3 for request in batch), "a right prediction was not used"
    if drafting is together and script == "right":
        assert sum(request.timings.accepted.get("prediction", 0) for request in batch) > 40


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_scripted_corpus_changes_nothing(tmp_path: Path, script: str) -> None:
    vocabulary, accepted = Vocabulary(VOCABULARY, bytes(32)), 0
    for setting in SETTINGS:
        truth = truth_of(setting)
        texts = [prompt + SCRIPTS[script](truth[f"r{i}"]) for i, prompt in enumerate(PROMPTS)]
        write_corpus(tmp_path / "corpus", texts, vocabulary)
        batch = [toy_request(f"r{i}", prompt, params_for(setting)) for i, prompt in enumerate(PROMPTS)]
        drafter = CorpusDrafter(Corpus(tmp_path / "corpus", vocabulary))
        assert run_all(toy_engine(AlwaysDraft(drafter), chunk_rows=7), batch) == truth
        accepted += sum(request.timings.accepted.get("corpus", 0) for request in batch)
    assert accepted > 40 * len(SETTINGS) or script not in ALWAYS_RIGHT


GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.8, seed=3)


def test_a_model_with_all_text_sources(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", vocabulary_size=320)
    source = random.Random(8)
    prompts = [[source.randrange(20, 300) for _ in range(30)] for _ in range(4)]
    jobs = [(prompt, params) for prompt in prompts for params in (GREEDY, SAMPLED)]
    off = [(prompt, dataclasses.replace(params, speculation=Speculation())) for prompt, params in jobs]
    plain = LLM(path, threads=1, kv_memory_bytes=1 << 21)
    truth = [list(done.ids) for done in plain.generate_many(off)]
    plain.close()
    write_corpus(
        tmp_path / "corpus", [prompts[0] + truth[0], prompts[1] + truth[3]],
        vocabulary_of(open_target(path).tokenizer),
    )  # fmt: skip
    llm = LLM(path, threads=1, kv_memory_bytes=1 << 21, lookup_corpus=tmp_path / "corpus")
    assert (
        llm.opened.sources
        == ("forced", "prediction", "lookup", "corpus")
        == llm.opened.engine.drafting.auto_sources
    )
    for script in ("right", "edited", "wrong"):
        predictions = [SCRIPTS[script](ids) if i % 4 != 3 else None for i, ids in enumerate(truth)]
        done = llm.generate_many(jobs, predictions)
        assert [list(one.ids) for one in done] == truth
        drafted = {name for one in done for name, count in one.timings.accepted.items() if count}
        assert "corpus" in drafted and ("prediction" in drafted or script == "wrong")
    alone = llm.generate(*jobs[0], llm.tokenizer.decode(truth[0]))
    assert list(alone.ids) == truth[0], "a text is tokenized, and need not come back to the same ids"
    for prediction, params, message in (
        ([320], GREEDY, "out of range"),
        ([5] * 10_000, GREEDY, "the context"),
        ([5], off[0][1], "with speculation 'off'"),
    ):
        with pytest.raises(BadParameter, match=message):
            llm.generate(prompts[0], params, prediction)
    llm.close()
    with pytest.raises(ModelFormatError, match="another tokenizer"):
        LLM(write_tiny_llama(tmp_path / "b.gguf", vocabulary_size=300), lookup_corpus=tmp_path / "corpus")

"""Cached == cold, bit for bit: ids and logprobs, with and without drafts, wherever the cache ends."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from quickdraft.engine.llm import LLM, Completion
from quickdraft.speculate.draft import Draft, SequenceView, Verdict
from quickdraft.types import SamplingParams
from tests.support.matrix import LOOKUP
from tests.support.tiny import write_tiny_llama, written_as
from tests.support.toy import AlwaysDraft

VOCABULARY = 320


class Told:
    """Drafts three tokens of `truth`, which is prompt and answer, and a wrong one."""

    source = "lookup"
    truth: Sequence[int] = ()

    def propose(self, view: SequenceView, budget: int) -> Draft:
        right = self.truth[len(view.tokens) :][: min(budget, 3)]
        wrong = [(view.tokens[-1] + 1) % VOCABULARY] if budget > len(right) else []
        return Draft((*right, *wrong), self.source, match_length=12)

    def observe(self, view: SequenceView, verdict: Verdict, taps: object) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.9, top_p=0.95, seed=11)
CHUNKS = 48


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("prefix") / "tiny.gguf", vocabulary_size=VOCABULARY)


@pytest.fixture(scope="module")
def pair(path: Path) -> Iterator[tuple[LLM, LLM]]:
    """The same model with a prefix cache and without one."""
    llms = [LLM(path, threads=1, chunk_rows=CHUNKS, prefix_cache=cache) for cache in (True, False)]
    yield llms[0], llms[1]
    for llm in llms:
        llm.close()


def text(length: int, seed: int) -> list[int]:
    """Random tokens of few kinds, so that lookup drafts."""
    source = random.Random(seed)
    alphabet = [source.randrange(20, VOCABULARY) for _ in range(5)]
    return [source.choice(alphabet) for _ in range(length)]


def same(cached: Completion, cold: Completion) -> None:
    assert cached.ids == cold.ids
    assert cached.logprobs == cold.logprobs  # floats, exactly
    assert cold.timings.cached_tokens == 0


def cached_lengths(length: int) -> list[int]:
    """Where the shared beginning ends: nothing, within a block, at its edges, all but one, all."""
    block = (length - 1) // 16 * 16
    return sorted({0, length // 3, max(block - 1, 0), block, min(block + 1, length), length - 1, length})


@pytest.mark.parametrize("first", range(1, 301, 50))
def test_every_length_and_where_the_cache_ends(pair: tuple[LLM, LLM], first: int) -> None:
    cache, cold = pair
    told = Told()
    drafting = (cache.opened.engine.drafting, AlwaysDraft(told))
    accepted = 0
    for length in range(first, first + 50):
        for shared in cached_lengths(length):
            prompt = [7 + shared, *text(length - 1, length)]  # no other case starts like this one
            params = GREEDY if length % 3 else SAMPLED
            cache.opened.engine.drafting = drafting[length % 2]
            expected = cold.generate(prompt, params)
            told.truth = (*prompt, *expected.ids)
            if shared:
                cache.generate([*prompt[:shared], 1], GREEDY)
            found = cache.generate(prompt, params)
            same(found, expected)
            assert found.timings.cached_tokens == min(shared, length - 1)
            again = cache.generate(prompt, params)
            same(again, expected)
            assert again.timings.cached_tokens == length - 1
            accepted += sum(found.timings.accepted.values())
        cache.opened.engine.scheduler.cache.clear()
    cache.opened.engine.drafting = drafting[0]
    assert accepted > 50, "drafts were hardly ever right"
    assert cache.free_blocks == cache.total_blocks


@pytest.mark.parametrize("drafts", [False, True])
def test_every_length_after_a_restart(
    path: Path, tmp_path: Path, pair: tuple[LLM, LLM], drafts: bool
) -> None:
    cold = pair[1]
    settings = {"threads": 1, "chunk_rows": CHUNKS, "cache_dir": tmp_path / "kv", "kv_memory_bytes": 1 << 20}
    cases = [
        (shared, [7 + index, 15 + length, *text(length - 2, length)])
        for length in range(2, 301, 7 - drafts)
        for index, shared in enumerate(cached_lengths(length))
        if shared > 1  # the first token is no case's own
    ]
    writer = LLM(path, **settings)
    for shared, prompt in cases:
        writer.generate([*prompt[:shared], 1], GREEDY)
    writer.close()
    reader, told = LLM(path, **settings), Told()
    if drafts:
        reader.opened.engine.drafting = AlwaysDraft(told)
    for shared, prompt in cases:
        params = GREEDY if len(prompt) % 2 else SAMPLED
        expected = cold.generate(prompt, params)
        told.truth = (*prompt, *expected.ids)
        found = reader.generate(prompt, params)
        same(found, expected)
        assert found.timings.cached_tokens == min(shared, len(prompt) - 1)
        assert found.cache.restored_tokens >= found.timings.cached_tokens - 2
    counters = reader.opened.engine.metrics().disk
    assert counters["hits"] == len(cases) and counters["rejected_files"] == 0
    assert reader.opened.engine.metrics().prefix_evicted_blocks > 0, "memory was to be too small for all"
    reader.close()


@pytest.mark.parametrize(
    ("architecture", "weights", "dtype"),
    [
        ("qwen3", "BF16", "float16"),
        ("qwen2", "Q4_1", "float32"),
        ("llama", "mixed", "float16"),
        ("llama", "Q4_1", "int8"),
        ("qwen3", "F32", "int8"),
    ],
)
def test_other_models_weights_and_kv_types(tmp_path: Path, architecture: str, weights: str, dtype) -> None:
    made = {"architecture": architecture, "vocabulary_size": VOCABULARY} | written_as(weights)
    path = write_tiny_llama(tmp_path / "tiny.gguf", **made)
    settings = {"threads": 1, "chunk_rows": CHUNKS, "kv_dtype": dtype}
    cold, told = LLM(path, **settings, prefix_cache=False), Told()
    prompts = [[*text(150, 20)[:shared], *text(40, shared)] for shared in (150, 0, 1, 100, 128, 143)]
    for start in range(2):  # the second finds on disk what the first computed
        cache = LLM(path, **settings, cache_dir=tmp_path / "kv")
        drafting = (cache.opened.engine.drafting, AlwaysDraft(told))
        for index, prompt in enumerate(prompts):
            cache.opened.engine.drafting = drafting[index % 2]
            params = SAMPLED if index % 3 else GREEDY
            expected = cold.generate(prompt, params)
            told.truth = (*prompt, *expected.ids)
            found = cache.generate(prompt, params)
            same(found, expected)
            assert found.timings.cached_tokens == (
                len(prompt) - 1 if start else (0, 0, 1, 100, 128, 143)[index]
            )
        cache.close()


def test_the_same_again_writes_nothing(path: Path, tmp_path: Path) -> None:
    llm = LLM(path, threads=1, cache_dir=tmp_path / "kv")
    written = []
    for _ in range(10):
        llm.generate(text(200, 9), GREEDY)
        written.append(llm.opened.engine.metrics().disk["written_bytes"])
    assert written[0] > 0 and set(written) == {written[0]}
    llm.close()


def test_another_models_files_are_never_read(path: Path, tmp_path: Path) -> None:
    prompt = text(100, 10)
    other = write_tiny_llama(tmp_path / "other.gguf", vocabulary_size=VOCABULARY, seed=77)
    for model, dtype in ((path, "float32"), (path, "float16"), (path, "int8"), (other, "float32")):
        llm = LLM(model, threads=1, cache_dir=tmp_path / "kv", kv_dtype=dtype)
        assert llm.generate(prompt, GREEDY).timings.cached_tokens == 0
        llm.close()
    assert len(list((tmp_path / "kv").iterdir())) == 4


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_damaged_files_are_misses(path: Path, tmp_path: Path, pair: tuple[LLM, LLM], damage: str) -> None:
    prompt, settings = text(290, 11), {"threads": 1, "cache_dir": tmp_path / "kv"}
    llm = LLM(path, **settings)
    llm.generate(prompt, GREEDY)
    llm.close()
    for file in (tmp_path / "kv").glob("*/*.kv"):
        data = bytearray(file.read_bytes())
        data[len(data) * 2 // 3] ^= 16
        file.write_bytes({"flip": data, "cut": data[: len(data) // 2], "empty": b""}[damage])
    llm = LLM(path, **settings)
    found = llm.generate(prompt, GREEDY)
    same(found, pair[1].generate(prompt, GREEDY))
    assert found.timings.cached_tokens < 289
    assert llm.opened.engine.metrics().disk["rejected_files"] > 0
    again = llm.generate(prompt, GREEDY)
    assert again.ids == found.ids and again.timings.cached_tokens == 289
    llm.close()


def test_the_next_turn_reuses_prompt_and_answer(pair: tuple[LLM, LLM]) -> None:
    cache, cold = pair
    prompt, shared = text(77, 1), 1
    for turn in range(6):
        params = dataclasses.replace(GREEDY, max_tokens=20, speculation=LOOKUP)
        answer = cache.generate(prompt, params)
        same(answer, cold.generate(prompt, params))
        assert answer.timings.cached_tokens == shared - 1
        shared = len(prompt) + 20
        prompt = [*prompt, *answer.ids, *text(9, 100 + turn)]


def test_a_b_a_b_with_a_short_third_between(pair: tuple[LLM, LLM]) -> None:
    cache, cold = pair
    texts = {"a": text(300, 2), "b": text(280, 3)}
    hits = []
    for turn in range(4):
        for name in texts:
            prompt = texts[name] = texts[name] + text(7, 10 * turn + ord(name))
            found = cache.generate(prompt, GREEDY)
            same(found, cold.generate(prompt, GREEDY))
            hits.append(found.timings.cached_tokens - len(prompt) + 7)
            short = text(12, 1000 + turn)
            same(cache.generate(short, GREEDY), cold.generate(short, GREEDY))
    assert hits[:2] == [-300, -280] and hits[2:] == [0] * 6


def test_an_edited_message_restarts_at_the_edit(pair: tuple[LLM, LLM]) -> None:
    cache, cold = pair
    chat = text(290, 4)
    cache.generate(chat, GREEDY)
    for at in (0, 1, 15, 16, 17, 100, 200, 288):
        edited = [*chat[:at], 19, *chat[at + 1 :]]
        found = cache.generate(edited, GREEDY)
        same(found, cold.generate(edited, GREEDY))
        assert found.timings.cached_tokens == at
        assert found.cache.reason == "differs" and found.cache.token == 19
        assert found.cache.cached_token == chat[at]
    assert cache.generate(chat, GREEDY).timings.cached_tokens == 289


def test_a_batch_of_the_same_document(pair: tuple[LLM, LLM]) -> None:
    cache, cold = pair
    prompts = [text(200, 5) + text(20, 60 + index) for index in range(6)]
    jobs = [(prompt, dataclasses.replace(SAMPLED, speculation=LOOKUP)) for prompt in prompts]
    for found, expected in zip(cache.generate_many(jobs), cold.generate_many(jobs), strict=True):
        same(found, expected)
    for found, expected in zip(cache.generate_many(jobs), cold.generate_many(jobs), strict=True):
        same(found, expected)
        assert found.timings.cached_tokens == 219


def test_an_abandoned_prompt_keeps_what_it_computed(pair: tuple[LLM, LLM]) -> None:
    cache, cold = pair
    prompt = text(290, 6)
    engine = cache.opened.engine
    request = cache.opened.request("gone", prompt, GREEDY)
    engine.add(request)
    for _ in range(3):
        engine.step()
    engine.abort("gone")
    found = cache.generate(prompt, GREEDY)
    same(found, cold.generate(prompt, GREEDY))
    assert found.timings.cached_tokens == 3 * CHUNKS

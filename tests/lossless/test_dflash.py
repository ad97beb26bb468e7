"""Block drafters in the engine: right by the golden values, the same whatever was refused or cached before,
and lossless alone, fused with lookup, in mixed batches and beside other sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quickdraft.engine.llm import LLM, Completion
from quickdraft.models.registry import open_target
from quickdraft.types import SamplingParams, Speculation
from tests.lossless.test_tiny_llama import repetitive_prompts
from tests.support.draft_engine import Recorder, Scratch, knowing_drafter, poison_freed
from tests.support.drafting import Counted
from tests.support.golden import FOLDER, TARGET, expected
from tests.support.settings import SETTINGS
from tests.support.tiny import write_tiny_llama
from tests.support.tiny_hybrid import ADDRESSABLE, write_tiny_hybrid

OPENING: dict[str, Any] = {"threads": 1, "chunk_rows": 80, "kv_memory_bytes": 1 << 22}
MAX_TOKENS = 40
OFF = Speculation()
FUSED = ("dflash2", "dflash", "dflash2+lookup@8", "dflash2+lookup@16", "dflash2+lookup@64", "dflash+lookup@8")
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)


def using(params: SamplingParams, text: str, **changes: Any) -> SamplingParams:
    return dataclasses.replace(params, speculation=Speculation.parse(text), **changes)


def same(found: Completion, wanted: Completion) -> None:
    assert found.ids == wanted.ids and found.logprobs == wanted.logprobs
    assert found.finish_reason == wanted.finish_reason
    assert found.timings.steps + sum(found.timings.accepted.values()) == found.timings.completion_tokens


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target, what it answers without drafts, and drafters that are right now and then."""

    path: Path
    drafters: tuple[Path, ...]
    prompts: list[list[int]]

    def open(self, **changes: Any) -> LLM:
        llm = LLM(self.path, **OPENING | {"drafters": self.drafters} | changes)
        poison_freed(llm)
        return llm


@pytest.fixture(scope="module", params=["llama", "hybrid"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        path = write_tiny_llama(
            folder / "tiny.gguf", vocabulary_size=60, tokenizer=False, quantisation="Q8_0"
        )
        prompts = repetitive_prompts(60)
    else:
        path = write_tiny_hybrid(folder / "tiny")
        prompts = repetitive_prompts(ADDRESSABLE)
    following: dict[int, int] = {}
    plain = LLM(path, **OPENING, drafters=())
    for prompt in prompts:
        text = [*prompt, *plain.generate(prompt, using(GREEDY, "off")).ids]
        following |= dict(zip(text[len(prompt) - 1 :], text[len(prompt) :], strict=False))
    plain.close()
    target = open_target(path).config
    inner = {"selector_top_k": 32}
    knowing = knowing_drafter(folder / "v2", target, following, sliding_window=40, dflash_config=inner)
    older = knowing_drafter(folder / "v1", target, following, version=1, dflash_config={"block_size": 16})
    return Pair(path, (knowing, older), prompts)


@pytest.fixture(scope="module")
def llm(pair: Pair) -> Iterator[LLM]:
    llm = pair.open(max_sequences=4)
    yield llm
    llm.close()


@pytest.mark.parametrize("version", [1, 2])
def test_golden_drafts(version: int) -> None:
    """The engine's rows, made chunk by chunk and step by step, give the published package's drafts."""
    wanted, source = expected(), {1: "dflash", 2: "dflash2"}[version]
    llm = LLM(TARGET, **OPENING, kv_dtype="float32", drafters=(FOLDER / f"dflash{version}",))
    recorder = Recorder(llm, source)
    prompt, golden = wanted["prompt"], wanted["greedy_64"]
    assert list(llm.generate(prompt, using(GREEDY, source)).ids) == golden[:MAX_TOKENS]
    seen = 0
    for block in wanted[f"dflash{version}"]:
        text = (*prompt, *golden)[: block["context"] + 1]
        if text in recorder.made:
            seen += 1
            assert list(recorder.made[text]) == (block["path"] if version == 2 else block["argmax"])
    assert seen >= 2
    llm.close()


@pytest.mark.parametrize("text", [*FUSED, "auto"])
def test_ids_equal_plain_decoding(llm: LLM, pair: Pair, text: str) -> None:
    """Every sampling parameter, alone (the second time after a prefix hit), and four at once."""
    accepted: dict[str, int] = {}
    groups = []
    for number, (name, setting) in enumerate(SETTINGS.items()):
        params = dataclasses.replace(setting, max_tokens=MAX_TOKENS)
        prompt = pair.prompts[number % len(pair.prompts)]
        wanted = llm.generate(prompt, using(params, "off"))
        for again in range(2):
            found = llm.generate(prompt, using(params, text))
            same(found, wanted)
            assert found.timings.cached_tokens >= len(prompt) - 1 or llm.opened.engine.scheduler.slots, again
            for source, count in found.timings.accepted.items():
                accepted[source] = accepted.get(source, 0) + count
        groups.append((prompt, params, wanted, name))
    for first in range(0, len(groups), 4):
        group = groups[first : first + 4]
        uses = (text, "lookup@16", "off", text)
        requests = [(one[0], using(one[1], other)) for one, other in zip(group, uses, strict=False)]
        for found, (_, _, wanted, _) in zip(llm.generate_many(requests), group, strict=True):
            same(found, wanted)
    assert llm.free_blocks == llm.total_blocks
    named = ["dflash2", "lookup"] if text == "auto" else text.split("@")[0].split("+")
    for source in named:
        least = 0 if source == "dflash" else 20
        assert accepted.get(source, 0) >= least, f"{source} hardly drafted, so this proved little: {accepted}"
    assert set(accepted) <= {*named, *(("mtp",) if text == "auto" else ())}


@pytest.mark.parametrize("turns", [("dflash2",), ("dflash2", "lookup", "")], ids=["dflash2", "by turns"])
def test_drafts_do_not_depend_on_what_was_refused_or_cached(pair: Pair, tmp_path: Path, turns: Any) -> None:
    """Every draft equals one computed over the same text from nothing, after refusals, prefix hits in memory
    and on disk, and beside others."""
    scratch = Scratch(pair.path, pair.drafters[0], [0, open_target(pair.path).config.layers - 1])
    params = using(GREEDY, "dflash2", max_tokens=20)
    made: dict[tuple[int, ...], tuple[int, ...]] = {}
    accepted = drafted = 0
    for _ in range(2):
        llm = pair.open(cache_dir=tmp_path, max_sequences=4)
        recorder = Recorder(llm, "dflash2", turns)
        for prompt in pair.prompts:
            for text in (prompt, [*prompt, 3], [*prompt[:33], 4, 5]):
                found = llm.generate(text, params)
                same(found, llm.generate(text, using(params, "off")))
                accepted += found.timings.accepted.get("dflash2", 0)
                drafted += found.timings.drafted.get("dflash2", 0)
        llm.generate_many([(prompt, params) for prompt in pair.prompts])
        made |= recorder.made
        while llm.opened.engine.idle():
            pass
        llm.close()
    assert 20 < accepted < drafted - 20, f"{accepted} of {drafted}: not both right and wrong"
    assert len(made) > 40
    for text, draft in made.items():
        assert scratch.draft(text, len(draft)) == draft, f"after {len(text)} tokens"


def test_rows_outside_of_the_window_give_their_place_away(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache far smaller than the target's gives the same drafts, as all layers have a window."""
    monkeypatch.setattr("quickdraft.engine.memory.places_for", lambda window, blocks, sequences, chunk: 18)
    target = open_target(pair.path).config
    kinds = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 24}
    following = {t: t - t % 10 + (t + 1) % 10 for t in range(60)}
    folder = knowing_drafter(tmp_path / "narrow", target, following, **kinds)
    params = using(GREEDY, "dflash2", max_tokens=30)
    llm = pair.open(drafters=[folder], max_sequences=4, prefix_cache=False)
    assert llm.opened.memory.side_cars[0].kv.blocks == 19 < llm.total_blocks
    wanted = [llm.generate(prompt, using(params, "off")) for prompt in pair.prompts]
    recorder = Recorder(llm, "dflash2")
    found = llm.generate_many([(prompt, params) for prompt in pair.prompts])
    for one, plain in zip(found, wanted, strict=True):
        same(one, plain)
    scratch = Scratch(pair.path, folder, [0, target.layers - 1])
    assert len(recorder.made) > 40
    for text, draft in recorder.made.items():
        assert scratch.draft(text, len(draft)) == draft, f"after {len(text)} tokens"
    llm.close()
    for again in range(2):
        llm = pair.open(drafters=[folder], max_sequences=4, cache_dir=tmp_path / "kv")
        for prompt in (*pair.prompts, *pair.prompts):
            cut = using(params, "dflash2+lookup@16")
            same(llm.generate(prompt, cut), llm.generate(prompt, using(params, "off")))
        while llm.opened.engine.idle():
            pass
        assert llm.opened.engine.metrics().prefix_restored > 0 or not again
        llm.close()


def test_preempted_requests_draft_again_as_before(pair: Pair) -> None:
    llm = pair.open(max_sequences=4)
    one = llm.opened.memory.storage.bytes_per_block
    llm.close()
    small = pair.open(max_sequences=4, kv_memory_bytes=20 * one)
    params = using(GREEDY, "dflash2+lookup@8")
    wanted = [small.generate(prompt, using(params, "off")) for prompt in pair.prompts]
    for found, plain in zip(
        small.generate_many([(prompt, params) for prompt in pair.prompts]), wanted, strict=True
    ):
        same(found, plain)
    assert small.opened.engine.metrics().preemptions > 0
    assert small.free_blocks == small.total_blocks
    small.close()


def test_an_answer_that_was_given_up_is_gone_on_with_warm(pair: Pair) -> None:
    """The tokens whose rows were not made yet get them before their blocks are published."""
    llm = pair.open()
    prompt, params = pair.prompts[0], using(GREEDY, "dflash2", max_tokens=60)
    stream, seen = llm.stream(prompt, params), list(prompt)
    while len(seen) < len(prompt) + 25:
        seen += next(stream).tokens
    stream.close()
    recorder = Recorder(llm, "dflash2")
    same(llm.generate(seen, params), llm.generate(seen, using(params, "off")))
    assert llm.opened.engine.drafting.cold_tokens == 0 and recorder.made
    llm.close()


def test_a_prefix_without_rows_is_cold_and_counted(pair: Pair) -> None:
    """Nothing unwritten is seen (it is NaN); drafts come again from the rows that are made since."""
    llm = pair.open()
    prompt = pair.prompts[0][:50]
    llm.generate(prompt, using(GREEDY, "off", max_tokens=1))
    assert llm.opened.engine.metrics().draft_cold_tokens == 0
    recorder = Recorder(llm, "dflash2")
    found = llm.generate(prompt, using(GREEDY, "dflash2"))
    same(found, llm.generate(prompt, using(GREEDY, "off")))
    cached = found.timings.cached_tokens
    assert cached == 49
    layers = [0, open_target(pair.path).config.layers - 1]
    full = Scratch(pair.path, pair.drafters[0], layers)
    assert llm.opened.engine.drafting.cold_tokens == cached  # v2 has a layer that sees all
    assert len(recorder.made) > 4
    for text, draft in recorder.made.items():
        assert full.draft(text, len(draft), seen_from=cached) == draft
    llm.close()


def test_sources_that_a_request_may_not_use_write_nothing(pair: Pair) -> None:
    llm = pair.open()
    ran: list[str] = []
    for name, drafter in llm.opened.engine.drafting._models.items():
        if name != "mtp":
            context: Any = drafter
            context._context = Counted(context._context, name, ran)
    llm.generate(pair.prompts[0], using(GREEDY, "lookup"))
    llm.generate(pair.prompts[1], using(GREEDY, "off"))
    assert not ran
    llm.generate(pair.prompts[2], using(GREEDY, "auto"))
    assert set(ran) == {"dflash2"}, "auto means one model"
    llm.generate(pair.prompts[3], using(GREEDY, "dflash"))
    assert set(ran) == {"dflash2", "dflash"}
    llm.close()


@pytest.mark.parametrize("lengths", [(1, 2, 3), (15, 16, 17), (46, 47, 50)])
def test_short_prompts_and_the_end_of_the_context(pair: Pair, lengths: Sequence[int]) -> None:
    llm = pair.open(max_context=64)
    for length in lengths:
        prompt = pair.prompts[1][:length]
        params = dataclasses.replace(GREEDY, max_tokens=None)
        found = llm.generate(prompt, using(params, "dflash2+lookup@16"))
        same(found, llm.generate(prompt, using(params, "off")))
        assert len(found.ids) == 64 - length
    llm.close()

"""AsyncEngine: the limit on open requests, closing, and requests that can never end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from quickdraft.engine.async_engine import AsyncEngine
from quickdraft.engine.opened import EngineConfig, open_model
from quickdraft.engine.outputs import Outputs
from quickdraft.errors import BadParameter, CapacityError, EngineError
from quickdraft.types import SamplingParams
from tests.support.tiny import write_tiny_llama

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[AsyncEngine]:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    config = EngineConfig(threads=1, kv_memory_bytes=1 << 20, max_sequences=2)
    engine = AsyncEngine(open_model(path, config), max_queue=1)
    yield engine
    engine.shutdown()


async def tokens_of(outputs: Outputs) -> int:
    return sum([len(output.tokens) async for output in outputs])


def test_a_full_queue_refuses_and_makes_room_again(engine: AsyncEngine) -> None:
    async def run() -> None:
        held = [engine.generate([5], LONG, request_id=f"held-{i}") for i in range(3)]
        with pytest.raises(CapacityError, match="at most 2 running and 1 waiting"):
            engine.generate([5], SHORT, request_id="late")
        await held[0].aclose()
        await held[0].aclose()
        assert [output async for output in held[0]] == []
        assert await tokens_of(held[1]) == 400
        while True:  # the abort above is handled by the engine's thread, soon
            try:
                late = engine.generate([5], SHORT, request_id="late")
                break
            except CapacityError:
                await asyncio.sleep(0.01)
        assert await tokens_of(late) == 3
        await held[2].aclose()

    asyncio.run(run())
    metrics = engine.metrics()
    assert metrics.kv_blocks > 0 and metrics.waiting == 0


def test_marks_reach_the_request(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    add = engine.opened.engine.add
    monkeypatch.setattr(
        engine.opened.engine, "add", lambda request: (seen.append(request.marks), add(request))
    )

    async def run() -> int:
        return await tokens_of(engine.generate([5, 6, 7], SHORT, request_id="one", marks=(1, 2)))

    assert asyncio.run(run()) == 3 and seen == [(1, 2)]


def test_what_waits_for_a_prompt_outlives_the_request_that_reads_it(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader may be aborted, and so may those that wait; nobody waits for one that is not there."""
    added = []
    add = engine.opened.engine.add
    monkeypatch.setattr(
        engine.opened.engine, "add", lambda request: (added.append(request.request_id), add(request))
    )

    async def run() -> list[int]:
        prompt = [5] * 200
        reader, gone, waits = [
            engine.generate(prompt, LONG if name == "reader" else SHORT, request_id=name, after="reader")
            for name in ("reader", "gone", "waits")
        ]
        await gone.aclose()
        await reader.aclose()
        emitted = await tokens_of(waits)
        late = engine.generate(prompt, SHORT, request_id="late", after="reader")
        return [emitted, await tokens_of(late)]

    assert asyncio.run(run()) == [3, 3]
    assert engine.metrics().waiting == engine.metrics().running == 0
    assert {*added} >= {"waits", "late"} and not engine._behind


def test_refused_requests_take_no_room(engine: AsyncEngine) -> None:
    async def run() -> None:
        for _ in range(5):
            with pytest.raises(BadParameter):
                engine.generate([], SHORT, request_id="bad")
        held = engine.generate([5], LONG, request_id="same")
        with pytest.raises(BadParameter, match="an id not in use"):
            await tokens_of(engine.generate([5], SHORT, request_id="same"))
        await held.aclose()
        assert await tokens_of(engine.generate([5], SHORT, request_id="good")) == 3

    asyncio.run(run())


def test_masking_every_token_is_refused(engine: AsyncEngine) -> None:
    every = tuple(range(320))
    with pytest.raises(BadParameter, match="every token of the vocabulary"):
        engine.validate([5], SamplingParams(stop_token_ids=every, min_tokens=1))
    with pytest.raises(BadParameter, match="every token of the vocabulary"):  # EOS is masked as well
        engine.validate([5], SamplingParams(stop_token_ids=(*every[:2], *every[3:]), min_tokens=1))
    engine.validate([5], SamplingParams(stop_token_ids=every))
    engine.validate([5], SamplingParams(stop_token_ids=every[:-1], min_tokens=1))


def test_a_failure_is_kept_and_told(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: object) -> None:
        raise RuntimeError("the kernels are on fire")

    monkeypatch.setattr(engine.opened.runner, "run", broken)

    async def run() -> None:
        assert engine.failure is None and engine.alive
        with pytest.raises(EngineError, match="on fire"):
            await tokens_of(engine.generate([5], SHORT, request_id="a"))
        with pytest.raises(EngineError):
            engine.generate([5], SHORT, request_id="b")

    asyncio.run(run())
    assert isinstance(engine.failure, RuntimeError) and not engine.alive

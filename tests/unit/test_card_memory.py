"""What an engine does with a card's memory, played by the CPU's kernels and a number of free bytes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quickdraft.config import Hardware
from quickdraft.doctor import machine
from quickdraft.doctor.check import Failed
from quickdraft.engine.measured_costs import Scratch, time_steps
from quickdraft.engine.memory_sizes import card_spare_bytes
from quickdraft.engine.opened import EngineConfig, Opened, open_model
from quickdraft.engine.plan import StepPlan
from quickdraft.engine.runner import ModelRunner
from quickdraft.engine.step_timing import Rounds
from quickdraft.errors import ConfigError
from quickdraft.models.registry import default_kv_dtype
from quickdraft.ops.cpu.backend import CpuOps
from quickdraft.types import SamplingParams
from tests.support.golden import FOLDER, TARGET, expected

PROMPT: list[int] = expected()["prompt"][:17]
FREE = card_spare_bytes(3) + (64 << 20)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.freeze()  # each smaller pool collects garbage, and other tests leave much to be looked through
    monkeypatch.setattr(CpuOps, "free_memory_bytes", lambda self: FREE)
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls: cls(1, 1 << 30)))
    yield
    gc.unfreeze()


def opened(**changes: Any) -> Opened:
    settings: dict[str, Any] = {
        "threads": 1, "max_sequences": 3, "chunk_rows": 32, "drafters": (FOLDER / "dflash2",),
        "take_memory": True, "checkpoint_memory_bytes": 1 << 20,
    }  # fmt: skip
    return open_model(TARGET, EngineConfig(**settings | changes))


def said(found: Opened, words: str) -> str:
    (line,) = (line for line in found.explain() if words in line)
    return line


def answer(found: Opened) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    request = found.request("r", PROMPT, params)
    found.engine.add(request)
    while found.engine.has_work:
        found.engine.step()
    return list(request.tokens[len(PROMPT) :])


def test_the_heaviest_steps_are_run_before_serving_and_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, plans = ModelRunner.run, list[StepPlan]()
    monkeypatch.setattr(ModelRunner, "run", lambda self, plan: plans.append(plan) or run(self, plan))
    found = opened()
    assert f"before serving: {len(plans)} in" in said(found, "heaviest steps")
    shapes = [tuple(len(entry.tokens) for entry in plan.entries) for plan in plans]
    assert shapes.pop(0) == (31, 31, 32), "once more"
    assert set(shapes[::2]) == {  # each twice, as a shape is captured when it is met again
        (31, 31, 32), (32,), (16,), (8,), (4,), (2,), (1,),
        *[(rows,) * 2 for rows in (32, 16, 8, 4, 2, 1)], *[(rows,) * 3 for rows in (16, 8, 4, 2, 1)],
    } and shapes[::2] == shapes[1::2]  # fmt: skip
    assert max(e.start + len(e.tokens) for plan in plans for e in plan.entries) == found.max_context_tokens
    for plan in plans:
        written = [b for e in plan.entries for b in e.block_table[e.start // 16 :].tolist()]
        assert len(set(written)) == len(written) and max(written) < found.memory.blocks
        assert [entry.slot for entry in plan.entries] == list(range(len(plan.entries)))
    pool, slots = found.engine.scheduler.pool, found.engine.scheduler.slots
    assert pool.free == found.memory.blocks and slots is not None and slots.free_sequences == 3
    assert answer(found) == answer(opened(take_memory=False))


def test_where_the_heaviest_steps_run_out_of_memory_the_context_is_lowered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, room, plain = ModelRunner.run, 4096 // 16 * 2 // 3, answer(opened(take_memory=False))

    def limited(self: ModelRunner, plan: StepPlan) -> Any:
        if self.kv.blocks > room:
            raise MemoryError("the card is full")
        return run(self, plan)

    monkeypatch.setattr(ModelRunner, "run", limited)
    found = opened()
    tokens = found.max_context_tokens
    assert 0.8 * room < found.memory.blocks <= room and tokens == found.memory.blocks * 16
    assert f"context lowered from 4096 to {tokens} tokens" in said(found, "KV memory went from")
    assert answer(found) == plain
    with pytest.raises(ConfigError, match=r"heaviest steps do not fit.*give --max-sequences"):
        opened(max_context=4000)
    with pytest.raises(ConfigError, match=r"heaviest steps do not fit.*MiB\) beside them"):
        opened(kv_memory_bytes=8 << 20)
    room = 0
    with pytest.raises(ConfigError, match="heaviest steps do not fit"):
        opened()


def test_keys_and_values_are_no_more_than_can_be_used() -> None:
    """Whole contexts of all sequences and four for the prefix cache; a fixed share for neither the CPU nor
    who asked for a size."""
    tokens = {
        name: opened(take_memory=False, **changes).memory.blocks * 16
        for name, changes in {
            "default": {}, "asked": {"max_context": 160},
            "no cache": {"max_context": 160, "prefix_cache": False, "checkpoint_memory_bytes": None},
            "size": {"max_context": 160, "kv_memory_bytes": 16 << 20},
        }.items()
    }  # fmt: skip
    assert "of the 64 MiB that the card has" in said(opened(take_memory=False), "can use no more")
    assert (tokens["default"], tokens["asked"], tokens["no cache"]) == (7 * 4096, 7 * 160, 3 * 160)
    assert tokens["size"] > 8192


@pytest.mark.parametrize(
    ("free", "asked", "rows"), [(FREE, None, 31), (1 << 20, None, 15), (FREE, 7, 7), (None, None, 15)]
)
def test_a_card_keeps_more_drafted_rows_where_they_are_few_bytes(
    free: int | None, asked: int | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuOps, "free_memory_bytes", lambda self: free)
    found = opened(take_memory=False, kv_memory_bytes=1 << 20, pending_rows=asked)
    slots = found.engine.scheduler.slots
    assert slots is not None and slots.max_pending == rows


def test_checkpoints_count_in_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls: cls(1, 16 << 20)))
    slots = opened(checkpoint_memory_bytes=None).engine.scheduler.slots
    assert slots is not None
    assert slots.checkpoints == (4 << 20) // slots.storage.bytes_per_slot, "a quarter of it"
    with pytest.raises(ConfigError, match="recurrent states do not fit"):
        opened(checkpoint_memory_bytes=32 << 20)
    monkeypatch.setattr(CpuOps, "free_memory_bytes", lambda self: 1 << 16)
    with pytest.raises(ConfigError, match="recurrent states do not fit"):
        opened()


@pytest.mark.parametrize(
    ("types", "free", "expected_type"),
    [
        (["F32"], 1, "float32"), (["BF16", "F32", "I32"], 1, "bfloat16"), (["F16", "I32"], 1, "float16"),
        (["BF16", "F32"], None, "float16"),
    ],
)  # fmt: skip
def test_the_type_of_keys_and_values_follows_the_model_on_a_card(
    types: list[str], free: int | None, expected_type: str
) -> None:
    file: Any = SimpleNamespace(tensors={name: SimpleNamespace(type_name=name) for name in types})
    ops: Any = SimpleNamespace(free_memory_bytes=lambda: free)
    assert default_kv_dtype(file, ops) == expected_type


def test_the_doctor_counts_checkpoints_in_the_memory_of_the_host() -> None:
    llm: Any = SimpleNamespace(opened=opened(take_memory=False))
    patient: Any = SimpleNamespace(llm=llm, vocabulary_size=101, free_memory_bytes=2 << 20)
    note = machine.memory(patient).detail
    assert f"{FREE >> 20} MiB left" in note and "checkpoints take 1 of 2 MiB of the host" in note
    patient.free_memory_bytes = 1 << 18
    with pytest.raises(Failed, match="checkpoints take"):
        machine.memory(patient)


def test_weights_that_do_not_fit_are_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(self: CpuOps, weight: Any) -> Any:
        raise MemoryError("full")

    monkeypatch.setattr(CpuOps, "pack", pack)
    with pytest.raises(ConfigError, match=r"weights do not fit.*got 2 MiB"):
        opened()


@pytest.mark.parametrize(("free", "most"), [(FREE, 32), (None, 16)])
def test_steps_of_32_rows_are_timed_on_a_card(
    free: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = list[int]()
    monkeypatch.setattr(CpuOps, "free_memory_bytes", lambda self: free)
    monkeypatch.setattr(Rounds, "run", lambda self, budget: timed.extend(self.rows))
    found = opened(take_memory=False, kv_memory_bytes=1 << 20, pending_rows=31)
    time_steps(Scratch(found.runner, found.memory.blocks, found.memory.slots, 4096), ())
    assert max(timed) == most and timed[0] == 1

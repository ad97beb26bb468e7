"""The losslessness matrix: every sampling parameter, prompts that make lookup draft, one comparison.

`check` runs the same requests plain and with lookup under every schedule (alone, in a mixed batch
of 4, one prefill chunk or many, 1 or 2 threads) and demands equal ids, and that drafts were really
made and accepted somewhere: a silent zero is a bug too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from quickdraft.engine.llm import LLM, Completion
from quickdraft.ops.interface import KVDtype
from quickdraft.types import SamplingParams, Speculation

OFF, LOOKUP = Speculation(), Speculation.parse("lookup@16")


def run(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    spec: Speculation,
    batch: bool,
) -> list[Completion]:
    """One completion per prompt, alone or all in one mixed batch."""
    with_spec = [dataclasses.replace(p, speculation=spec) for p in params]
    if batch:
        return llm.generate_many(list(zip(prompts, with_spec, strict=True)))
    return [llm.generate(p, s) for p, s in zip(prompts, with_spec, strict=True)]


def check(
    path: Path,
    prompts: Sequence[Sequence[int]],
    settings: dict[str, SamplingParams],
    max_tokens: int,
    schedules: Sequence[tuple[int, int]] = ((1, 256), (2, 256), (2, 16)),
    kv_dtype: KVDtype | None = None,
) -> dict[str, int]:
    """Compare everything; returns accepted counts per setting. `schedules`: (threads, chunk rows)."""
    names = list(settings)
    params = [dataclasses.replace(settings[n], max_tokens=max_tokens) for n in names]
    truth: dict[str, list[Completion]] = {}
    accepted = dict.fromkeys(names, 0)
    for threads, chunk_rows in schedules:
        llm = LLM(path, threads=threads, chunk_rows=chunk_rows, max_sequences=4, kv_dtype=kv_dtype)
        try:
            for name, param in zip(names, params, strict=True):
                many = [param] * len(prompts)
                if name not in truth:
                    truth[name] = run(llm, prompts, many, OFF, batch=False)
                found = run(llm, prompts, many, LOOKUP, batch=False)
                accepted[name] += _compare(truth[name], found, f"{name} alone {threads=} {chunk_rows=}")
            for offset in range(0, len(names), 4):  # mixed batch: different settings, both with lookup
                group = names[offset : offset + 4]
                index = [(i + offset) % len(prompts) for i in range(len(group))]
                found = run(
                    llm, [prompts[i] for i in index], [params[names.index(n)] for n in group], LOOKUP, True
                )
                expected = [truth[n][i] for n, i in zip(group, index, strict=True)]
                _compare(expected, found, f"batch {group} {threads=} {chunk_rows=}")
            assert llm.free_blocks == llm.total_blocks, "blocks leaked"
        finally:
            llm.close()
    return accepted


def _compare(expected: Sequence[Completion], found: Sequence[Completion], what: str) -> int:
    accepted = 0
    for index, (plain, drafted) in enumerate(zip(expected, found, strict=True)):
        assert drafted.ids == plain.ids, f"{what}: prompt {index}: ids differ"
        assert drafted.finish_reason == plain.finish_reason, what
        assert drafted.text == plain.text, what
        assert drafted.logprobs == plain.logprobs, f"{what}: logprobs differ"
        timings = drafted.timings
        assert timings.steps + sum(timings.accepted.values()) == timings.completion_tokens, what
        assert plain.timings.rows == plain.timings.completion_tokens, "plain decoding verifies one row a step"
        accepted += sum(timings.accepted.values())
    return accepted

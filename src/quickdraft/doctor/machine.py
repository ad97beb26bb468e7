"""The machine: kernels that run and why, what memory and arithmetic allow, whether memory suffices.

Measures for under a second and judges no speed: rates differ between machines, and that is no fault.
"""

from __future__ import annotations

import math
from typing import Final

from quickdraft.bench.machine import measure_peaks, rates, read_bandwidth
from quickdraft.bench.roofline import BYTES_PER_WEIGHT, nearly_free_rows
from quickdraft.config import kernel_object
from quickdraft.doctor.check import Failed, Note, Skipped
from quickdraft.doctor.patient import Patient
from quickdraft.ops.interface import BLOCK_TOKENS

PEAK_REPEATS: Final = 5
LOGIT_BYTES: Final = 4
STATES: Final = "recurrent states and checkpoints"
MEMORY_HINT: Final = "give `--kv-memory` less, or `--max-sequences` and `--checkpoint-memory`"


def kernels(patient: Patient) -> Note:
    """What the backend says it runs."""
    said, wanted = patient.llm.opened.runner.ops.explain(), kernel_object()
    if wanted != "auto":
        return Note(
            f"{said}; asked for by QUICKDRAFT_KERNELS={wanted}", "unset QUICKDRAFT_KERNELS for the best ones"
        )
    return Note(said)


def balance(patient: Patient, threads: int) -> Note:
    """Read bandwidth, multiply-adds, and what the two make of the model; Failed for rates that are none."""
    if patient.llm.opened.runner.ops.name != "cpu":
        raise Skipped("these are rates of the CPU; those of a card: `quickdraft bench card`")
    bandwidth = read_bandwidth(threads)
    here = rates(bandwidth, measure_peaks(threads, repeats=PEAK_REPEATS))
    found = (bandwidth, here.narrow_macs_per_second, here.wide_macs_per_second, here.float_macs_per_second)
    if not all(math.isfinite(rate) and rate > 0 for rate in found):
        raise Failed(f"the measured rates make no sense: {found}", "try `quickdraft bench machine`")
    weights = patient.llm.opened.weight_bytes
    rows = nearly_free_rows(here.narrow_macs_per_second, bandwidth, BYTES_PER_WEIGHT[4])
    return Note(
        f"{bandwidth / 1e9:.1f} GB/s, {here.narrow_macs_per_second / 1e9:.0f} GMAC/s with {threads} threads: "
        f"plain decoding reads {weights / 1e6:.0f} MB a token: at most {bandwidth / weights:.0f} tokens/s; "
        f"{rows:.1f} rows of 4-bit weights take as long as one"
    )


def memory(patient: Patient) -> Note:
    """Everything full at once: weights, KV pool, side cars of drafters, states and checkpoints, logits;
    Failed when that is more than was free before the model was opened."""
    opened = patient.llm.opened
    held, slots = opened.memory, opened.engine.scheduler.slots
    parts = {
        "weights": opened.weight_bytes,
        "those of drafters": opened.drafter_bytes,
        "keys and values": held.kv.blocks * held.kv.bytes_per_block,
        "keys and values of drafters": sum(car.kv.blocks * car.kv.bytes_per_block for car in held.side_cars),
        STATES: (
            (slots.sequences + slots.checkpoints) * slots.storage.bytes_per_slot if slots is not None else 0
        ),
        "logits": opened.runner.max_wanted * patient.vocabulary_size * LOGIT_BYTES,
    }
    free, left = patient.free_memory_bytes, opened.runner.ops.free_memory_bytes()
    if left is not None:
        return _card_memory(
            parts, slots.checkpoints * slots.storage.bytes_per_slot if slots else 0, left, free
        )
    needed, listed = sum(parts.values()), _listed(parts)
    said = f"at worst {needed / 2**20:.0f} MiB ({listed}) of {free / 2**20:.0f} MiB that were free"
    if needed > free:
        raise Failed(said, MEMORY_HINT)
    return Note(f"{said}; {held.blocks * BLOCK_TOKENS} tokens of context for all requests together")


def _card_memory(parts: dict[str, int], checkpoints: int, left: int, free: int) -> Note:
    """The same where all but checkpoints lies on a card, which has handed it out: what it has `left`, and
    whether checkpoints fit into the `free` memory of the host."""
    parts = {**parts, STATES: parts[STATES] - checkpoints}
    said = (
        f"on the card {_listed(parts)} MiB, {left / 2**20:.0f} MiB left; "
        f"checkpoints take {checkpoints / 2**20:.0f} of {free / 2**20:.0f} MiB of the host"
    )
    if checkpoints > free:
        raise Failed(said, MEMORY_HINT)
    return Note(said)


def _listed(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / 2**20:.0f}" for name, size in parts.items() if size)

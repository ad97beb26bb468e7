"""`quickdraft doctor`: opens a model and runs every check on it, in the order of what explains most.

Owns which checks there are and what each is called. Whatever happens inside one is a line of the report;
where the model does not open, the checks that need it are reported as skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quickdraft.config import (
    DEFAULT_MODEL,
    MAX_THREADS,
    Hardware,
    cached_model,
    check_head_bits,
    check_range,
    find_model,
    usable_cores,
)
from quickdraft.doctor import drafting, exactness, machine, text
from quickdraft.doctor.check import Check, Note, Report, Skipped, run_check
from quickdraft.doctor.files import files
from quickdraft.doctor.patient import REPORT_HINT, Patient
from quickdraft.engine.llm import LLM
from quickdraft.ops.interface import KVDtype
from quickdraft.types import Backend

Tell = Callable[[Check], None]
Examine = Callable[[Patient], Note]


@dataclass(frozen=True, slots=True)
class Settings:
    """How the model is opened; None leaves a choice to the engine."""

    threads: int | None = None
    kv_dtype: KVDtype | None = None
    kv_memory_bytes: int | None = None
    head_bits: int | None = None
    drafters: tuple[Path, ...] | None = None
    draft_vocab: Path | None = None
    measure_costs: bool = True
    backend: Backend = Backend.AUTO

    def __post_init__(self) -> None:
        check_head_bits(self.head_bits)
        if self.threads is not None:
            check_range("threads", self.threads, 1, MAX_THREADS)


def run(
    model: str | Path = DEFAULT_MODEL, settings: Settings | None = None, tell: Tell = lambda check: None
) -> Report:
    """Every check on `model`; `tell` hears each as it ends. ConfigError for a name that is no model."""
    settings = settings or Settings()
    find_model(model)
    checks: list[Check] = []

    def done(check: Check) -> None:
        checks.append(check)
        tell(check)

    opened: list[Patient] = []

    def opens() -> Note:
        opened.append(_open(model, settings))
        return _described(opened[0])

    done(run_check("files", lambda: files(model), "run: quickdraft pull"))
    done(run_check("model", opens, f"`quickdraft inspect {model}` shows what it holds"))
    try:
        for check in examine(opened[0] if opened else None, settings.threads or usable_cores()):
            done(check)
    finally:
        for patient in opened:
            patient.llm.close()
    return Report(tuple(checks))


def examine(patient: Patient | None, threads: int) -> Iterator[Check]:
    """The checks of an opened model, one after the other; each is skipped where it did not open."""
    for name, check, hint in _examinations(threads):
        yield run_check(name, lambda check=check: _examined(check, patient), hint)  # type: ignore[misc]


def _examinations(threads: int) -> tuple[tuple[str, Examine, str], ...]:
    texts = cache(drafting.decode_texts)  # two checks read them
    return (
        ("tokenizer", text.tokenizer, text.FILE_HINT),
        ("chat template", text.chat_template, text.FILE_HINT),
        ("kernels", machine.kernels, REPORT_HINT),
        ("machine", lambda patient: machine.balance(patient, threads), "try `quickdraft bench machine`"),
        ("memory", machine.memory, machine.MEMORY_HINT),
        ("speculation", exactness.speculation, exactness.SPECULATION_HINT),
        ("prefix cache", exactness.cached_is_cold, exactness.CACHE_HINT),
        ("batch", exactness.alone_is_batched, exactness.BATCH_HINT),
        ("stream", text.stream, REPORT_HINT),
        ("drafters", lambda patient: drafting.drafters(patient, texts(patient)), drafting.DRAFTER_HINT),
        ("gain", lambda patient: drafting.gains(texts(patient)), drafting.GAIN_HINT),
    )


def _examined(check: Examine, patient: Patient | None) -> Note:
    if patient is None:
        raise Skipped("the model did not open")
    return check(patient)


def _open(model: str | Path, settings: Settings) -> Patient:
    cached_model(model)  # an alias that was not pulled
    free = Hardware.detect().free_memory_bytes
    llm = LLM(
        model,
        threads=settings.threads,
        kv_dtype=settings.kv_dtype,
        kv_memory_bytes=settings.kv_memory_bytes,
        head_bits=settings.head_bits,
        drafters=settings.drafters,
        draft_vocab=settings.draft_vocab,
        measure_costs=settings.measure_costs,
        backend=settings.backend,
    )
    return Patient(llm, free)


def _described(patient: Patient) -> Note:
    opened = patient.llm.opened
    notes = "".join(f"; {note}" for note in opened.notes)
    return Note(
        f"opened {opened.name}, {opened.weight_bytes / 1e6:.1f} MB of weights, keys and values in "
        f"{opened.kv_dtype}, context {opened.max_context_tokens}, {opened.load_seconds:.1f} s{notes}"
    )

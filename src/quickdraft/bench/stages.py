"""`bench stages`: each workload under each stage, paired with plain decoding, in this process.

Puts the pieces together: a model opened by the engine, prompts from `workloads`, numbers from `measure`,
output through `report`. `off` always runs, and first: it is what the others are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from rich.console import Console

from quickdraft.bench.break_even import BreakEven, print_break_even
from quickdraft.bench.engine_arms import EngineArms
from quickdraft.bench.machine import commit, read_bandwidth
from quickdraft.bench.measure import OFF, PlainRate, measure, plain_rate
from quickdraft.bench.plot import check_plot, draw
from quickdraft.bench.report import BenchResult, WorkloadResult, check_json_folder, print_table, say
from quickdraft.bench.workloads import Encoding, PromptIds, Workload, encoding_of, named, prompt_ids
from quickdraft.config import usable_cores
from quickdraft.engine.opened import EngineConfig, Opened, open_model
from quickdraft.errors import ConfigError, RequestError
from quickdraft.speculate.cost_curve import explain_costs
from quickdraft.types import Backend, Speculation

# the default: those of them whose sources the opened model has
STAIRCASE: Final = ("off", "lookup@16", "mtp", "dflash2", "dflash2+lookup@8", "dflash2+lookup@16")
ROOF_TEXT: Final = "The history of the city of Lisbon begins"
ROOF_PROMPT_TOKENS: Final = 8


def run(
    model: str | Path,
    workloads: Sequence[str] | None = None,
    stages: Sequence[str] | None = None,
    max_tokens: int | None = None,
    json_path: Path | None = None,
    threads: int | None = None,
    head_bits: int | None = None,
    drafters: tuple[Path, ...] | None = None,
    draft_vocab: Path | None = None,
    plot_path: Path | None = None,
    frozen_costs: bool = False,
    explain_drafts: Path | None = None,
    backend: Backend = Backend.AUTO,
) -> BenchResult:
    """Measure, print tables, write `json_path` and draw `plot_path` if given. None: all workloads, every
    stage of STAIRCASE that the model has the sources for.

    ConfigError, BadParameter or UnsupportedError for a name that is unknown or a source that is not loaded,
    before anything is measured.
    """
    check_json_folder(json_path)
    check_plot(plot_path)
    threads = usable_cores() if threads is None else threads
    config = EngineConfig(
        threads=threads, prefix_cache=False, head_bits=head_bits, drafters=drafters, draft_vocab=draft_vocab,
        measure_costs=True, frozen_costs=frozen_costs, explain_drafts=explain_drafts, backend=backend,
    )  # fmt: skip
    opened = open_model(model, config)
    settings = parse_stages(stages, opened.sources)
    chosen = named(workloads, has_tokenizer=opened.tokenizer is not None)
    prompts = _runnable(chosen, encoding_of(opened), max_tokens, strict=workloads is not None)
    drafting, console = opened.engine.drafting, Console()
    break_even = BreakEven(opened.costs, drafting.auto_sources, drafting.longest)
    with (
        closing(opened),
        closing(EngineArms(opened.engine, opened.request, opened.memory.storage.copy_block)) as runner,
    ):
        rate = plain_rate(runner, roof_prompt(opened), is_text=opened.tokenizer is not None)
        if opened.runner.ops.name == "cpu":
            roof = decode_roof(rate, read_bandwidth(threads), opened.weight_bytes, threads)
            console.print(roof, markup=False, highlight=False, soft_wrap=True)
        results: list[WorkloadResult] = []
        for workload, ids in prompts:
            plural = "" if len(ids) == 1 else "s"
            say(f"{workload.name}: {len(ids)} prompt{plural} under {', '.join(map(str, settings))}")
            results.append(measure(runner, workload, ids, settings, break_even))
    curve = explain_costs(opened.costs)
    result = BenchResult(opened.name, threads, commit(), tuple(results), curve)
    print_table(result, console)
    print_break_even(result, console)
    if json_path is not None:
        result.write(json_path)
    if plot_path is not None:
        draw(result, plot_path)
    return result


def parse_stages(names: Sequence[str] | None, sources: Sequence[str]) -> list[Speculation]:
    """`off` first, then the named stages in order, each once; UnsupportedError for a source not loaded."""
    parsed = [Speculation.parse(name) for name in (STAIRCASE if names is None else names)]
    if names is None:
        parsed = [stage for stage in parsed if set(stage.sources) <= set(sources)]
    for stage in parsed:
        stage.require(sources)
    return list(dict.fromkeys([OFF, *parsed]))


def decode_roof(rate: PlainRate, bandwidth: float, weight_bytes: int, threads: int) -> str:
    """One line: plain decoding near context 0 against the read bandwidth (bytes/s) of this run."""
    memory = f"read bandwidth {bandwidth / 1e9:.1f} GB/s ({threads} threads, 256 MiB buffer)"
    if rate.tokens_per_second is None:
        return f"decode-roof: FAIL: {rate.failed}; {memory}"
    share = weight_bytes * rate.tokens_per_second / bandwidth
    return (
        f"decode-roof: {weight_bytes / 1e6:.1f} MB of tensors x {rate.tokens_per_second:.1f} tokens/s plain "
        f"near context 0 = {share:.2f} of the {memory}"
    )


def roof_prompt(opened: Opened) -> list[int]:
    """A prompt of at most 8 tokens."""
    if opened.tokenizer is not None:
        return opened.tokenizer.encode(ROOF_TEXT)[:ROOF_PROMPT_TOKENS]
    return list(range(1, min(ROOF_PROMPT_TOKENS, opened.runner.model.config.vocabulary_size)))


def _runnable(
    workloads: Sequence[Workload], encoding: Encoding, max_tokens: int | None, *, strict: bool
) -> list[tuple[Workload, list[PromptIds]]]:
    """Prompts of the workloads this file can run; the others are named, or raised when asked for by name."""
    found: list[tuple[Workload, list[PromptIds]]] = []
    for workload in workloads:
        try:
            found.append((workload, prompt_ids(workload, encoding, max_tokens)))
        except (ConfigError, RequestError) as error:
            if strict:
                raise
            say(f"{workload.name}: left out, {error}")
    if not found:
        raise ConfigError("this model file can run none of the workloads", hint="`--workloads NAME` says why")
    return found

"""`bench peers`: quickdraft beside llama-server, over HTTP, on the same file, threads and token ids.

Both are loaded, one computes at a time. In each round both get the same question, in mirrored order from
round to round; medians are compared, with the peer's best configuration of those its --help offers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from quickdraft.bench.llama_flags import LlamaFlags, PeerConfig, llama_flags
from quickdraft.bench.machine import commit
from quickdraft.bench.peer_report import Pair, PeersResult, best_rows, print_rows
from quickdraft.bench.peer_servers import (
    Answer,
    PeerFailed,
    QuickdraftServer,
    Server,
    llama_server,
    quickdraft_server,
)
from quickdraft.bench.peer_tasks import DRAFTING, Sizes, Task, check_kinds, fresh_tokens, of_kinds, tasks
from quickdraft.bench.report import check_json_folder, say, write_json
from quickdraft.bench.workloads import copy_document, long_document
from quickdraft.config import cached_model, usable_cores
from quickdraft.errors import EngineError, UnsupportedError
from quickdraft.models.inspect import inspect_model
from quickdraft.text.tokenizer import Tokenizer

OFF: Final = "off"
QUICKDRAFT_DRAFTING: Final = ("lookup@8", "lookup@16", "lookup@32")
ROUNDS: Final = 3
SPARE_TOKENS: Final = 64  # of the peer's context


def run(
    binary: Path,
    model: str | Path,
    json_path: Path | None = None,
    threads: int | None = None,
    rounds: int = ROUNDS,
    only: Sequence[str] | None = None,
    sizes: Sizes | None = None,
) -> PeersResult:
    """Measure, print, write `json_path` if given. `only`: kinds of tasks, see peer_tasks.KINDS.

    ConfigError for a binary that is no llama-server, UnsupportedError for a model that is no GGUF file,
    EngineError when quickdraft or every configuration of the peer fails.
    """
    check_json_folder(json_path)
    check_kinds(only)
    flags = llama_flags(binary)
    name, path = cached_model(model)
    encode = _encoder(path)
    threads = usable_cores() if threads is None else threads
    with quickdraft_server(path, threads) as quickdraft:
        document, longest = encode(long_document()), quickdraft.longest_context()
        wanted = of_kinds(tasks(document, encode(copy_document()), sizes or Sizes()), only)
        chosen = list(_fitting(wanted, longest))
        comparison = _Comparison(quickdraft, flags, path, threads, rounds, fresh_tokens(document))
        pairs = comparison.run(chosen, min(longest, max(task.length for task in chosen) + SPARE_TOKENS))
    result = PeersResult(name, threads, commit(), flags.version, best_rows(chosen, pairs), tuple(pairs))
    print_rows(result, Console())
    if json_path is not None:
        write_json(json_path, result.to_dict())
    return result


def _encoder(path: Path) -> Callable[[str], list[int]]:
    if path.is_dir():
        raise UnsupportedError("llama-server reads GGUF files only", got=f"the folder {path}")
    data = inspect_model(path).tokenizer
    if data is None:
        raise UnsupportedError("a file without a tokenizer, which llama-server needs", got=path)
    return Tokenizer(data).encode


def _fitting(all_tasks: Sequence[Task], longest: int) -> Iterator[Task]:
    for task in all_tasks:
        if task.length <= longest:
            yield task
        else:
            say(f"{task.name}: left out, {task.length} tokens do not fit a context of {longest}")


class _Comparison:
    """Starts the peer in each configuration and asks both servers every task that concerns it."""

    def __init__(
        self,
        quickdraft: QuickdraftServer,
        flags: LlamaFlags,
        model: Path,
        threads: int,
        rounds: int,
        fresh: Iterator[int],
    ) -> None:
        self._quickdraft, self._flags, self._model, self._threads = quickdraft, flags, model, threads
        self._rounds, self._fresh, self._context = rounds, fresh, 0

    def run(self, chosen: Sequence[Task], context: int) -> list[Pair]:
        """All pairs: plain tasks under every plain configuration, drafting under every n-gram drafter of
        the better one, and the best drafter under the other plain configurations too."""
        self._context = context
        plain = [task for task in chosen if task.name != DRAFTING]
        drafting = [task for task in chosen if task.name == DRAFTING]
        bases = self._flags.plain
        pairs = [pair for base in bases for pair in self._under(base, plain, OFF)]
        if plain and all(pair.failed is not None for pair in pairs):
            raise EngineError("no configuration of llama-server gave a valid answer", got=pairs[0].failed)
        if drafting:
            pairs += self._drafting(drafting[0], bases, pairs)
        return pairs

    def _drafting(self, task: Task, bases: Sequence[PeerConfig], plain: Sequence[Pair]) -> list[Pair]:
        setting = self._best_setting(task)
        base = _best(bases, [pair for pair in plain if pair.task.prompt == task.prompt])
        configs = self._flags.drafting(base)
        if not configs:
            say("this llama-server has no n-gram drafting: its plain decoding stands in")
            configs = [PeerConfig(f"{base.label} (it has no n-gram drafting)", base.flags)]
        pairs = [pair for config in configs for pair in self._under(config, [task], setting)]
        best = _best(configs, pairs)
        if best.drafts:
            others = [self._flags.drafting(other)[configs.index(best)] for other in bases if other != base]
            pairs += [pair for config in others for pair in self._under(config, [task], setting)]
        return pairs

    def _best_setting(self, task: Task) -> str:
        """quickdraft's own fastest setting for this task."""
        self._ask(self._quickdraft, task, task.prompt, OFF, prime=True)
        return min(
            QUICKDRAFT_DRAFTING,
            key=lambda setting: statistics.median(
                self._ask(self._quickdraft, task, task.prompt, setting).seconds for _ in range(self._rounds)
            ),
        )

    def _under(self, config: PeerConfig, chosen: Sequence[Task], setting: str) -> list[Pair]:
        """One pair per task. A configuration that does not start or breaks fails the tasks left."""
        pairs: list[Pair] = []
        say(f"starting llama-server: {config.label}")
        try:
            with llama_server(self._flags, config, self._model, self._threads, self._context) as peer:
                for task in chosen:
                    say(f"  {task.name}")
                    pairs.append(self._pair(peer, config, task, setting))
        except PeerFailed as error:
            left = chosen[len(pairs) :]
            pairs += [Pair(task, setting, config.label, (), (), False, str(error)) for task in left]
        return pairs

    def _pair(self, peer: Server, config: PeerConfig, task: Task, setting: str) -> Pair:
        arms: list[tuple[Server, str]] = [(self._quickdraft, setting), (peer, setting)]
        if task.cached:
            first = task.prompt_with(next(self._fresh)) if task.vary is not None else task.prompt
            for server, drafting in arms:
                self._ask(server, task, first, drafting, prime=True)
        seconds: tuple[list[float], list[float]] = ([], [])
        texts: tuple[list[str], list[str]] = ([], [])
        failed: str | None = None
        for turn in range(self._rounds):
            prompt = task.prompt_with(next(self._fresh)) if task.vary is not None else task.prompt
            for index in (0, 1) if turn % 2 == 0 else (1, 0):
                server, drafting = arms[index]
                answer = self._ask(server, task, prompt, drafting)
                reason = task.refusal(answer)
                if reason is not None and failed is None:
                    failed = f"{('quickdraft', 'llama-server')[index]}: {reason}"
                seconds[index].append(answer.seconds)
                texts[index].append(answer.text)
        ours, theirs = (tuple(task.value(one) for one in times) for times in seconds)
        return Pair(task, setting, config.label, ours, theirs, texts[0] == texts[1], failed)

    def _ask(
        self, server: Server, task: Task, prompt: Sequence[int], drafting: str, *, prime: bool = False
    ) -> Answer:
        return server.ask(
            prompt, 1 if prime else task.max_tokens, use_cache=bool(task.cached), drafting=drafting
        )


def _best(configs: Sequence[PeerConfig], pairs: Sequence[Pair]) -> PeerConfig:
    """The configuration with the peer's best median; the first one when none has any."""
    good = [pair for pair in pairs if pair.failed is None]
    if not good:
        return configs[0]
    label = max(good, key=lambda pair: pair.task.ratio(pair.peer, 1.0)).peer_config
    return next(config for config in configs if config.label == label)

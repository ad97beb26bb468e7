"""`quickdraft serve`: check the settings, listen, load the model, say what was chosen, serve."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quickdraft.cli import flags
from quickdraft.config import (
    DEFAULT_CHECKPOINT_INTERVAL,
    DEFAULT_DRAIN_SECONDS,
    DEFAULT_HOST,
    DEFAULT_MAX_QUEUE,
    DEFAULT_MAX_SEQUENCES,
    DEFAULT_MODEL,
    DEFAULT_PORT,
    Hardware,
    ServeConfig,
    environment_api_keys,
    parse_bytes,
    parse_kv_dtype,
)
from quickdraft.errors import ConfigError
from quickdraft.types import Backend, ReasoningParser, Speculation, ToolCallParser

if TYPE_CHECKING:
    from quickdraft.server.limits import Limits
    from quickdraft.server.run import Loaded

app = typer.Typer(add_completion=False)


@app.command()
def serve(
    model: flags.Model = DEFAULT_MODEL,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback only with an API key.")
    ] = DEFAULT_HOST,
    port: Annotated[int, typer.Option(help="Port to listen on.")] = DEFAULT_PORT,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A key clients must send; repeatable. Other users see it in `ps`."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with one key a line; # begins a comment.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond loopback without any key.")
    ] = False,
    threads: flags.Threads = None,
    backend: flags.BackendFlag = Backend.AUTO,
    kv_memory: flags.KVMemory = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens a request may hold; default: what the model and the memory carry."
        ),
    ] = None,
    checkpoint_memory: flags.CheckpointMemory = None,
    checkpoint_interval: flags.CheckpointInterval = DEFAULT_CHECKPOINT_INTERVAL,
    kv_dtype: flags.KVDtype = None,
    head_bits: flags.HeadBits = None,
    drafter: flags.DrafterFolders = None,
    draft_vocab: flags.DraftVocabFile = None,
    mtp: Annotated[
        bool,
        typer.Option(
            "--mtp/--no-mtp",
            help="Load the MTP module in the model's own folder; without it there is more memory.",
        ),
    ] = True,
    lookup_corpus: flags.LookupCorpus = None,
    frozen_costs: flags.FrozenCosts = False,
    explain_drafts: flags.ExplainDrafts = None,
    speculation: flags.SpeculationFlag = "auto",
    reasoning_parser: Annotated[
        ReasoningParser,
        typer.Option(help="How reasoning is told from the answer; auto: by the model's files."),
    ] = ReasoningParser.AUTO,
    tool_call_parser: Annotated[
        ToolCallParser,
        typer.Option(help="How the model writes tool calls; auto: by its template; none: they stay text."),
    ] = ToolCallParser.AUTO,
    thinking_budget: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Most tokens of thinking, for requests that do not say."),
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option(help="Resume prompts from what earlier requests computed.")
    ] = True,
    cache_dir: flags.CacheDir = None,
    cache_size: flags.CacheSize = None,
    max_sequences: Annotated[
        int, typer.Option(metavar="N", help="Requests computed at the same time; more wait in a queue.")
    ] = DEFAULT_MAX_SEQUENCES,
    max_queue: Annotated[
        int, typer.Option(metavar="N", help="Requests that may wait; beyond that they get 429.")
    ] = DEFAULT_MAX_QUEUE,
    request_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Longest time for one request; default: no limit.")
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long running answers may go on when told to stop.")
    ] = DEFAULT_DRAIN_SECONDS,
) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API."""
    config = ServeConfig(
        model=model,
        host=host,
        port=port,
        threads=threads,
        backend=backend,
        kv_memory_bytes=parse_bytes(kv_memory, name="kv_memory") if kv_memory is not None else None,
        max_context=context,
        kv_dtype=parse_kv_dtype(kv_dtype) if kv_dtype is not None else None,
        head_bits=head_bits,
        drafters=flags.drafter_folders(drafter),
        draft_vocab=draft_vocab,
        own_mtp=mtp,
        lookup_corpus=lookup_corpus,
        frozen_costs=frozen_costs,
        explain_drafts=explain_drafts,
        speculation=Speculation.parse(speculation),
        reasoning_parser=reasoning_parser,
        tool_call_parser=tool_call_parser,
        thinking_budget=thinking_budget,
        prefix_cache=prefix_cache,
        cache_dir=cache_dir,
        cache_bytes=flags.cache_bytes(cache_dir, cache_size),
        checkpoint_memory_bytes=flags.checkpoint_bytes(checkpoint_memory),
        checkpoint_interval=checkpoint_interval,
        max_sequences=max_sequences,
        api_keys=collect_keys(api_key or [], api_key_file),
        insecure=insecure,
        max_queue=max_queue,
        request_timeout_seconds=request_timeout,
        drain_seconds=drain_seconds,
    ).resolve(Hardware.detect())
    sockets = listen(config.host, config.port)
    try:
        run(config, sockets)
    finally:
        for one in sockets:
            one.close()


def collect_keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    """The keys of all three places; ConfigError for one that cannot be used."""
    from quickdraft.server.keys import GUESSABLE_KEY, check_keys, keys_of_file

    keys = check_keys(given, "--api-key") + check_keys(environment_api_keys(), "QUICKDRAFT_API_KEYS")
    if file is not None:
        of_file, warning = keys_of_file(file)
        keys += of_file
        if warning:
            flags.report(f"warning: {warning}")
    if any(len(key) < GUESSABLE_KEY for key in keys):
        flags.report(f"warning: an API key has fewer than {GUESSABLE_KEY} characters and may be guessed")
    return tuple(dict.fromkeys(keys))


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to every address of `host`: a port in use shows before the model is loaded."""
    sockets: list[socket.socket] = []
    problem: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    for family, kind, protocol, _, address in dict.fromkeys(found):
        one = socket.socket(family, kind, protocol)
        sockets.append(one)
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
        except OSError as error:
            sockets.pop().close()
            problem = error
            if error.errno != errno.EADDRNOTAVAIL:  # a host with two addresses, of which one is not here
                break
    if sockets and (problem is None or problem.errno == errno.EADDRNOTAVAIL):
        return sockets
    for one in sockets:
        one.close()
    assert problem is not None, "without a socket there was a reason"
    busy = problem.errno == errno.EADDRINUSE
    raise ConfigError(
        f"cannot listen on {host} port {port}: {problem.strerror}",
        hint="another program uses this port; choose one with --port" if busy else "",
    ) from problem


def run(config: ServeConfig, sockets: list[socket.socket]) -> None:
    """Serve on `sockets` until told to stop, loading the model meanwhile and saying what was chosen."""
    flags.fetched(config.model)
    from quickdraft.server.limits import Limits
    from quickdraft.server.run import serve as serve_app

    limits = Limits(request_seconds=config.request_timeout_seconds)
    count = len(config.api_keys)
    keys = "no API key" if not count else f"{count} API key{'s' if count > 1 else ''}"
    address = f"[{config.host}]:{config.port}" if ":" in config.host else f"{config.host}:{config.port}"
    print(f"listening on http://{address} ({keys}); loading the model", flush=True)
    serve_app(
        sockets,
        lambda: load(config, limits),
        keys=config.api_keys,
        any_host=config.insecure,
        limits=limits,
        drain_seconds=config.drain_seconds,
    )


def load(config: ServeConfig, limits: Limits) -> Loaded:
    """The model in its engine, and the application over it; prints what was chosen once."""
    from quickdraft.engine.async_engine import AsyncEngine
    from quickdraft.engine.opened import EngineConfig, open_model
    from quickdraft.server.app import create_app
    from quickdraft.text.formats import Formats

    opened = open_model(
        config.model,
        EngineConfig(
            threads=config.threads,
            backend=config.backend,
            kv_dtype=config.kv_dtype,
            head_bits=config.head_bits,
            drafters=config.drafters,
            draft_vocab=config.draft_vocab,
            own_mtp=config.own_mtp,
            lookup_corpus=config.lookup_corpus,
            kv_memory_bytes=config.kv_memory_bytes,
            max_context=config.max_context,
            take_memory=True,
            max_sequences=config.max_sequences,
            prefix_cache=config.prefix_cache,
            cache_dir=config.cache_dir,
            cache_bytes=config.cache_bytes,
            checkpoint_memory_bytes=config.checkpoint_memory_bytes,
            checkpoint_interval=config.checkpoint_interval,
            measure_costs=True,
            frozen_costs=config.frozen_costs,
            explain_drafts=config.explain_drafts,
        ),
    )
    config.speculation.require(opened.sources)
    for line in opened.explain():
        print(line)
    print(
        f"speculation by default: {config.speculation}; at most {config.max_sequences} requests at a "
        f"time, {config.max_queue} waiting"
    )
    parsers = config.reasoning_parser, config.tool_call_parser
    print(Formats.of(opened.tokenizer, opened.chat_template, *parsers).explain())
    engine = AsyncEngine(opened, max_queue=config.max_queue)
    own_name = opened.path.name if opened.path.is_dir() else opened.path.stem
    app = create_app(
        engine,
        served_names=(own_name,),
        speculation=config.speculation,
        reasoning_parser=config.reasoning_parser,
        tool_call_parser=config.tool_call_parser,
        thinking_budget=config.thinking_budget,
        limits=limits,
    )
    print("ready", flush=True)
    return app, engine

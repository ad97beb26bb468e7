"""`quickdraft serve`: check the settings, load the model, say what was chosen, serve until Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Annotated

import typer

from quickdraft.cli import flags
from quickdraft.config import (
    DEFAULT_HOST,
    DEFAULT_MAX_SEQUENCES,
    DEFAULT_MODEL,
    DEFAULT_PORT,
    Hardware,
    ServeConfig,
    parse_bytes,
    parse_kv_dtype,
)
from quickdraft.errors import ConfigError
from quickdraft.types import Speculation

app = typer.Typer(add_completion=False)


@app.command()
def serve(
    model: flags.Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on; loopback only.")] = DEFAULT_HOST,
    port: Annotated[int, typer.Option(help="Port to listen on.")] = DEFAULT_PORT,
    threads: flags.Threads = None,
    kv_memory: flags.KVMemory = None,
    kv_dtype: flags.KVDtype = None,
    speculation: flags.SpeculationFlag = "auto",
    max_sequences: Annotated[
        int, typer.Option(help="Requests computed at the same time; more wait in a queue.")
    ] = DEFAULT_MAX_SEQUENCES,
) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API."""
    config = ServeConfig(
        model=model,
        host=host,
        port=port,
        threads=threads,
        kv_memory_bytes=parse_bytes(kv_memory, name="kv_memory") if kv_memory is not None else None,
        kv_dtype=parse_kv_dtype(kv_dtype) if kv_dtype is not None else None,
        speculation=Speculation.parse(speculation),
        max_sequences=max_sequences,
    ).resolve(Hardware.detect())
    check_port_is_free(config.host, config.port)
    run(config)


def check_port_is_free(host: str, port: int) -> None:
    """Fail before the model is loaded, not after."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        busy = error.errno == errno.EADDRINUSE
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}",
            hint="another program uses this port; choose one with --port" if busy else "",
        ) from error


def run(config: ServeConfig) -> None:
    """Load, print what was chosen once, serve; Ctrl-C ends it cleanly."""
    from quickdraft.prepare.models import resolve_model

    resolve_model(config.model, flags.report)
    from quickdraft.engine.async_engine import AsyncEngine
    from quickdraft.engine.llm import EngineConfig, open_model
    from quickdraft.server.app import create_app
    from quickdraft.server.run import serve as serve_app

    opened = open_model(
        config.model,
        EngineConfig(
            threads=config.threads,
            kv_dtype=config.kv_dtype,
            kv_memory_bytes=config.kv_memory_bytes,
            max_sequences=config.max_sequences,
        ),
    )
    config.speculation.require(opened.sources)
    for line in opened.explain():
        print(line)
    print(f"speculation by default: {config.speculation}; at most {config.max_sequences} requests at a time")
    print(f"listening on http://{_authority(config.host, config.port)}", flush=True)
    engine = AsyncEngine(opened)
    own_name = opened.path.name if opened.path.is_dir() else opened.path.stem
    app = create_app(engine, served_names=(own_name,), speculation=config.speculation)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            serve_app(app, config.host, config.port)
    finally:
        engine.shutdown()


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

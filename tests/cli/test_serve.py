"""`serve`: refused settings, what reaches the engine, what is printed, how it ends."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quickdraft.cli.main import app
from quickdraft.types import Speculation
from tests.cli.fakes import install


@dataclass
class World:
    """Stands for engine and server; notes what `serve` does with them, in order."""

    events: list[Any] = field(default_factory=list)
    sources: tuple[str, ...] = ("lookup",)
    path: Path = Path("folder/tiny.gguf")
    served_name: str = "tiny"  # the file stem, beside the alias
    interrupt: bool = False

    def engine_config(self, **settings: Any) -> dict[str, Any]:
        return settings

    def open_model(self, model: str, config: dict[str, Any]) -> World:
        self.events.append(("open", model, config))
        return self

    def explain(self) -> list[str]:
        return ["model tiny", "kernels: fake"]

    def async_engine(self, opened: World) -> World:
        return self

    def create_app(self, engine: World, *, served_names: tuple[str, ...], speculation: Speculation) -> str:
        assert served_names == (self.served_name,)
        self.events.append(("app", str(speculation)))
        return "app"

    def serve(self, app: str, host: str, port: int) -> None:
        self.events.append(("serve", app, host, port))
        if self.interrupt:
            raise KeyboardInterrupt

    def shutdown(self) -> None:
        self.events.append("shutdown")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    install(
        monkeypatch, "quickdraft.engine.llm", EngineConfig=world.engine_config, open_model=world.open_model
    )
    install(monkeypatch, "quickdraft.engine.async_engine", AsyncEngine=world.async_engine)
    install(monkeypatch, "quickdraft.server.app", create_app=world.create_app)
    install(monkeypatch, "quickdraft.server.run", serve=world.serve)
    return world


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments])


def test_a_folder_is_served_under_its_whole_name(world: World, port: int, tmp_path: Path) -> None:
    world.path, world.served_name = tmp_path / "Tiny-0.5B", "Tiny-0.5B"
    world.path.mkdir()
    assert run(str(world.path), "--port", str(port)).exit_code == 0
    assert "shutdown" in world.events


@pytest.mark.parametrize("interrupt", [False, True], ids=["end", "ctrl-c"])
def test_serve_from_start_to_end(world: World, gguf: str, port: int, interrupt: bool) -> None:
    world.interrupt = interrupt
    result = run(
        gguf, "--port", str(port), "--threads", "2", "--kv-memory", "64MiB", "--kv-dtype", "bf16",
        "--max-sequences", "3", "--speculation", "lookup@16",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    settings = {"threads": 2, "kv_dtype": "bfloat16", "kv_memory_bytes": 2**26, "max_sequences": 3}
    assert world.events == [
        ("open", gguf, settings),
        ("app", "lookup@16"),
        ("serve", "app", "127.0.0.1", port),
        "shutdown",
    ]
    for text in (
        "model tiny",
        "kernels: fake",
        "lookup@16",
        f"http://127.0.0.1:{port}",
        "at most 3 requests",
    ):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "binding beyond loopback needs an API key, which this version does not have"),
        (["--port", "0"], "port"),
        (["--port", "70000"], "port"),
        (["--max-sequences", "0"], "max_sequences"),
        (["--kv-memory", "lots"], "kv_memory"),
        (["--kv-dtype", "int4"], "kv_dtype"),
        (["--speculation", "eagle"], "speculation"),
    ],
)
def test_wrong_settings(world: World, gguf: str, arguments: list[str], message: str) -> None:
    result = run(gguf, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert world.events == []


def test_a_source_that_is_not_loaded_is_refused_before_serving(world: World, gguf: str, port: int) -> None:
    result = run(gguf, "--port", str(port), "--speculation", "mtp")
    assert result.exit_code == 1
    assert "'mtp'" in result.stderr and "lookup" in result.stderr
    assert [event[0] for event in world.events] == ["open"]


def test_port_in_use(world: World, gguf: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        result = run(gguf, "--port", str(number))
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1 port {number}" in result.stderr and "--port" in result.stderr
    assert world.events == []

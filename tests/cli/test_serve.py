"""`serve`: refused settings, what reaches the engine, what is printed, how it ends."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quickdraft.cli.main import app
from quickdraft.errors import EngineError
from quickdraft.types import ReasoningParser, Speculation, ToolCallParser
from tests.cli.fakes import install

KEY = "a-key-of-some-length"


@dataclass
class World:
    """Stands for engine and server; notes what `serve` does with them, in order."""

    events: list[Any] = field(default_factory=list)
    sources: tuple[str, ...] = ("lookup",)
    path: Path = Path("folder/tiny.gguf")
    failure: Exception | None = None
    tokenizer: None = None
    chat_template: None = None
    served_name: str = "tiny"  # the file stem, beside the alias

    def engine_config(self, **settings: Any) -> dict[str, Any]:
        return settings

    def open_model(self, model: str, config: dict[str, Any]) -> World:
        self.events.append(("open", model, config))
        return self

    def explain(self) -> list[str]:
        return ["model tiny", "kernels: fake"]

    def async_engine(self, opened: World, *, max_queue: int) -> World:
        self.events.append(("queue", max_queue))
        return self

    def create_app(
        self,
        engine: World,
        *,
        served_names: tuple[str, ...],
        speculation: Speculation,
        reasoning_parser: ReasoningParser,
        tool_call_parser: ToolCallParser,
        thinking_budget: int | None,
        limits: Any,
    ) -> str:
        assert served_names == (self.served_name,)
        parsers = reasoning_parser, tool_call_parser, thinking_budget
        self.events.append(("app", str(speculation), limits.request_seconds, *parsers))
        return "app"

    def serve(self, sockets: list[socket.socket], load: Any, **settings: Any) -> None:
        """Loads as the real one does, in this thread."""
        assert load() == ("app", self)
        del settings["limits"]
        self.events.append(("serve", [one.getsockname() for one in sockets], settings))
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    install(
        monkeypatch, "quickdraft.engine.opened", EngineConfig=world.engine_config, open_model=world.open_model
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


def test_serve_from_start_to_end(world: World, gguf: str, port: int) -> None:
    result = run(
        gguf, "--port", str(port), "--threads", "2", "--kv-memory", "64MiB", "--kv-dtype", "bf16",
        "--max-sequences", "3", "--speculation", "lookup@16", "--max-queue", "5", "--request-timeout", "2.5",
        "--drain-seconds", "7", "--api-key", KEY, "--cache-dir", "kv", "--cache-size", "1G",
        "--reasoning-parser", "qwen3", "--tool-call-parser", "none", "--thinking-budget", "9",
        "--checkpoint-memory", "2M", "--checkpoint-interval", "64",
        "--head-bits", "16", "--drafter", "none", "--draft-vocab", "v.json", "--lookup-corpus", "c",
        "--frozen-costs", "--explain-drafts", "e.jsonl", "--context", "4096", "--backend", "cpu",
        "--no-mtp",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    settings = {
        "threads": 2, "kv_dtype": "bfloat16", "kv_memory_bytes": 2**26, "max_sequences": 3,
        "prefix_cache": True, "cache_dir": Path("kv"), "cache_bytes": 2**30, "head_bits": 16,
        "checkpoint_memory_bytes": 2**21, "checkpoint_interval": 64, "measure_costs": True,
        "drafters": (), "draft_vocab": Path("v.json"), "lookup_corpus": Path("c"),
        "frozen_costs": True, "explain_drafts": Path("e.jsonl"), "max_context": 4096, "take_memory": True,
        "backend": "cpu", "own_mtp": False,
    }  # fmt: skip
    assert world.events == [
        ("open", gguf, settings),
        ("queue", 5),
        ("app", "lookup@16", 2.5, "qwen3", "none", 9),
        ("serve", [("127.0.0.1", port)], {"keys": (KEY,), "any_host": False, "drain_seconds": 7.0}),
    ]
    for text in (
        "model tiny",
        "kernels: fake",
        "lookup@16",
        f"http://127.0.0.1:{port}",
        "at most 3 requests",
        "reasoning: split at think blocks; tools: not in the chat template",
    ):
        assert text in result.stdout
    assert "1 API key)" in result.stdout and KEY not in result.output


def test_a_cache_folder_without_a_cache_is_refused_at_once(world: World, gguf: str, port: int) -> None:
    result = run(gguf, "--port", str(port), "--no-prefix-cache", "--cache-dir", "kv")
    assert result.exit_code == 2 and "without a prefix cache" in result.stderr and not world.events


def test_an_engine_failure_ends_with_an_error_line(world: World, gguf: str, port: int) -> None:
    world.failure = EngineError("the engine failed", got="a scripted failure")
    result = run(gguf, "--port", str(port))
    assert result.exit_code == 1 and "error: the engine failed; got a scripted failure" in result.stderr


def test_keys_of_all_places(
    world: World, gguf: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# people\n\n  key-of-anna \nkey-of-bert\n{KEY}\n")
    file.chmod(0o644)
    monkeypatch.setenv("QUICKDRAFT_API_KEYS", "key-of-cleo, key-of-dora")
    result = run(gguf, "--port", str(port), "--api-key", KEY, "--api-key-file", str(file))
    assert world.events[-1][2]["keys"] == (KEY, "key-of-cleo", "key-of-dora", "key-of-anna", "key-of-bert")
    assert "can be read by other users" in result.stderr and "chmod 600" in result.stderr
    assert "may be guessed" in result.stderr and "key-of" not in result.output
    file.chmod(0o600)
    file.write_text(KEY)
    monkeypatch.delenv("QUICKDRAFT_API_KEYS")
    assert "warning" not in run(gguf, "--port", str(port), "--api-key-file", str(file)).stderr


@pytest.mark.parametrize("key", ["", "two words", "schlüssel-schlüssel", "tab\ttab\ttab", "x" * 1001])
@pytest.mark.parametrize("place", ["flag", "file"])
def test_keys_that_cannot_be_used(world: World, gguf: str, tmp_path: Path, key: str, place: str) -> None:
    arguments = ["--api-key", key]
    if place == "file":
        (tmp_path / "keys").write_text(key)
        arguments = ["--api-key-file", str(tmp_path / "keys")]
    result = run(gguf, *arguments)
    assert result.exit_code == 2 and " key" in result.stderr, result.output
    assert not key or key not in result.output.replace(str(tmp_path), "")
    assert world.events == []


def test_beyond_loopback_with_a_key_or_on_purpose(world: World, gguf: str, port: int) -> None:
    for more in (["--api-key", KEY], ["--insecure"]):
        assert run(gguf, "--host", "0.0.0.0", "--port", str(port), *more).exit_code == 0
    assert world.events[-1][1] == [("0.0.0.0", port)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "binding beyond loopback needs an API key"),
        (["--max-queue", "-1"], "max_queue"),
        (["--request-timeout", "0"], "request_timeout"),
        (["--request-timeout", "nan"], "request_timeout"),
        (["--drain-seconds", "-1"], "drain_seconds"),
        (["--api-key-file", "/nothing/here"], "cannot read the key file /nothing/here: No such file"),
        (["--port", "0"], "port"),
        (["--port", "70000"], "port"),
        (["--max-sequences", "0"], "max_sequences"),
        (["--kv-memory", "lots"], "kv_memory"),
        (["--checkpoint-memory", "lots"], "checkpoint_memory"),
        (["--checkpoint-interval", "100"], "multiple of 16"),
        (["--kv-dtype", "int4"], "kv_dtype"),
        (["--head-bits", "4"], "head_bits"),
        (["--speculation", "eagle"], "speculation"),
        (["--tool-call-parser", "xml"], "tool-call-parser"),
        (["--thinking-budget", "-1"], "thinking_budget"),
        (["--reasoning-parser", "magic"], "reasoning-parser"),
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

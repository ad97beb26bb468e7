"""Two kinds of servers over HTTP, in processes of their own: quickdraft's and llama-server.

Owns starting, waiting for and ending them, and the translation of one question: prompt ids, greedy, a
fixed number of tokens. A question is timed from sending it until all of its answer is here.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from quickdraft.bench.llama_flags import LlamaFlags, PeerConfig
from quickdraft.config import child_environment
from quickdraft.errors import EngineError

START_SECONDS: Final = 600.0
STOP_SECONDS: Final = 30.0
ANSWER_SECONDS: Final = 1800.0
LOG_LINES: Final = 5


class PeerFailed(EngineError):
    """The server that quickdraft is compared with failed, in one of its configurations."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `computed` counts prompt tokens that were not cached; None when a server does not say."""

    seconds: float
    text: str
    tokens: int
    computed: int | None


class Server(Protocol):
    """What a comparison asks."""

    def ask(self, ids: Sequence[int], max_tokens: int, *, use_cache: bool, drafting: str) -> Answer:
        """Greedy, exactly `max_tokens` tokens. `drafting` is a speculation setting, for quickdraft only."""


@dataclass(frozen=True, slots=True)
class Connection:
    """JSON over HTTP to one port of this machine."""

    name: str
    port: int
    failure: type[EngineError] = EngineError

    def get(self, path: str, seconds: float = 10.0) -> int:
        """The status of a GET; OSError or HTTPException while nothing listens."""
        return self._exchange("GET", path, None, seconds)[0]

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object a POST gives; `failure` for anything else."""
        try:
            status, raw = self._exchange("POST", path, json.dumps(body).encode(), ANSWER_SECONDS)
            value = json.loads(raw)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self.failure(f"{self.name} gave no answer to {path}", got=repr(error)) from error
        if status != 200 or not isinstance(value, dict):
            raise self.failure(f"{self.name} refused {path}", got=f"{status}: {str(value)[:300]}")
        return value

    @contextmanager
    def reading(self, value: object) -> Iterator[None]:
        """`failure` instead of the error of a missing or mistyped field."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise self.failure(
                f"{self.name}: an answer of another shape ({error!r})", got=str(value)[:300]
            ) from error

    def _exchange(self, method: str, path: str, body: bytes | None, seconds: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class QuickdraftServer:
    """`quickdraft serve` behind a connection; caches prompts always, so a cold one must be new."""

    http: Connection
    model: str

    def ask(self, ids: Sequence[int], max_tokens: int, *, use_cache: bool, drafting: str) -> Answer:
        body = {
            "model": self.model, "prompt": list(ids), "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "speculation": drafting,
        }  # fmt: skip
        started = time.perf_counter()
        value = self.http.post("/v1/completions", body)
        seconds = time.perf_counter() - started
        with self.http.reading(value):
            usage = value["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            computed = int(usage["prompt_tokens"]) - int(cached)
            return Answer(seconds, value["choices"][0]["text"], int(usage["completion_tokens"]), computed)

    def longest_context(self) -> int:
        """Tokens of prompt and answer it has room for."""
        value = self.http.post("/tokenize", {"prompt": "a"})
        with self.http.reading(value):
            return int(value["max_model_len"])


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """llama-server behind a connection; drafts as it was started."""

    http: Connection

    def ask(self, ids: Sequence[int], max_tokens: int, *, use_cache: bool, drafting: str) -> Answer:
        body = {
            "prompt": list(ids), "n_predict": max_tokens, "temperature": 0, "ignore_eos": True,
            "cache_prompt": use_cache, "stream": False,
        }  # fmt: skip
        started = time.perf_counter()
        value = self.http.post("/completion", body)
        seconds = time.perf_counter() - started
        with self.http.reading(value):
            computed = value.get("timings", {}).get("prompt_n")
            return Answer(
                seconds, value["content"], int(value["tokens_predicted"]),
                None if computed is None else int(computed),
            )  # fmt: skip


@contextmanager
def quickdraft_server(model: Path, threads: int) -> Iterator[QuickdraftServer]:
    """quickdraft over this file, ready; ended on the way out, whatever the way."""
    port = free_port()
    command = [
        sys.executable, "-m", "quickdraft", "serve", str(model), "--port", str(port),
        "--threads", str(threads), "--max-sequences", "1",
    ]  # fmt: skip
    connection = Connection("quickdraft", port)
    with _running(connection, command):
        yield QuickdraftServer(connection, model.stem)


@contextmanager
def llama_server(
    flags: LlamaFlags, config: PeerConfig, model: Path, threads: int, context: int
) -> Iterator[LlamaServer]:
    """llama-server in this configuration, ready; ended on the way out, whatever the way."""
    port = free_port()
    command = [*flags.command(model, port, threads, context), *config.flags]
    connection = Connection(f"llama-server ({config.label})", port, PeerFailed)
    with _running(connection, command):
        yield LlamaServer(connection)


def free_port() -> int:
    """A port of loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running(connection: Connection, command: list[str]) -> Iterator[None]:
    """The process in a session of its own: Ctrl-C reaches this one, which then ends the other."""
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=child_environment(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise connection.failure(f"{connection.name} cannot be started", got=str(error)) from error
        try:
            _wait_until_healthy(connection, process)
            yield
        except EngineError as error:
            if not _has_ended(process):
                raise
            log.seek(0)
            lines = log.read().decode("utf-8", "replace").strip().splitlines()[-LOG_LINES:]
            raise connection.failure(
                f"{connection.name} ended, status {process.returncode}",
                got=" | ".join(line.strip() for line in lines) or "no output",
            ) from error
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()
                process.wait()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it is gone, or goes within a second: a connection breaks a little earlier than a process."""
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        return False
    return True


def _wait_until_healthy(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise connection.failure(f"{connection.name} ended while starting")
        try:
            if connection.get("/health") == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.05)
    raise connection.failure(
        f"{connection.name} did not become healthy", got=f"{START_SECONDS:.0f} s of waiting"
    )

"""A server process from its first moment to its last: loading, failing, draining, real signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from quickdraft.config import child_environment

SLOW = {"reply": "x" * 400, "tokens_per_step": 1, "step_seconds": 0.02}  # eight seconds
USER = [{"role": "user", "content": "hi"}]
ROOT = Path(__file__).parents[2]


class Process:
    """A fake_process; `client` has a short timeout and no retries."""

    def __init__(self, **settings: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "tests.support.fake_process", json.dumps({"port": port, **settings})]
        environment = child_environment(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}")
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False)
        self.wait_for(lambda: self.health() is not None, "it never listened")

    def health(self) -> httpx.Response | None:
        with suppress(httpx.TransportError):
            return self.client.get("/health")
        return None

    def ready(self) -> None:
        self.wait_for(lambda: (h := self.health()) is not None and h.is_success, "it never became ready")

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert self.process.poll() is None, f"it ended: {self.process.stderr.read()}"  # type: ignore[union-attr]
            assert time.monotonic() < deadline, what
            time.sleep(0.02)

    def ask(self, **fields: Any) -> httpx.Response:
        """From any thread."""
        return httpx.post(
            f"{self.client.base_url}/v1/chat/completions",
            json={"model": "fake", "messages": USER, **fields}, timeout=20, trust_env=False,
        )  # fmt: skip

    def end(self) -> tuple[int, str]:
        """(exit status, what it wrote to stderr)"""
        code = self.process.wait(20)
        assert self.process.stderr is not None
        return code, self.process.stderr.read()

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def start() -> Any:
    processes: list[Process] = []

    def start(**settings: Any) -> Process:
        processes.append(Process(**settings))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


class Asking(threading.Thread):
    """One request in the background."""

    def __init__(self, process: Process, **fields: Any) -> None:
        super().__init__()
        self.process, self.fields = process, fields
        self.reply: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        with suppress(httpx.TransportError):  # no answer: reply stays None
            self.reply = self.process.ask(**self.fields)

    def result(self) -> httpx.Response:
        self.join(20)
        assert self.reply is not None
        return self.reply


def begin(process: Process, *requests: dict[str, Any]) -> list[Asking]:
    """Requests that the engine is working on."""
    asking = [Asking(process, **fields) for fields in requests]
    running = f'vllm:num_requests_running{{model_name="fake"}} {len(requests)}.0'
    process.wait_for(lambda: running in process.client.get("/metrics").text, "they do not run")
    return asking


WHOLE: dict[str, Any] = {}
STREAMED = {"stream": True}


def error_of(reply: httpx.Response | None, status: int, code: str) -> dict[str, Any]:
    assert reply is not None and reply.status_code == status, reply
    assert reply.json()["error"]["code"] == code and int(reply.headers["retry-after"]) > 0
    return dict(reply.json()["error"])


def test_it_listens_before_the_model_is_loaded(start: Any, tmp_path: Path) -> None:
    process = start(load_when=str(tmp_path / "now"))
    error_of(process.health(), 503, "model_loading")
    error_of(process.ask(), 503, "model_loading")
    for path in ("/metrics", "/v1/models", "/nothing"):
        error_of(process.client.get(path), 503, "model_loading")
    assert process.client.get("/version").status_code == 200
    page = process.client.get("/")
    assert page.status_code == 200 and "<title>" in page.text and "content-security-policy" in page.headers
    assert process.client.get("/page/app.js").status_code == process.client.head("/").status_code == 200
    error_of(process.client.post("/"), 503, "model_loading")
    (tmp_path / "now").touch()
    process.ready()
    assert process.ask().is_success


def test_a_model_that_cannot_be_loaded_ends_it(start: Any, tmp_path: Path) -> None:
    process = start(load_when=str(tmp_path / "now"), load_error="the file is damaged")
    (tmp_path / "now").touch()
    code, stderr = process.end()
    assert code == 1 and "error: the file is damaged" in stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopping_lets_answers_finish(start: Any, number: int) -> None:
    process = start(**{**SLOW, "reply": "x" * 150})
    process.ready()
    whole, streamed = begin(process, WHOLE, STREAMED)
    process.process.send_signal(number)
    process.wait_for(lambda: not process.health().is_success, "it never drained")
    error_of(process.health(), 503, "shutting_down")
    error_of(process.ask(), 503, "shutting_down")
    assert whole.result().json()["choices"][0]["message"]["content"] == "x" * 150
    assert streamed.result().text.endswith("data: [DONE]\n\n")
    code, stderr = process.end()
    assert code == 0 and "stopping" in stderr and "Traceback" not in stderr


def test_stopping_aborts_what_takes_too_long(start: Any) -> None:
    process = start(**SLOW, drain_seconds=0.3)
    process.ready()
    whole, streamed = begin(process, WHOLE, STREAMED)
    process.process.send_signal(signal.SIGTERM)
    error_of(whole.result(), 503, "engine_unavailable")
    assert "the engine stopped; got shutdown" in streamed.result().text
    code, stderr = process.end()
    assert code == 0 and "aborting 2 answers" in stderr and "Traceback" not in stderr


def test_idle_and_loading_servers_stop_at_once(start: Any) -> None:
    for settings in ({}, {"load_when": "/nothing/here"}):
        process = start(**settings)
        if not settings:
            process.ready()
        process.process.send_signal(signal.SIGTERM)
        code, stderr = process.end()
        assert code == 0 and "Traceback" not in stderr


def test_a_second_signal_ends_at_once(start: Any) -> None:
    process = start(**SLOW)
    process.ready()
    (asking,) = begin(process, WHOLE)
    process.process.send_signal(signal.SIGTERM)
    process.wait_for(lambda: not process.health().is_success, "it never drained")
    process.process.send_signal(signal.SIGINT)
    code, _ = process.end()
    assert code == 128 + signal.SIGINT
    asking.join(20)
    assert asking.reply is None


def test_an_engine_failure_is_told_and_ends_it(start: Any) -> None:
    process = start(**{**SLOW, "fail_at_step": 100})
    process.ready()
    first, second = (asking.result() for asking in begin(process, WHOLE, STREAMED))
    error_of(first, 503, "engine_unavailable")
    assert "a scripted failure" in first.text
    assert second.status_code == 200 and '"error"' in second.text and "[DONE]" not in second.text
    code, stderr = process.end()
    assert code == 1 and "error: the engine failed; got RuntimeError('a scripted failure')" in stderr

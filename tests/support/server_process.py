"""`quickdraft serve` in a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from quickdraft.config import child_environment

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class ServerProcess:
    """A server that answered /health with 200."""

    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def resident_bytes(self) -> int:
        """Memory of the process that lies in RAM now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None
        return int(found[1]) << 10

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def metric(self, name: str, **labels: str) -> float:
        """The value of the one series of that name with these labels (and perhaps others)."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=20).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        (value,) = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
        return float(value)

    def wait_until_idle(self, seconds: float = 30) -> None:
        """Nothing runs or waits, and no request holds a block; AssertionError says what is left."""
        deadline = time.monotonic() + seconds
        while True:
            left = {
                "running": self.metric("vllm:num_requests_running"),
                "waiting": self.metric("vllm:num_requests_waiting"),
                "blocks used": self.metric("quickdraft_kv_blocks", state="used"),
            }
            if not any(left.values()):
                return
            assert time.monotonic() < deadline, f"left after {seconds} s: {left}"
            time.sleep(0.02)


@contextmanager
def server_process(*arguments: str) -> Iterator[ServerProcess]:
    """`quickdraft serve ARGUMENTS --port ...`, ready; ended with SIGTERM, which must succeed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "quickdraft", "serve", *arguments, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        env=child_environment(PYTHONPATH=str(ROOT / "src")),
    )
    server = ServerProcess(f"http://127.0.0.1:{port}", process)
    try:
        _wait_for_health(server)
        yield server
        process.terminate()
        assert process.wait(60) == 0, "it did not end cleanly"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _wait_for_health(server: ServerProcess) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.process.poll() is None, f"the server ended with {server.process.returncode}"
        try:
            if httpx.get(f"{server.url}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("the server never became healthy")

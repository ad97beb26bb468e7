"""What a process holds once the default model is loaded: packed weights, and no trace of the file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.model import default_model_path

pytestmark = pytest.mark.model

LOAD = """
import json, pathlib, sys
from quickdraft.engine.opened import EngineConfig, open_model
opened = open_model(sys.argv[1], EngineConfig(threads=2, kv_memory_bytes=64 << 20))
status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
mapped = sys.argv[1] in pathlib.Path("/proc/self/maps").read_text()
print(json.dumps([int(status["VmRSS"].split()[0]) << 10, opened.weight_bytes, mapped]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_the_packed_weights_and_little_more() -> None:
    """KV blocks take memory when they are first written, so the cache counts for nothing yet."""
    path = default_model_path()
    done = subprocess.run([sys.executable, "-c", LOAD, path], capture_output=True, text=True, check=True)
    resident_bytes, weight_bytes, mapped = json.loads(done.stdout)
    assert not mapped
    assert resident_bytes < weight_bytes + 200e6

"""kill -9 at any moment of a process that fills the prefix cache on disk: the next one answers right."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from quickdraft.config import child_environment
from quickdraft.engine.llm import LLM
from quickdraft.types import SamplingParams
from tests.support.tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
KILLS = 20
CHILD = """
import sys
from pathlib import Path
from quickdraft.engine.llm import LLM
from tests.e2e.test_prefix_kill import GREEDY, prompt
llm = LLM(sys.argv[1], threads=1, cache_dir=Path(sys.argv[2]), cache_bytes=int(sys.argv[3]))
first = int(sys.argv[4])
print("ready", flush=True)
for index in range(first, first + 10_000):
    llm.generate(prompt(index), GREEDY)
"""


def prompt(index: int) -> list[int]:
    """Texts that share a beginning, and differ by index."""
    common, own = random.Random(1), random.Random(index)
    return [common.randrange(20, 300) for _ in range(40)] + [own.randrange(20, 300) for _ in range(440)]


def test_kills_at_random_moments(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", vocabulary_size=320)
    folder, budget, moments = tmp_path / "kv", 3 << 20, random.Random(3)
    cold = LLM(model, threads=1, prefix_cache=False)
    hits = 0
    for kill in range(KILLS):
        first = 100 * kill
        arguments = [sys.executable, "-c", CHILD, str(model), str(folder), str(budget), str(first)]
        child = subprocess.Popen(arguments, stdout=subprocess.PIPE, env=child_environment())
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(moments.uniform(0.01, 0.12))
        child.kill()
        child.communicate()
        llm = LLM(model, threads=1, cache_dir=folder, cache_bytes=budget)
        assert not list(folder.glob("*/*.tmp*")), "a temporary file stayed"
        for index in (first, first + 1, first + 2):
            found = llm.generate(prompt(index), GREEDY)
            assert found.ids == cold.generate(prompt(index), GREEDY).ids
            hits += found.cache.restored_tokens > 40
        counters = llm.opened.engine.metrics().disk
        assert counters["bytes_on_disk"] <= budget and counters["rejected_files"] == 0
        llm.close()
    assert hits > KILLS // 4, "hardly anything was on disk when the process was killed"

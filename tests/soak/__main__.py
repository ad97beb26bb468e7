"""`make soak`: the siege of tests/e2e/test_abuse.py for minutes. Prints its numbers; status 1 on a violation.

SOAK_SECONDS (600) and SOAK_SEED (1) are read from the environment.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.support.abuse import Crowd, Growth, besiege, clock, solo
from tests.support.malformed import flood, send_malformed
from tests.support.server_process import ServerProcess, server_process
from tests.support.tiny import write_tiny_llama

MODEL = "tiny"
AT_ONCE = 64
MALFORMED = 1000
CONNECTIONS = 700  # more than a server takes


def main() -> int:
    seconds, seed = float(os.environ.get("SOAK_SECONDS", "600")), int(os.environ.get("SOAK_SEED", "1"))
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_llama(Path(folder) / f"{MODEL}.gguf", quantisation="Q4_1")
        small = ("--threads", "1", "--kv-memory", str(64 * 16 * 512), "--max-queue", "16")
        with server_process(str(path), *small) as server:
            violations = asyncio.run(soak(server, seconds, seed))
    for violation in violations:
        print(f"VIOLATION: {violation}")
    print("soak failed" if violations else "soak passed")
    return 1 if violations else 0


async def soak(server: ServerProcess, seconds: float, seed: int) -> list[str]:
    """What was violated in a siege of so many seconds."""
    expected, texts = await solo(server.port, MODEL)
    crowd = Crowd(server.port, MODEL, expected, random.Random(seed), texts)
    await crowd.run(visits=4 * AT_ONCE, at_once=AT_ONCE)  # what is allocated once
    files, started = server.open_files(), time.monotonic()

    def resident() -> float:
        size = server.resident_bytes()
        visits = sum(crowd.counts[name] for name in crowd.counts if name not in ("checked", "told to wait"))
        print(
            f"{time.monotonic() - started:6.0f} s  {visits} visits, {crowd.counts['checked']} answers "
            f"checked, {len(crowd.wrong)} wrong, {size / 2**20:.1f} MiB resident, "
            f"{server.open_files()} files",
            flush=True,
        )
        return size

    samples = await besiege(
        crowd, visits=2 * AT_ONCE, at_once=AT_ONCE, resident=resident, until=clock(seconds)
    )
    statuses = await send_malformed(server.port, MODEL, seed, count=MALFORMED, at_once=16)
    refused = await flood(server.port, CONNECTIONS)
    print(f"{MALFORMED} malformed requests: {dict(statuses)}; {refused} of {CONNECTIONS} connections refused")
    violations = [f"a wrong answer: {wrong}" for wrong in crowd.wrong[:5]]
    try:
        server.wait_until_idle()
    except AssertionError as error:
        violations.append(str(error))
    if max(statuses) >= 500:
        violations.append(f"a server error for a malformed request: {dict(statuses)}")
    if await solo(server.port, MODEL) != (expected, texts):
        violations.append("answers afterwards differ from the first ones")
    growth = Growth.of(samples)
    print(f"visits: {dict(crowd.counts)}")
    print(f"memory grew by {100 * growth.share:.2f} % from the second quarter to the last")
    if growth.share >= 0.05:
        violations.append(f"memory grew: {growth}")
    if server.open_files() > files:
        violations.append(f"files left open: {server.open_files()}, {files} at first")
    return violations


if __name__ == "__main__":
    sys.exit(main())

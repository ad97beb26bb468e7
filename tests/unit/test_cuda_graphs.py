"""What program.CudaGraphs asks of torch, beside a stand-in for torch's rules of captures and their pools."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from quickdraft.ops.cuda.program import CudaGraphs

pools: Counter[Any] = Counter()  # live graphs of each pool that was ever in use


class Graph:
    """As torch.cuda.CUDAGraph: a pool of its own where none is named; one that no graph is left in takes no
    more."""

    void = False  # what went into the capture was no good

    def __init__(self) -> None:
        self._pool: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local", "other threads may use the card meanwhile"
        pool = object() if pool is None else pool
        if pool in pools and not pools[pool]:
            raise RuntimeError("INTERNAL ASSERT FAILED: it->second->use_count > 0")
        self._pool = pool
        pools[pool] += 1

    def capture_end(self) -> None:
        if self.void:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        pools[self._pool] -= 1


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> CudaGraphs:
    replaced: dict[str, Callable[..., Any]] = {
        "CUDAGraph": Graph, "Stream": object, "stream": nullcontext, "synchronize": lambda: None,
        "graph_pool_handle": object,
    }  # fmt: skip
    for name, stand_in in replaced.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return CudaGraphs(list)


def test_a_graph_is_captured_after_all_others_were_dropped(graphs: CudaGraphs) -> None:
    """As when KV memory is built again with fewer blocks, or the one capture gives way to another."""
    collects = list[bool]()  # what waits for the card as it ends would void the capture
    for _ in range(3):
        replay = graphs.record(lambda: collects.append(gc.isenabled()))
        replay()
        del replay
    assert sum(pools.values()) == 0 and collects == [False] * 3 and gc.isenabled()


def test_what_went_wrong_in_a_capture_is_said(graphs: CudaGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "void", True)

    def run() -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        graphs.record(run)

"""HostKV: what every KV cache is that lies in numpy arrays of the host. Knows no kernel."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from quickdraft.ops.interface import block_views


class HostKV:
    """ops.interface.KVCache over `keys` and `values` [layers, blocks, ...], which whoever derives from it
    allocates: a block's views are its memory, so what is written to its room is there."""

    keys: NDArray[Any]
    values: NDArray[Any]

    @property
    def bytes_per_block(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes) // max(int(self.keys.shape[1]), 1)

    @property
    def layout(self) -> tuple[int, ...]:
        return len(self.keys), *self.keys.shape[2:]

    def views(self, block: int) -> list[memoryview]:
        return block_views(self.keys, self.values, block)

    room = views

    def filled(self, block: int) -> None:
        pass

    def copy_block(self, source: int, target: int) -> None:
        self.keys[:, target], self.values[:, target] = self.keys[:, source], self.values[:, source]

    def take(self, blocks: int) -> None:
        self.keys[:, :blocks], self.values[:, :blocks] = 0, 0

"""The prefix cache over too little memory and a folder that others change: never a wrong token, no error."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from quickdraft.errors import CapacityError
from tests.support.prefix_world import World, texts


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1:] = b"?" if data[-1:] != b"?" else b"!"
    file.write_bytes(data)


def become_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


HARM = [lambda file: None, flip, lambda file: file.write_bytes(b""), Path.unlink, become_a_folder]


@given(
    texts(),
    st.integers(1, 9),
    st.integers(0, 2000),
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from(HARM)), min_size=24, max_size=24
    ),
)
@settings(max_examples=400, deadline=None)
def test_a_small_pool_over_a_folder_that_is_tampered_with(sequence, blocks: int, budget: int, moves) -> None:
    folder = Path(tempfile.mkdtemp())
    world, held = World(blocks, folder, budget), []
    for tokens, (keep, writes, harm) in zip(sequence * 2, moves, strict=False):
        while len(held) > keep:
            world.leave(*held.pop(0))
        for _ in range(writes):
            world.cache.disk.write_next()
        for file in [each for each in sorted(folder.glob("*/*.kv")) if each.is_file()][::2]:
            harm(file)
        try:
            _, state, cursor = world.compute(tokens, publish_at=7)
        except CapacityError:
            continue
        held.append((state, cursor, tokens))
        for other in held:
            world.check(other[0], other[2])
    for item in held:
        world.leave(*item)
    assert world.pool.free == world.pool.count
    while world.cache.disk.write_next():
        pass
    world.cache.disk.close()
    shutil.rmtree(folder)

"""Packing a file's bytes as they are against packing the values they decode to: the same bits, whatever
the type, the number of threads and the way a matrix is cut into tensors; and the same complaints.
"""

from __future__ import annotations

import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quickdraft.engine.llm import LLM
from quickdraft.errors import ModelFormatError
from quickdraft.models.loading import gguf as loading
from quickdraft.models.loading.strict_files import open_regular
from quickdraft.models.loading.tensor_types import DECODERS, READABLE, TYPES, decode
from quickdraft.models.registry import load_model
from quickdraft.ops.cpu import _cpu
from quickdraft.ops.cpu.backend import CpuOps
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.weights import Blocks, Dense, Part, Value, Weight, concat_rows
from quickdraft.types import SamplingParams
from tests.support.ops_cases import awkward_rows, step_of
from tests.support.tiny import write_tiny_llama, written_as

DENSE: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # else (0,)
BLOCKS = {name: (elements, size) for name, elements, size in TYPES.values()}


def random_bytes(type_name: str, outputs: int, inputs: int, seed: int) -> np.ndarray:
    """Any bytes whose half-precision numbers are finite; both signs, every code."""
    random = np.random.default_rng(seed)
    if type_name in DENSE:
        values = random.standard_normal((outputs, inputs)).astype(DENSE[type_name])
        return values.view(np.uint8)
    elements, size = BLOCKS[type_name]
    raw = random.integers(0, 256, (outputs, inputs // elements, size), np.uint8)
    for at in HALVES.get(type_name, (0,)):
        raw[:, :, at + 1] &= 0xBF
    return raw.reshape(outputs, -1)


def random_blocks(folder: Path, type_name: str, outputs: int, inputs: int) -> Blocks:
    """In a file of its own, from an odd byte on."""
    raw = random_bytes(type_name, outputs, inputs, outputs)
    path = folder / str(outputs)
    path.write_bytes(bytes(5) + raw.tobytes())

    def read() -> Value:
        if type_name in DENSE:
            return Dense(raw.view(DENSE[type_name]))
        return decode(type_name, raw, outputs, inputs)

    return Blocks(type_name, inputs, (Part(open_regular(path), 5, outputs, read),))


def results(ops: CpuOps, weight: Weight) -> bytes:
    """All rows of `weight` as an embedding, and a linear over it."""
    outputs, inputs = weight.shape
    packed, batch = ops.pack(weight), ops.batch(outputs, 1, 8, 8, outputs)
    step = step_of([(0, outputs)], 8, vocabulary=outputs)
    step.tokens[:] = np.arange(outputs)
    step.set_on(batch)
    rows = ops.empty(outputs, inputs)
    ops.embed(batch, packed, rows)
    out = ops.empty(outputs, outputs)
    ops.linear(batch.rows, awkward_rows(outputs, inputs), packed, out)
    return rows.tobytes() + out.tobytes()


@pytest.mark.parametrize("type_name", READABLE)
def test_bytes_pack_to_the_bits_of_their_value(tmp_path: Path, type_name: str) -> None:
    """37 + 16 outputs: a tile that two tensors share, and one that is not full."""
    inputs = 512 if type_name in DECODERS else 301
    parts = [random_blocks(tmp_path, type_name, outputs, inputs) for outputs in (37, 16)]
    weight = concat_rows(parts)
    assert isinstance(weight, Blocks) and weight.shape == (53, inputs)
    of_value = results(CpuOps(1), weight.value())
    for threads in (1, 2, 7):
        assert results(CpuOps(threads), weight) == of_value
    reference = ReferenceOps().pack(weight)
    assert reference.dequantised().tobytes() == b"".join(p.dequantised().tobytes() for p in parts)


@pytest.mark.parametrize("type_name", [*READABLE, "mixed"])
def test_a_file_answers_the_same_however_it_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_name: str
) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", **written_as(type_name))
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=12, logprobs=2)

    def answer(threads: int) -> Any:
        done = LLM(path, threads=threads).generate([5, 17, 40, 5, 17], params)
        return done.ids, done.logprobs

    as_bytes = answer(1)
    assert answer(2) == as_bytes
    original = loading.GGUFFile.matrix

    def decoded(file: loading.GGUFFile, name: str) -> Weight:
        weight = original(file, name)
        assert isinstance(weight, Blocks)
        return weight.value()

    monkeypatch.setattr(loading.GGUFFile, "matrix", decoded)
    assert answer(2) == as_bytes


NOT_FINITE = {"F32": b"\0\0\xc0\x7f", "F16": b"\0\xfc", "BF16": b"\x80\x7f"}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("type_name", READABLE)
def test_a_number_that_is_not_finite_is_found_in_the_last_row_of_a_fused_tensor(
    tmp_path: Path, type_name: str, backend: str
) -> None:
    """The weight that holds it is made of three tensors; the message names the right one."""
    path = write_tiny_llama(tmp_path / "tiny.gguf", **written_as(type_name))
    info = loading.GGUFFile(path).tensors["blk.1.attn_k.weight"]
    data = bytearray(path.read_bytes())
    broken = NOT_FINITE.get(type_name, b"\0\x7e")
    at = HALVES.get(type_name, (0,))[-1]
    first = info.offset + info.bytes - BLOCKS[type_name][1] + at
    data[first : first + len(broken)] = broken
    path.write_bytes(data)
    ops = CpuOps(2) if backend == "cpu" else ReferenceOps()
    with pytest.raises(
        ModelFormatError, match=r"tiny\.gguf: tensor blk\.1\.attn_k\.weight holds .* not finite"
    ):
        load_model(path, ops, max_rows=2, max_wanted=1)


@pytest.mark.parametrize("type_name", ["F16", "Q4_0", "Q8_0"])
def test_loading_makes_no_copy_of_the_weights_on_the_way(tmp_path: Path, type_name: str) -> None:
    """What numpy and Python allocate meanwhile, fused tensors included; the packed weights are not traced."""
    path = write_tiny_llama(
        tmp_path / "tiny.gguf", quantisation=type_name, hidden=1024, ff=2048, tokenizer=False
    )
    ops = CpuOps(2)
    tracemalloc.start()
    try:
        loaded = load_model(path, ops, max_rows=2, max_wanted=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < loaded.model.weight_bytes / 5


def test_parts_that_make_no_weight_are_refused() -> None:
    engine = CpuOps(1)._engine
    with tempfile.TemporaryFile() as file:
        part = (file.fileno(), 0, 4)
        assert _cpu.pack_blocks(engine, "Q4_1", [part], 256) is None  # an empty file
        with pytest.raises(ValueError, match="a multiple of 32 inputs; got 250"):
            _cpu.pack_blocks(engine, "Q4_1", [part], 250)
        with pytest.raises(ValueError, match="unknown block type 'Q2_K'"):
            _cpu.pack_blocks(engine, "Q2_K", [part], 256)
        with pytest.raises(ValueError, match="a part of -1 outputs"):
            _cpu.pack_blocks(engine, "Q4_1", [(file.fileno(), 0, -1)], 256)
    with pytest.raises(ValueError, match="at least one output"):
        _cpu.pack_blocks(engine, "Q4_1", [], 256)
    assert _cpu.pack_blocks(engine, "Q4_1", [(2**31 - 1, 0, 4)], 256) is None  # no such file

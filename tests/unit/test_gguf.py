"""The GGUF reader: values equal the gguf package's, damage is an error that names file and cause."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.loading.gguf import GGUFFile
from quickdraft.models.loading.tensor_types import DECODERS, TYPES, decode
from quickdraft.models.registry import load_model
from quickdraft.ops.reference.backend import ReferenceOps
from tests.support.tiny import K_SHAPE, write_tiny_llama

READ = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def load(path: Path) -> None:
    load_model(path, ReferenceOps(), max_rows=2, max_wanted=1)


@pytest.mark.parametrize("quantisation", READ)
def test_values_equal_the_gguf_package(tmp_path: Path, quantisation: str) -> None:
    file = GGUFFile(write_tiny_llama(tmp_path / "t.gguf", quantisation=quantisation))
    tensors = gguf.GGUFReader(tmp_path / "t.gguf").tensors
    assert {t.name for t in tensors} == set(file.tensors)
    for tensor in tensors:
        ours = (
            file.vector(tensor.name)[None]
            if tensor.data.ndim == 1
            else file.matrix(tensor.name).dequantised()
        )
        theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours, theirs.reshape(ours.shape))


@pytest.mark.parametrize("type_name", DECODERS)
def test_any_bytes_decode_to_the_bits_of_the_gguf_package(type_name: str) -> None:
    """Codes, steps and halves of both signs; zero scales, largest codes and smallest halves among them."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    rows, blocks = 300, 2048 // elements  # several chunks of rows
    raw = np.random.default_rng(3).integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    halves = {"Q5_1": (0, 2), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for at in halves.get(type_name, (0,)):
        raw[:, :, at + 1] &= 0xBF  # the exponent's top bit: finite, below 2
    raw[0] = 0
    raw[1] = 0xFF  # largest codes and steps
    raw[2, :, 2:] = 0
    raw[3, :, 4:] = 0x80
    for at in halves.get(type_name, (0,)):
        raw[1, :, at : at + 2] = [0xFF, 0xBB] if at else [0xFF, 0x3B]
        raw[4, :, at : at + 2] = [1, 0x80]  # the smallest negative half
    ours = decode(type_name, raw.reshape(-1), rows, blocks * elements).dequantised()
    theirs = gguf.quants.dequantize(raw.reshape(rows, -1), gguf.GGMLQuantizationType[type_name])
    assert np.isfinite(theirs).all() and (theirs < 0).any()
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("type_name", ["Q4_K", "Q5_K", "Q6_K"])
def test_a_file_of_k_quants_equals_the_gguf_package(tmp_path: Path, type_name: str) -> None:
    file = GGUFFile(write_tiny_llama(tmp_path / "t.gguf", quantisation=type_name, **K_SHAPE))
    for tensor in gguf.GGUFReader(tmp_path / "t.gguf").tensors:
        if tensor.data.ndim == 2:
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(file.matrix(tensor.name).dequantised(), theirs)


def test_metadata_equals_the_gguf_package(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "t.gguf")
    theirs = gguf.GGUFReader(path).fields
    for key, value in GGUFFile(path).metadata.items():
        assert value == theirs[key].contents(), key


def put(data: bytes, offset: int, code: str, value: int) -> bytes:
    new = struct.pack(f"<{code}", value)
    return data[:offset] + new + data[offset + len(new) :]


def after(data: bytes, text: str, skip: int = 0) -> int:
    return data.index(text.encode()) + len(text) + skip


DAMAGE = {
    "empty": lambda d: b"",
    "four bytes": lambda d: d[:4],
    "wrong magic": lambda d: b"GGML" + d[4:],
    "big-endian version": lambda d: put(d, 4, "I", 0x03000000),
    "version 99": lambda d: put(d, 4, "I", 99),
    "absurd tensor count": lambda d: put(d, 8, "Q", 2**62),
    "absurd metadata count": lambda d: put(d, 16, "Q", 2**63),
    "too few tensors counted": lambda d: put(d, 8, "Q", 3),
    "absurd key length": lambda d: put(d, 24, "Q", 2**60),
    "metadata type 77": lambda d: put(d, after(d, "general.architecture"), "I", 77),
    "absurd array": lambda d: put(d, after(d, "tokenizer.ggml.tokens", 8), "Q", 2**50),
    "array of arrays of nothing": lambda d: put(d, after(d, "tokenizer.ggml.tokens", 4), "I", 9),
    "absurd string in an array": lambda d: put(d, after(d, "tokenizer.ggml.tokens", 16), "Q", 2**55),
    "rank 9": lambda d: put(d, after(d, "output_norm.weight"), "I", 9),
    "rank 0": lambda d: put(d, after(d, "output_norm.weight"), "I", 0),
    "dimension 0": lambda d: put(d, after(d, "output_norm.weight", 4), "Q", 0),
    "dimension 2^63": lambda d: put(d, after(d, "output_norm.weight", 4), "Q", 2**63),
    "wrong dimension": lambda d: put(d, after(d, "output_norm.weight", 4), "Q", 32),
    "unknown tensor type": lambda d: put(d, after(d, "output_norm.weight", 12), "I", 250),
    "offset outside the file": lambda d: put(d, after(d, "output_norm.weight", 16), "Q", 2**40),
    "offset 2^64-32": lambda d: put(d, after(d, "output_norm.weight", 16), "Q", 2**64 - 32),
    "misaligned offset": lambda d: put(d, after(d, "output_norm.weight", 16), "Q", 33),
    "overlapping tensors": lambda d: put(d, after(d, "output_norm.weight", 16), "Q", 0),
    "key that is not UTF-8": lambda d: d.replace(b"general.architecture", b"general.architectur\xff"),
    "renamed tensor": lambda d: d.replace(b"output_norm.weight", b"outpat_norm.weight"),
    "tensor of a later layer": lambda d: d.replace(b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight"),
    "unknown key": lambda d: d.replace(b"llama.context_length", b"llama.contest_length"),
    "rope scaling": lambda d: d.replace(b"llama.rope.freq_base", b"llama.rope.freq_bose"),
    "unknown architecture": lambda d: d.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0alpac"),
    "no layers": lambda d: put(d, after(d, "llama.block_count", 4), "I", 0),
    "heads that do not divide": lambda d: put(d, after(d, "llama.attention.head_count_kv", 4), "I", 3),
    "truth value 2": lambda d: put(d, after(d, "tokenizer.ggml.add_bos_token", 4), "B", 2),
    "misaligned by a byte": lambda d: put(d, after(d, "output_norm.weight", 16), "Q", 1),
    "cut in the tensors": lambda d: d[:-100],
    "cut in the header": lambda d: d[:900],
}  # fmt: skip


CAUSES = {
    "empty": "an empty file",
    "four bytes": "ends inside version",
    "wrong magic": "not a GGUF file",
    "big-endian version": "unknown GGUF version",
    "version 99": "unknown GGUF version; got 99",
    "absurd tensor count": "tensor count does not fit the file",
    "absurd metadata count": "metadata count does not fit the file",
    "too few tensors counted": "is missing",
    "absurd key length": "ends inside metadata key",
    "metadata type 77": "'general.architecture' has a bad type; got 77",
    "absurd array": "tokenizer.ggml.tokens does not fit the file",
    "array of arrays of nothing": "tokenizer.ggml.tokens does not fit the file",
    "absurd string in an array": "string in 'tokenizer.ggml.tokens' runs past the end",
    "rank 9": "bad rank; got 9",
    "rank 0": "bad rank; got 0",
    "dimension 0": "bad shape",
    "dimension 2^63": "bad shape",
    "wrong dimension": "output_norm.weight has a wrong shape; got (32,); expected (64,)",
    "unknown tensor type": "'output_norm.weight' has an unknown type; got 250",
    "offset outside the file": "'output_norm.weight' ends outside the file",
    "offset 2^64-32": "'output_norm.weight' ends outside the file",
    "misaligned offset": "'output_norm.weight' is not aligned; got 33",
    "misaligned by a byte": "'output_norm.weight' is not aligned; got 1;",
    "overlapping tensors": "'output_norm.weight' overlaps",
    "key that is not UTF-8": "not UTF-8",
    "renamed tensor": "output_norm.weight is missing",
    "tensor of a later layer": "blk.1.ffn_up.weight is missing",
    "unknown key": "llama.contest_length",
    "rope scaling": "llama.rope.freq_bose",
    "unknown architecture": "unknown architecture; got 'alpac'",
    "no layers": "llama.block_count; got 0",
    "heads that do not divide": "query heads that key heads cannot share",
    "truth value 2": "add_bos_token is neither true nor false",
    "cut in the tensors": "the file is cut off",
    "cut in the header": "does not fit the file",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_names_the_file_and_the_cause(tmp_path: Path, damage: str) -> None:
    good = write_tiny_llama(tmp_path / "good.gguf").read_bytes()
    path = tmp_path / "broken.gguf"
    path.write_bytes(DAMAGE[damage](good))
    with pytest.raises((ModelFormatError, UnsupportedError), match=r"broken\.gguf: \w+") as error:
        load(path)
    assert CAUSES[damage] in str(error.value)


def test_missing_leftover_and_misshaped_tensors_are_named(tmp_path: Path) -> None:
    good = write_tiny_llama(tmp_path / "good.gguf").read_bytes()
    path = tmp_path / "broken.gguf"
    path.write_bytes(good.replace(b"blk.1.attn_norm.weight", b"blk.1.attn_nurm.weight"))
    with pytest.raises(ModelFormatError, match=r"blk\.1\.attn_norm\.weight is missing"):
        load(path)
    path.write_bytes(put(good, after(good, "llama.block_count", 4), "I", 1))
    with pytest.raises(ModelFormatError, match=r"nobody uses; got blk\.1\.attn_k\.weight"):
        load(path)
    path.write_bytes(put(good, after(good, "llama.feed_forward_length", 4), "I", 64))
    with pytest.raises(ModelFormatError, match=r"blk\.0\.ffn_gate\.weight has a wrong shape; got \(96, 64\)"):
        load(path)


@pytest.mark.parametrize(
    ("quantisation", "skip", "code", "bits", "what"),
    [
        ("F32", 0, "I", 0x7FC00000, "values"),
        ("F32", 0, "I", 0xFF800000, "values"),
        ("F16", 0, "H", 0xFE00, "values"),
        ("BF16", 0, "H", 0x7F80, "values"),
        ("Q4_0", 0, "H", 0x7C00, "scales"),
        ("Q4_1", 0, "H", 0x7E00, "scales"),
        ("Q4_1", 2, "H", 0xFC00, "minimums"),
        ("Q8_0", 0, "H", 0x7E00, "scales"),
        ("Q5_0", 0, "H", 0xFC00, "scales"),
        ("Q5_1", 2, "H", 0x7C00, "minimums"),
        ("Q4_K", 0, "H", 0x7E00, "scales"),
        ("Q4_K", 2, "H", 0xFC00, "minimums"),
        ("Q5_K", 2, "H", 0x7C00, "minimums"),
        ("Q6_K", 208, "H", 0x7C00, "scales"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(
    tmp_path: Path, quantisation: str, skip: int, code: str, bits: int, what: str
) -> None:
    shape = K_SHAPE if quantisation.endswith("K") else {}
    path = write_tiny_llama(tmp_path / "t.gguf", quantisation=quantisation, **shape)
    info = GGUFFile(path).tensors["blk.0.ffn_up.weight"]
    data = path.read_bytes()
    path.write_bytes(put(data, info.offset + skip, code, bits))
    with pytest.raises(ModelFormatError, match=rf"t\.gguf: .*ffn_up\.weight holds {what} that are not"):
        load(path)


def test_the_largest_finite_numbers_are_kept(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "t.gguf", quantisation="F16")
    info = GGUFFile(path).tensors["blk.0.ffn_up.weight"]
    path.write_bytes(put(path.read_bytes(), info.offset, "H", 0xFBFF))
    assert GGUFFile(path).matrix(info.name).dequantised()[0, 0] == -65504


def test_tensor_types_are_those_of_the_gguf_package() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: theirs[number] for number in TYPES if number in theirs} == {
        number: sizes for number, sizes in TYPES.items() if number in theirs
    }
    assert {0, 1, 2, 3, 8, 12, 14, 30} <= set(theirs) & set(TYPES)


def test_a_type_that_cannot_be_read_is_named_with_its_tensor(tmp_path: Path) -> None:
    data = write_tiny_llama(tmp_path / "t.gguf").read_bytes()
    path = tmp_path / "k.gguf"  # 96 x 64 values of 4 bytes become IQ4_NL, which needs less room
    path.write_bytes(put(data, after(data, "blk.0.ffn_up.weight", 20), "I", 20))
    with pytest.raises(
        UnsupportedError, match=r"k\.gguf: tensor blk\.0\.ffn_up\.weight .* got IQ4_NL; expected one of"
    ):
        load(path)


def test_k_quants_need_whole_blocks(tmp_path: Path) -> None:
    data = write_tiny_llama(tmp_path / "t.gguf").read_bytes()
    path = tmp_path / "k.gguf"
    path.write_bytes(put(data, after(data, "blk.0.ffn_up.weight", 20), "I", 12))
    with pytest.raises(
        ModelFormatError, match=r"'blk\.0\.ffn_up\.weight' has a bad shape for Q4_K; got \(64, 96"
    ):
        load(path)

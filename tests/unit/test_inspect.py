"""inspect_model: sizes, bytes and reasons from headers, also for what nobody here can run."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.inspect import Inspection, inspect_model
from quickdraft.models.loading.folder import ModelFolder
from quickdraft.models.loading.gguf import GGUFFile
from quickdraft.models.registry import load_model
from quickdraft.models.tensors import OPTIONAL, decoder_tensors
from quickdraft.ops.reference.backend import ReferenceOps
from tests.support.tiny import write_tiny_llama
from tests.support.tiny_folder import put_json, write_tiny_folder

KINDS = [("llama", None), ("qwen2", None), ("qwen3", 24)]


def of(folder: Path, **changes: object) -> Inspection:
    return inspect_model(write_tiny_folder(folder, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "head_dim"), KINDS)
def test_the_tensor_list_is_what_the_model_takes(tmp_path: Path, kind: str, head_dim: int | None) -> None:
    path = write_tiny_llama(tmp_path / "t.gguf", architecture=kind, head_dim=head_dim)
    config = load_model(path, ReferenceOps(), max_rows=1, max_wanted=1).model.config
    expected = dict(decoder_tensors(config))
    found = {name: info.shape for name, info in GGUFFile(path).tensors.items()}  # loading has used them all
    assert found.items() <= expected.items()
    assert set(expected) - set(found) <= set(OPTIONAL)


@pytest.mark.parametrize(("kind", "head_dim"), KINDS)
def test_a_file_that_runs(tmp_path: Path, kind: str, head_dim: int | None) -> None:
    file = write_tiny_llama(
        tmp_path / "t.gguf",
        architecture=kind,
        head_dim=head_dim,
        quantisation="Q8_0" if head_dim is None else "F16",
    )
    folder = write_tiny_folder(tmp_path / "t", kind, dtype="BF16", shards=2)
    for path in (file, folder):
        found = inspect_model(path)
        model = load_model(path, ReferenceOps(), max_rows=1, max_wanted=1).model
        assert (found.problems, found.architecture, found.config) == ((), kind, model.config)
        assert sum(found.bytes_by_part.values()) == sum(found.bytes_by_format.values()) == model.weight_bytes
        assert set(found.bytes_by_part) == {"norms", "embedding", "head", "attention", "feed-forward"}
        kv = model.kv_cache(3, "float16")
        assert found.kv_bytes_per_token("float16") == (kv.keys.nbytes + kv.values.nbytes) // 48
        assert found.sizes["context"] == 512 and found.sizes["vocabulary"] == 320


def test_the_longest_context_counts_weights_and_whole_blocks(tmp_path: Path) -> None:
    found = of(tmp_path / "t")
    per_token = found.kv_bytes_per_token("float32")
    assert found.default_kv_dtype == "float32" and per_token == 2 * 2 * 2 * 24 * 4
    for room, tokens in ((-1, 0), (0, 0), (16 * per_token - 1, 0), (35 * per_token, 32), (1 << 30, 512)):
        assert found.longest_context(found.weight_bytes + room, "float32") == tokens
    assert found.longest_context(found.weight_bytes + 35 * per_token, "float16") == 64


def test_what_stands_in_the_way_is_listed(tmp_path: Path) -> None:
    strange = of(tmp_path / "a", architecture="llama", rope_scaling={"type": "yarn"})
    assert strange.config is None and strange.longest_context(1 << 40, "float16") is None
    assert "a/config.json: rope_scaling.rope_type; got 'yarn'" in strange.problems[0]
    assert len(strange.problems) == 1 and strange.tokenizer is not None
    short = of(tmp_path / "b", num_hidden_layers=3)
    assert (
        len(short.problems) == 3 and "model.layers.2.input_layernorm.weight is missing" in short.problems[0]
    )
    long = of(tmp_path / "c", num_hidden_layers=1)
    assert "11 tensors nobody uses; got model.layers.1." in long.problems[0]
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    assert "b/tokenizer.json: model; got NoneType" in inspect_model(tmp_path / "b").problems[0]
    endless = of(tmp_path / "d", num_hidden_layers=2**24)
    assert len(endless.problems) == 3


def test_what_the_loader_refuses_inspect_refuses(tmp_path: Path) -> None:
    """A norm in Q8_0: a matrix may be quantised, a vector not."""
    path = write_tiny_llama(tmp_path / "t.gguf")
    norm = path.read_bytes().index(b"blk.1.ffn_norm.weight") + len("blk.1.ffn_norm.weight") + 4 + 8
    data = bytearray(path.read_bytes())
    data[norm : norm + 4] = (8).to_bytes(4, "little")
    path.write_bytes(data)
    assert inspect_model(path).problems == (
        "tensor blk.1.ffn_norm.weight has a type this version cannot read; got Q8_0",
    )
    with pytest.raises(UnsupportedError, match=r"ffn_norm\.weight is a quantised vector; got Q8_0"):
        load_model(path, ReferenceOps(), max_rows=1, max_wanted=1)


def test_an_architecture_nobody_here_runs(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "mamba")
    writer.add_block_count(7)
    writer.add_tensor("blk.0.ssm_in.weight", np.ones((4, 8), np.float32))
    writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = inspect_model(tmp_path / "t.gguf")
    assert (found.architecture, found.sizes) == ("mamba", {"layers": 7, "vocabulary": 4})
    assert found.bytes_by_part == {"embedding": 64, "other": 128}
    assert "unknown architecture; got 'mamba'" in found.problems[0]
    folder = write_tiny_folder(tmp_path / "t")
    put_json(folder / "config.json", {"model_type": "gpt_oss", "hidden_size": 64})
    assert "model_type; got 'gpt_oss'" in inspect_model(folder).problems[0]


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vector", "matrix", "_same"):
        monkeypatch.delattr(ModelFolder, name)
    assert of(tmp_path / "t").problems == ()
    assert of(tmp_path / "tied", tied=True).problems == ()


def test_a_header_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "t.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFormatError, match=r"t\.gguf: "):
        inspect_model(tmp_path / "t.gguf")

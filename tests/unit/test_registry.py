"""load_model: what is served, refused and read beside the weights; LLM keeps to the context it was given."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from quickdraft.engine.llm import LLM
from quickdraft.errors import ConfigError, ContextTooLong, ModelFormatError, UnsupportedError
from quickdraft.models.interface import LoadedModel
from quickdraft.models.loading.folder import ModelFolder
from quickdraft.models.loading.gguf import GGUFFile
from quickdraft.models.registry import load_model
from quickdraft.ops.interface import Ops
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.select import select
from quickdraft.types import FinishReason, SamplingParams
from tests.support.tiny import tiny_tensors, write_tiny_llama, written_as
from tests.support.tiny_folder import write_tiny_folder


def load(path: Path, max_context: int | None = None) -> LoadedModel:
    return load_model(path, ReferenceOps(), max_rows=2, max_wanted=1, max_context=max_context)


def written(path: Path, add: Callable[[gguf.GGUFWriter], object]) -> Path:
    """A one-layer llama with whatever `add` puts into its metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    for field, value in (
        ("block_count", 1), ("context_length", 64), ("embedding_length", 64), ("feed_forward_length", 96),
        ("attention.head_count", 4), ("attention.head_count_kv", 2),
    ):  # fmt: skip
        writer.add_uint32(f"llama.{field}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    add(writer)
    for name, values in tiny_tensors(0, 1, 64, 4, 2, 96, 320).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_served_context_is_the_one_asked_for(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "t.gguf", context=512)
    assert load(path).model.config.context_length == 512
    assert load(path, 64).model.config.context_length == 64
    for wrong in (0, -5, 513):
        with pytest.raises(ConfigError, match=rf"'max_context'; got {wrong}; expected 1\.\.512"):
            load(path, wrong)


def test_an_answer_ends_at_the_served_context(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "t.gguf", context=512)
    llm = LLM(path, threads=1, max_context=50, kv_memory_bytes=1 << 20)
    assert llm.max_context_tokens == 50
    answer = llm.generate(list(range(3, 43)), SamplingParams(temperature=0.0, ignore_eos=True))
    assert (len(answer.ids), answer.finish_reason) == (10, FinishReason.LENGTH)
    with pytest.raises(ContextTooLong):
        llm.generate([5] * 50)


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"/config\.json: cannot be read; got No such file"):
        load(tmp_path)
    with pytest.raises(ModelFormatError, match=r"nothing\.gguf: cannot be read"):
        load(tmp_path / "nothing.gguf")


@pytest.mark.parametrize("quantisation", ["F32", "F16", "BF16", "Q4_1"])
def test_kv_is_float32_for_float32_files_only(tmp_path: Path, quantisation: str) -> None:
    path = write_tiny_llama(tmp_path / "t.gguf", quantisation=quantisation)
    assert load(path).kv_dtype == ("float32" if quantisation == "F32" else "float16")
    dense_table = {"token_embd.weight": "F32"}
    mixed = write_tiny_llama(tmp_path / "m.gguf", quantisation=quantisation, other_quantisation=dense_table)
    assert load(mixed).kv_dtype == ("float32" if quantisation == "F32" else "float16")


def test_weight_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "t.gguf", quantisation="Q4_1")
    tensors = gguf.GGUFReader(path).tensors
    assert load(path).model.weight_bytes == sum(int(t.n_bytes) for t in tensors)


@pytest.mark.parametrize(
    ("add", "cause"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), r"got llama\.rope\.scaling\.type"),
        (lambda w: w.add_rope_scaling_factor(4.0), r"got llama\.rope\.scaling\.factor"),
        (lambda w: w.add_expert_count(8), r"got llama\.expert_count"),
        (lambda w: w.add_sliding_window(16), r"got llama\.attention\.sliding_window"),
        (lambda w: w.add_value_length(8), "keys and values of different size"),
        (lambda w: w.add_uint16("split.count", 3), "one part of a split model; got 3 parts"),
    ],
)
def test_settings_that_change_the_result_are_refused(
    tmp_path: Path, add: Callable[[gguf.GGUFWriter], object], cause: str
) -> None:
    with pytest.raises(UnsupportedError, match=rf"w\.gguf: .*{cause}"):
        load(written(tmp_path / "w.gguf", add))


def test_files_without_optional_metadata(tmp_path: Path) -> None:
    loaded = load(written(tmp_path / "w.gguf", lambda w: w.add_custom_alignment(64)))
    config = loaded.model.config
    assert (config.head_dim, config.rotary_dim, config.rope_base) == (16, 16, 10000.0)
    assert loaded.tokenizer is None


def test_rope_factors_must_be_positive(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "t.gguf", rope_factors=np.zeros(8))
    with pytest.raises(ModelFormatError, match=r"t\.gguf: tensor rope_freqs\.weight; got 0"):
        load(path)


def test_everything_a_tokenizer_needs_is_read(tmp_path: Path) -> None:
    tokens = [f"t{i}" for i in range(320)]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types([3] + [1] * 319)
        writer.add_token_scores([0.5] * 320)
        writer.add_token_merges(["a b"])
        for name, token in (("bos", 5), ("eos", 7), ("eot", 9), ("eom", 7), ("unknown", 0), ("padding", 8)):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(True)
        writer.add_chat_template("{{ messages }}")

    data = load(written(tmp_path / "w.gguf", add)).tokenizer
    assert data is not None
    assert (data.model, data.pre_tokenizer, data.tokens) == ("gpt2", "qwen2", tuple(tokens))
    assert (data.token_types[:2], data.merges, data.scores[:1]) == ((3, 1), ("a b",), (0.5,))
    assert (data.bos_id, data.eos_ids, data.unknown_id, data.padding_id) == (5, (7, 9), 0, 8)
    assert (data.add_bos, data.add_space_prefix, data.chat_template) == (True, True, "{{ messages }}")


@pytest.mark.parametrize("form", ["folder F32", "folder F16", "F32", "F16", "Q8_0", "Q4_K"])
def test_a_loaded_model_needs_its_file_no_more(tmp_path: Path, form: str) -> None:
    kind, _, dtype = form.rpartition(" ")
    if kind:
        path = write_tiny_folder(tmp_path / "tiny", dtype=dtype)
        weights = path / "model.safetensors"
    else:
        path = weights = write_tiny_llama(tmp_path / "tiny.gguf", **written_as(dtype))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    first = LLM(path, threads=1, kv_memory_bytes=1 << 22).generate(list(range(20, 40)), params)
    llm = LLM(path, threads=1, kv_memory_bytes=1 << 22)
    with weights.open("r+b") as file:  # in place: a view of the map would see it
        file.write(bytes(weights.stat().st_size))
    assert llm.generate(list(range(20, 40)), params).ids == first.ids


@pytest.mark.parametrize("backend", [ReferenceOps, select])
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_a_file_that_shrinks_while_it_is_read_is_an_error(
    tmp_path: Path, form: str, backend: Callable[[], Ops]
) -> None:
    opened: GGUFFile | ModelFolder
    if form == "folder":
        opened = ModelFolder(write_tiny_folder(tmp_path / "tiny"))
        path = tmp_path / "tiny" / "model.safetensors"
    else:
        path = write_tiny_llama(tmp_path / "tiny.gguf")
        opened = GGUFFile(path)
    os.truncate(path, 5000)
    with pytest.raises(ModelFormatError, match="became shorter while it was read; got 5000 bytes") as error:
        backend().pack(opened.matrix("blk.1.ffn_down.weight"))
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("pre", "said", "bos", "add_bos"),
    [("llama-bpe", None, 5, True), ("llama-bpe", False, 5, False), ("llama-bpe", None, None, False),
     ("qwen2", None, 5, False), ("qwen2", True, 5, True)],
)  # fmt: skip
def test_llama_3_files_get_a_bos_without_saying_so(
    tmp_path: Path, pre: str, said: bool | None, bos: int | None, add_bos: bool
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([f"t{i}" for i in range(320)])
        if said is not None:
            writer.add_add_bos_token(said)
        if bos is not None:
            writer.add_bos_token_id(bos)

    data = load(written(tmp_path / "w.gguf", add)).tokenizer
    assert data is not None
    assert data.add_bos is add_bos


def test_a_tokenizer_that_ends_prompts_is_refused(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{i}" for i in range(320)])
        writer.add_add_eos_token(True)

    with pytest.raises(UnsupportedError, match=r"w\.gguf: tokenizer\.ggml\.add_eos_token; got True"):
        load(written(tmp_path / "w.gguf", add))


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a"] * 319)

    with pytest.raises(ModelFormatError, match=r"tokenizer\.ggml\.tokens; got 319"):
        load(written(tmp_path / "w.gguf", add))

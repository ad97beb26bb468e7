"""Folders that transformers saved, and the same architectures as GGUF: logits, greedy ids and token ids
equal those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quickdraft.engine.llm import LLM
from quickdraft.models.loading.tokenizer_files import tokenizer_of_folder
from quickdraft.models.registry import load_model
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.select import select
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import SamplingParams
from tests.parity.test_llama import TOLERANCE, dequantised, our_logits, their_logits
from tests.support.tiny import write_tiny_llama
from tests.support.tiny_folder import put_json, tiny_tokenizer, write_tiny_folder

PROMPT = [int(i) for i in np.random.default_rng(1).integers(3, 320, 37)]
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def saved(folder: Path, kind: str, dtype: str = "float32", shard: str = "1GB", **changes: Any) -> Any:
    """A random model of transformers, saved to `folder` and read back in float32."""
    import torch
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512, "initializer_range": 0.2,
    }  # fmt: skip
    if kind == "qwen3":
        sizes["head_dim"] = 24
    torch.manual_seed(7)
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    config = getattr(transformers, f"{name}Config")(**sizes, **changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases start as zeros, norms as ones
            parameter.data += torch.randn_like(parameter) * 0.3
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shard)
    put_json(folder / "tokenizer.json", tiny_tokenizer())
    # read again: turning the model itself into float32 would leave rope's frequencies rounded
    return type(model).from_pretrained(folder, dtype=torch.float32)


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "shard"), [("float32", "1GB"), ("float32", "40KB"), ("float16", "1GB"), ("bfloat16", "40KB")]
)
def test_a_saved_folder_equals_transformers(tmp_path: Path, kind: str, dtype: str, shard: str) -> None:
    model = saved(tmp_path, kind, dtype, shard)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (shard == "1GB")
    theirs = logits_of(model, PROMPT)
    assert np.ptp(theirs) > 3  # or the tolerance would mean little
    for ops in (ReferenceOps(), select(2)):
        assert np.abs(our_logits(tmp_path, PROMPT, ops) - theirs).max() < TOLERANCE["tiny"]
    loaded = load_model(tmp_path, ReferenceOps(), max_rows=1, max_wanted=1)
    assert [path.name for path in loaded.files] == ["config.json", *files]
    assert loaded.kv_dtype == ("float32" if dtype == "float32" else "float16")
    ops = ReferenceOps("sixteen")
    load_model(tmp_path, ops, max_rows=1, max_wanted=1)
    assert ops.activations == ("bfloat16" if dtype == "bfloat16" else "float16")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_greedy_ids_equal_transformers(tmp_path: Path, kind: str) -> None:
    import torch

    model = saved(tmp_path, kind, eos_token_id=None, bos_token_id=None)
    theirs = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40)[0, len(PROMPT) :]
    llm = LLM(tmp_path, threads=2, kv_memory_bytes=1 << 22)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    assert list(llm.generate(PROMPT, params).ids) == theirs.tolist()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_theta": 5000.0, **LLAMA3_ROPE}}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    ],
)
def test_options_of_config_json_equal_transformers(tmp_path: Path, kind: str, changes: Any) -> None:
    model = saved(tmp_path, kind, **changes)
    ids = PROMPT * 3
    ours = our_logits(tmp_path, ids, ReferenceOps())
    assert np.abs(ours - logits_of(model, ids)).max() < TOLERANCE["tiny"]
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    older = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope if len(rope) > 1 else None}
    put_json(tmp_path / "config.json", {**config, **older})
    assert (our_logits(tmp_path, ids, ReferenceOps()) == ours).all()


@pytest.mark.parametrize("quantisation", ["F32", "Q8_0"])
@pytest.mark.parametrize(("kind", "head_dim"), [("qwen2", None), ("qwen3", 128)])
def test_gguf_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, head_dim: int | None, quantisation: str
) -> None:
    # transformers forgets a GGUF file's head size and takes qwen3's usual 128
    path = write_tiny_llama(
        tmp_path / "tiny.gguf", architecture=kind, head_dim=head_dim, quantisation=quantisation
    )
    dequantised(monkeypatch)
    theirs = their_logits(path, PROMPT)
    for ops in (ReferenceOps(), select(2)):
        assert np.abs(our_logits(path, PROMPT, ops) - theirs).max() < TOLERANCE["tiny"]


@pytest.mark.parametrize(("kind", "head_dim"), [("qwen2", None), ("qwen3", 24)])
def test_a_folder_and_a_gguf_of_one_model_give_the_same_bits(
    tmp_path: Path, kind: str, head_dim: int | None
) -> None:
    gguf = write_tiny_llama(tmp_path / "tiny.gguf", architecture=kind, head_dim=head_dim)
    folder = write_tiny_folder(tmp_path / "tiny", kind, shards=3)
    ops = select(2)
    assert our_logits(folder, PROMPT, ops).tobytes() == our_logits(gguf, PROMPT, ops).tobytes()


def test_settings_are_read_from_what_transformers_writes(tmp_path: Path) -> None:
    """tokenizer.json and its companions as transformers saves them, from the same tokenizer."""
    from transformers import PreTrainedTokenizerFast

    write_tiny_folder(tmp_path / "a")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "a")
    theirs.save_pretrained(tmp_path / "b")
    data = tokenizer_of_folder(tmp_path / "b", {"eos_token_id": 2}, 320)
    first = tokenizer_of_folder(tmp_path / "a", {"eos_token_id": 2}, 320)
    assert (data.tokens, data.token_types, data.eos_ids) == (first.tokens, first.token_types, first.eos_ids)
    assert (data.bos_id, data.add_bos, data.chat_template) == (1, False, first.chat_template)
    text = "The rain <tool_call> 123<|im_end|>"
    assert Tokenizer(data).encode(text, special=True) == theirs(text).input_ids

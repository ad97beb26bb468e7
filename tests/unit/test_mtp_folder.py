"""An MTP module's folder: its formula, its forms and formats, and everything that does not fit a target."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quickdraft.engine.llm import LLM
from quickdraft.errors import ConfigError, ModelFormatError, QuickdraftError
from quickdraft.models.loading.gguf import GGUFFile
from quickdraft.types import SamplingParams, Speculation
from tests.support.mtp import Scratch
from tests.support.mtp_folder import HEAD_DIM, HEADS, KV_HEADS, mtp_tensors, write_mtp_folder
from tests.support.tiny import write_tiny_llama
from tests.support.tiny_hybrid import write_tiny_hybrid

Tensors = dict[str, NDArray[np.float32]]
LAYER = "mtp.layers.0."
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama") / "tiny.gguf")


def rms(x: Any, weight: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def rotated(x: Any, positions: Any) -> Any:
    """Halves of each head turn against each other; x [T, heads, D]."""
    angles = positions[:, None] / 10000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def formula(
    w: Tensors, embedded: Any, hidden: Any, *, offset: int = 0, gate: bool = False, norms: bool = True
) -> Any:
    """y [T, C] of rows 1 .. T, from the embedded tokens there and the hidden states before them; float64."""

    def norm(x: Any, name: str) -> Any:
        return rms(x, offset + w[f"{name}.weight"].astype(np.float64))

    def linear(x: Any, name: str) -> Any:
        return x @ w[f"{LAYER}{name}.weight"].astype(np.float64).T

    count, positions = len(embedded), np.arange(1, len(embedded) + 1)
    joint = [norm(embedded, "mtp.pre_fc_norm_embedding"), norm(hidden, "mtp.pre_fc_norm_hidden")]
    x = np.concatenate(joint, axis=1) @ w["mtp.fc.weight"].astype(np.float64).T
    h = norm(x, f"{LAYER}input_layernorm")
    q = linear(h, "self_attn.q_proj").reshape(count, HEADS, -1)
    q, gates = q[..., :HEAD_DIM], q[..., HEAD_DIM:]
    k, v = (linear(h, f"self_attn.{part}_proj").reshape(count, KV_HEADS, HEAD_DIM) for part in "kv")
    if norms:
        q, k = norm(q, f"{LAYER}self_attn.q_norm"), norm(k, f"{LAYER}self_attn.k_norm")
    q, k = rotated(q, positions), rotated(k, positions)
    k, v = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(HEAD_DIM)
    scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)
    if gate:
        mixed = mixed / (1 + np.exp(-gates))
    x = x + linear(mixed.reshape(count, -1), "self_attn.o_proj")
    h = norm(x, f"{LAYER}post_attention_layernorm")
    up = linear(h, "mlp.gate_proj")
    x = x + linear(up / (1 + np.exp(-up)) * linear(h, "mlp.up_proj"), "mlp.down_proj")
    return norm(x, "mtp.norm")


def widened(tensors: Tensors) -> Tensors:
    """q_proj with a gate per head beside the query."""
    q = tensors[f"{LAYER}self_attn.q_proj.weight"].reshape(HEADS, HEAD_DIM, -1)
    both = np.concatenate([q, q[::-1]], axis=1).reshape(2 * HEADS * HEAD_DIM, -1)
    return tensors | {f"{LAYER}self_attn.q_proj.weight": both}


@pytest.mark.parametrize(
    ("tensors", "changes", "options"),
    [
        (mtp_tensors(), {}, {}),
        (mtp_tensors(head_norm=False), {"qk_norm": False}, {"norms": False}),
        (widened(mtp_tensors()), {"attention_gate": True, "norm_offset": 1}, {"gate": True, "offset": 1}),
    ],
    ids=["llama", "without head norms", "gate and shifted norms"],
)
def test_rows_are_those_of_the_formula(
    tmp_path: Path, target: Path, tensors: Tensors, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    folder = write_mtp_folder(tmp_path / "mtp", tensors=tensors, **changes)
    scratch, random = Scratch(target, "float32", folder), np.random.default_rng(3)
    tokens = random.integers(20, 300, 90).tolist()
    hidden = random.normal(0, 1, (90, 64)).astype(np.float32)
    embedding = GGUFFile(target).matrix("token_embd.weight").dequantised().astype(np.float64)
    expected = formula(tensors, embedding[tokens], hidden.astype(np.float64), **options)
    assert np.abs(scratch.run(tokens, 1, hidden) - expected).max() < TOLERANCE


def packed(tensors: Tensors, bits: int) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Linears as compressed-tensors packs them, in groups of 32, symmetric; and the config that says so."""
    result: dict[str, NDArray[Any]] = {}
    for name, values in tensors.items():
        if values.ndim == 1:
            result[name] = values
            continue
        groups = values.reshape(len(values), -1, 32)
        scales = (np.abs(groups).max(2) / (2 ** (bits - 1) - 1)).astype(np.float16)
        codes = np.rint(groups / scales[:, :, None].astype(np.float32)).astype(np.int64) + 2 ** (bits - 1)
        codes = codes.reshape(len(values), -1, 32 // bits) << np.arange(0, 32, bits)
        module = name.removesuffix(".weight")
        result[f"{module}.weight_packed"] = codes.sum(2).astype(np.uint32).view(np.int32)
        result[f"{module}.weight_scale"] = scales
        result[f"{module}.weight_shape"] = np.array(values.shape, np.int64)
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups_of = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups_of}
    return result, config


def multiple_of_32(tensors: Tensors) -> Tensors:
    """A feed-forward width of whole groups."""
    return {
        name: np.ascontiguousarray(v[:, :64] if "down" in name else v[:64] if "mlp" in name else v)
        for name, v in tensors.items()
    }


@pytest.mark.parametrize("form", ["BF16", "F16", "int8", "int4"])
def test_formats(tmp_path: Path, target: Path, form: str) -> None:
    tensors = multiple_of_32(mtp_tensors())
    if form.startswith("int"):
        values, config = packed(tensors, int(form[3:]))
        folder = write_mtp_folder(
            tmp_path / "m", tensors=values, dtype=None, intermediate_size=64, quantization_config=config
        )
    else:
        folder = write_mtp_folder(tmp_path / "m", tensors=tensors, dtype=form, intermediate_size=64)
    exact = write_mtp_folder(tmp_path / "exact", tensors=tensors, intermediate_size=64)
    random = np.random.default_rng(3)
    tokens, hidden = random.integers(20, 300, 40).tolist(), random.normal(0, 1, (40, 64)).astype(np.float32)
    found, expected = (Scratch(target, "float32", one).run(tokens, 1, hidden) for one in (folder, exact))
    off = float(np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()))
    limit = {"BF16": 0.02, "F16": 0.003, "int8": 0.03, "int4": 0.5}[form]
    assert limit / 100 < off < limit


def without(name: str) -> Callable[[Path], Path]:
    return lambda folder: write_mtp_folder(
        folder, tensors={key: values for key, values in mtp_tensors().items() if key != name}
    )


def changed(**changes: Any) -> Callable[[Path], Path]:
    return lambda folder: write_mtp_folder(folder, **changes)


def more(folder: Path) -> Path:
    return write_mtp_folder(folder, tensors=mtp_tensors() | {"mtp.layers.1.x.weight": np.ones((2, 2))})


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (changed(hidden_size=128), "hidden_size; got 128; expected 64, as the target has"),
        (changed(vocab_size=321), "vocab_size; got 321; expected 320, as the target has"),
        (changed(num_attention_heads=8), "num_attention_heads; got 8"),
        (changed(num_key_value_heads=4), "num_key_value_heads; got 4"),
        (changed(head_dim=24), "head_dim; got 24"),
        (changed(head_dim=None), "head_dim; got nothing"),
        (changed(num_hidden_layers=2), "num_hidden_layers; got 2; expected 1"),
        (changed(rope_theta=5e5), "rope_theta; got 500000.0; expected 10000.0"),
        (changed(norm_offset=2), "norm_offset; got 2; expected 0 or 1"),
        (changed(attention_gate=True), "q_proj.weight has a wrong shape"),
        (changed(qk_norm=False), "tensors nobody uses; got mtp.layers.0.self_attn.k_norm.weight"),
        (changed(architectures=["OtherMTP"]), "architectures; got ['OtherMTP']"),
        (changed(clip=3), "a key that is not understood; got 'clip'"),
        (changed(target_sha256="0" * 64), "this drafter was made for another target"),
        (changed(target_sha256="abc"), "target_sha256; got 'abc'; expected 64 hex digits"),
        (without("mtp.fc.weight"), "tensor mtp.fc.weight is missing"),
        (without(f"{LAYER}self_attn.q_norm.weight"), "self_attn.q_norm.weight is missing"),
        (more, "tensors nobody uses; got mtp.layers.1.x.weight"),
    ],
)
def test_what_does_not_fit_is_named_at_load(
    tmp_path: Path, target: Path, write: Callable[[Path], Path], named: str
) -> None:
    folder = write(tmp_path / "mtp")
    with pytest.raises(QuickdraftError, match=re.escape(str(folder))) as error:
        LLM(target, threads=1, drafters=[folder])
    assert named in str(error.value)


def test_a_folder_for_this_target_by_its_digest_and_its_own_vocabulary(tmp_path: Path, target: Path) -> None:
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    folder = write_mtp_folder(tmp_path / "mtp", target_sha256=digest, training={"steps": 3})
    own = folder / "draft_vocab.json"
    text = '{"schema": "quickdraft-draft-vocab-1", "vocabulary_size": %d, "ids": [%s], "coverage": 1, '
    text += '"counted_tokens": 0}'
    own.write_text(text % (320, "2, 30, 31"))
    llm = LLM(target, threads=1, drafters=[folder])
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, speculation=Speculation.parse("mtp"))
    found = llm.generate([30, 31], params)
    assert "mtp drafts among 3 of 320 ids, 100.0% of 0 tokens counted" in llm.notes
    assert found.timings.drafted["mtp"] > 0 and found.timings.accepted["mtp"] < 20
    llm.close()
    own.write_text(text % (321, "2"))
    with pytest.raises(ModelFormatError, match=re.escape(str(own))):
        LLM(target, threads=1, drafters=[folder])


def test_what_cannot_have_one_says_so(tmp_path: Path, target: Path) -> None:
    folder, hybrid = write_mtp_folder(tmp_path / "mtp"), write_tiny_hybrid(tmp_path / "hybrid")
    with pytest.raises(QuickdraftError, match=rf"an MTP drafter folder for {re.escape(str(hybrid))};"):
        LLM(hybrid, threads=1, drafters=[folder])
    other = write_mtp_folder(tmp_path / "other")
    with pytest.raises(ConfigError, match="2 drafters of source 'mtp'"):
        LLM(target, threads=1, drafters=[folder, other])
    with pytest.raises(ConfigError, match="no MTP module whose head it would limit"):
        LLM(target, threads=1, drafters=[], draft_vocab=tmp_path / "vocab.json")

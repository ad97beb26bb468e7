"""Drafter folders: what may be in them gives the values it says, what is wrong with them is named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.dflash_config import DFlashConfig
from quickdraft.models.dflash_loading import load_dflash
from quickdraft.models.draft_vocab import DraftVocab
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.select import select
from quickdraft.ops.weights import values_of
from tests.support.dflash import DrafterSteps, drafter_config, drafter_tensors, target_of, write_drafter
from tests.support.golden import TARGET
from tests.support.model_steps import ModelSteps
from tests.support.quant_folder import FORMATS, quantised_linear

Tensors = dict[str, Any]
EVERY, SOME = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
VOCAB = DraftVocab(np.array([0, 2, 5, 8, *range(20, 70)]), 0.9, 101, 1000)


@pytest.fixture(scope="module")
def target() -> ModelSteps:
    return ModelSteps(TARGET, select(2))


def drafted(folder: Path, target: ModelSteps) -> list[Any]:
    """y of a block over 40 random context rows, then the candidates of its rows and their scores."""
    drafter = DrafterSteps.load(folder, target.loaded, select(2))
    drafter.append(np.random.default_rng(2).standard_normal((40, 192)).astype(np.float32))
    (hidden,) = drafter.block([3], [8])
    candidates = drafter.module.candidates(7)
    found = [candidates.scores(row, 3 + row) for row in range(7)]
    return [hidden, np.stack([ids for ids, _ in found]), np.stack([scores for _, scores in found])]


def assert_same(got: list[Any], expected: list[Any]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(("version", "layers", "count"), [(2, 5, 81), (1, 5, 58)])
def test_the_published_layout(version: int, layers: int, count: int, tmp_path: Path, target: Any) -> None:
    config = drafter_config(version, num_hidden_layers=layers, layer_types=None)
    folder = write_drafter(tmp_path / "d", config)
    assert len(load_file(folder / "model.safetensors")) == count
    plain = drafted(folder, target)
    named = {f"model.{name}": values for name, values in drafter_tensors(config).items()}
    assert_same(drafted(write_drafter(tmp_path / "named", config, named), target), plain)


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bits(kind: Any, tmp_path: Path, target: ModelSteps) -> None:
    config = drafter_config()
    short = {name: values.astype(kind) for name, values in drafter_tensors(config).items()}
    wide = {name: values.astype(np.float32) for name, values in short.items()}
    expected = drafted(write_drafter(tmp_path / "wide", config, wide), target)
    assert_same(drafted(write_drafter(tmp_path / "short", config, short), target), expected)


class KeepingOps(ReferenceOps):
    """Remembers the values of what was packed."""

    def __init__(self) -> None:
        self.packed: list[Any] = []

    def pack(self, weight: Any) -> Any:
        self.packed.append(values_of(weight).dequantised())
        return super().pack(weight)


@pytest.mark.parametrize("name", ["compressed-tensors", "compressed-tensors 8 bits", "gptq asymmetric"])
def test_quantised_linears_are_their_values(name: str, tmp_path: Path, target: ModelSteps) -> None:
    """As the published W4A16 file: q, k, v, o, gate, up, down and fc; everything else in bfloat16."""
    form, config = FORMATS[name], drafter_config()
    parts: Tensors = {}
    plain: Tensors = {}
    for seed, (tensor, values) in enumerate(drafter_tensors(config).items()):
        if "_proj." in tensor or tensor == "fc.weight":
            found, plain[tensor] = quantised_linear(form, *values.shape, seed)
            parts |= {f"{tensor.removesuffix('.weight')}.{suffix}": part for suffix, part in found.items()}
        else:
            parts[tensor] = plain[tensor] = values.astype(ml_dtypes.bfloat16)
    plain = {tensor: values.astype(np.float32) for tensor, values in plain.items()}
    quantised = {**config, "quantization_config": form.config()}
    folders = write_drafter(tmp_path / "q", quantised, parts), write_drafter(tmp_path / "p", config, plain)
    got, expected = KeepingOps(), KeepingOps()
    for folder, ops in zip(folders, (got, expected), strict=True):
        load_dflash(folder, target_of(target.loaded), ops)
    assert len(got.packed) == 1 + 2 * 7 + 1
    for one, other in zip(got.packed, expected.packed, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.isfinite(drafted(folders[0], target)[0]).all()


def eight_bits(tensors: Tensors, *names: str) -> Tensors:
    """The codebooks `names` in int8 with a scale per row."""
    changed = dict(tensors)
    for name in names:
        scales = (np.abs(tensors[name]).max(axis=1) / 127).astype(np.float16)
        codes = np.clip(np.rint(tensors[name] / scales.astype(np.float32)[:, None]), -127, 127)
        changed |= {name: codes.astype(np.int8), f"{name}_scale": scales}
    return changed


def test_codebooks_in_eight_bits(tmp_path: Path, target: ModelSteps) -> None:
    config = drafter_config()
    small = eight_bits(drafter_tensors(config), EVERY, SOME)
    wide = {name: values for name, values in small.items() if not name.endswith("_scale")}
    for name in (EVERY, SOME):
        wide[name] = small[name].astype(np.float32) * small[f"{name}_scale"].astype(np.float32)[:, None]
    folder = write_drafter(tmp_path / "small", config, small)
    assert_same(drafted(folder, target), drafted(write_drafter(tmp_path / "wide", config, wide), target))
    module = load_dflash(folder, target_of(target.loaded), select(2))
    selector = module._weights.selector
    assert (
        selector is not None and selector.predecessor.codes.dtype == selector.successor.codes.dtype == np.int8
    )


def test_a_row_for_the_mask(tmp_path: Path, target: ModelSteps) -> None:
    config, weights = drafter_config(), load_file(TARGET / "model.safetensors")
    own = weights["model.language_model.embed_tokens.weight"][5]
    tensors = drafter_tensors(config)
    plain = drafted(write_drafter(tmp_path / "plain", config, tensors), target)
    same = write_drafter(tmp_path / "same", config, {**tensors, "mask_embedding": own})
    assert_same(drafted(same, target), plain)
    other = write_drafter(tmp_path / "other", config, {**tensors, "mask_embedding": -own})
    assert drafted(other, target)[0].tobytes() != plain[0].tobytes()


@pytest.mark.parametrize("version", [1, 2])
def test_a_draft_vocabulary_limits_the_candidates(version: int, tmp_path: Path, target: ModelSteps) -> None:
    """Hidden states stay; candidates are the best of its ids, with the scores of the whole head. A successor
    codebook of its rows alone says the same."""
    config = drafter_config(version)
    tensors = drafter_tensors(config)
    write_drafter(tmp_path / "whole", config, tensors)
    folders = [write_drafter(tmp_path / "limited", config, tensors)]
    if version == 2:
        rows = {**tensors, SOME: tensors[SOME][VOCAB.ids]}
        folders.append(write_drafter(tmp_path / "rows", config, rows))
        folders.append(write_drafter(tmp_path / "small", config, eight_bits(rows, SOME)))
    for folder in folders:
        VOCAB.save(folder / "draft_vocab.json")
    results = [drafted(folder, target) for folder in folders]
    hidden, ids, scores = results[0]
    for other in results[1:2]:
        assert_same(other, results[0])
    for other in results[2:]:
        np.testing.assert_allclose(other[2], scores, atol=0.1)
    assert set(ids.ravel().tolist()) <= set(VOCAB.ids.tolist()) and ids.shape == (7, 16)
    assert hidden.tobytes() == drafted(tmp_path / "whole", target)[0].tobytes()
    logits = hidden[1:] @ load_file(TARGET / "model.safetensors")["lm_head.weight"].T
    for row in range(7):
        best = VOCAB.ids[np.argsort(-logits[row, VOCAB.ids], kind="stable")[:16]]
        assert ids[row].tolist() == sorted(best.tolist())


def test_a_block_is_as_long_as_it_has_to_be(target: ModelSteps) -> None:
    config = target.loaded.model.config
    trained = DFlashConfig.read(drafter_config(dflash_config={"block_lengths": [4, 6, 8]}), config, "d")
    assert [trained.rows_for(drafts) for drafts in (1, 3, 4, 5, 6, 7, 9)] == [4, 4, 6, 6, 8, 8, 8]
    assert DFlashConfig.read(drafter_config(), config, "d").rows_for(1) == 8


@pytest.mark.parametrize("digest", ["a" * 64, "b" * 64, None])
def test_a_drafter_of_one_file(digest: str | None, tmp_path: Path, target: ModelSteps) -> None:
    folder = write_drafter(tmp_path / "d", drafter_config(target_sha256="a" * 64))
    found = target_of(target.loaded)
    if digest is not None:
        found = dataclasses.replace(found, sha256=lambda: digest)
    if digest == "a" * 64:
        assert load_dflash(folder, found, select(2)).config.target_sha256 == digest
        return
    with pytest.raises(ModelFormatError, match=r"target_sha256 is not .* expected a{64}.*another model"):
        load_dflash(folder, found, select(2))


Case = tuple[int, Callable[[dict[str, Any], Tensors], object], str]


def inner(**changes: Any) -> Callable[[dict[str, Any], Tensors], object]:
    return lambda config, _: config.update(drafter_config(2, dflash_config=changes))


def outer(**changes: Any) -> Callable[[dict[str, Any], Tensors], object]:
    return lambda config, _: config.update(changes)


def put(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any], Tensors], object]:
    return lambda _, tensors: tensors.update({name: change(tensors[name])})


def drop(name: str) -> Callable[[dict[str, Any], Tensors], object]:
    return lambda _, tensors: tensors.pop(name)


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
WRONG: dict[str, Case] = {
    "another architecture": (2, outer(architectures=["Qwen3ForCausalLM"]), "architectures; got"),
    "another width": (2, outer(hidden_size=128), "hidden_size is not the target's; got 128; expected 64"),
    "another vocabulary": (2, outer(vocab_size=100), "vocab_size is not the target's; got 100; expected 101"),
    "another number of layers": (2, outer(num_target_layers=64), "num_target_layers; got 64; expected 8"),
    "a mask beyond the vocabulary": (2, inner(mask_token_id=101), "mask_token_id; got 101; expected 0..100"),
    "a mask below 0": (2, inner(mask_token_id=-1), "mask_token_id; got -1"),
    "no mask": (2, inner(mask_token_id=None), "mask_token_id; got nothing"),
    "a tap after no layer": (2, inner(target_layer_ids=[1, 3, 8]), "target_layer_ids; got 8; expected 0..7"),
    "taps are text": (2, inner(target_layer_ids="1,3"), "target_layer_ids; got '1,3'"),
    "other taps than fc has": (2, inner(target_layer_ids=[1, 3]), "fc.weight has a wrong shape"),
    "no inner config": (2, outer(dflash_config=None), "dflash_config; got None"),
    "an unknown key": (2, outer(attention_sinks=4), "not understood; got 'attention_sinks'"),
    "an unknown inner key": (2, inner(markov_order=2), "dflash_config: a key that is not understood"),
    "a vocabulary by d2t": (2, outer(draft_vocab_size=50), "not understood; got 'draft_vocab_size'"),
    "slots that look ahead": (2, inner(sample_from_anchor=True), "sample_from_anchor; got True"),
    "sinks": (2, inner(attention_sink_bias=True), "attention_sink_bias; got True"),
    "a bias": (2, outer(attention_bias=True), "attention_bias; got True"),
    "another activation": (2, outer(hidden_act="gelu"), "hidden_act; got 'gelu'"),
    "yarn": (2, outer(rope_parameters={"rope_type": "yarn"}), "rope_type; got 'yarn'"),
    "half a rope": (2, outer(rope_parameters={"rope_type": "default"}), "rope_theta; got nothing"),
    "two thetas": (2, outer(rope_theta=5.0), "rope_theta; got [5.0, 10000.0]"),
    "a rope key": (2, outer(rope_parameters={**ROPE, "factor": 2}), "got 'factor'"),
    "two block sizes": (2, outer(block_size=16), "block_size is stated twice, differently; got [8, 16]"),
    "lengths that fall": (2, inner(block_lengths=[6, 4, 8]), "block_lengths; got [6, 4, 8]"),
    "lengths without the block": (2, inner(block_lengths=[4, 6]), "block_lengths; got [4, 6]"),
    "a block of one": (2, inner(block_size=1), "block_size; got 1"),
    "three taps": (2, inner(conv_kernel_size=3), "conv_kernel_size; got 3; expected 2"),
    "groups that do not divide": (2, inner(conv_group_size=10), "conv_group_size; got 10"),
    "no rank": (2, inner(selector_rank=None), "selector_rank; got nothing"),
    "too many candidates": (2, inner(selector_top_k=33), "selector_top_k; got 33"),
    "a window below the block": (2, outer(sliding_window=7), "sliding_window; got 7"),
    "no window": (2, outer(sliding_window=None), "sliding_window; got None"),
    "windows turned off": (2, outer(use_sliding_window=False), "use_sliding_window is false"),
    "unknown layers": (2, outer(layer_types=["chunked_attention"] * 2), "layer_types; got"),
    "too few layer types": (2, outer(layer_types=["full_attention"]), "layer_types; got"),
    "odd heads": (2, outer(num_key_value_heads=4), "query heads that key heads cannot share"),
    "a digest that is none": (2, outer(target_sha256="abc"), "target_sha256; got 'abc'; expected 64"),
    "no selector": (2, drop(EVERY), "predecessor_codebook is missing"),
    "half a selector": (2, drop(SOME), "successor_codebook is missing"),
    "no projection": (
        2, drop("candidate_selector.hidden_projection.weight"), "hidden_projection.weight is missing"),
    "no convolution": (2, drop("layers.1.mlp_conv.base_kernel"), "layers.1.mlp_conv.base_kernel is missing"),
    "no layer": (2, drop("layers.1.self_attn.q_proj.weight"), "layers.1.self_attn.q_proj.weight is missing"),
    "a layer too many": (1, outer(num_hidden_layers=1, layer_types=None), "nobody uses; got layers.1.input"),
    "a selector in version 1": (
        1, lambda _, t: t.update(drafter_tensors(drafter_config())), "tensors nobody uses; got candidate_"),
    "an embedding": (
        2, lambda _, t: t.update({"embed_tokens.weight": t[EVERY]}), "nobody uses; got embed_tokens.weight"),
    "a codebook for fewer tokens": (2, put(SOME, lambda t: t[:50]), "got (50, 24); expected (101, 24)"),
    "a codebook of another rank": (2, put(EVERY, lambda t: t[:, :8]), "got (101, 8); expected (101, 24)"),
    "codes without scales": (2, put(EVERY, lambda t: t.astype(np.int8)), "predecessor_codebook_scale is mi"),
    "scales of 32 bits": (
        2, lambda _, t: t.update(eight_bits(t, EVERY) | {f"{EVERY}_scale": np.ones(101, np.float32)}),
        "predecessor_codebook_scale; got F32; expected F16"),
    "codes of 16 bits": (2, put(EVERY, lambda t: t.astype(np.int16)), "predecessor_codebook has a type"),
    "a mask row too long": (
        2, lambda _, t: t.update({"mask_embedding": np.ones(65, np.float32)}), "mask_embedding has a wrong"),
    "not finite": (2, put("norm.weight", lambda t: t * np.float32(np.nan)), "norm.weight holds values"),
    "integers for a matrix": (2, put("fc.weight", lambda t: t.astype(np.int32)), "fc.weight"),
    "twice": (
        2, lambda _, t: t.update({"model.norm.weight": t["norm.weight"]}), "norm.weight is there under"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str, tmp_path: Path, target: ModelSteps) -> None:
    version, change, cause = WRONG[case]
    config = drafter_config(version)
    tensors = drafter_tensors(config)
    change(config, tensors)
    folder = write_drafter(tmp_path / "d", config, tensors)
    with pytest.raises((ModelFormatError, UnsupportedError)) as error:
        load_dflash(folder, target_of(target.loaded), select(1))
    message = str(error.value)
    assert message.startswith(str(folder)) and cause in message, message


def test_a_vocabulary_of_another_model_or_too_small(tmp_path: Path, target: ModelSteps) -> None:
    folder = write_drafter(tmp_path / "d", drafter_config())
    for vocab, cause in (
        (DraftVocab(np.arange(20), 0.5, 100), "vocabulary_size; got 100; expected 101"),
        (DraftVocab(np.arange(15), 0.5, 101), "ids; got 15 tokens; expected at least 16"),
    ):
        vocab.save(folder / "draft_vocab.json")
        with pytest.raises(ModelFormatError, match=cause):
            load_dflash(folder, target_of(target.loaded), select(1))


def test_files_that_are_not_there(tmp_path: Path, target: ModelSteps) -> None:
    for name in ("model.safetensors", "config.json"):
        folder = write_drafter(tmp_path / name, drafter_config())
        (folder / name).unlink()
        with pytest.raises(ModelFormatError, match=f"{name}: cannot be read"):
            load_dflash(folder, target_of(target.loaded), select(1))


@pytest.mark.parametrize(
    ("changes", "layers"),
    [({"num_hidden_layers": 1}, (4,)), ({"num_hidden_layers": 3}, (1, 3, 5)), ({}, (1, 5))],
)
def test_what_is_left_out_follows_the_rules(
    changes: Any, layers: tuple[int, ...], tmp_path: Path, target: ModelSteps
) -> None:
    """Taps by number of layers, 16 rows, full attention that is not causal."""
    config = drafter_config(1, layer_types=None, sliding_window=None, **changes)
    config["dflash_config"] = {"target_layer_ids": list(layers)}
    tensors = drafter_tensors(config)
    config |= {"dflash_config": {}, "mask_token_id": 7}
    folder = write_drafter(tmp_path / "d", config, tensors)
    found = load_dflash(folder, target_of(target.loaded), select(1)).config
    count = config["num_hidden_layers"]
    assert (found.block, found.mask_id, found.target_layers) == (16, 7, layers)
    assert found.causal == (False,) * count and found.window == (None,) * count
    assert json.loads((folder / "config.json").read_text())["dflash_config"] == {}

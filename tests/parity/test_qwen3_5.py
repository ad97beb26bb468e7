"""The hybrid model: golden values of transformers, whole tiny models of transformers, and rows in bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quickdraft.engine.llm import LLM
from quickdraft.models.interface import Taps
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.select import select
from quickdraft.types import SamplingParams, Speculation
from tests.support.golden import TARGET, TOLERANCE, expected, expected_tensors
from tests.support.model_steps import ModelSteps

PROMPT: list[int] = expected()["prompt"]
GREEDY: list[int] = expected()["greedy_64"]
ALL_TAPS = Taps(layers=(1, 3, 5), hidden=True)


@pytest.mark.parametrize("cuts", [[75], [1, 2, 7, 16, 33, 16]], ids=["at once", "in pieces"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_golden_values(backend: str, cuts: list[int]) -> None:
    steps = ModelSteps(TARGET, ReferenceOps() if backend == "reference" else select(2), ALL_TAPS)
    golden = expected_tensors()
    first = 0
    for count in cuts:
        logits = steps.step(PROMPT[first : first + count])
        rows = slice(first, first + count)
        found = {f"layer{n}_out": steps.model.taps[n] for n in ALL_TAPS.layers}
        found["final_hidden_normed"] = steps.model.hidden
        for name, values in (*found.items(), ("prompt_logits", logits)):
            np.testing.assert_allclose(values[:count], golden[name][rows], atol=TOLERANCE, err_msg=name)
        first += count
    assert first == len(PROMPT)


def test_taps_change_no_bit() -> None:
    plain, tapped = ModelSteps(TARGET, select(2)), ModelSteps(TARGET, select(2), ALL_TAPS)
    assert plain.step(PROMPT).tobytes() == tapped.step(PROMPT).tobytes()
    assert not plain.model.taps and plain.model.hidden is None


@pytest.mark.parametrize("speculation", ["off", "lookup"])
def test_golden_greedy_ids(speculation: str) -> None:
    llm = LLM(TARGET, threads=2, kv_dtype="float32", kv_memory_bytes=1 << 22)
    spec = Speculation.parse(speculation)
    go_on = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, speculation=spec)
    assert list(llm.generate(PROMPT, go_on).ids) == GREEDY
    stopping = SamplingParams(temperature=0.0, max_tokens=64, speculation=spec)
    found = llm.generate(PROMPT, stopping)  # eos_token_id 0, though there is no tokenizer
    assert list(found.ids) == GREEDY[: GREEDY.index(0) + 1]
    assert found.finish_reason == "stop"


@pytest.mark.parametrize("kept", range(16))
def test_a_verify_block_keeps_any_number_of_drafts(kept: int) -> None:
    """Logits and state, in bits: 15 drafts of which `kept` hold, then a replay, against plain decoding."""
    ops = select(2)
    plain, drafting = ModelSteps(TARGET, ops), ModelSteps(TARGET, ops)
    drafts = [*GREEDY[1 : 1 + kept], *((token + 1) % 101 for token in GREEDY[1 + kept : 16])]
    for steps in (plain, drafting):
        steps.step(PROMPT)
    rows = drafting.step([GREEDY[0], *drafts], drafted=15)
    one_by_one = [plain.step([token]) for token in GREEDY[: 1 + kept]]
    assert rows[: 1 + kept].tobytes() == np.concatenate(one_by_one).tobytes()
    after = GREEDY[1 + kept : 4 + kept]
    got = drafting.step(after, replay=kept, drafted=2)
    drafting.state.settle(0, 2)
    assert got.tobytes() == np.concatenate([plain.step([token]) for token in after]).tobytes()
    assert drafting.state_bytes() == plain.state_bytes()


def saved(folder: Path, dtype: str, nested: bool = False, **changes: Any) -> Any:
    """A random model of transformers, saved to `folder` and read back in float32."""
    import torch
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 6,
        "num_key_value_heads": 1, "head_dim": 256, "linear_num_key_heads": 1, "linear_num_value_heads": 3,
        "linear_key_head_dim": 24, "linear_value_head_dim": 40, "vocab_size": 130,
        "max_position_embeddings": 512, "initializer_range": 0.15, **changes,
    }  # fmt: skip
    torch.manual_seed(7)
    if nested:
        vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
        config = transformers.Qwen3_5Config(text_config=sizes, vision_config=vision)
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    else:
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes))
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms start as zeros or ones
            parameter.data += torch.randn_like(parameter) * 0.3
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("dtype", "nested", "changes"),
    [
        ("float32", False, {}),
        ("bfloat16", False, {"tie_word_embeddings": True, "linear_key_head_dim": 128}),
        ("float32", True, {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}),
    ],
    ids=["text only", "bfloat16, tied", "nested"],
)
def test_tiny_models_equal_transformers(
    tmp_path: Path, backend: str, dtype: str, nested: bool, changes: dict[str, Any]
) -> None:
    import torch

    model = saved(tmp_path, dtype, nested, **changes)
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 130, 70)]
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    assert np.ptp(theirs) > 3  # or the tolerance would mean little
    steps = ModelSteps(tmp_path, ReferenceOps() if backend == "reference" else select(2))
    ours = np.concatenate([steps.step(ids[:40]), steps.step(ids[40:])])
    assert np.abs(ours - theirs).max() < TOLERANCE

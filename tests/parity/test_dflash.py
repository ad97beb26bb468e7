"""DFlash and DFlash2: golden blocks, the published package on random weights, and rows in bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quickdraft.models.interface import Taps
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.select import select
from tests.support.dflash import DrafterSteps, drafter_config, write_drafter
from tests.support.golden import FOLDER, TARGET, TOLERANCE, expected, expected_tensors
from tests.support.model_steps import ModelSteps

TAPS = Taps(layers=(1, 3, 5))
GOLDEN = expected()
TEXT: list[int] = [*GOLDEN["prompt"], *GOLDEN["greedy_64"]]


def features_of(steps: ModelSteps, tokens: list[int]) -> Any:
    """The target's taps [n, 3 C] of further tokens."""
    steps.step(tokens)
    return np.concatenate([steps.model.taps[layer][: len(tokens)] for layer in TAPS.layers], axis=1)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["dflash1", "dflash2"])
def test_golden_blocks(name: str, backend: str) -> None:
    ops = ReferenceOps() if backend == "reference" else select(2)
    target = ModelSteps(TARGET, ops, TAPS)
    drafter = DrafterSteps.load(FOLDER / name, target.loaded, ops)
    tensors, done = expected_tensors(), 0
    for index, block in enumerate(GOLDEN[name]):
        drafter.append(features_of(target, TEXT[done : block["context"]]))
        done = block["context"]
        rows = drafter.module.config.block
        (hidden,) = drafter.block([block["anchor"]], [rows])
        np.testing.assert_allclose(hidden, tensors[f"{name}_block{index}_hidden"], atol=TOLERANCE)
        candidates = drafter.module.candidates(rows - 1)
        assert [
            int(ids[best.argmax()]) for ids, best in zip(candidates.ids, candidates.logits, strict=True)
        ] == (block["argmax"])
        assert drafter.path(block["anchor"], rows - 1) == block.get("path", block["argmax"])
    assert done == 85


def random_features(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, 3 * 64)).astype(np.float32)


@pytest.fixture(scope="module")
def target() -> ModelSteps:
    return ModelSteps(TARGET, select(2), TAPS)


CONFIGS: dict[str, dict[str, Any]] = {
    "v2": {},
    "v2 causal": {"is_causal": True},
    "v2 full": {"layer_types": None, "sliding_window": None},
    "v2 multipliers": {
        "dflash_config": {
            "output_multiplier": 2.5, "input_embedding_scale": 0.25, "final_logit_softcapping": 3.0,
        },
    },
    "v1": {"version": 1},
    "v1 of one row kind": {"version": 1, "layer_types": ["sliding_attention"] * 2},
    "v1 long blocks": {"version": 1, "dflash_config": {"block_size": 16}, "sliding_window": 16},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_equal_the_published_package(name: str, tmp_path: Path, target: ModelSteps) -> None:
    """Four blocks with partial acceptance, lengths beyond the window, on random weights."""
    config = drafter_config(**CONFIGS[name])
    folder = write_drafter(tmp_path / "drafter", config)
    theirs = Published(folder, config, target)
    ours = DrafterSteps.load(folder, target.loaded, select(2))
    block = ours.module.config.block
    runs = ((50, block, 3), (3, block, 77), (1, 4, 12), (8, block, 100))
    for seed, (kept, rows, anchor) in enumerate(runs):
        features = random_features(kept, seed)
        ours.append(features)
        hidden, tokens = theirs.block(features, anchor, rows)
        (got,) = ours.block([anchor], [rows])
        np.testing.assert_allclose(got[1:], hidden, atol=2e-4)
        assert ours.path(anchor, rows - 1) == tokens


class Published:
    """dflash 0.1.0 over the same folder and the target's embedding and head."""

    def __init__(self, folder: Path, config: dict[str, Any], target: ModelSteps) -> None:
        import torch
        from dflash.model import DFlash2DraftModel, DFlashDraftModel
        from safetensors.torch import load_file
        from transformers import DynamicCache, Qwen3Config

        values = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
        settings = Qwen3Config(**values, use_sliding_window="sliding_window" in values)
        settings._attn_implementation = "sdpa"
        version_2 = "DFlash2" in config["architectures"][0]
        self.model = (DFlash2DraftModel if version_2 else DFlashDraftModel)(settings).eval()
        weights = {
            f"{name}.weight" if name.endswith("codebook") else name: tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self.model.load_state_dict(weights)
        target_weights = load_file(TARGET / "model.safetensors")
        self._embedding = target_weights["model.language_model.embed_tokens.weight"]
        self._head = torch.nn.Linear(64, 101, bias=False)
        self._head.weight.data = target_weights["lm_head.weight"]
        self._cache = DynamicCache(config=settings)
        self._cache.activate_past_recording()
        self._done, self._scale = 0, config["dflash_config"].get("input_embedding_scale", 1.0)

    def block(self, features: Any, anchor: int, rows: int) -> tuple[Any, list[int]]:
        """Append context and run a block: (y of its masks, greedy tokens)."""
        import torch

        start, end = self._done, self._done + len(features)
        ids = torch.tensor([[anchor] + [5] * (rows - 1)])
        with torch.inference_mode():
            hidden = self.model(
                target_hidden=torch.from_numpy(features)[None],
                noise_embedding=self._embedding[ids] * self._scale,
                position_ids=torch.arange(start, end + rows)[None],
                past_key_values=self._cache,
                use_cache=True,
            )[:, 1 - rows :]
            self._cache.crop(end - self._cache.get_seq_length())
            if hasattr(self.model, "propose"):
                tokens = self.model.propose(hidden, ids[:, 0], self._head, 0.0)[0]
            else:
                tokens = self.model.compute_logits(hidden, self._head).argmax(-1)
        self._done = end
        return hidden[0].numpy(), tokens[0].tolist()


@pytest.mark.parametrize("version", [1, 2])
def test_two_sequences_draft_as_each_alone(version: int, tmp_path: Path, target: ModelSteps) -> None:
    """In bits: blocks of other lengths and positions in the batch, one of which sees less of its context."""
    folder, ops = write_drafter(tmp_path / "drafter", drafter_config(version)), select(2)
    both = DrafterSteps.load(folder, target.loaded, ops)
    contexts, anchors, rows, seen_from = [random_features(n, n) for n in (37, 300)], [9, 70], [5, 8], [6, 0]
    for slot, features in enumerate(contexts):
        both.append(features, slot)
    together = both.block(anchors, rows, seen_from)
    paths = [both.path(9, 4), both.path(70, 7, first=4)]
    for slot, features in enumerate(contexts):
        alone = DrafterSteps.load(folder, target.loaded, ops)
        alone.append(features)
        (hidden,) = alone.block(anchors[slot : slot + 1], rows[slot : slot + 1], seen_from[slot : slot + 1])
        assert hidden.tobytes() == together[slot].tobytes()
        assert alone.path(anchors[slot], rows[slot] - 1) == paths[slot]


def test_context_is_independent_of_blocks_and_of_pieces(tmp_path: Path, target: ModelSteps) -> None:
    """In bits: blocks in between, whose rows lie where context comes to lie, leave nothing behind."""
    folder, ops, features = (
        write_drafter(tmp_path / "drafter", drafter_config()),
        select(2),
        random_features(150),
    )
    whole, pieces = (DrafterSteps.load(folder, target.loaded, ops, kv="float16") for _ in range(2))
    whole.append(features)
    first = 0
    for count in (70, 1, 3, 8, 60, 8):
        pieces.append(features[first : first + count])
        pieces.block([first % 101], [8])
        first += count
    assert first == len(features)
    for one, other in zip(whole.block([3], [8]), pieces.block([3], [8]), strict=True):
        assert one.tobytes() == other.tobytes()


def test_what_a_window_leaves_behind_is_not_read(tmp_path: Path, target: ModelSteps) -> None:
    """NaN in all blocks that lie wholly below the window of every layer."""
    folder = write_drafter(tmp_path / "drafter", drafter_config(layer_types=["sliding_attention"] * 2))
    drafter = DrafterSteps.load(folder, target.loaded, select(2))
    drafter.append(random_features(400))
    (clean,) = drafter.block([3], [8])
    window = drafter.module.config.longest_window
    assert window == 20
    released = drafter.tables[0, : (400 - window + 1) // 16]
    drafter.kv.keys[:, released] = drafter.kv.values[:, released] = np.nan
    (dirty,) = drafter.block([3], [8])
    assert clean.tobytes() == dirty.tobytes()


@pytest.mark.parametrize(("kv", "largest"), [("float16", 0.01), ("bfloat16", 0.1), ("int8", 0.1)])
def test_smaller_keys_and_values(kv: str, largest: float, tmp_path: Path, target: ModelSteps) -> None:
    folder = write_drafter(tmp_path / "drafter", drafter_config())
    hidden = []
    for kind in ("float32", kv):
        drafter = DrafterSteps.load(folder, target.loaded, select(2), kv=kind)
        drafter.append(random_features(60))
        hidden += drafter.block([3], [8])
    assert 0 < np.abs(hidden[0] - hidden[1]).max() < largest * np.abs(hidden[0]).max()


def test_a_row_that_is_not_finite_has_no_candidates(tmp_path: Path, target: ModelSteps) -> None:
    """NaN in a context row: where a block sees it, nothing is drafted; where not, all is."""
    drafter = DrafterSteps.load(write_drafter(tmp_path / "d", drafter_config()), target.loaded, select(2))
    features = random_features(20)
    features[4] = np.nan
    drafter.append(features)
    drafter.block([3], [8])
    assert all(len(part) == 0 for row in range(7) for part in drafter.module.candidates(7).scores(row, 3))
    drafter.block([3], [8], seen_from=[5])
    assert [len(drafter.module.candidates(7).scores(row, 3)[0]) for row in range(7)] == [16] * 7


@pytest.mark.parametrize("rows", [[], [1], [9], [8, 1]])
def test_blocks_of_a_wrong_size(rows: list[int], tmp_path: Path, target: ModelSteps) -> None:
    drafter = DrafterSteps.load(write_drafter(tmp_path / "d", drafter_config()), target.loaded, select(2))
    with pytest.raises(ValueError, match=r"blocks of \[.*\] rows; expected 2..8"):
        drafter.block([3] * len(rows), rows)

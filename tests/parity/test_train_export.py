"""What is trained is what drafts: torch networks, and their exported folders in the product's own ops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quickdraft.models.dflash_loading import load_dflash
from quickdraft.models.draft_vocab import DraftVocab
from quickdraft.ops.select import select
from quickdraft.train import dflash2, mtp
from quickdraft.train.capture import Capture
from quickdraft.train.dflash2_trainee import DFlash2Trainee
from quickdraft.train.export import export
from quickdraft.train.form import DrafterForm
from quickdraft.train.head import Head
from quickdraft.train.open_target import open_for_training, target_tables
from tests.support.dflash import DrafterSteps, target_of
from tests.support.mtp import Scratch
from tests.support.tiny import write_tiny_llama

IDS = tuple(range(3, 300, 2))
TEXT = [int(token) for token in np.random.default_rng(5).integers(3, 300, 90)]
OWN: dict[str, Any] = {"block": 6, "window": 40, "mask_id": 1, "conv_group": 8, "rank": 12, "layers": 2}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target") / "tiny.gguf", layers=6)


def random_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """No tensor keeps a value, such as 0 or 1, that hides where it goes."""
    generator = torch.Generator().manual_seed(3)
    noisy = {}
    for name, value in weights.items():
        size = 0.2 if value.ndim == 1 or "base_kernel" in name else 2 / np.sqrt(value.shape[-1])
        noisy[name] = value + size * torch.randn(value.shape, generator=generator)
    return noisy


def as_stored(weights: dict[str, torch.Tensor], bits: int) -> dict[str, torch.Tensor]:
    return {name: value.half().float() if bits == 16 else value for name, value in weights.items()}


def head_of(target: Path) -> Head:
    opened, _ = open_for_training(target)
    embedding, head = target_tables(opened)
    return Head.of(embedding, head, IDS)


def vocab() -> DraftVocab:
    return DraftVocab(np.array(IDS), 0.5, 320)


@pytest.mark.parametrize("bits", [32, 16])
def test_dflash2_blocks_are_those_of_training(target: Path, tmp_path: Path, bits: int) -> None:
    opened, sha256 = open_for_training(target)
    form = DrafterForm.of("dflash2", opened.config, sha256, **OWN)
    shape = dflash2.DFlash2Shape.of(form)
    weights = random_weights(dflash2.initial(shape, len(IDS), 1))
    export({name: value.numpy() for name, value in weights.items()}, form, vocab(), tmp_path / "d", bits, {})
    weights = as_stored(weights, bits)
    capture = Capture(target, form.taps, longest=len(TEXT), threads=1)
    features = capture.read(TEXT)[:, :-64]
    trainee = DFlash2Trainee(shape, head_of(target), weights)
    anchors = torch.tensor([7, 39, 41, 80])
    blocks = dflash2.Blocks(torch.tensor(TEXT), torch.from_numpy(features), anchors)
    with torch.no_grad():
        expected = dflash2.slots(shape, weights, [blocks], trainee.head.embedding)
        paths = trainee.paths([blocks], expected)
    whole = replace(target_of(capture.loaded), sha256=lambda: sha256)
    steps = DrafterSteps(load_dflash(tmp_path / "d", whole, select(1)), select(1), slots=1)
    done = 0
    for number, anchor in enumerate(anchors.tolist()):
        steps.append(features[done:anchor])
        done = anchor
        (hidden,) = steps.block([TEXT[anchor]], [form.block])
        np.testing.assert_allclose(hidden[1:], expected[number].numpy(), atol=2e-4)
        assert steps.path(TEXT[anchor], form.block - 1) == paths[number].tolist()


@pytest.mark.parametrize("bits", [32, 16])
def test_mtp_chains_are_those_of_training(target: Path, tmp_path: Path, bits: int) -> None:
    opened, sha256 = open_for_training(target)
    form = DrafterForm.of("mtp", opened.config, sha256, feed_forward=80)
    shape = mtp.MTPShape.of(form)
    weights = random_weights(mtp.initial(shape, 1))
    export({name: value.numpy() for name, value in weights.items()}, form, vocab(), tmp_path / "d", bits, {})
    weights = as_stored(weights, bits)
    hidden = Capture(target, (), longest=len(TEXT), threads=1).read(TEXT)
    head = head_of(target)
    run = Scratch(target, "float32", tmp_path / "d", tmp_path / "d" / "draft_vocab.json")
    for known in (2, 9, 60):  # tokens read; the draft goes on as the text does, to be compared row by row
        run._set(run.batch, TEXT[: known - 1], 0)
        run.program.run()
        run.run(TEXT[1:known], 1, hidden[: known - 1])
        text = mtp.Text(torch.tensor(TEXT[: known + 2]), torch.from_numpy(hidden[: known + 2]), 1)
        with torch.no_grad():
            chain = mtp.chain(shape, weights, [text], head.embedding, 3)
        for step in range(3):
            expected = chain[step][known - 2]
            np.testing.assert_allclose(run.module.last[0], expected.numpy(), atol=2e-4)
            assert int(run.module.best[0]) == int((head.rows @ expected).argmax())
            if step < 2:
                run.run(TEXT[known + step : known + step + 1], known + step, np.array(run.module.last))


@pytest.mark.parametrize(("bits", "largest"), [(8, 0.007), (4, 0.085)])
@pytest.mark.parametrize("kind", ["mtp", "dflash2"])
def test_quantised_folders_are_near_the_weights(
    target: Path, tmp_path: Path, kind: str, bits: int, largest: float
) -> None:
    """Relative rms error of every linear as the loader reads it; tables of the selector in int8."""
    from quickdraft.models.loading.drafter_folder import DrafterFolder

    opened, sha256 = open_for_training(target)
    form = DrafterForm.of(kind, opened.config, sha256, **(OWN if kind == "dflash2" else {}))
    raw = (
        dflash2.initial(dflash2.DFlash2Shape.of(form), len(IDS), 1)
        if kind == "dflash2"
        else mtp.initial(mtp.MTPShape.of(form), 1)
    )
    weights = random_weights(raw)
    export({name: value.numpy() for name, value in weights.items()}, form, vocab(), tmp_path / "d", bits, {})
    folder = DrafterFolder(tmp_path / "d")
    folder.check_quantisation()
    seen = 0
    for name, value in weights.items():
        if name.endswith(("_proj.weight", "fc.weight")):
            read = folder.matrix(name).dequantised()
            error = np.sqrt(((read - value.numpy()) ** 2).mean() / (value.numpy() ** 2).mean())
            assert 0 < error < largest, name
            seen += 1
    assert seen == (15 if kind == "dflash2" else 8)
    if kind == "dflash2":
        book = weights["candidate_selector.predecessor_codebook"].numpy()
        codes = folder.codes("candidate_selector.predecessor_codebook")
        read = codes * folder.values("candidate_selector.predecessor_codebook_scale")[:, None].astype(
            np.float32
        )
        for token in (3, 4, 299, 319):  # in the vocabulary, or the row of all others
            row = IDS.index(token) if token in IDS else len(IDS)
            np.testing.assert_allclose(read[token], book[row], atol=np.abs(book[row]).max() / 200)
        assert folder.codes("candidate_selector.successor_codebook").shape == (len(IDS), 12)


def test_what_contradicts_is_refused(target: Path, tmp_path: Path) -> None:
    from quickdraft.errors import ConfigError, UnsupportedError

    opened, sha256 = open_for_training(target)
    form = DrafterForm.of("dflash2", opened.config, sha256, **OWN)
    weights = {
        name: value.numpy()
        for name, value in dflash2.initial(dflash2.DFlash2Shape.of(form), len(IDS), 1).items()
    }
    other = DraftVocab(np.array(IDS[1:]), 0.5, 320)
    with pytest.raises(ConfigError, match="another draft vocabulary"):
        export(weights, form, other, tmp_path / "d", 16, {})
    with pytest.raises(ConfigError, match="of another model"):
        export(weights, form, replace(vocab(), vocabulary_size=321), tmp_path / "d", 16, {})
    odd = weights | {"fc.weight": weights["fc.weight"][:, :-5]}
    with pytest.raises(UnsupportedError, match="--bits 16"):
        export(odd, form, vocab(), tmp_path / "d", 8, {})
    assert not (tmp_path / "d").exists()

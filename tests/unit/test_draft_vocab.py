"""Draft vocabularies: the file, and the head rows and logits rows it limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quickdraft.engine.draft_logits import DraftLogits
from quickdraft.engine.runner import OpsRow, StepLogits
from quickdraft.errors import ModelFormatError
from quickdraft.models.draft_vocab import DraftVocab
from quickdraft.ops.select import select
from quickdraft.speculate.choose import Chooser
from quickdraft.types import SamplingParams
from tests.support.mtp import Scratch
from tests.support.mtp_folder import write_mtp_folder
from tests.support.tiny import write_tiny_llama
from tests.support.tiny_folder import write_tiny_folder

GOOD: dict[str, Any] = {
    "schema": "quickdraft-draft-vocab-1",
    "vocabulary_size": 100,
    "ids": [0, 2, 3, 50, 99],
    "coverage": 0.75,
    "counted_tokens": 4,
}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    DraftVocab(np.array(GOOD["ids"]), 0.75, 100, 4).save(path)
    assert json.loads(path.read_text()) == GOOD
    loaded = DraftVocab.load(path, 100)
    assert (loaded.ids.tolist(), loaded.coverage, loaded.counted_tokens) == (GOOD["ids"], 0.75, 4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"schema": "quickdraft-draft-vocab-2"}, "schema"),
        ({"more": 1}, "more is not understood"),
        ({"coverage": 1.5}, "coverage"),
        ({"coverage": True}, "coverage"),
        ({"counted_tokens": -1}, "counted_tokens"),
        ({"vocabulary_size": 101}, "100, the model's own"),
        ({"vocabulary_size": 0}, "vocabulary_size"),
        ({"ids": []}, "at least one"),
        ({"ids": "0"}, "a list"),
        ({"ids": [0, 100]}, "got 100"),
        ({"ids": [-1, 0]}, "got -1"),
        ({"ids": [0, True]}, "got True"),
        ({"ids": [0, 10**30]}, "0..99"),
        ({"ids": [3, 2]}, "3 before 2"),
        ({"ids": [2, 2]}, "2 before 2"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(GOOD | changes))
    with pytest.raises(ModelFormatError, match=f"{path}") as error:
        DraftVocab.load(path, 100)
    assert named in str(error.value)


def test_a_file_that_lacks_a_key_or_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps({key: value for key, value in GOOD.items() if key != "coverage"}))
    with pytest.raises(ModelFormatError, match="coverage is missing"):
        DraftVocab.load(path)
    path.write_text("[")
    with pytest.raises(ModelFormatError, match="not valid JSON"):
        DraftVocab.load(path)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=8),
        SamplingParams(max_tokens=8, repetition_penalty=1.3, logit_bias={3: 2.0, 4: 50.0}),
        SamplingParams(max_tokens=8, temperature=0.9, seed=1),
        SamplingParams(max_tokens=8, temperature=0.9, seed=1, top_k=40),
        SamplingParams(max_tokens=8, temperature=0.9, seed=1, top_p=0.9),
        SamplingParams(max_tokens=8, temperature=0.9, seed=1, min_p=0.05, presence_penalty=0.5),
    ],
    ids=["greedy", "penalties", "sampled", "top_k", "top_p", "min_p"],
)
def test_a_chooser_chooses_as_if_other_ids_had_no_logit(params: SamplingParams) -> None:
    rng, ops = np.random.default_rng(0), select(1)
    vocab = DraftVocab(np.sort(rng.choice(1000, 60, replace=False)), 1.0, 1000)
    short, full = Chooser(params, 1, [3], []), Chooser(params, 1, [3], [])
    for _ in range(8):
        logits = (4 * rng.standard_normal(60)).astype(np.float32)
        row = np.full(1000, -np.inf, np.float32)
        row[vocab.ids] = logits
        token = short.choose(DraftLogits(ops, vocab.ids, 1000, logits, int(logits.argmax())))
        assert token == full.choose(OpsRow(ops, StepLogits(ops, row[None], 1), 0, int(row.argmax())))
        assert token in vocab.ids or params.logit_bias
        short.push(token)
        full.push(token)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("gguf", {"quantisation": name}) for name in ("F32", "F16", "Q8_0", "Q4_1", "Q5_0")),
        ("gguf", {"quantisation": "Q8_0", "tied": True}),
        ("folder", {"dtype": "BF16"}),
        ("folder", {"dtype": "BF16", "tied": True}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_rows_of_the_head_give_the_bits_of_the_whole(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    if kind == "gguf":
        target = write_tiny_llama(tmp_path / "tiny.gguf", **options)
    else:
        target = write_tiny_folder(tmp_path / "tiny", "llama", **options)
    drafter, vocab = write_mtp_folder(tmp_path / "mtp"), DraftVocab(np.arange(3, 320, 7), 1.0, 320)
    vocab.save(tmp_path / "vocab.json")
    whole, part = (
        Scratch(target, "float32", drafter),
        Scratch(target, "float32", drafter, tmp_path / "vocab.json"),
    )
    text = list(range(20, 40))
    whole.drafts(text, 1)
    part.drafts(text, 1)
    assert part.module.logits.shape == (1, len(vocab)) and np.ptp(part.module.logits) > 0
    assert whole.module.logits[0][vocab.ids].tobytes() == part.module.logits[0].tobytes()

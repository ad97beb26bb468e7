"""A model that is left behind and follows again, at any step: no token changes, and it drafts again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quickdraft.engine.drafters import Asking, Drafting
from quickdraft.engine.llm import LLM
from quickdraft.models.registry import open_target
from quickdraft.speculate.draft import Draft, FollowingDrafter
from quickdraft.types import SamplingParams, Speculation
from tests.lossless.test_tiny_llama import repetitive_prompts
from tests.support.draft_engine import knowing_drafter
from tests.support.mtp_folder import VOCABULARY, write_mtp_folder
from tests.support.tiny import write_tiny_llama

SETTINGS: dict[str, Any] = {"threads": 1, "chunk_rows": 48, "kv_memory_bytes": 1 << 22}


class ComingAndGoing(Drafting):
    """Leaves requests and follows them again at random; drafts whenever it follows."""

    def __init__(self, own: Drafting, source: str, seed: int) -> None:
        super().__init__(own.drafters)
        (self._model,) = [one for one in own.drafters if one.source == source]
        assert isinstance(self._model, FollowingDrafter)
        self._random, self._left, self.returned = random.Random(seed), dict[str, int](), 0

    def propose_all(self, asking: Sequence[Asking], rows: int) -> list[Draft]:
        return [self._draft(one, min(rows, one.room, 7)) for one in asking]

    def _draft(self, asking: Asking, room: int) -> Draft:
        name, now = asking.view.request_id, len(asking.view.tokens)
        if asking.speculation.off:
            return Draft()
        if name in self._left:
            if now >= self._left[name]:
                del self._left[name]
                self._model.follow(name, True)
            return Draft()
        draft = self._model.propose(asking.view, room)
        self.returned += bool(draft.tokens) and now > 60
        if self._random.random() < 0.2:
            self._left[name] = now + self._random.choice([1, 3, 15, 16, 17, 40])
            self._model.follow(name, False)
        return draft


@pytest.mark.parametrize("source", ["mtp", "dflash2"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_token_changes(tmp_path: Path, source: str, temperature: float) -> None:
    target = write_tiny_llama(tmp_path / "tiny.gguf", quantisation="Q8_0")
    following = {token: (token + 1) % VOCABULARY for token in range(VOCABULARY)}
    folder = (
        write_mtp_folder(tmp_path / "mtp")
        if source == "mtp"
        else knowing_drafter(tmp_path / "block", open_target(target).config, following)
    )
    llm = LLM(target, **SETTINGS, drafters=[folder])
    engine = llm.opened.engine
    engine.drafting = drafting = ComingAndGoing(engine.drafting, source, seed=5)
    engine.scheduler.on_resumed, engine.scheduler.on_publish = drafting.resumed, drafting.publishing
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=90, ignore_eos=True)
    for prompt in repetitive_prompts(120)[:3]:
        found = [
            llm.generate(prompt, replace(params, speculation=Speculation.parse(text)))
            for text in ("off", source, source)
        ]
        assert found[0].ids == found[1].ids == found[2].ids, "the last of them resumes from rows with gaps"
    assert drafting.returned > 20
    llm.close()

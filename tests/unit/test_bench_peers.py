"""`bench peers` without a server: what help texts offer, what is asked, which answers and rows count."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
from rich.console import Console

from quickdraft.bench.llama_flags import LlamaFlags, llama_flags, parse_help
from quickdraft.bench.peer_report import Pair, PeersResult, best_rows, print_rows
from quickdraft.bench.peer_servers import Answer
from quickdraft.bench.peer_tasks import DRAFTING, Sizes, Task, fresh_tokens, tasks
from quickdraft.errors import ConfigError
from tests.support.fake_llama_server import NEW_HELP, OLD_HELP, write_binary

MIDDLE_HELP = """--spec-type [none|ngram-cache|ngram-simple|ngram-map-k]
                                        type of speculative decoding to use
--spec-ngram-size-n N                   ngram size N
--spec-ngram-size-m N                   ngram size M
--draft-max, --draft, --draft-n N       number of tokens to draft
"""
RATE = Task("decode", "tokens/s", (1, 2, 3), 4, counted=4, cached=2)
TIME = Task("question", "s", tuple(range(50)), 1, cached=40, vary=40)


def offered(text: str) -> LlamaFlags:
    return LlamaFlags(Path("llama-server"), "1", parse_help(text))


def test_a_new_binary_offers_flash_attention_by_value_and_n_gram_drafters() -> None:
    flags = offered(NEW_HELP)
    on, off = flags.plain
    assert (on.flags, off.flags) == (("--flash-attn", "on"), ("--flash-attn", "off"))
    assert [config.flags[2:] for config in flags.drafting(on)] == [
        ("--spec-type", "ngram-simple"),
        ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "15",
         "--spec-draft-n-max", "16"),
        ("--spec-type", "ngram-mod"),
        ("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "8", "--spec-draft-n-max", "16"),
    ]  # fmt: skip
    command = flags.command(Path("m.gguf"), 1234, 3, 512)
    text = " ".join(command)
    for part in ("--threads 3", "--threads-batch 3", "--parallel 1", "--cache-ram 0", "--n-gpu-layers 0"):
        assert part in text
    labels = [config.label for config in (*flags.drafting(on), *flags.drafting(off), *flags.plain)]
    assert len(set(labels)) == len(labels)


def test_older_binaries() -> None:
    old = offered(OLD_HELP)
    assert [config.flags for config in old.plain] == [("--flash-attn",), ()]
    assert old.drafting(old.plain[0]) == []
    assert not {"--cache-ram", "--n-gpu-layers"} & set(old.command(Path("m.gguf"), 1, 1, 1))
    middle = offered(MIDDLE_HELP)
    (base,) = middle.plain
    assert base.flags == ()
    short = ("--spec-ngram-size-n", "3", "--spec-ngram-size-m", "15", "--draft-max", "16")
    assert [config.flags for config in middle.drafting(base)] == [
        ("--spec-type", "ngram-cache"), ("--spec-type", "ngram-cache", "--draft-max", "16"),
        ("--spec-type", "ngram-simple"), ("--spec-type", "ngram-simple", *short),
        ("--spec-type", "ngram-map-k"), ("--spec-type", "ngram-map-k", *short),
    ]  # fmt: skip


def test_a_binary_that_is_no_llama_server(tmp_path: Path) -> None:
    assert llama_flags(write_binary(tmp_path / "llama", NEW_HELP)).version == "4711 (abc)"
    with pytest.raises(ConfigError, match="does not look like"):
        llama_flags(write_binary(tmp_path / "other", "usage: other"))
    with pytest.raises(ConfigError, match="cannot run"):
        llama_flags(tmp_path / "missing")


def test_tasks_are_what_they_say() -> None:
    document = list(range(100, 1100))
    all_tasks = {task.name: task for task in tasks(document, list(range(950)), Sizes())}
    assert list(all_tasks) == [
        "prefill 512", "prefill 4096", "copy, plain", DRAFTING, "decode after 0", "decode after 2048",
        "decode after 6000", "second question (6003 of 6012 cached)",
    ]  # fmt: skip
    prefill, question = all_tasks["prefill 4096"], all_tasks["second question (6003 of 6012 cached)"]
    assert len(prefill.prompt) == 4096 == prefill.counted and prefill.max_tokens == 1
    assert len(question.prompt) == 6012 and question.cached == question.vary == 6003
    assert prefill.prompt_with(7)[0] == 7 and prefill.prompt_with(7)[1:] == prefill.prompt[1:]
    assert question.prompt_with(7)[:6003] == question.prompt[:6003] and question.prompt_with(7)[6003] == 7
    copy = all_tasks[DRAFTING]
    assert copy.prompt == (*range(944), *range(944), *range(944), *range(200)) and copy.max_tokens == 512
    assert len(all_tasks["decode after 0"].prompt) == 8
    assert all_tasks["decode after 6000"].prompt == question.prompt[:6000]
    fresh = list(itertools.islice(fresh_tokens(document), 999))
    assert len(set(fresh)) == 999 and document[0] not in fresh
    with pytest.raises(ConfigError, match="fewer rounds"):
        list(fresh_tokens(document))
    with pytest.raises(ConfigError, match="too short"):
        tasks(document, [1], Sizes())


@pytest.mark.parametrize(
    ("task", "tokens", "computed", "reason"),
    [
        (RATE, 4, 1, None),
        (RATE, 3, 1, "3 tokens were generated, not 4"),
        (RATE, 4, None, None),
        (TIME, 1, 42, None),
        (TIME, 1, 43, "it was not cached"),
        (Task("cold", "tokens/s", (1, 2, 3), 1, counted=3, vary=0), 1, 3, None),
        (Task("cold", "tokens/s", (1, 2, 3), 1, counted=3, vary=0), 1, 2, "something was cached"),
    ],
)
def test_which_answers_count(task: Task, tokens: int, computed: int | None, reason: str | None) -> None:
    found = task.refusal(Answer(0.5, "", tokens, computed))
    assert found is None if reason is None else found is not None and reason in found


def test_rows_use_the_best_configuration_of_the_peer() -> None:
    """The peer's median decides, not quickdraft's; of a time the shorter one is better."""
    slow = Pair(RATE, "off", "slow", (100.0, 300.0, 200.0), (50.0, 60.0, 70.0), True)
    fast = Pair(RATE, "off", "fast", (110.0,), (90.0,), True)
    wrong = Pair(RATE, "off", "wrong", (1.0,), (900.0,), True, "3 tokens were generated, not 4")
    late, early = (
        Pair(TIME, "off", name, (2.0,), (peer,), False) for name, peer in (("late", 9.0), ("early", 3.0))
    )
    rows = best_rows([RATE, TIME], [slow, wrong, fast, late, early])
    assert [row.peer_config for row in rows] == ["fast", "early"]
    assert (slow.quickdraft, slow.peer, slow.ratio) == (200.0, 60.0, pytest.approx(200 / 60))
    assert rows[1].ratio == 1.5
    result = PeersResult("tiny", 2, None, "4711", (*rows, wrong), (slow, fast, wrong, late, early))
    data = result.to_dict()
    assert data["schema"] == "quickdraft-peers-1"
    assert rows[1].to_dict() == {
        "name": "question", "unit": "s", "quickdraft": 2.0, "quickdraft_config": "off", "peer": 3.0,
        "peer_config": "early", "ratio": 1.5, "texts_equal": False,
    }  # fmt: skip
    failed = wrong.to_dict()
    assert failed["quickdraft"] is failed["peer"] is failed["ratio"] is None and "3 tokens" in str(failed)
    assert best_rows([RATE], [wrong]) == (wrong,)
    buffer = io.StringIO()
    print_rows(result, Console(file=buffer, width=120))
    text = buffer.getvalue()
    assert "FAIL decode" in text and "900" not in text and "texts differ in: question" in text

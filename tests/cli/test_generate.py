"""`generate`: what reaches the engine, what reaches stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quickdraft.cli.generate import read_prompt
from quickdraft.cli.main import app
from quickdraft.errors import ConfigError, RequestError
from quickdraft.types import SamplingParams, Speculation
from tests.cli.fakes import TIMINGS, FakeLLM
from tests.support.golden import TARGET, expected


def run(*arguments: str, **settings: object) -> object:
    return CliRunner().invoke(app, ["generate", *arguments], **settings)


def test_text_streams_to_stdout_and_the_summary_to_stderr(llm: FakeLLM, gguf: str) -> None:
    result = run(gguf, "--prompt", "Say\nhello ")
    assert result.exit_code == 0
    assert result.stdout == "Héllo!\n"
    assert result.stderr == "[3 tokens, 100.0 tokens/s, 1 from drafts, stop, seed 77]\n"
    assert llm.asked == [("Say\nhello ", SamplingParams(temperature=0.0, max_tokens=256))]
    defaults = {"threads": None, "kv_dtype": None, "kv_memory_bytes": None, "cache_dir": None}
    defaults |= {"cache_bytes": 10 << 30, "checkpoint_memory_bytes": None, "checkpoint_interval": 512}
    defaults |= {"head_bits": None, "drafters": None, "draft_vocab": None, "measure_costs": True}
    defaults |= {"lookup_corpus": None, "backend": "auto"}
    defaults |= {"frozen_costs": False, "explain_drafts": None}
    assert llm.opened == [(gguf, defaults)]
    assert llm.closed == 1


def test_json_is_one_object_and_nothing_else(llm: FakeLLM, gguf: str) -> None:
    result = run(gguf, "--prompt", "x", "--output", "json")
    assert json.loads(result.stdout) == {
        "ids": [10, 11, 12],
        "text": "Héllo!",
        "finish_reason": "stop",
        "seed": 77,
        "timings": TIMINGS.to_dict(),
    }
    assert list(json.loads(result.stdout)) == ["ids", "text", "finish_reason", "seed", "timings"]
    assert result.stderr == ""


def test_prompt_ids_use_no_text(llm: FakeLLM, gguf: str) -> None:
    result = run(gguf, "--prompt-ids", "1, 2,3", "--output", "json")
    assert json.loads(result.stdout)["text"] is None
    assert llm.asked[0][0] == [1, 2, 3]
    assert run(gguf, "--prompt-ids", "5").stdout == "10,11,12\n"


def test_a_cache_size_needs_a_folder(llm: FakeLLM, gguf: str) -> None:
    result = run(gguf, "--prompt", "x", "--cache-size", "1G")
    assert result.exit_code == 2 and "--cache-dir" in result.output and not llm.opened


def test_every_flag_reaches_the_engine(llm: FakeLLM, gguf: str) -> None:
    result = run(
        gguf, "--prompt", "x", "--max-tokens", "9", "--min-tokens", "2", "--ignore-eos",
        "--speculation", "lookup@16", "--kv-dtype", "fp32", "--kv-memory", "64MiB", "--threads", "2",
        "--cache-dir", "kv", "--cache-size", "1G", "--head-bits", "8", "--drafter", "a", "--drafter", "b",
        "--draft-vocab", "v.json", "--lookup-corpus", "c", "--frozen-costs", "--explain-drafts", "e.jsonl",
        "--checkpoint-memory", "2M", "--checkpoint-interval", "64",
        "--temperature", "0.5", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.1",
        "--presence-penalty", "0.2", "--frequency-penalty", "0.3", "--repetition-penalty", "1.1",
        "--backend", "cuda",
        "--seed", "-5", "--stop", "a", "--stop", "b", "--stop-token-id", "7", "--stop-token-id", "8",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    settings = {"threads": 2, "kv_dtype": "float32", "kv_memory_bytes": 2**26, "head_bits": 8}
    settings |= {"checkpoint_memory_bytes": 2**21, "checkpoint_interval": 64, "measure_costs": True}
    settings |= {"drafters": (Path("a"), Path("b")), "draft_vocab": Path("v.json")}
    settings |= {"lookup_corpus": Path("c"), "backend": "cuda"}
    settings |= {"frozen_costs": True, "explain_drafts": Path("e.jsonl")}
    assert llm.opened == [(gguf, {**settings, "cache_dir": Path("kv"), "cache_bytes": 2**30})]
    assert llm.asked == [
        (
            "x",
            SamplingParams(
                temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=0.2,
                frequency_penalty=0.3, repetition_penalty=1.1, seed=-5, max_tokens=9, min_tokens=2,
                stop=("a", "b"), stop_token_ids=(7, 8), ignore_eos=True,
                speculation=Speculation(("lookup",), max_rows=16),
            ),
        )
    ]  # fmt: skip


def test_chat_tells_reasoning_from_the_answer(llm: FakeLLM, gguf: str) -> None:
    """A pipe gets what was said; a raw prompt's completion is left as it is."""
    llm.thinks, llm.parts = True, ["hm", ", so\n</thi", "nk>\n\nYes", "."]
    result = run(gguf, "--prompt", "hi", "--chat")
    assert result.stdout == "Yes.\n" and result.stderr.startswith("hm, so\n[3 tokens")
    assert run(gguf, "--prompt", "hi").stdout == "hm, so\n</think>\n\nYes.\n"


def test_chat_wraps_the_prompt(llm: FakeLLM, gguf: str) -> None:
    run(gguf, "--prompt", "hi", "--chat")
    assert llm.chats == [[{"role": "user", "content": "hi"}]]
    assert llm.asked[0][0] == [9, 9, 1]


def test_prompt_file_is_taken_as_it_is(llm: FakeLLM, gguf: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("naïve\r\n\n".encode())
    run(gguf, "--prompt-file", str(tmp_path / "p.txt"))
    run(gguf, "--prompt-file", "-", input="from stdin")
    run(gguf, "--prompt", "x", "--prediction", str(tmp_path / "p.txt"), "--output", "json")
    run(gguf, "--prompt", "x", "--prediction", str(tmp_path / "p.txt"))
    assert [prompt for prompt, _ in llm.asked] == ["naïve\r\n\n", "from stdin", "x", "x"]
    assert llm.predictions == [None, None, "naïve\r\n\n", "naïve\r\n\n"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "exactly one of"),
        (["--prompt", "x", "--prompt-ids", "1"], "got --prompt and --prompt-ids"),
        (["--prompt-ids", ""], "--prompt-ids"),
        (["--prompt-ids", "1,x"], "--prompt-ids"),
        (["--prompt-ids", "1,-2"], "--prompt-ids"),
        (["--prompt-ids", "1", "--chat"], "--chat needs a text prompt"),
        (["--prompt-file", "/nowhere/p"], "cannot read the prompt file"),
        (["--prompt", "x", "--prediction", "/nowhere/p"], "cannot read the prediction file"),
        (["--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens"),
        (["--prompt", "x", "--speculation", "magic"], "speculation"),
        (["--prompt", "x", "--kv-dtype", "int4"], "kv_dtype"),
        (["--prompt", "x", "--head-bits", "4"], "head_bits"),
        (["--prompt", "x", "--drafter", "none", "--drafter", "a"], "none alone"),
        (["--prompt", "x", "--drafter", ""], "--drafter"),
        (["--prompt", "x", "--kv-memory", "much"], "kv_memory"),
        (["--prompt", "x", "--checkpoint-memory", "much"], "checkpoint_memory"),
        (["--prompt", "x", "--output", "xml"], "output"),
    ],
)
def test_wrong_requests_exit_with_2(llm: FakeLLM, gguf: str, arguments: list[str], message: str) -> None:
    result = run(gguf, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert llm.asked == []


def test_binary_prompt_file(llm: FakeLLM, gguf: str, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"\xff\xfe")
    result = run(gguf, "--prompt-file", str(tmp_path / "p"))
    assert result.exit_code == 2 and "not UTF-8" in result.stderr


def test_request_error_of_the_engine(llm: FakeLLM, gguf: str) -> None:
    llm.parts = [RequestError("the prompt is empty")]
    assert run(gguf, "--prompt", "").exit_code == 2


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_request_that_failed_exits_with_1(llm: FakeLLM, gguf: str, form: str) -> None:
    llm.error = "NaN logits"
    result = run(gguf, "--prompt", "x", "--output", form)
    assert result.exit_code == 1
    assert result.stderr == "error: the request failed: NaN logits\n"


def test_a_reader_that_goes_away_is_not_an_error(gguf: str) -> None:
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from tests.cli.fakes import FakeLLM, ModuleType\n"
        "module = ModuleType('quickdraft.engine.llm'); module.LLM = FakeLLM(parts=['word '] * 100000)\n"
        "sys.modules['quickdraft.engine.llm'] = module\n"
        "from quickdraft.cli.main import app\n"
        f"app(['generate', {gguf!r}, '--prompt', 'x'])\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.read(5) == b"word "
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(timeout=60) == 128 + 13


def test_closed_stdin(llm: FakeLLM, gguf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="stdin: it is closed"):
        read_prompt(None, Path("-"), None)


@pytest.mark.parametrize("speculation", ["off", "lookup", "mtp"])
def test_golden_ids_of_the_hybrid(speculation: str) -> None:
    golden = expected()
    flags = ("--max-tokens", "64", "--ignore-eos", "--kv-dtype", "fp32", "--speculation", speculation)
    prompt = ",".join(map(str, golden["prompt"]))
    result = run(str(TARGET), "--prompt-ids", prompt, "--kv-memory", "4MiB", "--threads", "2", *flags)
    assert result.exit_code == 0, result.output
    assert result.stdout == ",".join(map(str, golden["greedy_64"])) + "\n"

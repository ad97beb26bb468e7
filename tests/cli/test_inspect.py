"""`inspect`: what reaches stdout, for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from quickdraft.cli.main import app
from tests.support.tiny import write_tiny_llama
from tests.support.tiny_folder import put_json, write_tiny_folder


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_a_folder_that_runs(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", "qwen3")
    text = run(folder, "--memory", "1G")
    assert "architecture: qwen3: layers 2, width 64, heads 4, kv heads 2, head dim 24" in text
    assert "KV cache, bytes per token: float32 768 (default), float16 384, bfloat16 384, int8 224\n" in text
    assert (
        "counting weights and KV cache only: float32 512, float16 512, bfloat16 512, int8 512 tokens\n"
        in text
    )
    assert "tokenizer: byte-level BPE, 320 tokens, tokenizer.json\nchat template: yes\n" in text
    assert text.endswith("quickdraft can run it: yes\n")
    assert "longest context" not in run(folder)


def test_json_is_one_object(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", "qwen2", tied=True)
    found = json.loads(run(folder, "--output", "json", "--memory", "1G"))
    assert (found["name"], found["architecture"], found["runs"]) == ("tiny", "qwen2", True)
    assert found["longest_context"] == dict.fromkeys(("float32", "float16", "bfloat16", "int8"), 512)
    assert found["weights"]["bytes"] == sum(found["weights"]["by_part"].values())
    assert json.loads(run(folder, "--output", "json"))["longest_context"] is None


def test_problems_of_every_kind_are_lines(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", "qwen3", num_hidden_layers=1)
    (folder / "chat_template.jinja").write_text("{% for %}")
    text = run(folder)
    assert "quickdraft can run it: no\n  - 11 tensors nobody uses; got model.layers.1." in text
    assert f"\n  - {folder}/chat_template.jinja: the chat template does not parse" in text
    put_json(folder / "config.json", {"model_type": "mamba"})
    text = run(folder, "--memory", "1G")
    assert "architecture: mamba\n" in text and "KV cache: unknown" in text and "longest" not in text


def test_a_tokenizer_nobody_knows_is_a_problem(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "t.gguf")
    path.write_bytes(path.read_bytes().replace(b"\x06\0\0\0\0\0\0\0smollm", b"\x06\0\0\0\0\0\0\0klingo"))
    found = json.loads(run(path, "--output", "json"))
    assert not found["runs"] and "t.gguf: the model's pre-tokenizer is not known" in found["problems"][0]


def test_a_model_that_is_built_in() -> None:
    text = run("qwen3.8-27b", "--memory", "32GiB", "--context", "50000")
    assert "keys and values in bfloat16: 65536 bytes per token, and 4096 for the MTP layer\n" in text
    assert "longest context in 32.00 GiB, int8: 262,144 with 8 verify rows" in text
    assert "memory at 50,000 tokens, bfloat16: 2" in text and "RTX 5090: 1792 GB/s, 209.5 TFLOP/s" in text
    assert "memory at" not in run("qwen3.8-27b", "--kv-dtype", "int8")
    found = json.loads(run("qwen3.8-27b", "--output", "json", "--context", "5"))
    assert list(found) == [
        "schema", "parts", "kv_bytes_per_token", "state_bytes_per_sequence", "checkpoint_bytes",
        "max_context", "step_ms",
    ]  # fmt: skip
    assert found["schema"] == "quickdraft-inspect-1"
    assert all(set(part) == {"name", "bytes", "format"} for part in found["parts"])
    assert set(found["max_context"]) == {"8", "16"}
    assert set(found["step_ms"]) == {"RTX 3090", "RTX 4090", "RTX 5090"}
    assert set(found["step_ms"]["RTX 3090"]) == {"1", "4", "8", "16", "32"}
    assert list(found["step_ms"]["RTX 3090"]["8"]) == ["5", "2048", "25000", "112000"]
    halved = json.loads(run("qwen3.8-27b", "--output", "json", "--kv-dtype", "int8"))
    assert (found["kv_bytes_per_token"], halved["kv_bytes_per_token"]) == (65536, 33280)
    assert halved["step_ms"]["RTX 3090"]["8"]["25000"] < found["step_ms"]["RTX 3090"]["8"]["25000"]


def test_flags_of_the_built_in_description(tmp_path: Path) -> None:
    for arguments in (
        ["qwen3.8-27b", "--context", "0"],
        ["qwen3.8-27b", "--context", "262145"],
        ["qwen3.8-27b", "--kv-dtype", "fp4"],
        [str(write_tiny_folder(tmp_path / "tiny")), "--context", "5"],
    ):
        result = CliRunner().invoke(app, ["inspect", *arguments])
        assert result.exit_code == 2 and result.stdout == "" and "error: " in result.stderr

"""More damage to GGUF files than tests/unit/test_gguf.py has: repeats, nesting, alignment, text."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.registry import load_model
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.tokenizer import Tokenizer
from tests.support.tiny import write_tiny_llama


def swap(old: str, new: str) -> Callable[[bytes], bytes]:
    assert len(old) == len(new)
    return lambda data: data.replace(old.encode(), new.encode())


def one_pair(key: bytes, value: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + value


def renamed(architecture: str) -> Callable[[bytes], bytes]:
    """llama's file, called something else."""
    old, new = (struct.pack("<Q", 5) + name for name in (b"llama", architecture.encode()))
    return lambda data: data.replace(old, new).replace(b"llama.", f"{architecture}.".encode())


NESTED = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQB", 0, 1, 7)
CASES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "key twice": (
        swap("ggml.eos_token_id", "ggml.bos_token_id"), "'tokenizer.ggml.bos_token_id' occurs twice"),
    "tensor twice": (
        swap("blk.1.ffn_up.weight", "blk.0.ffn_up.weight"), "'blk.0.ffn_up.weight' occurs twice"),
    "nested arrays": (lambda d: one_pair(b"a", NESTED), "'a' has a bad type; got 9"),
    "alignment 3": (
        lambda d: one_pair(b"general.alignment", struct.pack("<II", 4, 3)), "general.alignment; got 3"),
    "alignment is text": (
        lambda d: one_pair(b"general.alignment", struct.pack("<IQ", 8, 1) + b"x"), "alignment; got x"),
    "nothing in it": (lambda d: one_pair(b"a", struct.pack("<II", 4, 3)), "token_embd.weight is missing"),
    "qwen3 without norms": (
        renamed("qwen3"), "blk.0.attn_q_norm.weight is missing"),
    "qwen2 without biases": (
        renamed("qwen2"), "blk.0.attn_q.bias is missing"),
    "eps is NaN": (
        lambda d: d.replace(struct.pack("<If", 6, 1e-5), struct.pack("<If", 6, float("nan"))),
        "layer_norm_rms_epsilon; got nan"),
    "template does not parse": (swap("{% endfor %}", "{% endfoo %}"), "the chat template does not parse"),
    "unknown tokenizer": (swap("\x04\0\0\0\0\0\0\0gpt2", "\x04\0\0\0\0\0\0\0bert"), "tokenizer is not known"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_damage_names_the_file_and_the_cause(tmp_path: Path, case: str) -> None:
    damage, cause = CASES[case]
    good = write_tiny_llama(tmp_path / "good.gguf").read_bytes()
    broken = damage(good)
    assert broken != good
    (tmp_path / "broken.gguf").write_bytes(broken)
    with pytest.raises((ModelFormatError, UnsupportedError), match=r"broken\.gguf: ") as error:
        loaded = load_model(tmp_path / "broken.gguf", ReferenceOps(), max_rows=2, max_wanted=1)
        assert loaded.tokenizer is not None
        Tokenizer(loaded.tokenizer)
        ChatTemplate.of(loaded.tokenizer)
    assert cause in str(error.value)

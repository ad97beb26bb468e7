"""Token ids of the real model equal transformers' ids; a known split equals its published tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import pre_tokenizers

from quickdraft.config import DEFAULT_MODEL, cached_model
from quickdraft.text.chat_prompt import chat_prompt_ids
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import TokenizerData

pytestmark = pytest.mark.model

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 3; }\r\n\r\n\r\n",
    "日本語のテキスト、中文文本，한국어 텍스트。ไทย हिन्दी العربية עברית",
    "emoji 🎉👩‍👩‍👧‍👦🇩🇪 ❤️ and ⚡ combined",
    "spaces:" + " " * 40 + "end" + " " * 7 + "\t\t\t \t x",
    "digits 1234567890 3.14159 1,000,000 0x1F ①²Ⅷ ٣٤٥",
    "I'll we've they're IT'S can't 'tis ’twas",
    "mixed\nnew\r\nlines\r\r\n\n\n \n  \n",
    "<|im_start|>user\nhi<|im_end|>\n<repo_name>x<|endoftext|>",
    "<|im_end|><|im_end|> <|im_end |> <|im_",
    " lead and trail  ",
    "\x00\x01\x7f\u00a0\u2028\u200b\ufeff",
    "naïve façade Ångström e\u0301 ﬁ ½",
    "",
    'https://example.org/a?b=c&d=%20#frag {"json": [1, 2.5e-3, null]}',
]


def read_tokenizer_data(path: Path) -> TokenizerData:
    fields = gguf.GGUFReader(path).fields
    get: Any = lambda name: fields[f"tokenizer.{name}"].contents()  # noqa: E731
    return TokenizerData(
        model=get("ggml.model"),
        pre_tokenizer=get("ggml.pre"),
        tokens=tuple(get("ggml.tokens")),
        token_types=tuple(get("ggml.token_type")),
        merges=tuple(get("ggml.merges")),
        bos_id=get("ggml.bos_token_id"),
        eos_ids=(get("ggml.eos_token_id"),),
        add_bos=get("ggml.add_bos_token"),
        chat_template=get("chat_template"),
    )


@pytest.fixture(scope="module")
def path() -> Path:
    return cached_model(DEFAULT_MODEL)[1]


@pytest.fixture(scope="module")
def data(path: Path) -> TokenizerData:
    return read_tokenizer_data(path)


@pytest.fixture(scope="module")
def ours(data: TokenizerData) -> Tokenizer:
    return Tokenizer(data)


@pytest.fixture(scope="module")
def theirs(path: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # From GGUF transformers forgets the digit split of the model's published tokenizer.json.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.mark.parametrize("text", CORPUS, ids=range(len(CORPUS)))
def test_ids_equal_transformers(text: str, ours: Tokenizer, theirs: Any) -> None:
    want = theirs(text, add_special_tokens=False).input_ids
    assert ours.encode(text, special=True) == want
    assert ours.decode(want, skip_special=False) == text
    plain = ours.encode(text)
    assert ours.decode(plain) == text
    assert not any(ours.token_bytes(token) == b"" for token in plain)


def test_one_long_text_equals_transformers(ours: Tokenizer, theirs: Any) -> None:
    text = "\n".join(CORPUS * 20)
    assert ours.encode(text, special=True) == theirs(text, add_special_tokens=False).input_ids


def test_chat_ids_equal_transformers(data: TokenizerData, ours: Tokenizer, theirs: Any) -> None:
    template = ChatTemplate.of(data)
    assert template is not None
    messages = [
        {"role": "user", "content": "What is 2+2?  日本 🎉"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "  and\n3? "},
    ]
    theirs.chat_template = data.chat_template
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert template.render(messages) == text
    assert chat_prompt_ids(ours, template, messages) == theirs(text, add_special_tokens=False).input_ids

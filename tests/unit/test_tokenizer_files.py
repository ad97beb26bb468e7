"""Tokenizers of folders: BOS, EOS, chat template, control tokens; and a folder through the offline API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quickdraft.engine.llm import LLM
from quickdraft.errors import RequestError
from quickdraft.models.loading.tokenizer_files import tokenizer_of_folder
from quickdraft.models.registry import load_model
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import SamplingParams, TokenizerData
from tests.support.tiny_folder import put_json, tiny_tokenizer, write_tiny_folder

START, END, TOOL = 1, 2, 312
BOS_FIRST = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [], "special_tokens": {},
}  # fmt: skip


def read(folder: Path, settings: dict[str, Any], config: dict[str, Any] | None = None) -> TokenizerData:
    put_json(folder / "tokenizer_config.json", settings)
    return tokenizer_of_folder(folder, config or {}, 320)


@pytest.mark.parametrize(
    ("post_processor", "settings", "bos"),
    [
        (None, {"bos_token": "<|im_start|>"}, (False, 1)),
        (BOS_FIRST, {}, (True, 0)),
        (BOS_FIRST, {"bos_token": "<|im_start|>"}, (True, 0)),
        (BOS_FIRST, {"bos_token": "<|im_start|>", "add_bos_token": False}, (False, 1)),
        (BOS_FIRST, {"bos_token": "<|im_start|>", "add_eos_token": False}, (False, 1)),
        ({"type": "ByteLevel"}, {"bos_token": "<|im_start|>", "add_bos_token": True}, (True, 1)),
        (None, {"add_bos_token": True}, (False, None)),
        (None, {"bos_token": None}, (False, None)),
    ],
)
def test_bos_follows_transformers(
    tmp_path: Path, post_processor: Any, settings: dict[str, Any], bos: tuple[bool, int | None]
) -> None:
    put_json(tmp_path / "tokenizer.json", tiny_tokenizer(post_processor=post_processor))
    data = read(tmp_path, settings)
    assert (data.add_bos, data.bos_id) == bos
    assert Tokenizer(data).encode("et")[0] == (bos[1] if bos[0] else data.tokens.index("et"))


def test_text_without_tokens_is_refused_not_turned_into_the_unknown_token(tmp_path: Path) -> None:
    values = tiny_tokenizer()
    values["model"]["unk_token"] = "<|endoftext|>"
    values["model"]["vocab"]["unused"] = values["model"]["vocab"].pop("Z")
    put_json(tmp_path / "tokenizer.json", values)
    tokenizer = Tokenizer(read(tmp_path, {}))
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    with pytest.raises(RequestError, match=r"no tokens for this text; got .*endoftext"):
        tokenizer.encode("aZc")


def test_eos_comes_from_the_first_file_that_names_it(tmp_path: Path) -> None:
    put_json(tmp_path / "tokenizer.json", tiny_tokenizer())
    assert read(tmp_path, {}).eos_ids == ()
    settings = {"eos_token": {"content": "<|im_end|>"}}
    assert read(tmp_path, settings).eos_ids == (2,)
    assert read(tmp_path, settings, {"eos_token_id": 0}).eos_ids == (0,)
    put_json(tmp_path / "generation_config.json", {"temperature": 0.6})
    assert read(tmp_path, settings, {"eos_token_id": 0}).eos_ids == (0,)
    put_json(tmp_path / "generation_config.json", {"eos_token_id": [2, 0, 2]})
    assert read(tmp_path, settings, {"eos_token_id": 1}).eos_ids == (2, 0)


def test_the_chat_template_and_what_it_is_told(tmp_path: Path) -> None:
    put_json(tmp_path / "tokenizer.json", tiny_tokenizer())
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    for settings, expected in (
        ({}, None),
        ({"chat_template": "{{ bos_token }}|{{ eos_token }}"}, "|"),
        ({"chat_template": "{{ bos_token }}|{{ eos_token }}", **tokens}, "<|im_start|>|<|im_end|>"),
        ({"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}, "d"),
        ({"chat_template": [{"name": "rag", "template": "r"}]}, None),
    ):
        template = ChatTemplate.of(read(tmp_path, settings, {"eos_token_id": [0, 2]}))
        assert (template and template.render([])) == expected
    (tmp_path / "chat_template.jinja").write_text("from its own file")
    template = ChatTemplate.of(read(tmp_path, {"chat_template": "from the settings"}))
    assert template is not None and template.render([]) == "from its own file"


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_text_never_becomes_a_control_token(tmp_path: Path, ignore_merges: bool) -> None:
    """Not even where a whole word of the text is looked up in the vocabulary."""
    values = tiny_tokenizer()
    values["model"] |= {"ignore_merges": ignore_merges}
    steps = [{"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    put_json(tmp_path / "tokenizer.json", values)
    tokenizer = Tokenizer(read(tmp_path, {}))
    text = "<|im_start|> <tool_call> <|im_end|>"
    assert not {START, END} & set(tokenizer.encode(text))
    assert tokenizer.encode(text).count(TOOL) == 1
    assert tokenizer.decode(tokenizer.encode(text)) == text
    special = tokenizer.encode(text, special=True)
    assert [special[0], special[2], special[4]] == [START, TOOL, END]
    assert tokenizer.control_tokens == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def test_ids_beyond_the_tokenizer_are_silent(tmp_path: Path) -> None:
    put_json(tmp_path / "tokenizer.json", tiny_tokenizer())
    tokenizer = Tokenizer(read(tmp_path, {}))
    assert tokenizer.vocabulary_size == 320
    assert tokenizer.token_bytes(319) == b"" and tokenizer.token_text(319) == "[unused 319]"


def test_a_folder_answers_through_the_offline_api(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "Tiny-0.5B", shards=2)
    llm = LLM(folder, threads=1, kv_memory_bytes=1 << 20)
    assert llm.name == "Tiny-0.5B"
    loaded = load_model(folder, ReferenceOps(), max_rows=1, max_wanted=1)
    assert [path.name for path in loaded.files] == [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip
    prompt = llm.chat_prompt([{"role": "user", "content": "hi <|im_end|>"}])
    assert prompt.ids.count(START) == 2 and prompt.ids.count(END) == 1
    done = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert len(done.ids) == 8 and isinstance(done.text, str)

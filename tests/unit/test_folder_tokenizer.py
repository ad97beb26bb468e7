"""Every way the tokenizer files of a folder can be wrong is an error that names the file and the cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.broken_folder import Change, added, bpe, check, link, pipeline, remove, write

JSON, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def declared(**tokens: object) -> Change:
    return write(SETTINGS, json.dumps({"added_tokens_decoder": tokens}).encode())


CASES: dict[str, tuple[Change, str, str]] = {
    "missing": (remove(JSON), JSON, "missing"),
    "no JSON": (write(JSON, b"nope"), JSON, "not valid JSON"),
    "no model": (pipeline(model=None), JSON, "model; got NoneType"),
    "unigram": (bpe(type="Unigram"), JSON, "model.type; got 'Unigram'"),
    "vocabulary is a list": (bpe(vocab=[["a", 0.1]]), JSON, "vocab; got list"),
    "dropout": (bpe(dropout=0.1), JSON, "model.dropout; got 0.1"),
    "SentencePiece": (bpe(byte_fallback=True), JSON, "model.byte_fallback"),
    "merge outside": (bpe(merges=["zz yy"]), JSON, "cannot be built"),
    "merge of three": (bpe(merges=["e t a"]), JSON, "model.merges; got 'e t a'"),
    "merges are text": (bpe(merges="e t"), JSON, "model.merges; got str"),
    "id twice": (bpe(vocab={"a": 5, "b": 5}, merges=[]), JSON, "two tokens have the same id"),
    "id outside": (bpe(vocab={"a": 2**62}, merges=[]), JSON, "outside the vocabulary"),
    "id negative": (bpe(vocab={"a": -1}, merges=[]), JSON, "outside the vocabulary"),
    "id is text": (bpe(vocab={"a": "x"}, merges=[]), JSON, "outside the vocabulary"),
    "added token with two ids": (added(id=9), JSON, "'<|endoftext|>' has two ids"),
    "added token of nothing": (added(content=""), JSON, "added_tokens"),
    "added token strips": (added(lstrip=True), JSON, "'<|endoftext|>'; got 'lstrip'"),
    "added tokens are text": (pipeline(added_tokens="x"), JSON, "added_tokens"),
    "lower case": (pipeline(normalizer={"type": "Lowercase"}), JSON, "got 'Lowercase'"),
    "metaspace": (pipeline(pre_tokenizer={"type": "Metaspace"}), JSON, "got 'Metaspace'"),
    "no bytes": (pipeline(pre_tokenizer=None), JSON, "one ByteLevel"),
    "text is dropped": (
        pipeline(pre_tokenizer={"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False}, BYTES]}),
        JSON, "got 'Split'"),
    "bad regex": (
        pipeline(pre_tokenizer={"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}, BYTES]}),
        JSON, "cannot be built"),
    "adds EOS": (
        pipeline(post_processor={"type": "TemplateProcessing", "single": [
            {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}]}),
        JSON, "tokens before the text only"),
    "post-processor of BERT": (
        pipeline(post_processor={"type": "BertProcessing"}), JSON, "got 'BertProcessing'"),
    "settings are a list": (write(SETTINGS, b"[]"), SETTINGS, "an object"),
    "settings add EOS": (
        write(SETTINGS, b'{"add_eos_token": true}'), SETTINGS, "add_eos_token"),
    "settings add a token of nothing": (declared(**{"319": {"content": "", "special": True}}),
                                        SETTINGS, "got 319"),
    "settings add a token that is text": (declared(**{"319": "<x>"}), SETTINGS, "got 319: '<x>'"),
    "settings add a token without a number": (declared(x={"content": "<x>", "special": True}),
                                              SETTINGS, "got x: "),
    "settings add a list": (write(SETTINGS, b'{"added_tokens_decoder": [1]}'), SETTINGS, "an object"),
    "settings add a token at an id": (declared(**{"300": {"content": "<x>", "special": True}}),
                                      JSON, "two tokens have the same id"),
    "settings give a token another id": (declared(**{"319": {"content": "<tool_call>", "special": True}}),
                                         JSON, "'<tool_call>' has two ids; got 319"),
    "settings add a token outside": (declared(**{"320": {"content": "<x>", "special": True}}),
                                     JSON, "'<x>' is outside the vocabulary"),
    "settings add a token that strips": (
        declared(**{"319": {"content": "<x>", "special": True, "rstrip": True}}),
        JSON, "'<x>'; got 'rstrip'"),
    "BOS is a number": (write(SETTINGS, b'{"bos_token": 3}'), SETTINGS, "bos_token"),
    "template does not parse": (
        write("chat_template.jinja", b"{% for %}"), "chat_template.jinja", "does not parse"),
    "template in settings does not parse": (
        write(SETTINGS, b'{"chat_template": "{{ x"}'), SETTINGS, "does not parse"),
    "template is a number": (
        write(SETTINGS, b'{"chat_template": 5}'), SETTINGS, "chat_template; got int"),
    "template is not UTF-8": (write("chat_template.jinja", b"\xff"), "chat_template.jinja", "not UTF-8"),
    "generation config leads nowhere": (link(GENERATION, "gone"), GENERATION, "No such file"),
    "settings lead nowhere": (link(SETTINGS, "gone"), SETTINGS, "No such file"),
    "template leads nowhere": (link("chat_template.jinja", "gone"), "chat_template.jinja", "No such file"),
    "template is huge": (write("chat_template.jinja", b" " * (5 << 20)), "chat_template.jinja", "too large"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named(tmp_path: Path, case: str) -> None:
    check(tmp_path / "folder", CASES[case])

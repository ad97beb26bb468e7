"""A tokenizer of single bytes as the files of a Hugging Face folder, for tiny random models.

Ids 0 to 255 are the bytes, then come <|endoftext|>, <|im_start|> and <|im_end|>; turns are marked as
in ChatML.
"""

from __future__ import annotations

from typing import Any, Final

from quickdraft.text.tokenizer import byte_characters

CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_files() -> dict[str, dict[str, Any]]:
    """File name -> content."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": 256 + i, "content": text, "special": True, **flags} for i, text in enumerate(CONTROL)]
    steps = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {text: i for i, text in enumerate(byte_characters())}, "merges": [],
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": steps, "post_processor": None, "decoder": steps, "model": model,
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": CONTROL[2],
        "pad_token": CONTROL[0], "chat_template": TEMPLATE,
    }  # fmt: skip
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}

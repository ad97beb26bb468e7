"""Reader: typed look-ups in a JSON object of a model folder, with errors that name file and key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quickdraft.errors import ModelFormatError

HARMLESS: Final = {  # training, sampling and book-keeping
    "_attn_implementation_autoset", "_model_name_or_path", "_name_or_path", "attention_dropout",
    "bos_token_id", "do_sample", "dtype", "eos_token_id", "id2label", "initializer_range", "is_llama_config",
    "label2id", "max_length", "max_new_tokens", "max_window_layers", "model_max_length", "name_or_path",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
    "repetition_penalty", "return_dict", "sep_token_id", "temperature", "tokenizer_class", "top_k", "top_p",
    "torch_dtype", "transformers.js_config", "transformers_version", "unk_token_id", "unsloth_fixed",
    "unsloth_version", "use_cache",
}  # fmt: skip
HINTS: Final = {
    "auto_map": "the folder wants its own Python code to run, which quickdraft never does",
}


class Reader:
    """Typed look-ups that name the key; null means absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def size(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int or not 1 <= value <= 2**24:
            raise self._wrong(key, "1..2^24")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0.0 < value < 1e12:
            raise self._wrong(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self._wrong(key, "true or false")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def _wrong(self, key: str, expected: str) -> ModelFormatError:
        got = repr(self.values[key])[:80] if key in self.values else "nothing"
        return ModelFormatError(f"{self.where}: {key}", got=got, expected=expected)

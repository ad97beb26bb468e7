"""The pre-tokenizers quickdraft knows by the name a GGUF file gives them (`tokenizer.ggml.pre`).

A name stands for exactly what the model family's published tokenizer.json does before BPE:
normalizer, split, byte mapping, and whether a word that is in the vocabulary skips the merges.
A name that is not here is an error: a split that is nearly right gives nearly right token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, normalizers, pre_tokenizers

from quickdraft.errors import UnsupportedError

_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Of Qwen3.5: marks belong to the letters before them.
_QWEN35: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`split`: a regex whose matches are the words, or None for GPT-2's own; `digits`: every digit
    is a word; `nfc`: text is put into Unicode NFC first; `ignore_merges`: as in tokenizers' BPE."""

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The chain of `tokenizers` steps: words, then bytes as GPT-2's printable characters."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.split is not None:
            steps.append(pre_tokenizers.Split(Regex(self.split), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.split is None))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_GPT2: Final = PreTokenizer()
_LLAMA_BPE: Final = PreTokenizer(split=_LLAMA3, ignore_merges=True)
_QWEN: Final = PreTokenizer(split=_QWEN2, nfc=True)
KNOWN: Final[dict[str, PreTokenizer]] = {
    "default": _GPT2,
    "gpt2": _GPT2,
    "gpt-2": _GPT2,
    "smollm": PreTokenizer(digits=True),
    "starcoder": PreTokenizer(digits=True),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "qwen2": _QWEN,
    "qwen35": PreTokenizer(split=_QWEN35, nfc=True),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of that GGUF name; UnsupportedError for one that is not known exactly."""
    if name not in KNOWN:
        raise UnsupportedError(
            "the model's pre-tokenizer is not known", got=repr(name[:80]), expected=_names(sorted(KNOWN))
        )
    return KNOWN[name]


def _names(names: Sequence[str]) -> str:
    return "one of " + ", ".join(names)

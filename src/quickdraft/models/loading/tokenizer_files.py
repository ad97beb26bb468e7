"""TokenizerData from the files of a Hugging Face folder.

tokenizer.json says how text becomes ids: byte-level BPE only, and no step that loses text, so that
what is accepted is exact. tokenizer_config.json, generation_config.json and config.json name the
BOS, EOS and chat template. Added tokens and the post-processor are taken out of the pipeline that
goes to the `tokenizers` package: quickdraft finds control tokens itself (text/tokenizer.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.loading.strict_files import is_there, read_object, read_text
from quickdraft.types import TokenizerData

TOKENIZER: Final = "tokenizer.json"
SETTINGS: Final = "tokenizer_config.json"
GENERATION: Final = "generation_config.json"
TEMPLATE: Final = "chat_template.jinja"
_ANY: Final = (TOKENIZER, SETTINGS, "tokenizer.model", "vocab.json", "merges.txt")
MAX_ADDED_TOKENS: Final = 1 << 14
MAX_TEMPLATE_BYTES: Final = 4 << 20
_NORMAL, _CONTROL, _USER_DEFINED, UNUSED_TOKEN = 1, 3, 4, 5
_SPLIT_BEHAVIOURS: Final = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


def tokenizer_of_folder(
    folder: Path, config: Mapping[str, Any], vocabulary_size: int
) -> TokenizerData | None:
    """The tokenizer of a folder whose config.json is `config`; ids fit 0..vocabulary_size-1. None where
    the folder has no file of one: such a model takes and gives ids only.

    ModelFormatError for missing or contradictory files, UnsupportedError for a tokenizer that is not
    known exactly; both name the file.
    """
    if not any(is_there(folder / name) for name in _ANY):
        return None
    if not is_there(folder / TOKENIZER):
        raise ModelFormatError(
            f"{folder / TOKENIZER}: missing", expected="the tokenizer of the folder",
            hint="vocab.json and merges.txt are not enough: save the tokenizer again with transformers",
        )  # fmt: skip
    settings = _optional(folder / SETTINGS)
    file = _TokenizerJson(folder / TOKENIZER, vocabulary_size, settings.get("added_tokens_decoder"))
    bos, eos = (_token_text(settings, key, folder / SETTINGS) for key in ("bos_token", "eos_token"))
    file.check_settings(settings, folder / SETTINGS)
    template, template_file = _chat_template(folder, settings)
    first = file.template_bos()
    add_bos, bos_id = first is not None, file.ids.get(bos or "") if first is None else first
    if (
        "add_bos_token" in settings or "add_eos_token" in settings
    ):  # transformers: they replace the file's own
        if settings.get("add_eos_token"):
            raise UnsupportedError(f"{folder / SETTINGS}: add_eos_token", got=True, expected="false")
        bos_id = file.ids.get(bos or "")
        add_bos = bool(settings.get("add_bos_token")) and bos_id is not None
    return TokenizerData(
        model="gpt2",
        pre_tokenizer="",
        tokens=file.tokens,
        token_types=file.types,
        merges=(),
        bos_id=bos_id,
        eos_ids=eos_ids(folder, config, file.ids.get(eos or ""), vocabulary_size),
        add_bos=add_bos,
        chat_template=template,
        pipeline=file.pipeline(),
        bos_token=bos or "",
        eos_token=eos or "",
        source=str(folder / TOKENIZER),
        template_source=str(template_file),
    )


class _TokenizerJson:
    """tokenizer.json, checked; `tokens` and `types` by id, gaps filled with unused tokens.

    `declared` is added_tokens_decoder of tokenizer_config.json: as with transformers, tokens that only it
    has are tokens too.
    """

    def __init__(self, path: Path, vocabulary_size: int, declared: Any) -> None:
        self.path, self._values = path, read_object(path)
        self._model = self._object(self._values, "model")
        self._added = self._added_tokens()
        self._added += self._only_declared(declared)
        self._check_pipeline()
        self.ids = self._all_ids(vocabulary_size)
        kinds = {t["content"]: _CONTROL if t["special"] else _USER_DEFINED for t in self._added}
        tokens = [f"[unused {token}]" for token in range(vocabulary_size)]
        types = [UNUSED_TOKEN] * vocabulary_size
        for text, token in self.ids.items():
            tokens[token], types[token] = text, kinds.get(text, _NORMAL)
        self.tokens, self.types = tuple(tokens), tuple(types)
        self._special = {text for text, kind in kinds.items() if kind == _CONTROL}

    def pipeline(self) -> str:
        """The file without what quickdraft does itself, as JSON. Control tokens are not in the vocabulary
        any more, so BPE cannot make one out of text (one character may also be plain text, and stays)."""
        merged = {"".join(pair) for pair in self._merges()}
        hidden = {text for text in self._special if len(text) > 1} - merged
        vocabulary = {text: token for text, token in self._model["vocab"].items() if text not in hidden}
        model = {**self._model, "vocab": vocabulary}
        without = dict.fromkeys(("post_processor", "truncation", "padding", "decoder"))
        return json.dumps({**self._values, **without, "added_tokens": [], "model": model})

    def template_bos(self) -> int | None:
        """The id the post-processor puts before a text, None for none."""
        found: list[int] = []
        for step in _flat(self._values.get("post_processor"), "processors"):
            kind = step.get("type")
            if kind == "ByteLevel":
                continue
            if kind != "TemplateProcessing":
                self._refuse("post_processor", kind, "ByteLevel or TemplateProcessing")
            parts = step.get("single")
            if (
                not isinstance(parts, list)
                or not parts
                or parts[-1] != {"Sequence": {"id": "A", "type_id": 0}}
            ):
                self._refuse("post_processor.single", parts, "tokens before the text only")
            for part in parts[:-1]:
                name = part.get("SpecialToken", {}).get("id") if isinstance(part, dict) else None
                if not isinstance(name, str) or name not in self.ids:
                    self._fail("post_processor.single names no token", got=repr(part)[:80])
                found.append(self.ids[name])
        if len(found) > 1:
            self._refuse("post_processor.single", f"{len(found)} tokens before the text", "one at most")
        return found[0] if found else None

    def check_settings(self, settings: dict[str, Any], where: Path) -> None:
        """UnsupportedError when tokenizer_config.json has tokens that could not be taken over."""
        declared = settings.get("added_tokens_decoder", {})
        for key, token in declared.items() if isinstance(declared, dict) else ():
            content = token.get("content") if isinstance(token, dict) else None
            if str(self.ids.get(content) if isinstance(content, str) else None) != key:
                raise UnsupportedError(
                    f"{where}: added_tokens_decoder has a token {TOKENIZER} has not",
                    got=f"{key[:20]}: {content!r:.80}",
                )

    def _check_pipeline(self) -> None:
        model = self._model
        if model.get("type", "BPE") != "BPE":
            self._refuse("model.type", model.get("type"), "BPE")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
            if model.get(key):
                self._refuse(f"model.{key}", model[key], "none")
        for step in _flat(self._values.get("normalizer"), "normalizers"):
            if step.get("type") != "NFC":
                self._refuse("normalizer", step.get("type"), "none or NFC")
        steps = list(_flat(self._values.get("pre_tokenizer"), "pretokenizers"))
        for step in steps:
            fine = step.get("type") in ("ByteLevel", "Digits") or (
                step.get("type") in ("Split", "Punctuation") and step.get("behavior") in _SPLIT_BEHAVIOURS
            )
            if not fine:
                self._refuse(
                    "pre_tokenizer", step.get("type"), "ByteLevel, Digits and Split that keep all text"
                )
        if [step.get("type") for step in steps].count("ByteLevel") != 1:
            self._refuse(
                "pre_tokenizer", [step.get("type") for step in steps], "one ByteLevel: byte-level BPE"
            )
        normalised = bool(list(_flat(self._values.get("normalizer"), "normalizers")))
        for token in self._added:
            for flag in ("single_word", "lstrip", "rstrip", "normalized"):
                if token.get(flag) and (flag != "normalized" or normalised):
                    self._refuse(f"added token {token['content'][:80]!r}", flag, "none of these flags")

    def _added_tokens(self) -> list[dict[str, Any]]:
        added = self._values.get("added_tokens") or []
        if not isinstance(added, list) or len(added) > MAX_ADDED_TOKENS:
            self._fail("added_tokens", expected=f"a list of at most {MAX_ADDED_TOKENS}")
        for token in added:
            fine = (
                isinstance(token, dict)
                and isinstance(token.get("content"), str)
                and token["content"] != ""
                and type(token.get("id")) is int
                and type(token.get("special")) is bool
            )
            if not fine:
                self._fail("added_tokens", got=repr(token)[:80], expected="content, id and special of each")
        return added

    def _only_declared(self, declared: Any) -> list[dict[str, Any]]:
        """Complete descriptions of tokens whose id and text tokenizer.json does not have."""
        known: dict[str, Any] = {**self._object(self._model, "vocab")}
        known |= {token["content"]: token["id"] for token in self._added}
        taken = {token for token in known.values() if type(token) is int}
        return [
            {**token, "id": int(key)}
            for key, token in (declared.items() if isinstance(declared, dict) else ())
            if key.isascii() and key.isdecimal() and len(key) < 10 and int(key) not in taken
            and isinstance(token, dict) and type(token.get("special")) is bool
            and isinstance(token.get("content"), str) and token["content"] not in ("", *known)
        ]  # fmt: skip

    def _all_ids(self, vocabulary_size: int) -> dict[str, int]:
        vocabulary = self._object(self._model, "vocab")
        ids = dict(vocabulary)
        for token in self._added:
            if ids.setdefault(token["content"], token["id"]) != token["id"]:
                self._fail(f"token {token['content'][:80]!r} has two ids", got=token["id"])
        for text, token in ids.items():
            if type(token) is not int or not 0 <= token < vocabulary_size:
                self._fail(
                    f"the id of token {text[:80]!r} is outside the vocabulary", got=repr(token)[:80],
                    expected=f"0..{vocabulary_size - 1}, as config.json has {vocabulary_size} tokens",
                )  # fmt: skip
        if len(set(ids.values())) != len(ids):
            self._fail("two tokens have the same id")
        return ids

    def _merges(self) -> Iterator[list[str]]:
        merges = self._model.get("merges")
        if not isinstance(merges, list):
            self._fail("model.merges", got=type(merges).__name__, expected="a list")
        for merge in merges:
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(p, str) for p in pair):
                self._fail("model.merges", got=repr(merge)[:80], expected="pairs of tokens")
            yield pair

    def _object(self, values: dict[str, Any], key: str) -> dict[str, Any]:
        value = values.get(key)
        if not isinstance(value, dict):
            self._fail(key, got=type(value).__name__, expected="an object")
        return value

    def _refuse(self, what: str, got: object, expected: str) -> NoReturn:
        raise UnsupportedError(f"{self.path}: {what}", got=repr(got)[:80], expected=expected)

    def _fail(self, what: str, **details: Any) -> NoReturn:
        raise ModelFormatError(f"{self.path}: {what}", **details)


def _flat(step: Any, children: str) -> Iterator[dict[str, Any]]:
    """The steps of a pipeline part, Sequences opened; parse_object has bounded the nesting."""
    if step is None:
        return
    if not isinstance(step, dict):
        yield {"type": step}
    elif step.get("type") == "Sequence":
        inner = step.get(children)
        for child in inner if isinstance(inner, list) else [inner]:
            yield from _flat(child, children)
    else:
        yield step


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path) if is_there(path) else {}


def _token_text(settings: dict[str, Any], key: str, where: Path) -> str | None:
    """A token named as a string or as an AddedToken object."""
    value = settings.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise ModelFormatError(f"{where}: {key}", got=repr(value)[:80], expected="a token")
    return text


def eos_ids(
    folder: Path, config: Mapping[str, Any], named: int | None, vocabulary_size: int
) -> tuple[int, ...]:
    """The ids that end a text: from generation_config.json, else config.json, else the tokenizer's eos_token, `named`."""
    where, value = folder / GENERATION, _optional(folder / GENERATION).get("eos_token_id")
    if value is None:
        where, value = folder / "config.json", config.get("eos_token_id")
    if value is None:
        value = [] if named is None else named
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocabulary_size:
            raise ModelFormatError(
                f"{where}: eos_token_id", got=repr(token)[:80], expected=f"ids in 0..{vocabulary_size - 1}"
            )
    return tuple(dict.fromkeys(ids))


def _chat_template(folder: Path, settings: dict[str, Any]) -> tuple[str | None, Path]:
    """chat_template.jinja, else tokenizer_config.json's own (one, or the one named default)."""
    if is_there(folder / TEMPLATE):
        return read_text(folder / TEMPLATE, MAX_TEMPLATE_BYTES), folder / TEMPLATE
    where, value = folder / SETTINGS, settings.get("chat_template")
    if isinstance(value, list):
        named = [item for item in value if isinstance(item, dict) and item.get("name") == "default"]
        value = named[0].get("template") if named else None
    if value is not None and not isinstance(value, str):
        raise ModelFormatError(f"{where}: chat_template", got=type(value).__name__, expected="text")
    return value, where

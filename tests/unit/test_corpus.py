"""Lookup corpora: what is written is found; damaged, hostile and other models' files are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from quickdraft.engine.text_sources import vocabulary_of
from quickdraft.errors import ConfigError, ModelFormatError, UnsupportedError
from quickdraft.prepare.lookup_corpus import make_corpus
from quickdraft.speculate.corpus import Corpus, CorpusDrafter, Vocabulary, write_corpus
from quickdraft.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import byte_tokenizer_data
from tests.support.tiny import write_tiny_llama
from tests.support.tiny_hybrid import write_tiny_hybrid
from tests.unit.test_prediction import View

VOCABULARY = Vocabulary(500, hashlib.sha256(b"words").digest())
TEXTS = [[1, 2, 3, 4, 5, 6, 7], [9, 2, 3, 4, 8]]
HEADER, TOKENS, PLACES = 92, 14, 10  # a separator after each text; every place between two tokens


@pytest.fixture
def path(tmp_path: Path) -> Path:
    assert write_corpus(tmp_path / "corpus", TEXTS, VOCABULARY) == 12
    return tmp_path / "corpus"


@pytest.mark.parametrize(
    ("text", "draft", "match"),
    [
        ([1, 2, 3, 4], (5, 6), 4),
        ([0, 9, 2, 3, 4], (8,), 4),
        ([2, 3, 4], {(5, 6), (8,)}, 3),
        ([3, 4], (), 0),  # too little to go by
        ([6, 7, 9], (), 0),  # no match reaches from one text into another
        ([5, 6, 7], (), 0),  # and nothing follows at a text's end
    ],
)
def test_what_followed_is_drafted(path: Path, text: list[int], draft: object, match: int) -> None:
    made = CorpusDrafter(Corpus(path, VOCABULARY)).propose(View("r", [], text), 2)
    assert made.tokens in draft if isinstance(draft, set) else made.tokens == draft
    assert made.match_length == match and (not match or made.source == "corpus")


def test_its_layout(path: Path) -> None:
    data = path.read_bytes()
    assert len(data) == HEADER + 4 * (TOKENS + PLACES)
    header = struct.unpack_from("<8s4I32sI", data)
    crc = zlib.crc32(data[HEADER:])
    assert header == (b"qdcorpus", 1, 500, TOKENS, PLACES, VOCABULARY.digest, crc)
    assert data[60:92] == hashlib.sha256(data[:60]).digest()
    end = 2**32 - 1
    assert struct.unpack_from(">14I", data, HEADER) == (end, 8, 4, 3, 2, 9, end, 7, 6, 5, 4, 3, 2, 1)


def changed(at: int, form: str, value: int, checked: bool = True) -> Callable[[bytes], bytes]:
    """A number replaced, the checks made right again as a hostile writer would."""

    def change(data: bytes) -> bytes:
        made = bytearray(data)
        struct.pack_into(form, made, at, value)
        if checked:
            struct.pack_into("<I", made, 56, zlib.crc32(made[HEADER:]))
            made[60:92] = hashlib.sha256(made[:60]).digest()
        return bytes(made)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "no lookup corpus"),
        (lambda data: data[: HEADER - 1], "no lookup corpus"),
        (lambda data: b"GGUF" + data[4:], "no lookup corpus.*hint: make one"),
        (changed(8, "<I", 2), "version 2"),
        (lambda data: data[:-1], "damaged; got 187 bytes; expected 188"),
        (lambda data: data + b"\0", "damaged; got 189 bytes"),
        (changed(16, "<I", 2**31), "damaged; got 188 bytes"),
        (changed(16, "<I", 0), "damaged"),
        (changed(20, "<I", 2**32 - 1), "damaged"),
        (changed(12, "<I", 499), "of another tokenizer; got 499 tokens"),
        (changed(24, "<I", 1), "of another tokenizer"),
        (changed(24, "<I", 1, checked=False), "header of another digest"),
        (changed(HEADER + 8, ">I", 12, checked=False), "another checksum"),
        (changed(HEADER + 4 * TOKENS, "<I", 5, checked=False), "another checksum"),
        (changed(HEADER + 4, ">I", 500), "an id or place outside"),
        (changed(HEADER + 4 * TOKENS, "<I", TOKENS), "an id or place outside"),
        (changed(HEADER + 4 * TOKENS, "<I", 0), "an id or place outside"),
    ],
)
def test_a_wrong_file_is_refused(path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ModelFormatError, match=message) as raised:
        Corpus(path, VOCABULARY)
    assert str(path) in str(raised.value)


def test_a_hostile_order_stays_inside(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for index in range(PLACES):
        struct.pack_into("<I", data, HEADER + 4 * (TOKENS + index), 1 + 7 * index % (TOKENS - 1))
    path.write_bytes(changed(8, "<I", 1)(bytes(data)))
    drafter = CorpusDrafter(Corpus(path, VOCABULARY))
    for text in (*TEXTS, [2, 3, 4], [400] * 40):
        assert all(token < 500 for token in drafter.propose(View("r", [], text), 63).tokens)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Corpus(tmp_path / "none", VOCABULARY)
    with pytest.raises(ModelFormatError, match="no lookup corpus"):
        Corpus(tmp_path, VOCABULARY)
    with pytest.raises(ConfigError, match="of no use"):
        write_corpus(tmp_path / "empty", [[], []], VOCABULARY)
    with pytest.raises(ConfigError, match="cannot write"):
        write_corpus(tmp_path / "no" / "folder", TEXTS, VOCABULARY)
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_is_what_the_ids_stand_for() -> None:
    data = byte_tokenizer_data()
    swapped = (data.tokens[1], data.tokens[0], *data.tokens[2:])
    assert vocabulary_of(data) == vocabulary_of(dataclasses.replace(data, chat_template=None))
    assert vocabulary_of(data) != vocabulary_of(dataclasses.replace(data, tokens=swapped))
    with pytest.raises(UnsupportedError, match="needs a tokenizer"):
        vocabulary_of(None)


def test_made_of_text_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    texts = ["The first text.\nIts second line.\n" * 3, "wörld", ""]
    files = [tmp_path / f"{number}.txt" for number in range(3)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, encoding="utf-8")
    monkeypatch.setattr("quickdraft.prepare.lookup_corpus._PIECE_CHARACTERS", 20)  # cut after every line
    lines: list[str] = []
    count = make_corpus(model, files, tmp_path / "corpus", lines.append)
    from quickdraft.models.registry import open_target

    data = open_target(model).tokenizer
    tokenizer = Tokenizer(data)
    ids = tokenizer.encode(texts[0], add_bos=False)
    assert count == len(ids) + len(tokenizer.encode(texts[1], add_bos=False)) and len(lines) == 3
    corpus = Corpus(tmp_path / "corpus", vocabulary_of(data))
    length, position = corpus.find(ids[:10])
    assert length == 10 and corpus.following(position, 5) == tuple(ids[10:15])
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    for bad in (tmp_path / "latin", tmp_path / "none"):
        with pytest.raises(ConfigError, match=bad.name):
            make_corpus(model, [bad], tmp_path / "other", lines.append)
    with pytest.raises(UnsupportedError, match="needs a tokenizer"):
        make_corpus(write_tiny_hybrid(tmp_path / "ids", tokenizer=False), files, tmp_path / "x", lines.append)

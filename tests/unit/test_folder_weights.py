"""Every way the weight files of a folder can be wrong is an error that names the file and the cause."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.broken_folder import (
    FIRST,
    INDEX,
    QUERY,
    WEIGHTS,
    Change,
    check,
    config,
    edit,
    entry,
    header,
    home,
    instead,
    link,
    raw,
    remove,
    sharded,
    tensors,
    write,
)
from tests.support.tiny_folder import with_header

SHARD = "model-00001-of-00002.safetensors"
IRREGULAR = "something else than a regular file"
NAN = np.float32(np.nan)
# name -> (change, the file named, the cause)
CASES: dict[str, tuple[Change, str, str]] = {
    "empty": (write(WEIGHTS, b""), WEIGHTS, "an empty file"),
    "seven bytes": (write(WEIGHTS, b"1234567"), WEIGHTS, "not a safetensors file; got 7 bytes"),
    "a zip": (write(WEIGHTS, b"PK\3\4" + bytes(99)), WEIGHTS, "the header does not fit the file"),
    "huge header": (raw(lambda d: b"\xff" * 8 + d[8:]), WEIGHTS, "the header does not fit the file"),
    "header of 0": (raw(lambda d: bytes(8) + d[8:]), WEIGHTS, "the header does not fit the file"),
    "header is a list": (write(WEIGHTS, with_header([1, 2, 3], b"")), WEIGHTS, "a header that starts with"),
    "header is no JSON": (write(WEIGHTS, with_header(b"{nonsense}", b"")), WEIGHTS, "header: not valid JSON"),
    "header is not UTF-8": (write(WEIGHTS, with_header(b'{"\xff\xfe": 1}', b"")), WEIGHTS, "not valid JSON"),
    "nesting bomb": (write(WEIGHTS, with_header(b'{"a":' * 99999, b"")), WEIGHTS, "too deep nesting"),
    "name twice": (
        write(WEIGHTS, with_header(b'{"a": {}, "a": {}}', b"")), WEIGHTS, "the key 'a' occurs twice"),
    "cut off": (raw(lambda d: d[:-100]), WEIGHTS, "ends outside the file"),
    "cut in the header": (raw(lambda d: d[:300]), WEIGHTS, "the header does not fit the file"),
    "too long": (raw(lambda d: d + bytes(8)), WEIGHTS, "the tensors do not fill the file"),
    "unknown dtype": (entry(FIRST, dtype="F31"), WEIGHTS, "has an unknown type; got 'F31'"),
    "dtype a number": (entry(FIRST, dtype=4), WEIGHTS, "has an unknown type; got 4"),
    "wrong dtype": (entry(FIRST, dtype="I32"), WEIGHTS, "cannot read; got I32"),
    "wider dtype": (entry(FIRST, dtype="F64"), WEIGHTS, "has a wrong size"),
    "negative shape": (entry(FIRST, shape=[-320, -64]), WEIGHTS, "has a bad shape"),
    "shape of truth": (entry(FIRST, shape=[True, 64]), WEIGHTS, "has a bad shape"),
    "huge shape": (entry(FIRST, shape=[2**40, 2**40]), WEIGHTS, "has a wrong size"),
    "endless shape": (entry(FIRST, shape=[1] * 9999), WEIGHTS, "has a bad shape"),
    "flat shape": (entry(FIRST, shape=[320 * 64]), "folder", "got shape (20480,); expected 320 rows"),
    "no shape": (tensors(lambda t: t.update({FIRST: np.float32(1)})), "folder", "got shape ()"),
    "missing embedding": (tensors(lambda t: t.pop(FIRST)), "folder", "embed_tokens.weight; got nothing"),
    "turned shape": (entry(QUERY, shape=[64, 96]), "folder", f"{QUERY} has a wrong shape"),
    "offsets reversed": (entry(FIRST, data_offsets=[81920, 0]), WEIGHTS, "has a wrong size; got -81920"),
    "offsets outside": (entry(FIRST, data_offsets=[2**40, 2**40 + 81920]), WEIGHTS, "ends outside the file"),
    "offsets overlap": (entry(QUERY, data_offsets=[0, 96 * 64 * 4]), WEIGHTS, "overlaps the one before it"),
    "three offsets": (entry(FIRST, data_offsets=[0, 1, 2]), WEIGHTS, "has bad data_offsets"),
    "offsets of text": (entry(FIRST, data_offsets=["0", "8"]), WEIGHTS, "has bad data_offsets"),
    "no offsets": (header(lambda v: v[FIRST].pop("data_offsets")), WEIGHTS, "is not described by dtype"),
    "one key more": (entry(FIRST, device="cuda"), WEIGHTS, "is not described by dtype"),
    "a hole": (header(lambda v: v.pop(QUERY)), WEIGHTS, "leaves a hole"),
    "metadata of numbers": (header(lambda v: v.update(__metadata__={"a": 1})), WEIGHTS, "__metadata__"),
    "NaN": (tensors(lambda t: t[QUERY].put(3, NAN)), WEIGHTS, f"{QUERY} holds values that are not"),
    "GGUF name": (
        tensors(lambda t: t.update({"blk.1.attn_q.weight": t.pop(QUERY)})), "folder", f"{QUERY} is missing"),
    "missing tensor": (tensors(lambda t: t.pop(QUERY)), "folder", f"{QUERY} is missing"),
    "missing norm": (tensors(lambda t: t.pop("model.norm.weight")), "folder", "model.norm.weight is missing"),
    "missing head": (tensors(lambda t: t.pop("lm_head.weight")), "folder", "lm_head.weight is missing"),
    "extra tensor": (
        tensors(lambda t: t.update(extra=t[QUERY])), "folder", "tensors nobody uses; got extra"),
    "a bias nobody adds": (
        tensors(lambda t: t.update({QUERY.replace("weight", "bias"): t[QUERY][:, 0]})),
        "folder", "nobody uses; got model.layers.1.self_attn.q_proj.bias"),
    "a third layer": (
        tensors(lambda t: t.update({QUERY.replace("1", "2"): t[QUERY]})),
        "folder", "nobody uses; got model.layers.2"),
    "two heads": (config(tie_word_embeddings=True), "folder", "differs from the embedding"),
    "a directory": (instead(WEIGHTS, Path.mkdir), WEIGHTS, IRREGULAR),
    "a pipe": (instead(WEIGHTS, os.mkfifo), WEIGHTS, IRREGULAR),
    "no weights": (remove(WEIGHTS), "folder", "no weights"),
    "a symlink loop": (link(WEIGHTS, WEIGHTS), WEIGHTS, "symbolic links"),
    "pickled weights": (
        lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), "pytorch_model.bin", "pickle are not read"),
    "a GGUF in a folder": (lambda f: (f / WEIGHTS).rename(f / "x.gguf"), "folder", "name the GGUF file"),
    "missing shard": (sharded(remove(SHARD)), SHARD, "No such file"),
    "looping shard": (sharded(link(SHARD, SHARD)), SHARD, "symbolic links"),
    "shard is a directory": (sharded(instead(SHARD, Path.mkdir)), SHARD, IRREGULAR),
    "shard that is not there": (home("model-00009-of-00002.safetensors"), "00009", "No such file"),
    "index with ../": (home("../model.safetensors"), INDEX, "expected the plain name"),
    "index with a path": (home("/etc/passwd"), INDEX, "expected the plain name"),
    "index with a number": (home(7), INDEX, "expected the plain name"),
    "index with NUL": (home("a\0b.safetensors"), INDEX, "expected the plain name"),
    "index names another shard": (home(SHARD.replace("00001-", "00002-")), SHARD, "are not those"),
    "index forgets a tensor": (
        sharded(edit(INDEX, lambda v: v["weight_map"].pop(QUERY))), "model-0000", f"this file; got {QUERY}"),
    "index without a map": (sharded(edit(INDEX, lambda v: v.pop("weight_map"))), INDEX, "weight_map"),
    "index is empty": (sharded(edit(INDEX, lambda v: v["weight_map"].clear())), INDEX, "weight_map"),
    "index is a list": (sharded(write(INDEX, b"[]")), INDEX, "expected an object"),
    "tensor in two shards": (
        sharded(lambda f: (f / SHARD).write_bytes((f / SHARD.replace("00001-", "00002-")).read_bytes())),
        SHARD, "are not those"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named(tmp_path: Path, case: str) -> None:
    check(tmp_path / "folder", CASES[case])

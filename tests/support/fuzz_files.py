"""Mutants of model files through the real loader, in a process of little memory: `python -m
tests.support.fuzz_files FOLDER ROUNDS` prints {kind: [accepted, refused]} as JSON.

Whatever is neither accepted nor a QuickdraftError ends the process with the mutant's number: a crash,
another exception, an allocation beyond SPARE_BYTES, a mutant that takes SECONDS.
"""

from __future__ import annotations

import json
import random
import re
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quickdraft.errors import QuickdraftError
from quickdraft.models.inspect import inspect_model
from quickdraft.models.registry import load_model
from quickdraft.ops.select import select
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.tokenizer import Tokenizer
from tests.support.quant_folder import FORMATS, quantised_folder
from tests.support.tiny import tiny_tensors, write_tiny_llama
from tests.support.tiny_folder import folder_name, write_tiny_folder

SPARE_BYTES = 256 << 20
SECONDS = 20
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
SMALL = {
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 32, "head_dim": 16,
}  # fmt: skip
NUMBERS = [b"0", b"-1", b"1e999", b"1.5", b"18446744073709551616", b"4294967295", b"9" * 30, b"16777216"]
TOKENS = [b"null", b"[]", b"{}", b"true", b"NaN", b'"', b"[[[[", b'{"a":', b"\xff", b"\\u0000", b"..", b"/"]


@dataclass(frozen=True, slots=True)
class Target:
    """A file to mutate: its first `head` bytes mostly; `model` is what is loaded afterwards."""

    name: str
    file: Path
    model: Path
    head: int
    share: int


def mutate(data: bytes, head: int, source: random.Random, text: bool) -> bytes:
    """One to four changes: bytes, numbers, splices, cuts, insertions."""
    mutant = bytearray(data)
    for _ in range(source.choice([1, 1, 1, 2, 4])):
        if not mutant:  # all was cut off
            break
        end = max(1, min(head if source.random() < 0.95 else len(mutant), len(mutant)))
        at, other, size = source.randrange(end), source.randrange(end), source.randrange(1, 40)
        kind = source.randrange(7)
        if kind == 0:
            mutant[at] = source.choice([0, 1, 127, 128, 255, source.randrange(256)])
        elif kind == 1:
            mutant[at] ^= 1 << source.randrange(8)
        elif kind == 2:
            mutant[at : at + size] = mutant[other : other + size]
        elif kind == 3:
            del mutant[at : at + size]
        elif kind == 4 and not text:
            width = source.choice([1, 4, 8])
            number = source.choice([0, 1, 2**31, 2**63, 2**64 - 1, source.randrange(2**16)])
            mutant[at : at + width] = number.to_bytes(8, "little")[:width]
        elif kind == 4:
            found = list(re.finditer(rb"\d+", bytes(mutant[:end])))
            if found:
                match = source.choice(found)
                mutant[match.start() : match.end()] = source.choice(NUMBERS)
        elif kind == 5:
            mutant[at:at] = source.choice(TOKENS) * source.choice([1, 1, 500])
        elif source.random() < 0.3:
            del mutant[source.randrange(len(mutant)) :]
    return bytes(mutant)


def opened(path: Path, ops: object) -> None:
    """All that opening a model does."""
    loaded = load_model(path, ops, max_rows=2, max_wanted=1, kv_memory_bytes=1 << 20)  # type: ignore[arg-type]
    if loaded.tokenizer is not None:
        Tokenizer(loaded.tokenizer).encode("The end. 42")
        ChatTemplate.of(loaded.tokenizer)


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def targets(folder: Path) -> list[Target]:
    tensors = {
        folder_name(name): values
        for name, values in tiny_tensors(0, 1, 32, 2, 1, 32, 320, "qwen3", 16).items()
    }
    whole = write_tiny_folder(folder / "whole", tensors=tensors, **SMALL)
    parts = write_tiny_folder(folder / "parts", shards=2, tensors=tensors, **SMALL)
    gguf = write_tiny_llama(
        folder / "tiny.gguf",
        layers=1,
        hidden=32,
        heads=2,
        kv_heads=1,
        ff=32,
        architecture="qwen3",
        head_dim=16,
    )
    weights = whole / WEIGHTS
    quantised = []
    for share, form in ((5, "compressed-tensors asymmetric"), (4, "gptq in order")):
        path = folder / form
        quantised_folder(path, FORMATS[form])
        quantised += [
            Target(f"{form}: weights", path / WEIGHTS, path, header_bytes(path / WEIGHTS), share),
            Target(f"{form}: config", path / "config.json", path, 1 << 20, share),
        ]
    return [
        *quantised,
        Target("gguf", gguf, gguf, 6000, 30),
        Target("safetensors", weights, whole, header_bytes(weights), 20),
        Target("config", whole / "config.json", whole, 1 << 20, 12),
        Target("tokenizer", whole / "tokenizer.json", whole, 1 << 20, 10),
        Target("settings", whole / "tokenizer_config.json", whole, 1 << 20, 5),
        Target("index", parts / INDEX, parts, 1 << 20, 5),
    ]


def run(folder: Path, rounds: int) -> dict[str, list[int]]:
    """Mutate every target in its share of the rounds."""
    ops, counts = select(1), {}
    everything = targets(folder)
    for target in everything:
        opened(target.model, ops)  # as written, each is fine
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))
    for target in everything:
        good, source, counts[target.name] = target.file.read_bytes(), random.Random(target.name), [0, 0]
        for number in range(rounds * target.share // 100):
            mutant = mutate(good, target.head, source, target.file.suffix == ".json")
            target.file.write_bytes(mutant)
            checks: list[Callable[[], object]] = [lambda t=target: opened(t.model, ops)]
            if number % 10 == 0:
                checks.append(lambda t=target: inspect_model(t.model))
            for check in checks:
                counts[target.name][survives(check, f"{target.name} {number}")] += 1
        target.file.write_bytes(good)
    return counts


def survives(check: Callable[[], object], mutant: str) -> bool:
    """True when it was refused as it should be."""
    signal.alarm(SECONDS)
    try:
        check()
    except QuickdraftError:
        return True
    except BaseException:
        print(f"mutant {mutant}", file=sys.stderr)
        raise
    finally:
        signal.alarm(0)
    return False


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]))))

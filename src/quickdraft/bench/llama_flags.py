"""What a llama-server binary offers, read from its own --help; flags change names from version to version.

Owns the choice of configurations to compare with. Starts the binary for --help and --version only.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quickdraft.errors import ConfigError

_HEAD: Final = re.compile(r"^((?:--?[A-Za-z][\w-]*, *)*--?[A-Za-z][\w-]*)(?: (\S+))?")
_TYPE: Final = re.compile(r"ngram-[a-z0-9]+(?:-[a-z0-9]+)*")
HELP_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Flag:
    """One entry of --help: the hint of its value (None: it takes none) and its whole text."""

    hint: str | None
    text: str


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """One way to start the peer; `label` is what tables call it."""

    label: str
    flags: tuple[str, ...] = ()
    drafts: bool = False


@dataclass(frozen=True, slots=True)
class LlamaFlags:
    """A binary and the flags it knows, those that it only knows as removed left out."""

    binary: Path
    version: str
    flags: Mapping[str, Flag]

    def given(self, flag: str, *values: str) -> list[str]:
        """The flag with its values if the binary has it, else nothing."""
        return [flag, *values] if flag in self.flags else []

    def command(self, model: Path, port: int, threads: int, context: int) -> list[str]:
        """Everything but the configuration: CPU only, one slot, no second cache in host memory."""
        return [
            str(self.binary), "--model", str(model), "--host", "127.0.0.1", "--port", str(port),
            "--ctx-size", str(context), "--threads", str(threads),
            *self.given("--threads-batch", str(threads)), *self.given("--parallel", "1"),
            *self.given("--n-gpu-layers", "0"), *self.given("--cache-ram", "0"),
        ]  # fmt: skip

    @property
    def plain(self) -> list[PeerConfig]:
        """Without drafts: flash attention on and off, as far as the binary lets one choose."""
        entry = self.flags.get("--flash-attn")
        if entry is None:
            return [PeerConfig("default")]
        on, off = (
            (("--flash-attn",), ())
            if entry.hint is None
            else (("--flash-attn", "on"), ("--flash-attn", "off"))
        )
        return [PeerConfig("flash attention on", on), PeerConfig("flash attention off", off)]

    def drafting(self, base: PeerConfig) -> list[PeerConfig]:
        """`base` with each n-gram drafter, as it comes and with short n-grams and drafts of at most 16."""
        entry = self.flags.get("--spec-type")
        types = [] if entry is None else list(dict.fromkeys(_TYPE.findall(f"{entry.hint} {entry.text}")))
        configs = []
        for kind in types:
            chosen = (*base.flags, "--spec-type", kind)
            configs.append(PeerConfig(f"{base.label}, {kind}", chosen, True))
            short = self._short(kind)
            if short:
                label = f"{base.label}, {kind} ({' '.join(short).replace('--spec-', '')})"
                configs.append(PeerConfig(label, (*chosen, *short), True))
        return configs

    def _short(self, kind: str) -> list[str]:
        if kind == "ngram-mod":
            own = [
                *self.given("--spec-ngram-mod-n-match", "8"), *self.given("--spec-ngram-mod-n-min", "1"),
                *self.given("--spec-ngram-mod-n-max", "16"),
            ]  # fmt: skip
        else:
            own = [*self.given(f"--spec-{kind}-size-n", "3"), *self.given(f"--spec-{kind}-size-m", "15")]
        shared = [*self.given("--spec-ngram-size-n", "3"), *self.given("--spec-ngram-size-m", "15")]
        if not own and kind != "ngram-cache":
            own = shared
        return [*own, *(self.given("--draft-max", "16") or self.given("--spec-draft-n-max", "16"))]


def llama_flags(binary: Path) -> LlamaFlags:
    """Ask the binary; ConfigError when it does not run or does not look like llama-server."""
    text = _output(binary, "--help")
    flags = parse_help(text)
    missing = [flag for flag in ("--model", "--port", "--ctx-size", "--threads") if flag not in flags]
    if missing:
        raise ConfigError(
            f"{binary} does not look like llama-server",
            got=f"no {missing[0]} in its --help",
            expected="the server of llama.cpp",
        )
    found = re.search(r"version: *(.+)", _output(binary, "--version"))
    return LlamaFlags(binary, found[1].strip() if found else "unknown", flags)


def parse_help(text: str) -> dict[str, Flag]:
    """Flags by every name they have. An entry begins in the first column; the rest of it is indented."""
    found: dict[str, Flag] = {}
    for entry in re.split(r"\n(?=-)", "\n" + text.replace("\r", "")):
        match = _HEAD.match(entry)
        if match is None or "argument has been removed" in entry:
            continue
        for name in re.split(r", *", match[1]):
            found[name] = Flag(match[2], entry)
    return found


def _output(binary: Path, flag: str) -> str:
    try:
        done = subprocess.run(
            [str(binary), flag], capture_output=True, timeout=HELP_SECONDS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"cannot run {binary} {flag}", got=str(error), hint="give the path of a llama-server binary"
        ) from error
    return (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace")

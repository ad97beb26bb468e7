"""Sizes, folders, model names, what `serve` may be asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from quickdraft import config
from quickdraft.config import Hardware, ServeConfig, kernel_object
from quickdraft.errors import ConfigError
from quickdraft.ops.select import select
from tests.support.objects import OBJECTS


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", 2**30), ("512MiB", 2**29), ("2G", 2**31), ("1.5g", 3 * 2**29), ("64 kb", 65536),
        ("1T", 2**40), ("1048576", 2**20), ("12B", 12), (" 7 ", 7),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert config.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "0", "1GG", "1e9", "1PiB", "nan", "1G 2G", "9" * 30, "٣G"])
def test_wrong_sizes_name_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_memory"):
        config.parse_bytes(text, name="kv_memory")


def test_cache_folder_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUICKDRAFT_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert config.cache_folder() == tmp_path / "own"
    monkeypatch.setenv("QUICKDRAFT_CACHE", "")
    assert config.cache_folder() == tmp_path / "xdg" / "quickdraft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert config.cache_folder() == tmp_path / "home" / ".cache" / "quickdraft"


def test_relative_cache_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICKDRAFT_CACHE", "cache")
    with pytest.raises(ConfigError, match=r"QUICKDRAFT_CACHE.*absolute"):
        config.cache_folder()


def test_alias_lies_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUICKDRAFT_CACHE", str(tmp_path))
    found = config.find_model("smollm2-135m")
    assert found.path == tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert found.name == "smollm2-135m"
    assert found.alias is config.ALIASES["smollm2-135m"]


def test_file_folder_and_unknown_name(tmp_path: Path) -> None:
    (tmp_path / "tiny.v2.gguf").write_bytes(b"GGUF")
    assert config.find_model(tmp_path / "tiny.v2.gguf") == config.FoundModel(
        "tiny.v2", tmp_path / "tiny.v2.gguf"
    )
    (tmp_path / "Tiny-0.5B").mkdir()
    assert config.find_model(f"{tmp_path}/Tiny-0.5B/") == config.FoundModel(
        "Tiny-0.5B", tmp_path / "Tiny-0.5B"
    )
    assert config.cached_model(tmp_path / "Tiny-0.5B") == ("Tiny-0.5B", tmp_path / "Tiny-0.5B")
    with pytest.raises(ConfigError, match="smollm2-135m"):
        config.find_model("smollm3")


@pytest.mark.parametrize("name", [".", "..", "./"])
def test_the_folder_one_stands_in_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    folder = (tmp_path / "in" / name).resolve()
    assert config.find_model(name) == config.FoundModel(folder.name, folder)


@pytest.mark.parametrize("name", ["x" * 5000, "\0", "~nobody-of-that-name/model.gguf", ""])
def test_strange_names_are_config_errors(name: str) -> None:
    with pytest.raises(ConfigError):
        config.find_model(name)


def test_cached_model_says_to_pull(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUICKDRAFT_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="quickdraft pull smollm2-135m"):
        config.cached_model("smollm2-135m")
    path = config.find_model("smollm2-135m").path
    path.parent.mkdir()
    path.write_bytes(b"GGUF")
    assert config.cached_model("smollm2-135m") == ("smollm2-135m", path)


@pytest.mark.parametrize("host", ["0.0.0.0", "", "192.168.1.2", "::", "example.org", "127.0.0.1.example.org"])
def test_only_loopback(host: str) -> None:
    with pytest.raises(ConfigError, match="binding beyond loopback needs an API key"):
        ServeConfig(host=host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_is_fine(host: str) -> None:
    assert ServeConfig(host=host).host == host


@pytest.mark.parametrize("field", ["port", "threads", "max_sequences"])
@pytest.mark.parametrize("value", [0, -1, 10**6, True])
def test_numbers_out_of_range(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=field):
        ServeConfig(**{field: value})


def test_resolve_fills_only_what_was_left_open() -> None:
    small, large = Hardware(3, 2**31), Hardware(3, 2**40)
    assert (small.default_kv_memory_bytes, large.default_kv_memory_bytes) == (2**29, 2**30)
    assert ServeConfig().resolve(small) == ServeConfig(threads=3)
    asked = ServeConfig(threads=1, kv_memory_bytes=5)
    assert asked.resolve(large) == asked


def test_hardware_of_this_machine() -> None:
    hardware = Hardware.detect()
    assert hardware.cores >= 1
    assert hardware.free_memory_bytes > 2**20


def test_kv_dtypes() -> None:
    asked = ("fp32", "float16", "bf16", "int8")
    assert [config.parse_kv_dtype(t) for t in asked] == ["float32", "float16", "bfloat16", "int8"]
    with pytest.raises(ConfigError, match="kv_dtype"):
        config.parse_kv_dtype("int4")


def test_kernels_are_named_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUICKDRAFT_KERNELS", raising=False)
    assert kernel_object() == "auto"
    monkeypatch.setenv("QUICKDRAFT_KERNELS", "scalar")
    assert "scalar kernels" in select(1).explain()
    monkeypatch.setenv("QUICKDRAFT_KERNELS", "sse")
    with pytest.raises(ConfigError, match=r"QUICKDRAFT_KERNELS.*'sse'.*avx512"):
        kernel_object()
    if "avx512" not in OBJECTS:
        monkeypatch.setenv("QUICKDRAFT_KERNELS", "avx512")
        with pytest.raises(ConfigError, match="no avx512 kernels"):
            select(1)

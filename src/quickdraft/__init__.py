"""quickdraft: serve one large language model fast, without changing a token.

The public names below are imported when first used, so that `import quickdraft` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from quickdraft.engine.llm import LLM as LLM
    from quickdraft.errors import BadParameter as BadParameter
    from quickdraft.errors import CapacityError as CapacityError
    from quickdraft.errors import ConfigError as ConfigError
    from quickdraft.errors import ContextTooLong as ContextTooLong
    from quickdraft.errors import EngineError as EngineError
    from quickdraft.errors import FetchError as FetchError
    from quickdraft.errors import ModelFormatError as ModelFormatError
    from quickdraft.errors import QuickdraftError as QuickdraftError
    from quickdraft.errors import RequestError as RequestError
    from quickdraft.errors import UnsupportedError as UnsupportedError
    from quickdraft.types import FinishReason as FinishReason
    from quickdraft.types import SamplingParams as SamplingParams
    from quickdraft.types import Speculation as Speculation
    from quickdraft.types import Timings as Timings

_HOMES: Final = {
    "quickdraft.engine.llm": ("LLM",),
    "quickdraft.types": ("FinishReason", "SamplingParams", "Speculation", "Timings"),
    "quickdraft.errors": (
        "BadParameter", "CapacityError", "ConfigError", "ContextTooLong", "EngineError", "FetchError",
        "ModelFormatError", "QuickdraftError", "RequestError", "UnsupportedError",
    ),
}  # fmt: skip
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'quickdraft' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})

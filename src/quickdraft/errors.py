"""The error tree. Every message says what happened, what was got, what was expected, and a hint.

QuickdraftError
├── ConfigError         the user's own settings
├── ModelFormatError    a model file that is not what it claims to be
├── UnsupportedError    well-formed, but nothing here can do it
├── RequestError        one request is wrong; the engine is fine
│   ├── ContextTooLong
│   └── BadParameter
├── CapacityError       no room now (KV blocks, queue, disk)
├── FetchError          a model could not be downloaded
└── EngineError         the engine failed; its requests are lost
"""

from __future__ import annotations

__all__ = [
    "BadParameter",
    "CapacityError",
    "ConfigError",
    "ContextTooLong",
    "EngineError",
    "FetchError",
    "ModelFormatError",
    "QuickdraftError",
    "RequestError",
    "UnsupportedError",
]


class QuickdraftError(Exception):
    """Base of every error quickdraft raises on purpose."""

    def __init__(self, what: str, *, got: object = None, expected: object = None, hint: str = "") -> None:
        self.what, self.got, self.expected, self.hint = what, got, expected, hint
        parts = [what]
        if got is not None:
            parts.append(f"got {got}")
        if expected is not None:
            parts.append(f"expected {expected}")
        message = "; ".join(parts)
        super().__init__(f"{message}. hint: {hint}" if hint else message)


class ConfigError(QuickdraftError):
    """A setting of this process is wrong (flag, environment variable, config file)."""


class ModelFormatError(QuickdraftError):
    """A model file is damaged or inconsistent; the message names file and cause."""


class UnsupportedError(QuickdraftError):
    """The input is well-formed but asks for something quickdraft does not have."""


class RequestError(QuickdraftError):
    """One request cannot be served as written; nothing else is affected."""


class ContextTooLong(RequestError):
    """The prompt leaves no room to answer; carries both numbers. `at_least`: it was too long to count."""

    def __init__(self, prompt_tokens: int, max_context_tokens: int, *, at_least: bool = False) -> None:
        self.prompt_tokens, self.max_context_tokens = prompt_tokens, max_context_tokens
        self.prompt_size = f"at least {prompt_tokens} tokens" if at_least else f"{prompt_tokens} tokens"
        super().__init__(
            "the prompt does not fit the context",
            got=self.prompt_size,
            expected=f"at most {max_context_tokens - 1} "
            f"(context {max_context_tokens}, one token of room to answer)",
            hint="shorten the prompt or serve a model with a longer context",
        )


class BadParameter(RequestError):
    """A field of a request has a wrong value; `name` is the field."""

    def __init__(self, name: str, *, got: object = None, expected: object = None, hint: str = ""):
        self.name = name
        super().__init__(f"bad value for '{name}'", got=got, expected=expected, hint=hint)


class CapacityError(QuickdraftError):
    """There is no room for this now; trying again later may work."""


class FetchError(QuickdraftError):
    """A model could not be downloaded; nothing half-done is left."""


class EngineError(QuickdraftError):
    """The engine failed while it worked on a request."""

"""The prompts of a completion, in the four shapes that OpenAI's API has for them.

Reads shapes only: whether ids are in range, and whether they fit, is the engine's to say.
"""

from __future__ import annotations

from typing import Any, Final

from quickdraft.errors import BadParameter

MAX_CHOICES: Final = 64  # answers to one request: prompts, times n


def token_ids(name: str, value: list[Any]) -> list[int]:
    """`value` as token ids; BadParameter names the first item that is none. Ranges are not checked."""
    for index, item in enumerate(value):
        if not isinstance(item, int) or isinstance(item, bool):
            raise BadParameter(f"{name}[{index}]", got=repr(item)[:80], expected="a token id")
    return value


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion: a text, token ids, or a list of either."""
    shapes = "a string, a list of token ids, or a list of these"
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise BadParameter("prompt", got=repr(prompt)[:80], expected=shapes)
    if isinstance(prompt[0], int):
        return [token_ids("prompt", prompt)]
    if len(prompt) > MAX_CHOICES:
        raise BadParameter("prompt", got=f"{len(prompt)} prompts", expected=f"at most {MAX_CHOICES}")
    given: list[str | list[int]] = []
    for index, one in enumerate(prompt):
        if type(one) is not type(prompt[0]) or not isinstance(one, str | list):
            raise BadParameter(f"prompt[{index}]", got=repr(one)[:80], expected=shapes)
        given.append(one if isinstance(one, str) else token_ids(f"prompt[{index}]", one))
    return given

"""Chat templates: jinja2 source from a model file, rendered as transformers renders it, sandboxed.

`render` gives the prompt as text. `chat_prompt_ids` gives it as token ids and keeps users out of
the structure: every string of the messages that reads like a control token gets a sentinel
character inside before rendering, so that after it only the template's own control tokens still
match; the sentinel is taken out of the literal pieces before BPE. The sentinel is a Unicode
noncharacter that occurs nowhere in the messages. Only a template that rewrites contents (deletes
from within them, changes their case, completes them) can still make a control token of them.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

from quickdraft.errors import ContextTooLong, ModelFormatError, RequestError
from quickdraft.text.source import naming
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import TokenizerData

MAX_SOURCE_CHARS: Final = 1 << 20
MAX_OUTPUT_CHARS: Final = 64 << 20
MAX_STEPS: Final = 500_000  # turns of loops and calls of macros in one rendering
_SENTINELS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class ChatTemplate:
    """A compiled template; ModelFormatError when the source is too long or does not parse."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelFormatError(
                "the chat template is too long",
                got=f"{len(source)} characters",
                expected=f"at most {MAX_SOURCE_CHARS}",
            )
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:  # also what Python says of generated code: nesting, odd characters
            raise ModelFormatError("the chat template does not parse", got=error) from error
        self._specials = {"bos_token": bos_token, "eos_token": eos_token}

    @classmethod
    def of(cls, data: TokenizerData) -> ChatTemplate | None:
        """The template of a model file, None when it has none."""
        if data.chat_template is None:
            return None
        ids = data.bos_id, next(iter(data.eos_ids), None)
        bos, eos = (
            text if text is not None else "" if token is None else data.tokens[token]
            for text, token in zip((data.bos_token, data.eos_token), ids, strict=True)
        )
        with naming(data.template_source):
            return cls(data.chat_template, bos_token=bos, eos_token=eos)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text; RequestError when the template refuses these messages or fails on them."""
        self._environment.start()
        try:
            pieces = self._template.generate(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self._specials,
                **variables,
            )
            return "".join(_bounded(pieces))
        except RequestError:
            raise
        # A template is a program from a model file: whatever it raises concerns this request only.
        except Exception as error:
            raise RequestError("the chat template failed on these messages", got=error) from error


def chat_prompt_ids(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    max_context: int | None = None,
    **variables: Any,
) -> list[int]:
    """Token ids of the rendered chat; control tokens come from the template only, never from contents.

    No BOS is added: a template that wants one writes it. ContextTooLong for text that cannot fit
    `max_context` however it is cut: tokenizing it would take hundreds of bytes for each of its own.
    """
    sentinel = _unused_sentinel([messages, variables])
    guard = _guard(tokenizer.control_tokens)
    if guard is not None:
        messages, variables = (_map_strings(v, guard, sentinel) for v in (messages, variables))
    text = template.render(messages, add_generation_prompt=add_generation_prompt, **variables)
    pieces: list[str | int] = []
    for piece in tokenizer.split_special(text):
        if isinstance(piece, str) and sentinel in piece:
            # Taking sentinels out may complete a user-defined token, which is found in any text.
            pieces += tokenizer.split_plain(piece.replace(sentinel, ""))
        else:
            pieces.append(piece)
    fewest = tokenizer.fewest_tokens(pieces)
    if max_context is not None and fewest >= max_context:
        raise ContextTooLong(fewest, max_context, at_least=True)
    return tokenizer.encode_pieces(pieces, add_bos=False)


def _guard(control_tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Matches the first character of every control token, overlapping ones too."""
    if not control_tokens:
        return None
    return re.compile(f"(?=(?:{'|'.join(map(re.escape, control_tokens))}))(.)", re.DOTALL)


def _map_strings(value: Any, guard: re.Pattern[str], sentinel: str) -> Any:
    if isinstance(value, str):
        return guard.sub(rf"\1{sentinel}", value)
    if isinstance(value, Mapping):
        return {key: _map_strings(item, guard, sentinel) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, guard, sentinel) for item in value]
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _unused_sentinel(value: Any) -> str:
    free = set(_SENTINELS)
    for text in _strings(value):
        free -= {sentinel for sentinel in free if sentinel in text}
    if not free:
        raise RequestError("the messages use every Unicode noncharacter U+FDD0..U+FDEF")
    return min(free)


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > MAX_OUTPUT_CHARS:
            raise RequestError(
                "the rendered chat is too long", expected=f"at most {MAX_OUTPUT_CHARS} characters"
            )
        yield piece


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; for serving it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CountingGenerator(CodeGenerator):
    """Generates code that calls `Environment.tick` on every turn of a loop and call of a macro, and
    computes no constant expression while it does: one may take forever, or all memory."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, _tick())
        super().visit_For(node, frame)

    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:
        node.body.insert(0, _tick())
        super().visit_Macro(node, frame)

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


def _tick() -> nodes.ExprStmt:
    return nodes.ExprStmt(nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None))


class _Environment(ImmutableSandboxedEnvironment):
    """The environment transformers renders chat templates in (utils/chat_template_utils.py), with a
    limit on steps."""

    code_generator_class = _CountingGenerator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols]
        )
        self._left = threading.local()  # templates are rendered in several threads
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self.globals["range"] = self._range

    def start(self) -> None:
        """A rendering begins in this thread."""
        self._left.steps = MAX_STEPS

    def tick(self, steps: int = 1) -> None:
        """Count steps of this thread's rendering; RequestError when it took too many."""
        self._left.steps -= steps
        if self._left.steps < 0:
            raise RequestError(
                "the chat template does not come to an end", expected=f"at most {MAX_STEPS} steps"
            )

    def _range(self, *arguments: int) -> range:
        numbers = safe_range(*arguments)
        self.tick(len(numbers))
        return numbers


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise RequestError("the chat template refused these messages", got=message)

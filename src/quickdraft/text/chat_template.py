"""Chat templates: jinja2 source from a model file, rendered as transformers renders it, sandboxed.

`render` gives the prompt as text; chat_prompt.py makes token ids of it. A template is a program that
came with a model: it is bounded in size, output and steps, sees nothing but its variables, and
whatever it raises is an error of the request. It also says which variables it reads, so that a
request for one it would ignore can be refused.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.idtracking import VAR_LOAD_RESOLVE
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

from quickdraft.errors import ModelFormatError, RequestError
from quickdraft.text.source import naming
from quickdraft.types import TokenizerData

MAX_SOURCE_CHARS: Final = 1 << 20
MAX_OUTPUT_CHARS: Final = 64 << 20
MAX_STEPS: Final = 500_000  # turns of loops and calls of macros in one rendering


class ChatTemplate:
    """A compiled template; ModelFormatError when the source is too long or does not parse.

    `variables` are the names it reads from what it is rendered with.
    """

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
            self.variables = _variables(self._environment, source)
        except Exception as error:  # also what Python says of generated code: nesting, odd characters
            raise ModelFormatError("the chat template does not parse", got=error) from error
        self._source = source
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

    def mentions(self, text: str) -> bool:
        """The source holds `text`."""
        return text in self._source

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


class _VariableFinder(_CountingGenerator):
    """Writes no code, but collects the names the code would look up in its context."""

    def __init__(self, environment: _Environment) -> None:
        super().__init__(environment, None, None, optimized=False)
        self.found: set[str] = set()

    def write(self, x: str) -> None:
        pass

    def enter_frame(self, frame: Frame) -> None:
        super().enter_frame(frame)
        self.found.update(
            str(name) for action, name in frame.symbols.loads.values() if action == VAR_LOAD_RESOLVE
        )


def _variables(environment: _Environment, source: str) -> frozenset[str]:
    finder = _VariableFinder(environment)
    finder.visit(environment.parse(source))
    return frozenset(finder.found - environment.globals.keys())


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

"""From a request's bytes to what the engine takes: prompt ids and SamplingParams.

Runs in a thread for large bodies, so nothing here touches the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quickdraft.errors import BadParameter, ContextTooLong, UnsupportedError
from quickdraft.server.body import CHAT_OFF, COMPLETION_OFF, parse_body
from quickdraft.server.chat_options import ChatOptions, chat_options, check_messages
from quickdraft.server.engine import AsyncEngine
from quickdraft.server.errors import ApiError
from quickdraft.server.messages import Message
from quickdraft.server.prompts import MAX_CHOICES, prompts_of
from quickdraft.server.schemas import ChatRequest, CompletionRequest, Generation, TemplateFields, parse
from quickdraft.server.structured import Wish, answer_format, chat_constraint, text_constraint
from quickdraft.speculate.constraint import Constraint
from quickdraft.speculate.draft import PREDICTION
from quickdraft.text.answer_parts import AnswerForm
from quickdraft.text.chat_prompt import ChatPrompt, chat_prompt
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.formats import Formats
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import ReasoningParser, SamplingParams, Speculation, ToolCallParser


@dataclass(frozen=True, slots=True)
class Call:
    """One request for answers, ready to run: `n` answers per prompt."""

    model: str
    prompts: tuple[list[int], ...]
    params: SamplingParams
    stream: bool
    include_usage: bool
    labels: dict[str, object]
    echo: tuple[str, ...] = ()  # text to repeat before each answer; empty: no echo
    marks: tuple[int, ...] = ()  # of every prompt: where a later one may differ
    form: AnswerForm = field(default_factory=AnswerForm)
    prediction: tuple[int, ...] = ()  # of every answer: what it is expected to repeat
    token_sources: bool = False  # the answer says where its tokens came from
    constraint: Constraint | None = None  # of every answer: what it must obey
    n: int = 1
    asked: object = None  # what an API's own shape needs of its request

    def params_of(self, sample: int) -> SamplingParams:
        """Those of a prompt's answer number `sample`: where a seed was given it has one of its own."""
        seed = self.params.seed
        return self.params if seed is None else replace(self.params, seed=seed + sample)


@dataclass(frozen=True, slots=True)
class Translator:
    """Turns request bodies into calls for one engine, served under `names`."""

    engine: AsyncEngine
    names: tuple[str, ...]
    speculation: Speculation
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO
    tool_call_parser: ToolCallParser = ToolCallParser.AUTO
    thinking_budget: int | None = None  # of conversations that do not say

    def chat(self, body: bytes) -> Call:
        """Parse, check and tokenize; raises ApiError and QuickdraftError."""
        return self.chat_call(parse_body(body, CHAT_OFF))

    def chat_call(self, values: Mapping[str, Any]) -> Call:
        """The call of a chat request, which other APIs' conversations become too; raises as `chat` does."""
        request = parse(ChatRequest, values)
        self._check(request)
        params = self._params(request, _chat_max_tokens(request), _chat_logprobs(request))
        prompt, options = self.chat_prompt(request.messages, request, values)
        form = self.formats.answer_form(
            thinking=prompt.thinking, tools=options.tools, one_call=not request.parallel_tool_calls
        )
        call = self._call(request, params, (prompt.ids,), ())
        budget = request.thinking_budget
        wish = Wish(
            answer_format(request), options.tools or (), options.must_call, not request.parallel_tool_calls,
            self.thinking_budget if budget is None else budget, prompt.thinking, prompt.ids,
        )  # fmt: skip
        return replace(call, marks=prompt.marks, form=form, constraint=self.constraint(request, wish))

    def constraint(self, request: Generation, wish: Wish) -> Constraint | None:
        """What an answer to a conversation must obey; raises ApiError and QuickdraftError."""
        return chat_constraint(request, wish, self.formats, self.tokenizer, lambda: self.engine.grammars)

    def completion(self, body: bytes) -> Call:
        """Parse, check and tokenize; raises ApiError and QuickdraftError."""
        request = parse(CompletionRequest, parse_body(body, COMPLETION_OFF))
        self._check(request)
        if request.echo and request.logprobs is not None:
            raise ApiError(
                "'echo' together with 'logprobs' is not supported: prompts have no log-probabilities here",
                param="echo",
                code="unsupported_parameter",
            )
        params = self._params(request, request.max_tokens, request.logprobs)
        given = prompts_of(request.prompt)
        prompts = tuple(self.text_ids(one) if isinstance(one, str) else one for one in given)
        echo: list[str] = []
        for one in given if request.echo else ():
            self.engine.validate(prompts[len(echo)], params)  # ids in range, before they are decoded
            echo.append(one if isinstance(one, str) else self.tokenizer.decode(one))
        call = self._call(request, params, prompts, tuple(echo))
        return replace(call, constraint=text_constraint(request, lambda: self.engine.grammars))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's; UnsupportedError when the file has none."""
        if self.engine.tokenizer is None:
            raise UnsupportedError("the model file has no tokenizer, so it cannot read or write text")
        return self.engine.tokenizer

    @property
    def formats(self) -> Formats:
        """What is read out of this model's answers."""
        engine = self.engine
        return Formats.of(
            engine.tokenizer, engine.chat_template, self.reasoning_parser, self.tool_call_parser
        )

    def chat_prompt(
        self,
        messages: Sequence[Message],
        request: TemplateFields,
        body: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[ChatPrompt, ChatOptions]:
        """A conversation through the model's template, with what its request, read from `body`, asks for."""
        tokenizer, template, formats = self.tokenizer, self._template(), self.formats
        # Tools go to the template as they were sent: keys in their order.
        options = chat_options(request, body.get("tools", ()), template, formats)
        check_messages(messages, template, formats)
        prompt = chat_prompt(
            tokenizer,
            template,
            [message.for_template() for message in messages],
            add_generation_prompt=add_generation_prompt,
            max_context=self.engine.max_context_tokens,
            **options.variables,
        )
        return prompt, options

    def text_ids(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Token ids of a raw prompt, control tokens found in it; ContextTooLong, before it is
        tokenized, for one that cannot fit."""
        pieces = list(self.tokenizer.split_special(text))
        fewest, most = self.tokenizer.fewest_tokens(pieces), self.engine.max_context_tokens
        if fewest >= most:
            raise ContextTooLong(fewest, most, at_least=True)
        return self.tokenizer.encode_pieces(pieces, add_bos=add_bos)

    def check_model(self, name: str) -> None:
        """404 for a model that is not served."""
        if name not in self.names:
            raise unknown_model(name, self.names)

    def _check(self, request: Generation) -> None:
        self.check_model(request.model)
        if request.stream_options is not None and not request.stream:
            raise ApiError(
                "'stream_options' is only allowed with stream true",
                param="stream_options",
                code="invalid_value",
            )

    def _call(
        self,
        request: Generation,
        params: SamplingParams,
        prompts: tuple[list[int], ...],
        echo: tuple[str, ...],
    ) -> Call:
        if not 1 <= request.n <= MAX_CHOICES // len(prompts):
            most = f"1..{MAX_CHOICES // len(prompts)}"
            raise BadParameter("n", got=request.n, expected=f"{most}: {MAX_CHOICES} answers to one request")
        prediction = self._prediction(request)
        for prompt_ids in prompts:
            self.engine.validate(prompt_ids, params, prediction)
        include_usage = request.stream_options is not None and request.stream_options.include_usage
        call = Call(
            request.model, prompts, params, request.stream, include_usage, request.labels(), echo,
            prediction=prediction, token_sources=request.return_token_sources, n=request.n,
        )  # fmt: skip
        call.params_of(request.n - 1)  # its seed is in range
        return call

    def _prediction(self, request: Generation) -> tuple[int, ...]:
        """Its ids, control tokens found, as the model writes them; BadParameter, before it is tokenized,
        for one that is longer than the context."""
        if request.prediction is None:
            return ()
        pieces = list(self.tokenizer.split_special(request.prediction.content))
        fewest, most = self.tokenizer.fewest_tokens(pieces), self.engine.max_context_tokens
        if fewest > most:
            raise BadParameter(
                "prediction", got=f"at least {fewest} tokens", expected=f"at most {most}, the context"
            )
        return tuple(self.tokenizer.encode_pieces(pieces, add_bos=False))

    def _params(self, request: Generation, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=_logit_bias(request.logit_bias),
            seed=request.seed,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            stop=tuple(request.stop),
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            logprobs=logprobs,
            speculation=self._speculation(request),
        )

    def _speculation(self, request: Generation) -> Speculation:
        """What the request says, else the server's own, to which a prediction that was sent is added."""
        if request.speculation is not None:
            speculation = Speculation.parse(request.speculation)
        else:
            own = self.speculation
            speculation = own.using(PREDICTION) if request.prediction is not None else own
        missing = [source for source in speculation.sources if source not in self.engine.sources]
        if missing:
            served = ", ".join(self.engine.sources) or "none"
            raise BadParameter(
                "speculation", got=f"'{speculation}'", expected=f"sources this server has: {served}"
            )
        return speculation

    def _template(self) -> ChatTemplate:
        if self.engine.chat_template is None:
            raise UnsupportedError("the model file has no chat template, so it cannot chat")
        return self.engine.chat_template


def unknown_model(name: str, served: Sequence[str]) -> ApiError:
    """404 in OpenAI's words, listing what is served."""
    return ApiError(
        f"the model {name[:200]!r} does not exist; served here: {', '.join(served)}",
        status=404,
        param="model",
        code="model_not_found",
    )


def _chat_max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise BadParameter(
            "max_completion_tokens", got=new, expected=f"the same as max_tokens ({old}), or only one of them"
        )
    return old if new is None else new


def _chat_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise BadParameter("top_logprobs", got=request.top_logprobs, expected="logprobs to be true with it")
    return None


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise BadParameter("logit_bias", got=ascii(key[:40]), expected="token ids in decimal as keys")
    return {int(key): value for key, value in bias.items()}

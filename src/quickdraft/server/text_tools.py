"""/tokenize and /detokenize: text to token ids and back, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from quickdraft.errors import BadParameter
from quickdraft.server.body import NOTHING_OFF, parse_body
from quickdraft.server.errors import ApiError
from quickdraft.server.prompts import token_ids
from quickdraft.server.schemas import DetokenizeRequest, TemplateFields, TokenizeRequest, parse
from quickdraft.server.translate import Translator

MAX_DETOKENIZE_TOKENS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TextTools:
    """Both directions, over one translator's tokenizer and chat template."""

    translator: Translator

    def tokenize(self, body: bytes) -> dict[str, Any]:
        """{"count", "max_model_len", "tokens"[, "token_strs"]}; raises ApiError and QuickdraftError."""
        values = parse_body(body, NOTHING_OFF)
        request = parse(TokenizeRequest, values)
        if request.model is not None:
            self.translator.check_model(request.model)
        ids = self._ids(request, values)
        tokenizer = self.translator.tokenizer
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self.translator.engine.max_context_tokens,
            "tokens": ids,
        }
        if request.return_token_strs:
            answer["token_strs"] = [tokenizer.token_text(token) for token in ids]
        return answer

    def detokenize(self, body: bytes) -> dict[str, Any]:
        """{"prompt"}: the text of the tokens, control tokens by name."""
        request = parse(DetokenizeRequest, parse_body(body, NOTHING_OFF))
        if request.model is not None:
            self.translator.check_model(request.model)
        if not isinstance(request.tokens, list):
            raise BadParameter("tokens", got=repr(request.tokens)[:80], expected="a list of token ids")
        if len(request.tokens) > MAX_DETOKENIZE_TOKENS:
            raise BadParameter(
                "tokens", got=f"{len(request.tokens)} ids", expected=f"at most {MAX_DETOKENIZE_TOKENS}"
            )
        tokenizer = self.translator.tokenizer
        size = tokenizer.vocabulary_size
        for index, token in enumerate(token_ids("tokens", request.tokens)):
            if not 0 <= token < size:
                raise BadParameter(f"tokens[{index}]", got=token, expected=f"an id in 0..{size - 1}")
        return {"prompt": tokenizer.decode(request.tokens, skip_special=False)}

    def _ids(self, request: TokenizeRequest, body: Mapping[str, Any]) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(
                "give either 'prompt' or 'messages'", param="prompt", code="missing_required_parameter"
            )
        if request.messages is None:
            for name in ("add_generation_prompt", *TemplateFields.model_fields):
                if name in request.model_fields_set:
                    raise BadParameter(name, expected="'messages' with it")
            assert request.prompt is not None, "one of the two is there"
            add_bos = None if request.add_special_tokens is not False else False
            return self.translator.text_ids(request.prompt, add_bos=add_bos)
        if request.add_special_tokens:
            raise BadParameter(
                "add_special_tokens", got=True, expected="false: the chat template writes its own"
            )
        generation = request.add_generation_prompt is not False
        prompt, _ = self.translator.chat_prompt(
            request.messages, request, body, add_generation_prompt=generation
        )
        return prompt.ids

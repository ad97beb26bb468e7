"""A small complete tokenizer for tests: control tokens, all 256 bytes, a few merges, a ChatML template."""

from __future__ import annotations

from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import TokenizerData

END_OF_TEXT, IM_START, IM_END, TOOL_CALL = 0, 1, 2, 3
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer_data(
    *, pre_tokenizer: str = "smollm", chat_template: str | None = CHAT_TEMPLATE
) -> TokenizerData:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    alphabet = [chr(b) if b in printable else chr(next(spare)) for b in range(256)]
    merges = ("l l", "h e", "he ll", "hell o", "Ġ w", "Ġ Ġ", "1 2", "ð Ł")
    control = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokens = (*control, "<tool_call>", *alphabet, *(merge.replace(" ", "") for merge in merges))
    types = (3, 3, 3, 4, *(1 for _ in range(256 + len(merges))))
    return TokenizerData(
        model="gpt2",
        pre_tokenizer=pre_tokenizer,
        tokens=tokens,
        token_types=types,
        merges=merges,
        bos_id=IM_START,
        eos_ids=(IM_END,),
        unknown_id=END_OF_TEXT,
        chat_template=chat_template,
    )


def byte_tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer_data())

"""Text in and out: tokenizer, chat template, and streams that equal the whole answer.

Knows no drafts and no caches.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from quickdraft.doctor.check import Failed, Note
from quickdraft.doctor.patient import GREEDY, LETTER, Patient
from quickdraft.engine.llm import LLM
from quickdraft.text.stream import TextStream
from quickdraft.types import Speculation

FILE_HINT: Final = "`quickdraft inspect MODEL` shows what the file holds; fetch or convert the model again"
ROUND_TRIPS: Final = (
    LETTER,
    "def f(x):\n\treturn {'a': [1, 2.5e-3]}  # ünïcödé\r\n",
    "天気はいい。Привет, мир! مرحبا",
    "👩‍👩‍👧‍👦 🇳🇴 👍🏽 e\u200bnd",
    "a" + " " * 400 + "b" + "\n" * 60 + "\t" * 30 + " ",
    "0123456789" * 12,
    "\x00\x1f\x7f \ufeff\u2028",
)
CONTENT: Final = "Qzxjk 417"  # no template writes that itself
MOST_CONTROL: Final = 40


def tokenizer(patient: Patient) -> Note:
    """Texts come back as they were, control tokens typed by a user included, which stay text."""
    words = patient.tokenizer
    control = words.control_tokens[:MOST_CONTROL]
    for text in (*ROUND_TRIPS, *(f"before{token}after" for token in control)):
        ids = words.encode(text, add_bos=False)
        back = words.decode(ids)
        if back != text:
            raise Failed(f"{_short(text)} came back as {_short(back)}", FILE_HINT)
        if max(ids) >= patient.vocabulary_size:
            raise Failed(
                f"{_short(text)} has id {max(ids)}; the model has {patient.vocabulary_size} rows", FILE_HINT
            )
    for token in control:
        typed, meant = (words.encode(token, special=special, add_bos=False) for special in (False, True))
        if len(meant) != 1 or meant[0] in typed:
            raise Failed(f"{token} typed by a user reads as the control token", FILE_HINT)
    return Note(
        f"{len(ROUND_TRIPS)} texts (emoji, scripts, code, 400 spaces) come back unchanged; {len(control)} "
        "control tokens stay text when typed"
    )


def chat_template(patient: Patient) -> Note:
    """A conversation renders with all that was said, the end of a turn is an id that ends an answer, and a
    user cannot write one."""
    template, words, opened = patient.template, patient.tokenizer, patient.llm.opened
    user = {"role": "user", "content": CONTENT}
    prompt = patient.llm.chat_prompt([user])
    if CONTENT not in words.decode(prompt.ids):
        raise Failed("the chat template leaves out what the user said", FILE_HINT)
    answered = [user, {"role": "assistant", "content": CONTENT[::-1]}]
    rendered = template.render(answered, add_generation_prompt=False)
    _, found, rest = rendered.partition(CONTENT[::-1])
    if not found:
        raise Failed("the chat template leaves out what the assistant said", FILE_HINT)
    ends = [piece for piece in words.split_special(rest) if isinstance(piece, int)]
    if ends and ends[0] not in opened.eos_ids:
        raise Failed(
            f"a turn ends with {words.token_text(ends[0])!r}, which does not end an answer; "
            f"{_names(patient.llm)} {'does' if len(opened.eos_ids) == 1 else 'do'}",
            f"answers run on: `--stop-token-id {ends[0]}` ends them; mend eos_token_id in the model's files",
        )
    known = set(words.encode("".join(words.control_tokens), special=True, add_bos=False))
    counts = [
        sum(token in known for token in patient.llm.chat_prompt([{**user, "content": content}]).ids)
        for content in (CONTENT, CONTENT + "".join(words.control_tokens[:MOST_CONTROL]))
    ]
    if counts[0] != counts[1]:
        raise Failed("control tokens in a user's text become control tokens of the prompt", FILE_HINT)
    end = words.token_text(ends[0]) if ends else "no control token"
    marks = f"marks at {', '.join(map(str, prompt.marks))}" if prompt.marks else "no marks"
    return Note(f"{len(prompt.ids)} tokens for a short question, {marks}; a turn ends with {end}")


def stream(patient: Patient) -> Note:
    """The pieces of a stream, joined, are the text of its ids, wherever steps cut it."""
    words = patient.tokenizer
    params = dataclasses.replace(GREEDY, max_tokens=40, speculation=Speculation(auto=True))
    patient.forget()
    outputs = list(patient.llm.stream(patient.text_ids(60, 40), params))
    if outputs[-1].error is not None:
        raise Failed(f"a request failed: {outputs[-1].error}", "")
    ids = [token for output in outputs for token in output.tokens]
    pieces = [output.text for output in outputs]
    whole = patient.cold(patient.text_ids(60, 40), params)
    if tuple(ids) != whole.ids or "".join(pieces) != whole.text:
        raise Failed("a stream and a whole answer to one request differ", "")
    if whole.text != words.decode(ids):
        raise Failed(
            f"a stream gives {_short(''.join(pieces))}, its ids mean {_short(words.decode(ids))}", ""
        )
    for text in ROUND_TRIPS:
        sink = TextStream(words)
        for token in words.encode(text, add_bos=False):
            sink.push(token, False)
        sink.finish()
        if (streamed := sink.take()) != text:
            raise Failed(f"{_short(text)} streams as {_short(streamed)}", "")
    return Note(
        f"{len(outputs)} pieces of an answer and {len(ROUND_TRIPS)} texts, token by token, join to the whole"
    )


def _names(llm: LLM) -> str:
    words, ids = llm.tokenizer, llm.opened.eos_ids
    return ", ".join(repr(words.token_text(i)) if words else str(i) for i in ids) or "nothing"


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."

"""What the twin answers: bodies and events in the form of vLLM's, and how they leave by a connection."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from capsim.emulator import tokenizer
from capsim.emulator.api_request import Generation

UNSENT = 1 << 16  # bytes; to a client that reads so slowly, the next event brings several tokens, as vLLM's does

_OBJECTS = {False: ("text_completion", "cmpl"), True: ("chat.completion", "chatcmpl")}


@dataclass(frozen=True)
class Heading:
    """What stands above every answer. `created` is in seconds since 1970."""

    model: str
    fingerprint: str
    number: int
    created: int

    def identity(self, chat: bool) -> str:
        return f"{_OBJECTS[chat][1]}-{self.number:032x}"

    def fields(self, chat: bool, chunk: bool) -> dict[str, Any]:
        name = _OBJECTS[chat][0] + (".chunk" if chat and chunk else "")
        return {"id": self.identity(chat), "object": name, "created": self.created, "model": self.model}


def usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + tokens, "completion_tokens": tokens}


def finish_reason(generation: Generation) -> str:
    return "length" if generation.output_tokens == generation.max_tokens else "stop"


def whole_answer(heading: Heading, generation: Generation) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    text = tokenizer.speech(0, generation.output_tokens)
    words: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if generation.chat else {"text": text}
    ending = {"logprobs": None, "finish_reason": finish_reason(generation), "stop_reason": None}
    return {
        **heading.fields(generation.chat, chunk=False),
        "choices": [{"index": 0, **words, **ending}],
        "system_fingerprint": heading.fingerprint,
        "usage": usage(generation.prompt.tokens, generation.output_tokens),
    }


class Events:
    """The server-sent events of one answer, built of bytes: there may be thousands a second."""

    def __init__(self, heading: Heading, generation: Generation) -> None:
        self._heading, self._generation = heading, generation
        fields = heading.fields(generation.chat, chunk=True)
        self._start = f'data: {_json(fields)[:-1]},"choices":[{{"index":0,'
        self._words = '"delta":{"content":"%s"}' if generation.chat else '"text":"%s"'
        self._told = 0  # tokens so far

    def up_to(self, tokens: int) -> bytes:
        """The event that brings the answer to so many tokens; before a chat's first one, that which opens it."""
        opening = ""
        if not self._told and self._generation.chat:
            opening = self._event('"delta":{"role":"assistant","content":""}', "null", 0)
        text = tokenizer.speech(self._told, tokens)
        self._told = tokens
        ended = tokens >= self._generation.output_tokens
        reason = f'"{finish_reason(self._generation)}"' if ended else "null"
        event = opening + self._event(self._words % text, reason, tokens)
        return (event + self._end() if ended else event).encode()

    def _event(self, words: str, reason: str, tokens: int) -> str:
        told = ""
        if self._generation.continuous_usage:
            told = f',"usage":{_json(usage(self._generation.prompt.tokens, tokens))}'
        return f'{self._start}{words},"logprobs":null,"finish_reason":{reason},"stop_reason":null}}]{told}}}\n\n'

    def _end(self) -> str:
        if not self._generation.include_usage:
            return "data: [DONE]\n\n"
        last = {
            **self._heading.fields(self._generation.chat, chunk=True),
            "choices": [],
            "usage": usage(self._generation.prompt.tokens, self._generation.output_tokens),
            "system_fingerprint": self._heading.fingerprint,
        }
        return f"data: {_json(last)}\n\ndata: [DONE]\n\n"


class EventStream:
    """Receives an answer and writes its events to a connection at once. `ended` is done when nothing more comes.

    The transport is written to without a detour: with a hundred streams, all of whose tokens come in one moment, it is
    the time of one write that counts.
    """

    def __init__(self, transport: asyncio.Transport, chunked: bool, events: Events) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport, self._chunked, self._events = transport, chunked, events

    def receive(self, tokens: int, ended: bool) -> None:
        transport = self._transport
        if transport.is_closing():
            return  # the handler hears of it
        if not ended and transport.get_write_buffer_size() > UNSENT:
            return
        data = self._events.up_to(tokens)
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        if ended and not self.ended.done():
            self.ended.set_result(None)


class WholeAnswer:
    """Receives an answer that is not streamed: only its end counts."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def receive(self, tokens: int, ended: bool) -> None:
        if ended and not self.ended.done():
            self.ended.set_result(None)


def _json(content: object) -> str:
    return json.dumps(content, separators=(",", ":"))

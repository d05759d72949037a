"""What clients ask for: bodies of requests, checked as vLLM checks them, and refused in its words.

Source: vLLM 0.32.0, `entrypoints/openai/*/protocol.py`, `renderers/params.py`. Fields that change words but not time
(temperature and its like) are taken and mean nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from capsim.emulator import tokenizer

Count = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenIds = list[int]
Body = TypeVar("Body", bound=BaseModel)

COMPLETION_TOKENS = 16  # of a completion that does not say how many, as in OpenAI's API


class ApiError(Exception):
    """A request that is refused: HTTP `status`, vLLM's `kind` of error, and the parameter at fault."""

    def __init__(
        self, message: str, status: int = 400, kind: str = "BadRequestError", parameter: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.parameter = status, kind, parameter

    def body(self) -> dict[str, object]:
        told = {"message": str(self), "type": self.kind, "param": self.parameter, "code": self.status}
        return {"error": told}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None


class StreamOptions(BaseModel):
    """Which usage a stream tells."""

    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class _Generation(_Body):
    """What completions and chats have in common."""

    max_tokens: Count | None = None
    min_tokens: Count | None = 0
    ignore_eos: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Count | None = 1
    priority: Count | None = 0

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens


class CompletionBody(_Generation):
    """The body of /v1/completions."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: Count | None = COMPLETION_TOKENS
    echo: bool | None = False


class ContentPart(BaseModel):
    """A part of a message; only text is understood."""

    type: str = "text"
    text: str | None = None


class Message(BaseModel):
    """A message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None


class ChatBody(_Generation):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Count | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeBody(_Body):
    """The body of /tokenize: a text, or the messages of a chat."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeBody(_Body):
    """The body of /detokenize."""

    tokens: TokenIds


@dataclass(frozen=True)
class Prompt:
    """A prompt as text or as ids of tokens."""

    text: str | None = None
    given_ids: Sequence[int] = ()

    @cached_property
    def tokens(self) -> int:
        return len(self.given_ids) if self.text is None else tokenizer.count(self.text)

    @cached_property
    def ids(self) -> Sequence[int]:
        return self.given_ids if self.text is None else tokenizer.encode(self.text)


@dataclass(frozen=True)
class Generation:
    """What is to be generated.

    Attributes
        max_tokens, output_tokens: the most tokens that the answer may have, and those that it will have
        include_usage, continuous_usage: whether a stream tells usage at its end, and with every event
    """

    chat: bool
    prompt: Prompt
    max_tokens: int
    output_tokens: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int


def parse(kind: type[Body], data: bytes) -> Body:
    """A body of the given kind. Raises `ApiError`."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise ApiError(f"{place}: {problem['msg']}" if place else problem["msg"], parameter=place or None) from None


def read_completion(data: bytes, max_model_len: int, own_length: int) -> tuple[str | None, Generation]:
    """The model and what a body of /v1/completions asks for. Raises `ApiError`."""
    body = parse(CompletionBody, data)
    if body.echo:
        raise ApiError("echo is not emulated", parameter="echo")
    return body.model, _generation(body, False, _completion_prompt(body.prompt), max_model_len, own_length)


def read_chat(data: bytes, max_model_len: int, own_length: int) -> tuple[str | None, Generation]:
    """The same of /v1/chat/completions."""
    body = parse(ChatBody, data)
    return body.model, _generation(body, True, Prompt(chat_text(body.messages)), max_model_len, own_length)


def chat_text(messages: Sequence[Message], ask: bool = True) -> str:
    """The chat's template: each message with its role, and with `ask` the start of the answer."""
    parts = [f"<|{message.role}|>\n{_content(message)}\n" for message in messages]
    return "".join(parts) + ("<|assistant|>\n" if ask else "")


def check_ids(ids: Sequence[int], parameter: str) -> None:
    """Raise `ApiError` for an id that the tokenizer does not have."""
    for number in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= number < tokenizer.VOCABULARY:
            raise ApiError(f"Token id {number} is out of vocabulary", parameter=parameter)


def _content(message: Message) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type not in ("text", "input_text"):
            raise ApiError(f"At most 0 {part.type} part(s) may be provided in one prompt.", parameter="messages")
    return "\n".join(part.text or "" for part in message.content)


def _completion_prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise ApiError("the twin takes one prompt a request", parameter="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Prompt(prompt)
    check_ids(prompt, "prompt")
    return Prompt(given_ids=prompt)


def _generation(body: _Generation, chat: bool, prompt: Prompt, max_model_len: int, own_length: int) -> Generation:
    _check(body, prompt, max_model_len)
    room = max_model_len - prompt.tokens
    most = room if body.most_tokens is None else min(body.most_tokens, room)
    length = most
    if body.most_tokens is None and not body.ignore_eos:
        length = min(most, max(own_length, body.min_tokens or 0))
    options = body.stream_options
    include = bool(options and options.include_usage)
    continuous = include and bool(options and options.continuous_usage_stats)
    return Generation(chat, prompt, most, length, bool(body.stream), include, continuous, body.priority or 0)


def _check(body: _Generation, prompt: Prompt, max_model_len: int) -> None:
    """Raise `ApiError` for what vLLM refuses too."""
    if body.n not in (None, 1):
        raise ApiError(f"n must be 1, got {body.n}: the twin gives one answer a request", parameter="n")
    if body.stream_options and not body.stream:
        raise ApiError("Stream options can only be defined when `stream=True`.", parameter="stream_options")
    _check_output(body.most_tokens, body.min_tokens or 0, max_model_len)
    _check_prompt(prompt, max_model_len)


def _check_output(most: int | None, least: int, max_model_len: int) -> None:
    if most is not None and most < 1:
        raise ApiError(f"max_tokens must be at least 1, got {most}.", parameter="max_tokens")
    if least < 0:
        raise ApiError(f"min_tokens must be greater than or equal to 0, got {least}.", parameter="min_tokens")
    if most is not None and least > most:
        message = f"min_tokens must be less than or equal to max_tokens={most}, got {least}."
        raise ApiError(message, parameter="min_tokens")
    if most is not None and most > max_model_len:
        message = f"max_tokens={most} cannot be greater than max_model_len={max_model_len}."
        raise ApiError(f"{message} Please request fewer output tokens.", parameter="max_tokens")


def _check_prompt(prompt: Prompt, max_model_len: int) -> None:
    too_long = f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains"
    remedy = "Please reduce the length of the input prompt."
    most = tokenizer.LONGEST * max_model_len
    if prompt.text is not None and len(prompt.text) > most:  # not worth counting
        why = f"{len(prompt.text)} characters (more than {most} characters, which is the upper bound for"
        raise ApiError(f"{too_long} {why} {max_model_len} input tokens). {remedy}", parameter="input_text")
    if not prompt.tokens:
        raise ApiError("The decoder prompt cannot be empty", parameter="prompt")
    if prompt.tokens > max_model_len:
        why = f"{prompt.tokens} input tokens, which exceeds this limit even without any output tokens."
        raise ApiError(f"{too_long} {why} {remedy}", parameter="input_tokens")
    if prompt.tokens == max_model_len:
        message = f"The decoder prompt (length {prompt.tokens}) plus the number of requested output tokens (at least 1)"
        raise ApiError(f"{message} is longer than the maximum model length of {max_model_len}.")

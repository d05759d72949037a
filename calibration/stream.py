"""One request and its answer as it streams in: server-sent events to tokens in time."""

from __future__ import annotations

import asyncio
import errno
import json
import re
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp

from calibration.endpoint import server_message

# Inside a JSON string every quote is escaped, so these bytes can only be keys: an event that matches is a choice that
# goes on, with the tokens of the request so far. It need not be decoded, which matters with 100 streams.
_ONE_MORE = re.compile(rb'data: ?\{.*"finish_reason": ?null\b.*"completion_tokens": ?(\d+)\b')


@dataclass(frozen=True)
class Patience:
    """The longest that anything is waited for, seconds."""

    connect: float = 10.0
    first_token: float = 600.0
    next_token: float = 120.0
    idle: float = 30.0  # for requests that are not ours to leave the server before a level


PATIENCE = Patience()


@dataclass
class Answer:
    """What came of one request. Times are seconds on the clock of `time.perf_counter`.

    `error` is "" for a success, else a short kind; `detail` the server's own words on it.
    """

    index: int
    prompt_tokens: int  # asked
    output_tokens: int  # asked
    scheduled: float
    sent: float = 0.0
    headers: float = 0.0  # when the answer began, before any token; 0 where it never did
    ended: float = 0.0  # when nothing more was waited for
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens so far), one per read with tokens
    events: int = 0  # events that carried a choice
    finish_reason: str = ""
    counted_prompt: int | None = None  # the server's count
    counted_output: int | None = None
    cached_prompt: int = 0  # of the counted prompt, from the prefix cache, where the server tells
    fingerprint: str = ""
    done: bool = False  # the stream said that it ended
    error: str = ""
    detail: str = ""

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt: the server's count where it tells."""
        return self.prompt_tokens if self.counted_prompt is None else self.counted_prompt

    @property
    def tokens(self) -> int:
        return self.arrivals[-1][1] if self.arrivals else 0


class StreamReader:
    """Fills an `Answer` from the bytes of its stream, in whatever pieces they come.

    Tokens are the server's count where every event carries it (`continuous_usage_stats`), else one an event. An event
    of a chat counts by its content or its reasoning; one that only opens or closes the answer is no token.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._tokens = 0
        self._rest = b""
        self._running_count = False  # whether events carry the count so far
        self._empty_end = False  # whether the last choice had no text

    def feed(self, time: float, data: bytes) -> bool:
        """Take what was read at `time`. True where it held new tokens."""
        before = self._tokens
        if self._rest:
            data = self._rest + data
        lines = data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            more = _ONE_MORE.match(line)
            if more:
                self._running_count = True
                self.answer.events += 1
                self._tokens = int(more[1])
            elif line.startswith(b"data:"):
                self._event(line[5:].strip())
        if self._tokens <= before:
            return False
        self.answer.arrivals.append((time, self._tokens))
        return True

    def end(self) -> None:
        """The stream is over: settle the count and whether it was a whole answer."""
        answer = self.answer
        if self._rest.startswith(b"data:"):
            self._event(self._rest[5:].strip())  # a last event without its newline
        if not answer.error and not (answer.done or answer.finish_reason):
            answer.error = "stream broken"
        if answer.counted_output is not None and not self._running_count:
            self._settle(answer.counted_output)

    def _event(self, payload: bytes) -> None:
        answer = self.answer
        if payload == b"[DONE]":
            answer.done = True
            return
        try:
            event = json.loads(payload)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            answer.error = answer.error or "not JSON"
            return
        if event.get("error"):
            error = event["error"]
            answer.error = "server error"
            answer.detail = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        usage = event.get("usage")
        counted = _count(usage, "completion_tokens")
        if isinstance(usage, dict):
            answer.counted_prompt, answer.counted_output = _count(usage, "prompt_tokens"), counted
            answer.cached_prompt = _count(usage.get("prompt_tokens_details"), "cached_tokens") or 0
        answer.fingerprint = answer.fingerprint or str(event.get("system_fingerprint") or "")
        choices = event.get("choices")
        if not choices:
            return
        answer.events += 1
        choice = choices[0]
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        self._empty_end = not _has_words(choice)
        if counted is not None:
            self._running_count = True
            self._tokens = max(self._tokens, counted)
        elif not (self._empty_end and _only_frames(choice)):
            self._tokens += 1

    def _settle(self, tokens: int) -> None:
        """Bring events counted one by one to the server's count of tokens."""
        arrivals = self.answer.arrivals
        counted = self.answer.tokens
        if counted == tokens + 1 and self._empty_end:  # the last event carried the reason of the end and no token
            last, _ = arrivals.pop()
            if not arrivals or arrivals[-1][1] < tokens:
                arrivals.append((last, tokens))
        elif counted and counted != tokens:  # several tokens an event: spread evenly, for want of better
            self.answer.arrivals = [(time, max(1, round(count * tokens / counted))) for time, count in arrivals]


async def ask(session: aiohttp.ClientSession, url: str, body: bytes, answer: Answer, patience: Patience) -> None:
    """Send `body` to `url` and fill `answer` until its stream ends. Whatever fails becomes the answer's error."""
    answer.sent = perf_counter()
    try:
        async with asyncio.timeout(patience.first_token) as deadline:
            async with session.post(url, data=body, allow_redirects=False) as response:
                answer.headers = perf_counter()
                if response.status != 200:
                    answer.error, answer.detail = f"http {response.status}", await _words(response)
                elif response.content_type != "text/event-stream":
                    answer.error, answer.detail = "no stream", f"the answer is {response.content_type}"
                else:
                    await _read(response.content, StreamReader(answer), deadline, patience.next_token)
    except TimeoutError:
        _fail(answer, "timeout")
    except aiohttp.ClientConnectorError:
        _fail(answer, "no connection")
    except (aiohttp.ClientError, OSError) as error:
        reset = isinstance(error, OSError) and error.errno == errno.ECONNRESET
        _fail(answer, "stream broken" if answer.headers else "connection reset" if reset else "connection lost")
    finally:
        answer.ended = perf_counter()


async def _read(
    content: aiohttp.StreamReader, reader: StreamReader, deadline: asyncio.Timeout, next_token: float
) -> None:
    loop = asyncio.get_running_loop()
    extend_at = 0.0
    while data := await content.readany():
        now = perf_counter()
        if reader.feed(now, data) and now >= extend_at:
            deadline.reschedule(loop.time() + next_token)
            extend_at = now + min(1.0, next_token / 10)  # moving a timer costs more than reading a token
    reader.end()


def _fail(answer: Answer, kind: str) -> None:
    if not answer.done:  # what happens after the end of the stream harms nobody
        answer.error = answer.error or kind


async def _words(response: aiohttp.ClientResponse) -> str:
    """The server's message in an error answer, of which only the start is read."""
    return server_message((await response.content.read(4096)).decode(errors="replace"), None)


def _has_words(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text"))
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _only_frames(choice: dict[str, Any]) -> bool:
    """Whether a wordless event of a chat is its first, which names the role, or its last, which says why it ended."""
    delta = choice.get("delta")
    return isinstance(delta, dict) and ("role" in delta or choice.get("finish_reason") is not None)


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) else None

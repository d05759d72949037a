"""One request and its answer as it streams in: server-sent events to tokens in time."""

from __future__ import annotations

import asyncio
import errno
import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp

from calibration.endpoint import server_message
from calibration.foreign_text import one_line
from calibration.secrecy import shown_url
from calibration.token_times import TokenTimes

# Inside a JSON string every quote is escaped, so these bytes can only be keys: an event that matches is a choice that
# goes on, with the tokens of the request so far. It need not be decoded, which matters with 100 streams.
_ONE_MORE = re.compile(rb'data: ?\{.*"finish_reason": ?null\b.*"completion_tokens": ?(\d{1,9})\b.*\}\r?$')

QUICK_BYTES = 4096  # of an event that is read without decoding; a pattern takes the square of that
MAX_EVENT_BYTES = 1 << 18  # vLLM's have some hundred
MAX_COUNT = 2**31 - 1  # tokens that a server may count in a request
WORDS_BYTES = 4096  # of an error answer
LINGER = 1.0  # s, after the stream has said that it ended, for its connection to be free for the next request


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
    arrivals: TokenTimes = field(default_factory=TokenTimes)  # (time, tokens so far), one per read with tokens
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
        return self.arrivals.tokens

    @property
    def most_tokens(self) -> int:
        """With more than these it has run on. Events that are counted as tokens may be a few more than asked."""
        return 2 * self.output_tokens + 64


class StreamReader:
    """Fills an `Answer` from the bytes of its stream, in whatever pieces they come.

    Tokens are the server's count where every event carries it (`continuous_usage_stats`), else one an event. An event
    of a chat counts by its content or its reasoning; one that only opens or closes the answer is no token. After an
    error there is nothing more to read.
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
            more = _ONE_MORE.match(line) if len(line) <= QUICK_BYTES else None
            if more and not self.answer.done:
                self._running_count = True
                self.answer.events += 1
                self.answer.counted_output = int(more[1])
                self._tokens = max(self._tokens, self.answer.counted_output)
            elif line.startswith(b"data:"):
                self._event(line[5:].strip())
        if len(self._rest) > MAX_EVENT_BYTES:
            self._refuse("event too long", f"{MAX_EVENT_BYTES >> 10} KiB without an end of line")
        if self._tokens <= before:
            return False
        if self._tokens > self.answer.most_tokens:
            self._refuse("ran on", f"{self._tokens} tokens and no end, instead of {self.answer.output_tokens}")
            self._tokens = before
            return False
        self.answer.arrivals.append((time, self._tokens))
        return True

    def end(self) -> None:
        """The stream is over: settle the count and whether it was a whole answer."""
        answer = self.answer
        if self._rest.startswith(b"data:"):
            self._event(self._rest[5:].strip())  # a last event without its newline
        if not (answer.done or answer.finish_reason):
            self._refuse("stream broken", "it ended before the answer did")
        if answer.counted_output is None:
            return
        if not self._running_count:
            self._settle(answer.counted_output)
        elif answer.counted_output != self._tokens:
            self._refuse("bad usage", f"{self._tokens} tokens were streamed, and {answer.counted_output} counted")

    def _refuse(self, error: str, detail: str) -> None:
        """The first error is the answer's."""
        if not self.answer.error:
            self.answer.error, self.answer.detail = error, detail

    def _event(self, payload: bytes) -> None:
        if self.answer.done:
            return  # what comes after the end is no part of the answer
        if payload == b"[DONE]":
            self.answer.done = True
            return
        if len(payload) > MAX_EVENT_BYTES:
            self._refuse("event too long", f"{len(payload) >> 10} KiB")
            return
        try:
            self._take(json.loads(payload))
        except (ValueError, RecursionError):
            self._refuse("not JSON", one_line(payload.decode(errors="replace"), 80))
        except TypeError as problem:
            self._refuse("bad event", str(problem))

    def _take(self, event: object) -> None:
        """Raises TypeError for an event that is none of the API's."""
        answer = self.answer
        if not isinstance(event, dict):
            raise TypeError("an event is no object")
        if error := event.get("error"):
            words = error.get("message", error) if isinstance(error, dict) else error
            self._refuse("server error", one_line(str(words)))
            return
        usage, choice = event.get("usage"), _choice(event)
        try:
            counted = _count(usage, "completion_tokens")
            if isinstance(usage, dict):
                answer.counted_prompt, answer.counted_output = _count(usage, "prompt_tokens"), counted
                answer.cached_prompt = _count(usage.get("prompt_tokens_details"), "cached_tokens") or 0
        except TypeError as problem:
            self._refuse("bad usage", str(problem))
            return
        answer.fingerprint = answer.fingerprint or one_line(str(event.get("system_fingerprint") or ""))
        if choice is None:
            return
        answer.events += 1
        answer.finish_reason = _reason(choice) or answer.finish_reason
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
            if tokens > arrivals.tokens:
                arrivals.append((last, tokens))
        elif counted and counted != tokens:  # several tokens an event, or none: spread evenly, for want of better
            spread = [(time, max(1, round(count * tokens / counted))) for time, count in arrivals]
            had = [0, *(count for _, count in spread)]
            grown = (pair for before, pair in zip(had, spread, strict=False) if pair[1] > before)
            self.answer.arrivals = TokenTimes(grown)


async def ask(session: aiohttp.ClientSession, url: str, body: bytes, answer: Answer, patience: Patience) -> None:
    """Send `body` to `url` and fill `answer` until its stream ends. Whatever fails becomes the answer's error."""
    answer.sent = perf_counter()
    try:
        async with asyncio.timeout(patience.first_token) as deadline:
            async with session.post(url, data=body, allow_redirects=False) as response:
                answer.headers = perf_counter()
                if response.status != 200:
                    answer.error = f"http {response.status}"
                    answer.detail = await _words(response, patience.connect)
                elif response.content_type != "text/event-stream":
                    answer.error, answer.detail = "no stream", f"the answer is {one_line(response.content_type, 80)}"
                else:
                    await _read(response.content, StreamReader(answer), deadline, patience.next_token)
    except TimeoutError:
        seconds = patience.next_token if answer.arrivals else patience.first_token
        _fail(answer, "timeout", f"no {'further' if answer.arrivals else 'first'} token in {seconds:g} s")
    except aiohttp.ClientConnectorError:
        _fail(answer, "no connection")
    except aiohttp.ClientResponseError as error:
        _fail(answer, "stream broken" if answer.headers else "not HTTP", one_line(error.message, 80))
    except (aiohttp.ClientError, OSError) as error:
        reset = isinstance(error, OSError) and error.errno == errno.ECONNRESET
        _fail(answer, "stream broken" if answer.headers else "connection reset" if reset else "connection lost")
    finally:
        answer.ended = perf_counter()


async def _read(
    content: aiohttp.StreamReader, reader: StreamReader, deadline: asyncio.Timeout, next_token: float
) -> None:
    loop, answer = asyncio.get_running_loop(), reader.answer
    extend_at = 0.0
    while data := await content.readany():
        now = perf_counter()
        if reader.feed(now, data) and now >= extend_at:
            deadline.reschedule(loop.time() + next_token)
            extend_at = now + min(1.0, next_token / 10)  # moving a timer costs more than reading a token
        if answer.error:
            return
        if answer.done:
            break
    reader.end()
    deadline.reschedule(loop.time() + LINGER)
    while await content.readany():  # to the end of the body, so that the connection is free for the next request
        pass


def _fail(answer: Answer, kind: str, detail: str = "") -> None:
    if not (answer.done or answer.error):  # what happens after the end of the stream harms nobody
        answer.error, answer.detail = kind, detail


async def _words(response: aiohttp.ClientResponse, patience: float) -> str:
    """The server's message in an error answer, of which only the start is read; where it sends us on, where to."""
    if 300 <= response.status < 400 and "Location" in response.headers:
        return f"sends on to {one_line(shown_url(response.headers['Location']))}"
    body = b""
    with suppress(TimeoutError, aiohttp.ClientError):  # the status has been told
        async with asyncio.timeout(patience):
            while len(body) < WORDS_BYTES and (more := await response.content.read(WORDS_BYTES - len(body))):
                body += more
    key = response.request_info.headers.get("Authorization", "").removeprefix("Bearer ")
    return server_message(body.decode(errors="replace"), key)


def _choice(event: dict[str, Any]) -> dict[str, Any] | None:
    """The event's choice, None where it has none. Raises TypeError for something else."""
    choices = event.get("choices")
    if not choices:
        return None
    if not isinstance(choices, list) or not isinstance(choices[0], dict):
        raise TypeError("its choices are none")
    return choices[0]


def _reason(choice: dict[str, Any]) -> str:
    reason = choice.get("finish_reason")
    if reason is not None and not isinstance(reason, str):
        raise TypeError("its finish_reason is no text")
    return one_line(reason or "", 40)


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
    """A count of tokens; None where it is not told. Raises TypeError for what cannot be one."""
    value = usage.get(name) if isinstance(usage, dict) else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise TypeError(f"{name} is {one_line(json.dumps(value), 40)}")
    return value

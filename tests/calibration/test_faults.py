"""Whatever a server does while it is measured: said in one line, counted by kind, waited for no longer than stated.

Every fault is played over a real socket, mostly after honest answers, which must stay as they were.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hostile_server import (
    CHUNKED,
    DEEP,
    DONE,
    UNTIL_CLOSED,
    Exchange,
    HostileServer,
    Route,
    always,
    drip,
    event,
    hang_up,
    honest,
    many_headers,
    raw,
    reset,
    response,
    serve,
    stall,
    tokens_of,
    usage,
    whole,
)
from played_levels import PATIENT, closed, kept

from calibration.clients import Job, record
from calibration.endpoint import discover
from calibration.load import level_of
from calibration.stream import Patience
from simulator.results.run import Level

HASTY = Patience(connect=1.0, first_token=1.5, next_token=1.0, idle=0.3)
KIB, MIB = 1 << 10, 1 << 20


def played(server: HostileServer, requests: int, patience: Patience = PATIENT, clients: int = 1) -> Level:
    job = Job(discover(server.url), closed(clients, requests, 32, 8), 1, patience=patience, sample_every=0.05)
    return level_of(job, asyncio.run(record(job, lambda _: None)))


# --- answers that go wrong


@dataclass(frozen=True)
class Fault:
    """What the server does, and what is said of it: the kind of error, and words of the first."""

    does: Route
    error: str
    words: str = ""
    patience: Patience = PATIENT


def pieces(make: Callable[[Exchange], list[bytes]]) -> Route:
    """A chunked stream of what `make` gives."""

    async def answer(exchange: Exchange) -> None:
        await exchange.write(CHUNKED)
        await exchange.chunks(*make(exchange))
        await exchange.write(b"0\r\n\r\n")

    return answer


def then(make: Callable[[Exchange], list[bytes]], what: Callable[[Exchange], Awaitable[None]]) -> Route:
    """A stream that begins as `make` says and goes on in another way."""

    async def answer(exchange: Exchange) -> None:
        await exchange.write(CHUNKED)
        await exchange.chunks(*make(exchange))
        await what(exchange)

    return answer


def three(exchange: Exchange) -> list[bytes]:
    return tokens_of(exchange, 3)


def three_and(*more: bytes) -> Callable[[Exchange], list[bytes]]:
    return lambda exchange: [*three(exchange), *more, DONE]


def content(text: str) -> bytes:
    return f"data: {text}\n\n".encode()


async def comments(exchange: Exchange) -> None:
    """Signs of life for ever, and no token."""
    while True:
        await exchange.chunks(b": still here\n\n")
        await asyncio.sleep(0.01)


async def lie(exchange: Exchange) -> None:
    """A chunk that is shorter than it says."""
    await exchange.write(b"ffff\r\n: a comment\r\n0\r\n\r\n")
    await stall(exchange)


async def no_size(exchange: Exchange) -> None:
    await asyncio.sleep(0.05)
    await exchange.write(b"xyz\r\n")


async def without_end(exchange: Exchange) -> None:
    """Tokens for ever."""
    await exchange.write(CHUNKED)
    for done in range(1, 100_000):
        await exchange.chunks(event(done, 32))


async def stalling_error(exchange: Exchange) -> None:
    await exchange.write(b"HTTP/1.1 500 Oops\r\nContent-Length: 500\r\n\r\nout of")
    await stall(exchange)


def sized(size: int) -> Route:
    """A stream whose Content-Length is off by so many bytes."""

    async def answer(exchange: Exchange) -> None:
        body = b"".join(whole(exchange))
        length = len(body) + size
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {length}\r\n\r\n"
        await exchange.write(head.encode())
        await exchange.write(body, cut=400, pause=0.02)
        exchange.hang_up()

    return answer


def gzipped(data: bytes) -> Route:
    pressed = zlib.compressobj(9, zlib.DEFLATED, 31)
    body = pressed.compress(data) + pressed.flush()
    return always(response(body, "text/event-stream", Content_Encoding="gzip"))


LONG_NUMBER = "9" * 5000

FAULTS = {
    "hangs up": Fault(hang_up, "connection lost"),
    "resets": Fault(reset, "connection reset"),
    "never answers": Fault(stall, "timeout", patience=HASTY),
    "drips headers": Fault(drip, "timeout", patience=HASTY),
    "headers without end": Fault(many_headers, "not HTTP"),
    "a header of 1 MB": Fault(raw(b"HTTP/1.1 200 OK\r\nX: " + b"a" * MIB), "not HTTP"),
    "does not speak HTTP": Fault(raw(b"220 mail.example ESMTP\r\n"), "not HTTP"),
    "half a status line": Fault(raw(b"HTTP/1.1 2"), "connection lost"),
    "100 for ever": Fault(raw(b"HTTP/1.1 100 Continue\r\n\r\n" * 5), "connection lost"),
    "a page with 200": Fault(always(response("<html>Welcome</html>", "text/html")), "no stream", "is text/html"),
    "JSON, no stream": Fault(always(response('{"choices": []}')), "no stream", "is application/json"),
    "429": Fault(
        always(response('{"error": {"message": "slow down"}}', status="429 Too Many Requests", Retry_After="3600")),
        "http 429",
        "slow down",
    ),
    "an error page that stalls": Fault(stalling_error, "http 500", patience=HASTY),
    "sends on to elsewhere": Fault(
        always(response("", status="302 Found", Location="http://elsewhere.example/v1/completions?key=1")),
        "http 302",
        "sends on to http://elsewhere.example/v1/completions",
    ),
    "sends on in a circle": Fault(
        always(response("", status="307 Temporary Redirect", Location="/v1/completions")), "http 307", "sends on to /v1"
    ),
    "stalls": Fault(then(three, stall), "timeout", patience=HASTY),
    "comments for ever": Fault(then(three, comments), "timeout", patience=HASTY),
    "comments, no token": Fault(then(lambda _: [], comments), "timeout", patience=HASTY),
    "tokens for ever": Fault(without_end, "ran on", "and no end, instead of 8"),
    "dies": Fault(then(three, hang_up), "stream broken"),
    "resets in the stream": Fault(then(three, reset), "stream broken"),
    "ends early": Fault(pieces(three), "stream broken", "it ended before the answer did"),
    "half an event": Fault(pieces(lambda it: [*three(it), tokens_of(it)[3][:40]]), "not JSON"),
    "half an event, and DONE": Fault(pieces(lambda it: [*three(it), tokens_of(it)[3][:-9], b"\n\n", DONE]), "not JSON"),
    "bad JSON": Fault(pieces(three_and(content("{oops}"))), "not JSON", "{oops}"),
    "no JSON": Fault(pieces(three_and(content("\x00\x1b[31mred"))), "not JSON", "[31mred"),
    "no UTF-8": Fault(pieces(three_and(b'data: {"choices": "\xff\xfe"}\n\n')), "not JSON"),
    "nested 100,000 deep": Fault(pieces(three_and(content(DEEP))), "not JSON"),
    "nested 900 deep in an error": Fault(
        pieces(three_and(content('{"error": ' + "[" * 900 + "]" * 900 + "}"))), "server error"
    ),
    "an error event": Fault(
        pieces(three_and(content('{"error": {"message": "engine\\n\\ud800 died"}}'))), "server error", "engine died"
    ),
    "an event is a list": Fault(pieces(three_and(content("[1]"))), "bad event", "no object"),
    "choices are a text": Fault(pieces(three_and(content('{"choices": "x"}'))), "bad event", "its choices"),
    "choices are an object": Fault(pieces(three_and(content('{"choices": {"0": 1}}'))), "bad event", "its choices"),
    "a choice is null": Fault(pieces(three_and(content('{"choices": [null]}'))), "bad event", "its choices"),
    "a reason is a number": Fault(
        pieces(three_and(content('{"choices": [{"finish_reason": 5}]}'))), "bad event", "finish_reason"
    ),
    "counts NaN": Fault(pieces(three_and(content('{"usage": {"completion_tokens": NaN}}'))), "bad usage", "is NaN"),
    "counts less than none": Fault(pieces(three_and(usage(32, -5))), "bad usage", "completion_tokens is -5"),
    "counts a text": Fault(pieces(three_and(usage("32", 8))), "bad usage", 'prompt_tokens is "32"'),
    "counts true": Fault(pieces(three_and(usage(32, True))), "bad usage", "is true"),
    "counts 1e30": Fault(pieces(three_and(usage(10**30, 8))), "bad usage", "prompt_tokens is 10000"),
    "a count of 5000 digits": Fault(
        pieces(three_and(content('{"usage":{"completion_tokens":' + LONG_NUMBER + "}}"))), "not JSON"
    ),
    "a quick count of 5000 digits": Fault(
        pieces(three_and(content('{"x":[{"finish_reason":null}],"y":{"completion_tokens":' + LONG_NUMBER + "}}"))),
        "not JSON",
    ),
    "counts a million at once": Fault(pieces(lambda it: [event(10**6, 32), *whole(it)]), "ran on", "1000000 tokens"),
    "ends early in its count": Fault(pieces(lambda it: [*three(it), event(4, 32, "stop"), DONE]), "ended early", "4"),
    "counts other than it streams": Fault(
        pieces(lambda it: [*tokens_of(it)[:-1], event(7, 32, "length"), usage(32, 8), DONE]),
        "bad usage",
        "7 tokens were streamed, and 8 counted",
    ),
    "another prompt": Fault(pieces(lambda it: [*tokens_of(it), usage(33, 8), DONE]), "prompt miscounted", "33 tokens"),
    "no tokens": Fault(pieces(lambda _: [usage(32, 0), DONE]), "no tokens"),
    "a lie about a chunk": Fault(then(three, lie), "timeout", patience=HASTY),
    "a chunk of no size": Fault(then(three, no_size), "timeout", patience=HASTY),
    "a longer Content-Length, no DONE": Fault(
        raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n" + event(1, 32)),
        "stream broken",
    ),
    "a shorter Content-Length": Fault(sized(-150), "not JSON"),
    "a pile of keys": Fault(  # a pattern that goes back and forth would take hours
        pieces(three_and(content('{"a":0' + ',"finish_reason":null' * 10_000 + "}"))), "ended early", "3 tokens"
    ),
    "a zip bomb": Fault(gzipped(b"a" * (64 * MIB)), "event too long", "256 KiB without an end of line"),
}


def each_in_turn(faults: Iterable[Route]) -> Route:
    """A trial, then an honest answer before each fault."""
    routes = [honest, *(route for fault in faults for route in (honest, fault))]

    async def answer(exchange: Exchange) -> None:
        await routes[exchange.number - 1](exchange)

    return answer


def each_at_once(faults: Sequence[Route]) -> Route:
    """A trial, as many honest answers as there are faults, then these."""
    routes = [honest] * (1 + len(faults)) + list(faults)

    async def answer(exchange: Exchange) -> None:
        await routes[exchange.number - 1](exchange)

    return answer


@pytest.mark.parametrize("patience", [PATIENT, HASTY], ids=["one after the other", "waits, all at once"])
def test_bad_answers_are_counted_by_their_kind_and_touch_no_other(patience: Patience, tmp_path: Path) -> None:
    """As many good answers as bad ones, and often on the same connection."""
    faults = {name: fault for name, fault in FAULTS.items() if fault.patience is patience}
    routes = [fault.does for fault in faults.values()]
    number, in_turn = len(faults), patience is PATIENT
    with serve(completions=each_in_turn(routes) if in_turn else each_at_once(routes)) as server:
        level = played(server, 2 * number, patience, 1 if in_turn else number)
        assert server.completions == 1 + 2 * number, "none is sent again"
    good, bad = level.completed, level.requests[level.requests["error"] != ""]
    assert level.records is not None
    details = level.records["detail"][bad.index]
    if in_turn:
        assert dict(zip(faults, bad["error"], strict=True)) == {name: fault.error for name, fault in faults.items()}
        for (name, fault), detail in zip(faults.items(), details, strict=True):
            assert fault.words in detail, name
    else:
        assert Counter(bad["error"]) == Counter(fault.error for fault in faults.values())
        assert set(details[bad["error"] == "timeout"]) == {
            "no first token in 1.5 s",
            "no further token in 1 s",
        }
    assert len(good) == number
    assert level.notes[0].startswith(f"{number} of {2 * number} requests failed: ")
    assert all(text.isprintable() and len(text) <= 200 for text in details)
    assert set(good["output_tokens"]) == {8}
    assert bad[["ttft", "tpot", "e2el"]].isna().all(axis=None)
    assert level.tokens is not None
    reads = level.tokens[level.tokens["request_id"].isin(good["request_id"])].groupby("request_id")["tokens"]
    assert level.gaps["count"].sum() == (reads.last() - reads.first()).sum(), "the gaps of the good answers alone"
    assert kept(level, tmp_path / "run").requests.equals(level.requests)


# --- odd answers that are good


async def until_closed(exchange: Exchange) -> None:
    """HTTP/1.0: no chunks, the end is the end of the connection."""
    await exchange.write(UNTIL_CLOSED)
    await exchange.write(b"".join(whole(exchange)), cut=50)
    exchange.hang_up()


async def at_every_byte(exchange: Exchange) -> None:
    """Each byte in a chunk of its own, and the whole cut at every byte once more."""
    await exchange.write(CHUNKED)
    data = b"".join(whole(exchange))
    await exchange.write(b"".join(b"1\r\n%c\r\n" % byte for byte in data), cut=1)
    await exchange.write(b"0\r\n\r\n")


async def never_closed(exchange: Exchange) -> None:
    """Says DONE and then nothing: neither the end of the body nor of the connection."""
    await exchange.write(CHUNKED)
    await exchange.chunks(*whole(exchange))
    await stall(exchange)


ODD = {
    "HTTP/1.0": until_closed,
    "cut at every byte": at_every_byte,
    "all in one": pieces(lambda it: [b"".join(whole(it))]),
    "no DONE": pieces(lambda it: whole(it)[:-1]),
    "no DONE, no newline": pieces(lambda it: [b"".join(whole(it)[:-1]).rstrip()]),
    "CRLF": pieces(lambda it: [piece.replace(b"\n", b"\r\n") for piece in whole(it)]),
    "comments between": pieces(lambda it: [b": ping\n\n" + piece for piece in whole(it)]),
    "names of events": pieces(lambda it: [b"event: message\nid: 1\nretry: 5\n" + piece for piece in whole(it)]),
    "garbage after DONE": pieces(lambda it: [*whole(it), event(99, 32), content("{oops}"), b"\xff" * 300_000]),
    "never closed after DONE": never_closed,
    "a broken end after DONE": then(whole, no_size),
    "a reset after DONE": then(whole, reset),
    "a longer Content-Length": sized(100),
    "counts as floats": pieces(lambda it: [*tokens_of(it), usage(32.0, 8.0), DONE]),
    "gzip, though not asked for": lambda it: gzipped(b"".join(whole(it)))(it),
    "an event of 200 KiB": pieces(lambda it: [event(1, 32, x="y" * (200 * KIB)), *whole(it)[1:]]),
}


def test_an_odd_answer_is_a_good_one() -> None:
    """All at once, after the trial."""
    routes = [honest, *ODD.values()]

    async def answer(exchange: Exchange) -> None:
        await routes[exchange.number - 1](exchange)

    with serve(completions=answer) as server:
        level = played(server, len(ODD), clients=len(ODD))
    assert level.requests["error"].tolist() == [""] * len(ODD), level.notes
    assert set(level.completed["output_tokens"]) == {8}
    assert set(level.completed["prompt_tokens"]) == {32}
    assert not any("fail" in note for note in level.notes)


def test_more_events_than_tokens_are_spread_and_noted() -> None:
    """Without a running count an event is a token, until the server says that they were fewer."""

    async def wordy(exchange: Exchange) -> None:
        plain = [b'data: {"choices": [{"text": "w", "finish_reason": null}]}\n\n'] * 20
        await pieces(lambda it: [*plain, usage(32, 8), DONE])(exchange)

    with serve(completions=wordy) as server:
        level = played(server, 2)
    assert level.completed["output_tokens"].tolist() == [8, 8]
    assert level.tokens is not None
    assert level.tokens.groupby("request_id")["tokens"].is_monotonic_increasing.all()
    assert level.gaps["count"].sum() <= 2 * 7
    assert "the server sent more events than it counts tokens: they were spread evenly" in level.notes

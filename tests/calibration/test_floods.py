"""A hundred megabytes where a few hundred bytes were asked for: refused at the start, and not kept in memory."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hostile_server import CHUNKED, Exchange, Route, after, response, serve

MIB = 1 << 20
FLOOD = 100 * MIB
GROWTH = 48 * MIB  # where an answer is read as far as 16 MiB: as bytes in pieces and put together, and as text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc"),
]

# Measures an honest server, then the one that floods, and says by how many bytes the peak of the memory grew.
SCRIPT = """
import asyncio, sys
from calibration.clients import Job, record
from calibration.endpoint import EndpointError, discover
from calibration.load import level_of
from calibration.stream import Patience
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

def measure(url):
    load = Workload(ClosedLoop(1), (Shape(Length.fixed(32), Length.fixed(8)),), 2)
    patience = Patience(connect=20.0, first_token=3.0, next_token=3.0, idle=0.3)
    job = Job(discover(url), load, 1, patience=patience, sample_every=0.05)
    level = level_of(job, asyncio.run(record(job, lambda _: None)))
    return [*level.requests["error"], *level.notes]

honest, flooding = sys.argv[1:]
measure(honest)
before = peak()
try:
    print(*measure(flooding), sep="; ")
except EndpointError as problem:
    print(problem)
print(peak() - before)
"""


def grown(**routes: Route) -> tuple[str, int, int]:
    """What is said of a server, by how many bytes the peak of the client's memory grew, and how many it was sent."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with serve() as honest, serve(**routes) as flooding:
        command = [sys.executable, "-c", SCRIPT, honest.url, flooding.url]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        sent = flooding.sent
    *said, growth = done.stdout.splitlines()
    return " ".join(said), int(growth), sent


def flood(head: bytes, piece: bytes, chunked: bool = False, size: int = FLOOD) -> Route:
    async def answer(exchange: Exchange) -> None:
        await exchange.write(head)
        await exchange.flood(piece, size, chunked)

    return answer


def bomb(kind: str) -> Route:
    """A tenth of a MiB that unpacks to a hundred."""
    pressed = zlib.compressobj(9, zlib.DEFLATED, 31)
    body = b"".join([*(pressed.compress(b"a" * MIB) for _ in range(100)), pressed.flush()])

    async def answer(exchange: Exchange) -> None:
        await exchange.write(response(body, kind, Content_Encoding="gzip"))

    return answer


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % FLOOD
ERROR = PLAIN.replace(b"200 OK", b"500 Oops")
GARBAGE = b"\x00garbage" * (1 << 13)
LINES = b"garbage of no meaning at all\n" * 2000
EVENTS = b"data: {garbage\n\n" * 4000
COMMENTS = b": garbage of no meaning at all\n\n" * 2000


@pytest.mark.parametrize(
    ("route", "words"),
    [
        (flood(PLAIN, GARBAGE), "/v1/models gives more than 16 MiB"),
        (bomb("application/json"), "/v1/models gives more than 16 MiB"),
        (flood(b"HTTP/1.1 200 OK\r\nX: ", b"a" * 65536), "does not speak HTTP"),
    ],
    ids=["body", "zip bomb", "header"],
)
def test_a_list_of_models_of_100_mb(route: Route, words: str) -> None:
    said, growth, sent = grown(models=route)
    assert words in said
    assert growth < GROWTH
    assert sent < 40 * MIB, "we hung up"


@pytest.mark.parametrize(
    "route",
    [
        flood(PLAIN, GARBAGE),
        flood(PLAIN, LINES),
        flood(PLAIN, b"vllm:num_requests_running 1\n" * 2000),
        bomb("text/plain"),
    ],
    ids=["garbage", "lines", "gauges", "zip bomb"],
)
def test_metrics_of_100_mb(route: Route) -> None:
    said, growth, _ = grown(metrics=route)
    assert said.startswith("; ; "), "the requests were measured"
    assert "the server shows no /metrics" in said
    assert growth < GROWTH


@pytest.mark.parametrize(
    ("route", "words", "most_sent"),
    [
        (flood(CHUNKED, GARBAGE, chunked=True), "event too long", 20 * MIB),
        (flood(CHUNKED, b"data: " + b"a" * 65530, chunked=True), "event too long", 20 * MIB),
        (flood(CHUNKED, EVENTS, chunked=True), "not JSON", 20 * MIB),
        (flood(CHUNKED, COMMENTS, True, size=100 * FLOOD), "timeout", 50 * FLOOD),
        (flood(PLAIN, GARBAGE), "no stream", 20 * MIB),
        (flood(ERROR, GARBAGE), "http 500", 20 * MIB),
        (bomb("text/event-stream"), "event too long", MIB),
    ],
    ids=["a line", "an event", "bad events", "comments", "no stream", "an error", "zip bomb"],
)
def test_a_stream_of_100_mb(route: Route, words: str, most_sent: int) -> None:
    """The answer to the second request of a level; what came before it is kept."""
    said, growth, sent = grown(completions=after(2, route))
    assert said.startswith(f"; {words}; 1 of 2 requests failed: {words} (1)"), said
    assert growth < 32 * MIB
    assert sent < most_sent

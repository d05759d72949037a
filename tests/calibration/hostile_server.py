"""A server of raw sockets that says whatever bytes a test wants. Where a test says nothing it is an honest vLLM."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
DONE = b"data: [DONE]\n\n"
DEEP = "[" * 100_000  # JSON that no reader can follow
MODEL = {"id": "demo", "owned_by": "vllm", "max_model_len": 8192}
METRICS = (
    "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
    'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1\n'
    "vllm:request_success_total {finished}\nvllm:generation_tokens_total {generated}\n"
)


class HungUp(Exception):
    """An answer that ends by closing the connection."""


@dataclass
class Exchange:
    """One request, and the way to answer it. `number` counts those to its path from 1."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    number: int
    server: HostileServer
    writer: asyncio.StreamWriter

    async def write(self, data: bytes, cut: int = 0, pause: float = 0.0) -> None:
        """Send `data`, where wanted in pieces of `cut` bytes with a `pause` (seconds) after each."""
        for start in range(0, len(data), cut or max(1, len(data))):
            piece = data[start : start + cut] if cut else data
            self.writer.write(piece)
            self.server.sent += len(piece)
            await self.writer.drain()
            await asyncio.sleep(pause)

    async def chunks(self, *pieces: bytes) -> None:
        """Pieces of a chunked body, without its end."""
        for piece in pieces:
            await self.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    async def flood(self, piece: bytes, size: int, chunked: bool = False) -> None:
        """`piece` again and again, until `size` bytes are sent or the other side has had enough."""
        for _ in range(size // len(piece)):
            await (self.chunks(piece) if chunked else self.write(piece))

    def hang_up(self) -> None:
        raise HungUp

    def reset(self) -> None:
        """Close so that the other end sees a reset."""
        connection = self.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()
        raise HungUp


Route = Callable[[Exchange], Awaitable[None]]


@dataclass
class HostileServer:
    """What it has seen; `routes` may be changed while it runs."""

    routes: dict[str, Route]
    url: str = ""
    asked: Counter[str] = field(default_factory=Counter)  # requests by path
    sent: int = 0  # bytes
    finished: int = 0  # completions
    generated: int = 0  # tokens
    token_seconds: float = 0.0

    @property
    def completions(self) -> int:
        return self.asked["/v1/completions"]


def response(body: bytes | str, kind: str = "application/json", status: str = "200 OK", **more: str) -> bytes:
    """A whole answer. Further headers are named with an underscore for a dash."""
    data = body.encode() if isinstance(body, str) else body
    told = {"Content-Type": kind, "Content-Length": str(len(data))}
    told |= {name.replace("_", "-"): value for name, value in more.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + data


def always(data: bytes) -> Route:
    async def answer(exchange: Exchange) -> None:
        await exchange.write(data)

    return answer


def event(done: int, prompt: int, reason: str | None = None, **more: object) -> bytes:
    """An event as vLLM writes it with continuous usage."""
    content: dict[str, object] = {"id": "cmpl-1", "object": "text_completion", "model": "demo"}
    content["choices"] = [{"index": 0, "text": " w", "logprobs": None, "finish_reason": reason}]
    content["usage"] = {"prompt_tokens": prompt, "total_tokens": prompt + done, "completion_tokens": done}
    return f"data: {json.dumps(content | more, separators=(',', ':'))}\n\n".encode()


def usage(prompt: object, output: object) -> bytes:
    """The last event, which has the counts alone."""
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n".encode()


def tokens_of(exchange: Exchange, upto: int | None = None) -> list[bytes]:
    """The events of an honest answer, one a token, as far as `upto` tokens."""
    prompt, most = len(exchange.body["prompt"]), exchange.body["max_tokens"]
    return [event(done, prompt, "length" if done == most else None) for done in range(1, min(upto or most, most) + 1)]


def whole(exchange: Exchange) -> list[bytes]:
    """An honest answer, event by event."""
    return [*tokens_of(exchange), usage(len(exchange.body["prompt"]), exchange.body["max_tokens"]), DONE]


async def honest(exchange: Exchange) -> None:
    """A completion as it should be."""
    await exchange.write(CHUNKED)
    for piece in whole(exchange):
        await exchange.chunks(piece)
        await asyncio.sleep(exchange.server.token_seconds)
    exchange.server.finished += 1
    exchange.server.generated += exchange.body["max_tokens"]
    await exchange.write(b"0\r\n\r\n")


def after(requests: int, fault: Route, before: Route = honest) -> Route:
    """Misbehave once so many have been answered as they should be; the first is the trial that learns the dialect."""

    async def answer(exchange: Exchange) -> None:
        await (before if exchange.number <= requests else fault)(exchange)

    return answer


async def metrics(exchange: Exchange, blocks: int = 1001) -> None:
    """Gauges and counters of a server that has nothing else to do."""
    server = exchange.server
    text = METRICS.format(blocks=blocks, finished=server.finished, generated=server.generated)
    await exchange.write(response(text, "text/plain"))


def models(*cards: dict[str, object]) -> bytes:
    return response(json.dumps({"object": "list", "data": list(cards)}))


def raw(data: bytes) -> Route:
    """Bytes, and the connection is closed."""

    async def answer(exchange: Exchange) -> None:
        await exchange.write(data)
        exchange.hang_up()

    return answer


async def stall(exchange: Exchange) -> None:
    await asyncio.sleep(60)


async def hang_up(exchange: Exchange) -> None:
    exchange.hang_up()


async def reset(exchange: Exchange) -> None:
    exchange.reset()


async def drip(exchange: Exchange) -> None:
    """A header line byte by byte, for ever."""
    await exchange.write(b"HTTP/1.1 200 OK\r\n")
    await exchange.write(b"X-A: " + b"a" * 10_000, cut=1, pause=0.01)


async def many_headers(exchange: Exchange) -> None:
    await exchange.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(1_000_000):
        await exchange.write(b"X-%d: %s\r\n" % (number, b"a" * 1000))


HONEST: dict[str, Route] = {
    "/v1/models": always(models(MODEL)),
    "/version": always(response('{"version": "0.32.0"}')),
    "/metrics": metrics,
    "/metrics/": metrics,
    "/v1/completions": honest,
}
NOT_FOUND = response('{"error": {"message": "not found"}}', status="404 Not Found")


@contextmanager
def serve(**routes: Route) -> Iterator[HostileServer]:
    """Run a server in a thread until the block ends. Routes are named `completions`, `models`, `metrics`, `version`."""
    places = {"completions": ["/v1/completions"], "models": ["/v1/models"], "metrics": ["/metrics", "/metrics/"]}
    server = HostileServer(dict(HONEST))
    for name, route in routes.items():
        server.routes |= dict.fromkeys(places.get(name, [f"/{name}"]), route)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def end() -> None:
        for task in (tasks := asyncio.all_tasks() - {asyncio.current_task()}):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    listener = asyncio.run_coroutine_threadsafe(_listen(server), loop).result(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(listener.close)
        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _listen(server: HostileServer) -> asyncio.Server:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with _closing(writer):
            while await _answer_one(server, reader, writer):
                pass

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    return listener


@asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    with suppress(ConnectionError, asyncio.IncompleteReadError, HungUp, asyncio.CancelledError):  # the test has ended
        try:
            yield
        finally:
            writer.close()


async def _answer_one(server: HostileServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether the connection may carry another request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    told: Sequence[list[str]] = [line.split(": ", 1) for line in head[1:] if ": " in line]
    headers = {name.lower(): value for name, value in told}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    path = head[0].split(" ")[1].partition("?")[0]
    server.asked[path] += 1
    content = json.loads(body) if body else {}
    exchange = Exchange(path, headers, content, server.asked[path], server, writer)
    await server.routes.get(path, always(NOT_FOUND))(exchange)
    return True

"""An OpenAI-compatible server whose pace and manners a test chooses, on a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Manners:
    """How the server behaves; the defaults are vLLM's."""

    token_seconds: float = 0.002
    prefill_seconds: float = 0.0  # per prompt token
    vocabulary: int = 8192
    key: str | None = None  # asked for
    models: tuple[str, ...] = ("demo",)
    web_page: bool = False  # a server of something else
    status: int = 200  # of every completion
    fail_every: int = 0  # every so many completions, one HTTP 500
    knows_continuous_usage: bool = True
    knows_stream_options: bool = True
    sends_usage: bool = True
    streams: bool = True
    buffers: bool = False  # as a proxy does: all events at the end
    tokens_per_event: int = 1
    empty_events: bool = False  # one before the first token and one after the last
    added_prompt_tokens: int = 0  # in what it counts
    forgotten_tokens: int = 0  # outputs shorter than asked
    cut: int = 0  # bytes a write, 0 for whole events
    dies_after: int | None = None  # tokens
    hangs_after: int | None = None  # tokens
    shows_metrics: bool = True
    filters_metrics: bool = True
    strangers: int = 0  # requests of others that it finishes with each of ours
    cached_tokens: int = 0  # prefix-cache hits a request
    old_metrics: bool = False  # names of vLLM before 0.9
    has_completions: bool = True  # /v1/completions answers, else HTTP 404
    takes_token_ids: bool = True
    has_chat: bool = True  # /v1/chat/completions answers, else HTTP 404
    thinks: str | None = None  # the name under which a chat streams the first half of its tokens
    template_tokens: int = 5  # that a chat adds to a prompt
    tokens_per_word: int = 1
    resets: bool = False  # every completion before it is answered
    tells_cached: bool = False  # the cached tokens of a prompt in its usage
    strange_tokens: int = 0  # generated for others with each of ours
    seconds_away: float = 0.0  # before any answer, as a distant server
    certificate: str | None = None  # file with a key and a certificate: speaks TLS


@dataclass
class FakeServer:
    """What the server has seen."""

    url: str
    manners: Manners
    requests: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    finished: int = 0
    generated: int = 0  # tokens
    metrics_paths: list[str] = field(default_factory=list)


@contextmanager
def serve(manners: Manners | None = None) -> Iterator[FakeServer]:
    """Run a server in a thread until the block ends."""
    server = FakeServer("", manners or Manners())
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(_app(server), shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        tls = None
        if server.manners.certificate:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(server.manners.certificate)
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        server.url = f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def metrics_text(server: FakeServer) -> str:
    """What vLLM shows on /metrics, as far as anyone here reads it."""
    labels = '{engine="0",model_name="demo"}'
    old = server.manners.old_metrics
    usage, queries = ("gpu_cache_usage_perc", "gpu_prefix_cache") if old else ("kv_cache_usage_perc", "prefix_cache")
    pool = "" if old else ',kv_cache_size_tokens="16000",kv_cache_max_concurrency="1.95"'
    config = f'block_size="16",enable_prefix_caching="True",gpu_memory_utilization="0.9",num_gpu_blocks="1001"{pool}'
    finished, ours = server.finished * (1 + server.manners.strangers), server.finished
    return "\n".join(
        [
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{labels} {server.running}.0",
            f"vllm:num_requests_waiting{labels} 0.0",
            'vllm:num_requests_waiting_by_reason{engine="0",model_name="demo",reason="capacity"} 7.0',
            f"vllm:{usage}{labels} {server.running / 10}",
            f'vllm:cache_config_info{{engine="0",{config}}} 1.0',
            f"vllm:num_preemptions_total{labels} 0.0",
            f"vllm:prompt_tokens_total{labels} {ours * 64}.0",
            f"vllm:generation_tokens_total{labels} {server.generated}.0",
            f"vllm:{queries}_queries_total{labels} {ours * 64}.0",
            f"vllm:{queries}_hits_total{labels} {ours * server.manners.cached_tokens}.0",
            f'vllm:request_success_total{{engine="0",model_name="demo",finished_reason="length"}} {finished}.0',
            'vllm:request_success_total{engine="0",model_name="demo",finished_reason="stop"} 0.0',
            f"vllm:time_to_first_token_seconds_sum{labels} {ours * 0.25}",
            f"vllm:time_to_first_token_seconds_count{labels} {ours}.0",
            f"vllm:request_queue_time_seconds_sum{labels} {ours * 0.125}",
            f"vllm:request_queue_time_seconds_count{labels} {ours}.0",
            "",
        ]
    )


def _app(server: FakeServer) -> web.Application:
    manners = server.manners

    async def models(request: web.Request) -> web.Response:
        cards = [{"id": name, "owned_by": "vllm", "max_model_len": 8192} for name in manners.models]
        return web.json_response({"object": "list", "data": cards})

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def metrics(request: web.Request) -> web.Response:
        server.metrics_paths.append(request.path_qs)
        filtered = request.path == "/metrics/"
        if not manners.shows_metrics or (filtered and not manners.filters_metrics):
            return web.Response(status=404)
        return web.Response(text=metrics_text(server))

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        server.requests.append(body)
        if manners.resets:
            return _reset(request)
        refusal = _refusal(server, body)
        if refusal is not None:
            return refusal
        server.running += 1
        server.most_running = max(server.most_running, server.running)
        try:
            return await _complete(server, request, body)
        finally:
            server.running -= 1
            server.finished += 1

    app = web.Application(middlewares=[_gate(manners)])
    app.router.add_get("/v1/models", models)
    app.router.add_get("/version", version)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/metrics/", metrics)
    if manners.has_completions:
        app.router.add_post("/v1/completions", completions)
    if manners.has_chat:
        app.router.add_post("/v1/chat/completions", completions)
    return app


def _gate(manners: Manners) -> Any:
    """What comes before every answer."""

    @web.middleware
    async def manage(request: web.Request, handler: Any) -> web.StreamResponse:
        await asyncio.sleep(manners.seconds_away)
        if manners.web_page:
            return web.Response(text="<!DOCTYPE html><html><body>It works!</body></html>", content_type="text/html")
        if manners.key and request.headers.get("Authorization") != f"Bearer {manners.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    return manage


def _refusal(server: FakeServer, body: dict[str, Any]) -> web.Response | None:
    manners, options = server.manners, body.get("stream_options", {})
    if manners.status != 200:
        return web.json_response({"error": {"message": "no luck today"}}, status=manners.status)
    if manners.fail_every and len(server.requests) % manners.fail_every == 0:
        return web.json_response({"error": {"message": "CUDA error"}}, status=500)
    if "prompt" in body and not manners.takes_token_ids:
        return web.json_response({"detail": [{"msg": "prompt: input should be a valid string"}]}, status=422)
    if "prompt" in body and max(body["prompt"]) >= manners.vocabulary:
        message = f"Token id {max(body['prompt'])} is out of vocabulary"
        return web.json_response({"error": {"message": message}}, status=400)
    if "stream_options" in body and not manners.knows_stream_options:
        return web.json_response({"error": {"message": "unknown field stream_options"}}, status=400)
    if "continuous_usage_stats" in options and not manners.knows_continuous_usage:
        return web.json_response({"error": {"message": "unknown field continuous_usage_stats"}}, status=400)
    return None


def _reset(request: web.Request) -> web.Response:
    """Close the connection so that its other end sees a reset."""
    assert request.transport is not None
    connection = request.transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.transport.abort()
    return web.Response()


def _prompt_tokens(manners: Manners, body: dict[str, Any]) -> int:
    if "prompt" in body:
        return len(body["prompt"]) + manners.added_prompt_tokens
    words = " ".join(message["content"] for message in body["messages"]).split()
    return manners.template_tokens + manners.tokens_per_word * len(words)


def _delta(manners: Manners, text: str, done: int, tokens: int) -> dict[str, Any]:
    """What an event of a chat adds: the role first, then half of the tokens as thoughts where it thinks."""
    if not done:
        return {"delta": {"role": "assistant", "content": ""}}
    name = manners.thinks if manners.thinks and done <= tokens // 2 else "content"
    return {"delta": {name: text} if text else {}}


async def _complete(server: FakeServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    manners, options = server.manners, body.get("stream_options", {})
    prompt, tokens = _prompt_tokens(manners, body), body["max_tokens"] - manners.forgotten_tokens
    chat = "messages" in body

    def usage(done: int) -> dict[str, Any]:
        details = {"prompt_tokens_details": {"cached_tokens": manners.cached_tokens}} if manners.tells_cached else {}
        return {"prompt_tokens": prompt, "total_tokens": prompt + done, "completion_tokens": done} | details

    await asyncio.sleep(manners.prefill_seconds * prompt)
    if not manners.streams:
        await asyncio.sleep(manners.token_seconds * tokens)
        choice = {"index": 0, "text": "w " * tokens, "finish_reason": "length"}
        return web.json_response({"choices": [choice], "usage": usage(tokens)})

    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    out = _Out(response, manners)
    continuous = manners.sends_usage and options.get("continuous_usage_stats", False)

    def event(text: str, done: int, reason: str | None = None) -> dict[str, Any]:
        content: dict[str, Any] = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
        words = _delta(manners, text, done, tokens) if chat else {"text": text}
        content["choices"] = [{"index": 0, **words, "logprobs": None, "finish_reason": reason}]
        return content | ({"usage": usage(done)} if continuous else {})

    if manners.empty_events or chat:
        await out.send(event("", 0))
    done = 0
    while done < tokens:
        if done == manners.dies_after:
            assert request.transport is not None
            request.transport.abort()
            return response
        if done == manners.hangs_after:
            await asyncio.sleep(60)
        count = min(manners.tokens_per_event, tokens - done)
        await asyncio.sleep(manners.token_seconds * count)
        done += count
        server.generated += count
        last = done == tokens and not manners.empty_events
        await out.send(event(" w" * count, done, "length" if last else None))
    if manners.empty_events:
        await out.send(event("", tokens, "length"))
    if manners.sends_usage and options.get("include_usage", False):
        await out.send({"choices": [], "usage": usage(tokens), "system_fingerprint": "vllm-0.32.0-tp2-0123abcd"})
    server.generated += manners.strange_tokens
    await out.end()
    return response


class _Out:
    """Events on their way out, held back or cut up as the manners say."""

    def __init__(self, response: web.StreamResponse, manners: Manners) -> None:
        self.response, self.manners, self.held = response, manners, b""

    async def send(self, event: dict[str, Any]) -> None:
        await self._write(f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode())

    async def end(self) -> None:
        await self._write(b"data: [DONE]\n\n")
        if self.held:
            await self.response.write(self.held)
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        if self.manners.buffers:
            self.held += data
        elif self.manners.cut:
            for start in range(0, len(data), self.manners.cut):
                await self.response.write(data[start : start + self.manners.cut])
                await asyncio.sleep(0)
        else:
            await self.response.write(data)

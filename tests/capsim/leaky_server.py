"""A server that wants an API key and repeats it wherever an answer has room for a text."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

KIND = 25  # completions before some fail


@dataclass
class LeakyServer:
    """Where it answers, the key it wants, and the key that came with each request, by host and path."""

    key: str
    url: str = ""
    elsewhere: str = ""  # where it sends those who ask for /metrics on; nowhere if empty
    seen: list[tuple[str, str]] = field(default_factory=list)
    completions: int = 0

    def body(self) -> dict[str, Any]:
        return {"error": {"message": f"bad luck for {self.key} of {self.key[:20]}, {'x' * 150} {self.key}"}}


@contextmanager
def serve_leaky(key: str) -> Iterator[LeakyServer]:
    """Run a server in a thread until the block ends."""
    server, loop = LeakyServer(key), asyncio.new_event_loop()
    runner = web.AppRunner(_app(server), shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

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


def _app(server: LeakyServer) -> web.Application:  # noqa: C901, a handler for each path
    key = server.key

    @web.middleware
    async def gate(request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        server.seen.append((request.path, given))
        if given != f"Bearer {key}":
            return web.json_response({"error": {"message": f"{given} is not {key}"}}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def models(request: web.Request) -> web.Response:
        cards = [
            {"id": name, "owned_by": f"org of {key}", "max_model_len": 8192} for name in ("demo", f"{key}/7b", "\ud800")
        ]
        return _told({"object": "list", "data": cards, key: key})

    async def version(request: web.Request) -> web.Response:
        return _told({"version": f"0.32.0+{key}"})

    async def info(request: web.Request) -> web.Response:
        config = {"model_config": {"dtype": key, "quantization": key}, "cache_config": {"cache_dtype": key}}
        return _told({"vllm_config": config, "system_env": {"nvidia_gpu_models": f"GPU 0: {key} H100"}, "api_key": key})

    async def metrics(request: web.Request) -> web.Response:
        if server.elsewhere:
            return web.Response(status=307, headers={"Location": f"{server.elsewhere}/metrics"})
        labels = f'{{engine="0",model_name="{key}"}}'
        config = f'block_size="16",num_gpu_blocks="1001",cache_dtype="{key}",gpu_memory_utilization="0.9"'
        lines = [f"vllm:num_requests_running{labels} 0.0", f"vllm:num_requests_waiting{labels} 0.0"]
        lines += [f"vllm:kv_cache_usage_perc{labels} 0.1", f'vllm:cache_config_info{{engine="0",{config}}} 1.0', ""]
        return web.Response(text="\n".join(lines), headers={"X-Key": key})

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        server.completions += 1
        fails = server.completions % 5 if server.completions > KIND else -1
        if fails == 0:
            return web.json_response(server.body(), status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Set-Cookie": f"key={key}"})
        await response.prepare(request)
        if fails == 3:
            await response.write(f"data: {json.dumps(server.body())}\n\n".encode())
            return response
        for done in range(1, body["max_tokens"] + 1):
            await asyncio.sleep(0.001)
            reason = f"length, {key}" if done == body["max_tokens"] else None
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": done}
            event = {"choices": [{"index": 0, "text": key, "finish_reason": reason}], "system_fingerprint": key}
            await response.write(f"data: {json.dumps(event | {'usage': usage, 'model': key})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application(middlewares=[gate])
    app.router.add_get("/v1/models", models)
    app.router.add_get("/version", version)
    app.router.add_get("/server_info", info)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/metrics/", metrics)
    app.router.add_post("/v1/completions", completions)
    return app


def _told(content: object) -> web.Response:
    return web.json_response(content, headers={"X-Request-Id": "1", "Server": "leaky"})

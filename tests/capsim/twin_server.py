"""A twin on a real socket, in a thread of the test."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from capsim.emulator.server import Twin
from simulator.engine.engine_flags import EngineFlags
from simulator.profile import Coefficient, Coefficients, MeasuredRange, Profile

RANGES = {"concurrency": (1, 8), "sequences": (1, 8), "context_tokens": (64, 1280), "prompt_chunk_tokens": (64, 2048)}


def make_profile(flags: EngineFlags, host_time: dict[str, float] | None = None, **step_time: float) -> Profile:
    """A profile with these seconds."""
    terms = [
        {name: Coefficient(value=value) for name, value in group.items()} for group in (step_time, host_time or {})
    ]
    return Profile(
        name="quick",
        model="quick-7b",
        gpu="a GPU",
        engine_version=flags.engine_version,
        kv_bytes_per_token=65536,
        engine_flags=flags,
        coefficients=Coefficients(step_time=terms[0], host_time=terms[1]),
        measured_range=MeasuredRange(**RANGES),
    )


@dataclass(frozen=True)
class Reply:
    """What came back; `events` are those of a stream, the last one is "[DONE]"."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        data = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        return [json.loads(event) for event in data[:-1]] + data[-1:]


@dataclass(frozen=True)
class TwinServer:
    """Where it answers."""

    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def get(self, path: str) -> Reply:
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> Reply:
        return self._ask("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)

    def metric(self, name: str) -> float:
        """The value of a sample of the engine, whatever its other labels; 0 where there is none."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}"))

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None = None) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Reply(response.status, dict(response.headers), response.read().decode())
        finally:
            connection.close()


@contextmanager
def serve_twin(profile: Profile, **options: Any) -> Iterator[TwinServer]:
    """Run a twin until the block ends."""
    loop = asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()
    found: list[str] = []

    async def serve() -> None:
        async with Twin(profile, **options) as twin:
            found.append(await twin.listen())
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield TwinServer(found[0])
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()

"""How many streams the load generator keeps up with, before it measures itself instead of the server.

    python -m benchmarks.load_generator --streams 64,128,256,400 --pace 50 --processes 1,2

A server that only writes prepared events, in step as vLLM does, runs beside it. For every level: tokens a second that
arrived of those that were sent, the share of a core that the busiest client process took, how late its event loop ran,
and the gaps that it measured where the true one is 1 / pace. Anything else that runs on the machine shows here too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
from dataclasses import dataclass
from functools import cache
from time import perf_counter

import numpy as np

from calibration.clients import Job
from calibration.dialect import Dialect
from calibration.endpoint import Endpoint
from calibration.load import level_of, record_apart
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload
from simulator.results.percentiles import weighted_percentiles

PROMPT, OUTPUT, ROUNDS = 64, 200, 2  # tokens, tokens, requests a client
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ADDRESS: multiprocessing.Queue[int] = multiprocessing.Queue()


@dataclass(eq=False)
class Stream:
    """An answer on its way: its writer, the tokens it is to have, those it has, and whether it is done."""

    writer: asyncio.StreamWriter
    wanted: int
    done: asyncio.Event
    sent: int = 0


@cache
def event(token: int, last: bool) -> bytes:
    """The bytes of one token as vLLM sends it, and of the end of the stream with the last."""
    choice = {"index": 0, "text": " w", "logprobs": None, "finish_reason": "length" if last else None}
    usage = {"prompt_tokens": PROMPT, "total_tokens": PROMPT + token, "completion_tokens": token}
    content = {"id": f"cmpl-{0:032x}", "object": "text_completion", "created": 1, "model": "demo"}
    text = json.dumps(content | {"choices": [choice], "usage": usage}, separators=(",", ":"))
    return chunk(f"data: {text}\n\n") + (chunk("data: [DONE]\n\n") + b"0\r\n\r\n" if last else b"")


def chunk(text: str) -> bytes:
    return f"{len(text):x}\r\n{text}\r\n".encode()


async def serve(pace: float) -> None:
    """Give every open stream a token every 1 / `pace` seconds, all at once."""
    streams: list[Stream] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.lower().split(b"\r\n")
                length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
                stream = Stream(writer, json.loads(await reader.readexactly(length))["max_tokens"], asyncio.Event())
                writer.write(HEAD)
                streams.append(stream)
                await stream.done.wait()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    ADDRESS.put(server.sockets[0].getsockname()[1])
    due = perf_counter()
    while True:
        due = max(due + 1 / pace, perf_counter() - 1)
        await asyncio.sleep(due - perf_counter())
        for stream in list(streams):
            stream.sent += 1
            last = stream.sent == stream.wanted
            stream.writer.write(event(stream.sent, last))
            if last:
                streams.remove(stream)
                stream.done.set()


def measure(port: int, streams: int, pace: float, processes: int) -> str:
    workload = Workload(ClosedLoop(streams), (Shape(Length.fixed(PROMPT), Length.fixed(OUTPUT)),), ROUNDS * streams)
    job = Job(Endpoint(f"http://127.0.0.1:{port}", "demo"), workload, 1, Dialect(), processes=processes)
    seen = record_apart(job)
    level = level_of(job, seen)
    rate = level.completed["output_tokens"].sum() / level.duration
    late = np.percentile(seen.loop_lags, [50, 99]) * 1e3
    gaps = weighted_percentiles(level.gaps["gap"], level.gaps["count"], [50, 99]) * 1e3
    failed = len(level.requests) - len(level.completed)
    return (
        f"| {streams} | {processes} | {streams * pace:,.0f} | {rate:,.0f} | {seen.cpu_share:.0%} "
        f"| {late[0]:.1f} / {late[1]:.1f} | {gaps[0]:.1f} / {gaps[1]:.1f} | {failed} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="64,128,256,400")
    parser.add_argument("--pace", type=float, default=50.0, help="tokens a second of each stream")
    parser.add_argument("--processes", default="1,2")
    options = parser.parse_args()
    server = multiprocessing.Process(target=run_server, args=(options.pace,), daemon=True)
    server.start()
    port = ADDRESS.get(timeout=10)
    print("| streams | processes | sent tok/s | got tok/s | core | late ms p50 / p99 | gap ms p50 / p99 | failed |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    try:
        for streams in map(int, options.streams.split(",")):
            for processes in map(int, options.processes.split(",")):
                print(measure(port, streams, options.pace, processes), flush=True)
    finally:
        server.kill()


def run_server(pace: float) -> None:
    asyncio.run(serve(pace))


if __name__ == "__main__":
    main()

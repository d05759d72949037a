"""How exactly the twin keeps its times: many streams, a token for each in every step, against an ideal clock.

    python -m benchmarks.twin --streams 64 --pace-ms 20 --tokens 250 --rounds 3 --ahead

The twin runs in a process of its own, as `capsim emulate` starts it. The client is as small as a client can be: one
loop that reads sockets and notes the time, so that what it adds is little; it shows all the same, as does anything else
that runs on the machine. With `--ahead` both run before ordinary processes, where the system permits it. Two errors are
printed, of all tokens but the first of each stream:

    gap    how far a gap between two tokens of a stream is from the true one
    late   how long after its moment on an ideal clock, which never drifts, a token was read; the clock is set by the
           token that came earliest, so that the constant part of the way does not count
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import numpy.typing as npt

from simulator.engine.engine_flags import EngineFlags
from simulator.profile import Coefficient, Coefficients, MeasuredRange, Profile
from tests.live.server import ahead_of_others

GOAL = 2.0  # ms, of the 99th percentile
TOKEN = re.compile(rb'data: \{[^\n]*"finish_reason":')
Times = npt.NDArray[np.float64]


def profile_of(step: float) -> Profile:
    """A server all of whose steps take `step` seconds."""
    flags = EngineFlags(max_num_seqs=1024, max_num_batched_tokens=8192, num_gpu_blocks=65536)
    return Profile(
        name="clock",
        model="clock",
        engine_version=flags.engine_version,
        engine_flags=flags,
        coefficients=Coefficients(step_time={"constant": Coefficient(value=step)}),
        measured_range=MeasuredRange(
            concurrency=(1, 1024), sequences=(1, 1024), context_tokens=(1, 32768), prompt_chunk_tokens=(1, 8192)
        ),
    )


@contextmanager
def twin(step: float) -> Iterator[tuple[str, int, int]]:
    """Run `capsim emulate`; gives host, port and process id."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "clock.yaml"
        profile_of(step).save(profile)
        command = [sys.executable, "-m", "capsim", "emulate", "--profile", str(profile), "--port", "0"]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            try:
                address = process.stdout.readline().partition("http://")[2].partition(";")[0]
                host, _, port = address.partition(":")
                yield host, int(port), process.pid
            finally:
                process.send_signal(signal.SIGINT)


def stream(host: str, port: int, streams: int, tokens: int) -> list[Times]:
    """When each token of each stream was read, in seconds. Raises ValueError where some are missing."""
    body = json.dumps({"prompt": [5], "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    sockets = [socket.create_connection((host, port)) for _ in range(streams)]
    for connection in sockets:
        connection.sendall(head.encode() + body)
    reads: dict[int, list[tuple[float, bytes]]] = {connection.fileno(): [] for connection in sockets}
    with selectors.DefaultSelector() as selector:
        for connection in sockets:
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                reads[key.fd].append((perf_counter(), data))
                if not data:
                    selector.unregister(key.fileobj)
    for connection in sockets:
        connection.close()
    return [arrivals(parts, tokens) for parts in reads.values()]


def arrivals(parts: list[tuple[float, bytes]], tokens: int) -> Times:
    times = np.array([time for time, data in parts for _ in TOKEN.findall(data)])
    if len(times) != tokens:
        raise ValueError(f"{len(times)} tokens came of {tokens}")
    return times


def errors(streams: list[Times], step: float) -> tuple[Times, Times]:
    """The errors of all gaps, and the lateness of all tokens, in ms."""
    gaps = np.concatenate([np.abs(np.diff(times) - step) for times in streams])
    firsts = [np.median(times - step * np.arange(len(times))) for times in streams]  # where a first token belongs
    ticks = np.round((np.array(firsts) - min(firsts)) / step)
    late = np.array([times - step * (tick + np.arange(len(times))) for times, tick in zip(streams, ticks, strict=True)])
    return gaps * 1000, (late - late.min())[:, 1:].ravel() * 1000


def quantiles(name: str, values: Times) -> float:
    """Print the quantiles of an error; returns the 99th percentile."""
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    print(f"  {name:<5} p50 {p50:6.3f}   p90 {p90:6.3f}   p99 {p99:6.3f}   max {values.max():7.3f} ms")
    return float(p99)


def server_lateness(host: str, port: int) -> str:
    """What the twin says itself: the share of steps all of whose tokens were sent in time."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    counts = {
        bound: float(value)
        for bound, value in re.findall(r'capsim:delivery_lateness_seconds_bucket\{le="(.*?)"\} (\S+)', text)
    }
    shares = [f"{counts[bound] / counts['+Inf']:.1%} within {float(bound) * 1000:g} ms" for bound in ("0.001", "0.002")]
    return f"server: all tokens of a step sent {', '.join(shares)} of their due time"


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far; 0 where the system does not tell."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--pace-ms", type=float, default=20.0, help="true time between two tokens of a stream")
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ahead", action="store_true", help="run before ordinary processes")
    arguments = parser.parse_args()
    step = arguments.pace_ms / 1000
    print(f"{arguments.streams} streams, a token every {arguments.pace_ms:g} ms, {arguments.tokens} tokens each")
    worst = []
    with ahead_of_others() if arguments.ahead else nullcontext(True) as permitted, twin(step) as (host, port, pid):
        if not permitted:
            print("the system does not permit --ahead: others run too")
        for number in range(arguments.rounds):
            began, ours, theirs = perf_counter(), process_time(), cpu_seconds(pid)
            gaps, late = errors(stream(host, port, arguments.streams, arguments.tokens), step)
            took = perf_counter() - began
            shares = (cpu_seconds(pid) - theirs) / took, (process_time() - ours) / took
            load = os.getloadavg()[0]
            print(f"round {number + 1}: core taken by server {shares[0]:.0%}, client {shares[1]:.0%}; load {load:.1f}")
            worst.append(max(quantiles("gap", gaps), quantiles("late", late)))
        print(server_lateness(host, port))
    met = sum(error < GOAL for error in worst)
    print(
        f"p99 under {GOAL:g} ms in {met} of {len(worst)} rounds (best {min(worst):.3f} ms, worst {max(worst):.3f} ms)"
    )


if __name__ == "__main__":
    main()

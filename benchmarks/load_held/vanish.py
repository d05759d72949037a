"""Clients that are killed in the middle of their streams: whether the twin, and their own processes, notice.

    python -m benchmarks.load_held.vanish --rounds 20

In every round `capsim sweep` is killed (SIGKILL) while its streams run. Its client processes, which nobody ends then,
must end by themselves; the twin must abort their requests, free their KV blocks and close their connections; and its
memory must not grow in the second half of the rounds: in the first the allocator still takes what it needs.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.load_held.processes import MB, PATIENCE, ROOT, Usage, alive, capsim, family, need_proc, settled, usage
from benchmarks.twin import twin

GROWTH = 1 * MB  # in the second half of the rounds, that may be the allocator's
OUTPUT = 200  # tokens; the warm-up takes one whole answer
REQUESTS = 1000  # a client, more than any round waits for


@dataclass(frozen=True)
class Round:
    """What was left of a killed client after `PATIENCE` at most.

    Attributes
        running: requests in the twin as the client was killed
        aborted: requests that the twin says it has aborted then
        requests_left, blocks_left: in the twin; blocks as a share of the pool
        processes_left: of the client's
        server: what the twin takes
    """

    running: int
    aborted: int
    requests_left: int
    blocks_left: float
    processes_left: int
    server: Usage

    @property
    def is_clean(self) -> bool:
        """Some end, and others begin, between the look and the kill."""
        noticed = 0 < 0.9 * self.running <= self.aborted
        return noticed and not (self.requests_left or self.blocks_left or self.processes_left)


def vanish(streams: int, rounds: int, step: float) -> tuple[Usage, list[Round]]:
    """The twin before, and after each round."""
    with twin(step) as (host, port, pid):
        url = f"http://{host}:{port}"
        before = usage([pid])
        return before, [_one_round(url, pid, streams, before.descriptors) for _ in range(rounds)]


def _one_round(url: str, pid: int, streams: int, descriptors: int) -> Round:
    aborted = _metric(url, 'request_success_total{.*finished_reason="abort"')
    with tempfile.TemporaryDirectory() as folder:
        command = capsim("sweep", "--no-probes", "--endpoint", url, "--output", f"{folder}/run")
        command += ["--concurrency", str(streams), "--requests-per-client", str(REQUESTS)]
        command += ["--input-len", "64", "--output-len", str(OUTPUT)]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, cwd=ROOT, stdout=quiet, stderr=quiet) as sweep:
            _until(lambda: _running(url) == streams or sweep.poll() is not None, 12 * PATIENCE)
            members, running = family(sweep.pid)[1:], _running(url)
            sweep.send_signal(signal.SIGKILL)
        _until(lambda: not any(map(alive, members)) and not _running(url), PATIENCE)
    return Round(
        running=running,
        aborted=int(_metric(url, 'request_success_total{.*finished_reason="abort"') - aborted),
        requests_left=_running(url) + int(_metric(url, "num_requests_waiting{")),
        blocks_left=_metric(url, "kv_cache_usage_perc{"),
        processes_left=sum(map(alive, members)),
        server=settled(pid, descriptors),
    )


def _running(url: str) -> int:
    return int(_metric(url, "num_requests_running{"))


def _metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE) as response:
        found = re.search(rf"^vllm:{name}.*\}} (\S+)$", response.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def _until(happened: Callable[[], bool], patience: float) -> None:
    end = time.perf_counter() + patience
    while not happened() and time.perf_counter() < end:
        time.sleep(0.1)


def main() -> None:
    need_proc()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--step-ms", type=float, default=40.0)
    options = parser.parse_args()
    before, rounds = vanish(options.streams, options.rounds, options.step_ms / 1e3)
    print(f"before: {before.rss / MB:.1f} MB, {before.descriptors} descriptors\n")
    print("| round | killed with | aborted | requests left | KV left | processes left | twin's MB | descriptors |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for number, one in enumerate(rounds, 1):
        print(
            f"| {number} | {one.running} | {one.aborted} | {one.requests_left} | {one.blocks_left:.1%} "
            f"| {one.processes_left} | {one.server.rss / MB:.1f} | {one.server.descriptors} |"
        )
    grown = rounds[-1].server.rss - rounds[len(rounds) // 2].server.rss
    print(f"\nthe twin's memory in the second half of the rounds: {grown / MB:+.2f} MB")
    clean = all(one.is_clean and one.server.descriptors == before.descriptors for one in rounds)
    raise SystemExit(0 if clean and grown < GROWTH else 1)


if __name__ == "__main__":
    main()

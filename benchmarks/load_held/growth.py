"""Loads that grow: what a request, or a token of a long one, costs among n, 2 n and 4 n of them.

    python -m benchmarks.load_held.growth

A cost that grows with n would show as a ratio of 2 and 4. Every number is measured in a process of its own, CPU time
without its start, and the most memory that it had.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.load_held.processes import MB, need_proc, spent
from benchmarks.loads import FLAGS, HOST_TIME, STEP_TIME, TIGHT_FLAGS
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.fleet import Fleet
from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.results.summary import summarize

MIXED = (Shape(Length(500, 1500), Length(100, 400)),)
LONG = FLAGS.changed(max_model_len=2_000_000, num_gpu_blocks=70_000)
BURST, ONE = OpenLoop(math.inf), Fleet()


@dataclass(frozen=True)
class Case:
    """A load of any size on a fleet; `most` is the largest size, of which a half and a quarter are measured too."""

    most: int
    load: Callable[[int], Workload]
    fleet: Fleet = ONE
    flags: EngineFlags = FLAGS

    def run(self, size: int) -> None:
        summarize(self.fleet.simulate(self.load(size), self.flags, STEP_TIME, HOST_TIME))


def clients(concurrency: int) -> Callable[[int], Workload]:
    return lambda size: Workload(ClosedLoop(concurrency), MIXED, size)


def burst(size: int) -> Workload:
    return Workload(BURST, MIXED, size)


def prompt(size: int) -> Workload:
    return Workload(ClosedLoop(1), (Shape(Length.fixed(size), Length.fixed(100)),), 8)


def output(size: int) -> Workload:
    return Workload(ClosedLoop(8), (Shape(Length.fixed(1000), Length.fixed(size)),), 64)


CASES = {
    "64 replicas, 4,096 clients": Case(32_768, clients(4096), Fleet(64)),
    "64 replicas, least-kv, 1,024 clients": Case(8192, clients(1024), Fleet(64, "least-kv")),
    "64 engines of one server, 1,024 clients": Case(8192, clients(1024), Fleet(data_parallel_size=64)),
    "64 replicas, a burst": Case(40_000, burst, Fleet(64)),
    "64 replicas, least-kv, a burst": Case(40_000, burst, Fleet(64, "least-kv")),
    "a burst": Case(40_000, burst),
    "a burst by priority": Case(40_000, burst, flags=FLAGS.changed(scheduling_policy="priority")),
    "a burst, preemptions": Case(10_000, burst, flags=TIGHT_FLAGS),
    "a burst, prefix cache": Case(10_000, burst, flags=FLAGS.changed(enable_prefix_caching=True)),
    "tokens of a prompt": Case(1_000_000, prompt, flags=LONG),
    "tokens of a prompt, prefix cache": Case(1_000_000, prompt, flags=LONG.changed(enable_prefix_caching=True)),
    "tokens of an output": Case(100_000, output, flags=LONG),
    "tokens of an output, prefix cache": Case(100_000, output, flags=LONG.changed(enable_prefix_caching=True)),
}


def measure(name: str, size: int) -> dict[str, float]:
    """CPU seconds and peak memory in bytes of a case, in a process of its own."""
    found = spent([sys.executable, "-m", "benchmarks.load_held.growth", "--measure", name, str(size)])
    if found.status:
        raise RuntimeError(f"{name} with {size}: {found.output[-500:]}")
    return dict(json.loads(found.output))


def measure_here(name: str, size: int) -> None:
    Case(200, clients(20)).run(200)  # warm-up
    began = time.process_time()
    CASES[name].run(size)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": time.process_time() - began, "bytes": peak}))


def main() -> None:
    need_proc()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "SIZE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args().measure
    if chosen:
        measure_here(chosen[0], int(chosen[1]))
        return
    print("| load | n | CPU s | us each | each among 2 n | among 4 n | peak MB at 4 n |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, case in CASES.items():
        sizes = [case.most // 4, case.most // 2, case.most]
        found = [measure(name, size) for size in sizes]
        each = [one["seconds"] / size * 1e6 for one, size in zip(found, sizes, strict=True)]
        print(
            f"| {name} | {sizes[0]:,} | {found[0]['seconds']:.2f} | {each[0]:.2f} | {each[1] / each[0]:.2f} x "
            f"| {each[2] / each[0]:.2f} x | {found[2]['bytes'] / MB:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

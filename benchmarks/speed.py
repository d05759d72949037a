"""How many requests capsim simulates in a second of one core, and how many its peers do.

    python -m benchmarks.speed [--requests 10000] [--repeats 5] [--azure FILE]
    python -m benchmarks.speed --million    cost of a request and peak memory at 1,000,000 requests

`FILE` is the conversation trace of the Azure LLM inference dataset of 2023 (CSV, also compressed), a public dataset.

A simulation is timed whole: drawing the requests, every step, the result tables, and their percentiles. Time is CPU
time of a process that is pinned to one core, so that neighbours on a shared machine count less. Simulators take turns
on every load, in the same order, after a warm-up; a ratio is the median of the ratios within a turn.

Peers run where they are installed (`pip install capsim[peers]`); what they do differently is said at `dynamo_mocker`
and `sched_sim`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from benchmarks import loads
from benchmarks.loads import FLAGS, HOST_TIME, STEP_TIME, TIGHT_FLAGS
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import play
from simulator.loads.trace_files import read_trace
from simulator.loads.workload import Load
from simulator.results.run import Level
from simulator.results.summary import Summary, summarize

MILLION = 1_000_000
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Case:
    """A load on an engine."""

    name: str
    load: Load
    flags: EngineFlags = FLAGS


class Unable(Exception):
    """A peer does not get through a load."""


Run = Callable[[], float]  # simulates a case once and returns its CPU seconds


def main() -> None:
    options = parse()
    pin_to_one_core()
    if options.measure:
        print(json.dumps(measure_alone(options.measure)))
    elif options.million:
        print_machine()
        print_million(options.requests, options.repeats)
    else:
        print_machine()
        print_speed(options.requests, options.repeats, options.azure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description="Simulated requests a second.")
    parser.add_argument("--requests", type=int, default=10_000, help="requests of each load but the trace")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--azure", type=Path, metavar="FILE", help="the Azure conversation trace of 2023")
    parser.add_argument("--million", action="store_true", help="measure 1,000,000 requests instead")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)  # how --million calls itself
    return parser.parse_args()


def pin_to_one_core() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def print_machine() -> None:
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores{load}; one core is used\n")


# --- the loads


def cases(requests: int, azure: Path | None) -> Iterator[Case]:
    closed = loads.closed_loop(requests)
    rate = 0.8 * simulate(Case("", closed)).request_throughput
    yield Case("closed loop, 64 clients, 1024/256, KV for all", closed)
    yield Case(f"the same as an open loop, Poisson at 80 % of that: {rate:.2f}/s", loads.open_loop(requests, rate))
    yield Case("tight KV pool with preemptions, 64 clients", loads.tight(requests), TIGHT_FLAGS)
    yield Case("ShareGPT-like lengths, 64 clients", loads.sharegpt(requests))
    if azure is None:
        print("The Azure conversation trace is left out: give its file as --azure FILE.\n")
        return
    trace = read_trace(azure)
    yield Case("Azure conversation trace of 2023 at half its rate", trace.faster(0.5))
    yield Case("Azure conversation trace of 2023 as recorded, more than this engine can serve", trace)


# --- capsim


def simulate(case: Case) -> Summary:
    """A whole simulation, tables and percentiles included."""
    recorder = play(case.load, case.flags, STEP_TIME, HOST_TIME)
    requests = recorder.requests()
    duration = float((requests["arrival"] + requests["e2el"]).max())
    return summarize(Level(case.load, duration, requests, recorder.gaps(), recorder.timeline()))


def capsim(case: Case, _seen: Summary, _folder: Path) -> Run:
    return lambda: cpu_seconds(lambda: simulate(case))


def cpu_seconds(work: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


# --- the Rust mocker of Dynamo (`ai-dynamo-runtime`), replaying a trace on its virtual clock


def dynamo_mocker(case: Case, seen: Summary, folder: Path) -> Run:
    """Same requests, arrivals or clients, sequences, token budget and KV blocks; no prefix caching.

    What differs: a step takes one fixed time, plus another if it holds a prompt. Both are chosen so that the load takes
    about as long as in capsim. It returns a summary with percentiles, no tables (asking for them costs it 5 % more). It
    knows neither asynchronous scheduling nor the API server's time. Reading its trace file is left out, by its own
    clock.
    """
    from dynamo._core import run_mocker_trace_replay

    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in mooncake_rows(case.load)))
    arguments: dict[str, Any] = {
        "extra_engine_args": {"engine": dynamo_engine(case, seen)},
        "replay_concurrency": case.load.concurrency,
        "trace_block_size": MOONCAKE_BLOCK,
        "capture_planner_details": False,
    }

    def run() -> float:
        gc.collect()
        start, cpu_start = time.perf_counter(), time.process_time()
        summary = run_mocker_trace_replay([path], **arguments).summary
        cpu, wall = time.process_time() - cpu_start, time.perf_counter() - start
        if (completed := summary["completed_requests"]) < case.load.num_prompts:
            raise Unable(f"{completed:,} of {case.load.num_prompts:,} requests end")
        return float(cpu * min(summary["wall_time_ms"] / 1e3 / wall, 1.0))

    return run


MOONCAKE_BLOCK = 512  # tokens


def mooncake_rows(load: Load) -> Iterator[dict[str, object]]:
    """Requests in the format of the Mooncake traces; no two share a block."""
    prompts, outputs = load.lengths()
    times = load.arrival_times()
    milliseconds = [0.0] * load.num_prompts if times is None else (times * 1e3).tolist()
    used = 0
    for sent, prompt, output in zip(milliseconds, prompts.tolist(), outputs.tolist(), strict=True):
        blocks = -(-prompt // MOONCAKE_BLOCK)
        yield {
            "timestamp": sent,
            "input_length": prompt,
            "output_length": output,
            "hash_ids": list(range(used, used + blocks)),
        }
        used += blocks


def dynamo_engine(case: Case, seen: Summary) -> dict[str, object]:
    prompt_tokens = float(case.load.lengths()[0].mean())
    return {
        "backend": "vllm",
        "num_gpu_blocks": case.flags.usable_blocks,
        "block_size": case.flags.block_size,
        "max_num_seqs": case.flags.max_num_seqs,
        "max_num_batched_tokens": case.flags.max_num_batched_tokens,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "timing_model": {
            "type": "fixed",
            "prefill_ms": STEP_TIME.per_prefill_token * prompt_tokens * 1e3,
            "decode_ms": seen.itl.p50 * 1e3,
        },
    }


# --- sched-sim, a simulator in Python


def sched_sim(case: Case, _seen: Summary, _folder: Path) -> Run:
    """Same requests, arrivals or clients, token budget and KV blocks.

    What differs: its chunked-prefill scheduler has no limit of sequences and generates anew what a preemption threw
    away; a step takes its roofline's time, for a GPU and model that come near ours; it knows no closed loop, so the
    next request is handed to it when one ends. It returns a summary with percentiles, no tables.
    """
    from sched_sim.core.event_engine import Simulator
    from sched_sim.schedulers.factory import create_scheduler

    def work() -> None:
        scheduler = create_scheduler("chunked", near_gpu(), token_budget=case.flags.max_num_batched_tokens)
        blocks = scheduler.block_manager
        blocks.total_gpu_blocks = case.flags.usable_blocks
        blocks.free_gpu_blocks = list(range(case.flags.usable_blocks))
        simulator = Simulator(scheduler.latency_model.hardware, scheduler)
        submit(simulator, case.load)
        with patience(case.load.num_prompts * 3e-3):
            simulator.run()

    return lambda: cpu_seconds(work)


def near_gpu() -> Any:
    """An RTX 4090 with a 7B model, with the constant and the cost of a prompt token of `STEP_TIME`."""
    from sched_sim.hardware.profile import HardwareProfile

    billion_parameters = 7.6
    return HardwareProfile(
        memory_bandwidth_gb_s=2 * billion_parameters / STEP_TIME.constant,
        fp16_tflops=2 * billion_parameters / 1e3 / STEP_TIME.per_prefill_token,
        tensor_core_efficiency=1.0,
        parameter_count_billions=billion_parameters,
        num_layers=28,
        num_kv_heads=4,
        head_dim=128,
    )


def submit(simulator: Any, load: Load) -> None:
    """Send all requests at their times, or the next one of a closed loop whenever one ends."""
    requests = sched_sim_requests(load)
    if load.concurrency is None:
        simulator.submit_workload(requests)
        return
    simulator.submit_workload(requests[: load.concurrency])
    waiting = iter(requests[load.concurrency :])
    free = simulator.block_manager.free

    def free_and_send_next(request: Any) -> None:
        free(request)
        if request.decoded_tokens >= request.output_tokens and (following := next(waiting, None)):
            following.arrived_at = request.completed_at
            simulator.submit_workload([following])

    simulator.block_manager.free = free_and_send_next


def sched_sim_requests(load: Load) -> list[Any]:
    from sched_sim.core.request import Request

    prompts, outputs = load.lengths()
    times = load.arrival_times()
    seconds = [0.0] * load.num_prompts if times is None else times.tolist()
    return [
        Request(request_id=str(number), arrived_at=sent, prompt_tokens=prompt, output_tokens=output)
        for number, (sent, prompt, output) in enumerate(zip(seconds, prompts.tolist(), outputs.tolist(), strict=True))
    ]


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Raise `Unable` after so many CPU seconds: a peer can spend them preempting the same requests in turn."""

    def give_up(*_: object) -> None:
        raise Unable(f"no end after {seconds:.0f} s")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# --- taking turns


Preparation = Callable[[Case, Summary, Path], Run]
PEERS: dict[str, Preparation] = {"ai-dynamo-runtime": dynamo_mocker, "sched-sim": sched_sim}  # by distribution


def installed_simulators() -> dict[str, Preparation]:
    """capsim and the peers that are installed, by name."""
    found: dict[str, Preparation] = {"capsim": capsim}
    for distribution, prepare in PEERS.items():
        try:
            found[f"{distribution} {metadata.version(distribution)}"] = prepare
        except metadata.PackageNotFoundError:
            print(f"{distribution} is left out: it is not installed.")
    return found


def print_speed(requests: int, repeats: int, azure: Path | None) -> None:
    simulators = installed_simulators()
    for case in cases(requests, azure):
        with tempfile.TemporaryDirectory() as folder:
            runs, failures = warmed_up(case, simulators, Path(folder))
            turns = [{name: case.load.num_prompts / run() for name, run in runs.items()} for _ in range(repeats)]
        print(f"{case.name} ({case.load.num_prompts:,} requests)")
        for name in simulators:
            print(f"  {name:26s}{failures.get(name) or speed_columns(name, turns)}")
        print(flush=True)


def warmed_up(case: Case, simulators: dict[str, Preparation], folder: Path) -> tuple[dict[str, Run], dict[str, str]]:
    """Every simulator that gets through the case, after its first run, and what kept the others."""
    seen = simulate(case)
    runs, failures = {}, {}
    for name, prepare in simulators.items():
        try:
            run = prepare(case, seen, folder)
            run()
        except Exception as error:  # noqa: BLE001  # peers raise what they like, and one that fails is a result
            failures[name] = f"fails: {error}"
        else:
            runs[name] = run
    return runs, failures


def speed_columns(name: str, turns: Sequence[dict[str, float]]) -> str:
    speeds = [turn[name] for turn in turns]
    columns = f"{statistics.median(speeds):9,.0f} requests/s  ({min(speeds):,.0f} to {max(speeds):,.0f})"
    if name == "capsim":
        return columns
    ratio = statistics.median(turn["capsim"] / turn[name] for turn in turns)
    return f"{columns}  capsim is {ratio:.2f} x as fast"


# --- a million requests


def print_million(few: int, repeats: int) -> None:
    turns = [(measured(few), measured(MILLION)) for _ in range(min(repeats, 3))]
    ratio = statistics.median(many["seconds"] / MILLION / (one["seconds"] / few) for one, many in turns)
    for number, results in zip((few, MILLION), zip(*turns, strict=True), strict=True):
        cost = statistics.median(result["seconds"] for result in results) / number
        memory = max(result["bytes"] for result in results) / 1e9
        print(f"{number:9,} requests: {cost * 1e6:5.1f} us a request, peak memory {memory:.2f} GB")
    print(f"a request among {MILLION:,} costs {ratio:.2f} x what it costs among {few:,}")


def measured(requests: int) -> dict[str, float]:
    """CPU seconds and peak memory of the closed loop in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.speed", "--measure", str(requests)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return cast(dict[str, float], json.loads(done.stdout))


def measure_alone(requests: int) -> dict[str, float]:
    simulate(Case("", loads.closed_loop(1_000)))  # warm-up
    case = Case("", loads.closed_loop(requests))
    seconds = cpu_seconds(lambda: simulate(case))
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return {"seconds": seconds, "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


if __name__ == "__main__":
    main()

"""Replays a dump of vLLM's own scheduler with ours and writes down the same events.

A dump is ``{"head": {"config": ..., "vllm": ...}, "workload": [...], "events": [...]}``: one run of vLLM's `Scheduler`
or `AsyncScheduler`, driven by the step function of vLLM's engine core. tests/live/vllm_scheduler.py writes such dumps.

Requests arrive before numbered passes of the engine's loop (`arrival_step`), or at moments of a made-up clock
(`arrival_time`) on which a step takes ``base + per_token * tokens`` seconds. The events are, in the engine's order
    add: `ids` of requests that are new to the scheduler
    schedule: `n` tokens of every request that got some, in order; who `samples`, was `admitted` (`new` or `resumed`) or
        `preempted`; and the state after it: `running`, `waiting`, `free` blocks
    update: whose `tokens` the step delivered and who `finished`; the state after it: `free` blocks
each with the pass `it`, the number of its `step`, and the time `t` where there is a clock.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable, Generator, Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import simpy

from simulator.engine.engine_core import EngineCore
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.recorder import Recorder
from simulator.engine.request import Request
from simulator.engine.scheduler import Scheduler
from simulator.engine.simulation import Engine
from simulator.engine.step import Step
from simulator.engine.step_time import StepTime

Event = dict[str, Any]
Dump = dict[str, Any]

CLOCK_TOLERANCE = 2e-6  # s; dumps round times to 1e-6


def load_dump(path: Path) -> Dump:
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)  # type: ignore[no-any-return]


def flags_of(head: dict[str, Any]) -> EngineFlags:
    config = head["config"]
    return EngineFlags(
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=config["max_model_len"],
        num_gpu_blocks=config["num_blocks"],
        block_size=config["block_size"],
        enable_chunked_prefill=config["chunked_prefill"],
        enable_prefix_caching=config["prefix_caching"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        long_prefill_token_threshold_adaptive=config["long_prefill_token_threshold_adaptive"],
        scheduling_policy=config["policy"],
        watermark=config["watermark"],
        scheduler_reserve_full_isl=config["reserve_full_isl"],
        async_scheduling=config["async"],
        engine_version=head["vllm"],
    )


def requests_of(dump: Dump) -> list[tuple[float, Request]]:
    """The requests of a dump in the order they arrive, each with its pass or moment."""
    # vLLM breaks ties of priority by its request ids, which are strings
    numbers = {name: number for number, name in enumerate(names_of(dump))}
    block_size = dump["head"]["config"]["block_size"]
    requests = []
    for entry in dump["workload"]:
        arrival = entry["arrival_time"] if "arrival_time" in entry else entry.get("arrival_step", 0)
        request = Request(
            numbers[entry["id"]],
            prompt_tokens=entry["prompt_len"],
            output_tokens=min(entry["output_len"], entry.get("stop_len", entry["output_len"])),
            max_tokens=entry["output_len"],
            priority=entry.get("priority", 0),
            arrival_time=float(arrival),
            prefix=tuple((entry.get("prefix_id"), block) for block in range(entry.get("prefix_len", 0) // block_size)),
        )
        requests.append((arrival, request))
    return requests


def names_of(dump: Dump) -> list[str]:
    """vLLM's request ids, at the place of our request numbers."""
    return sorted(entry["id"] for entry in dump["workload"])


class TooManyEvents(Exception):
    """The scheduler goes on for longer than vLLM's, and perhaps for ever."""


class WatchedScheduler(Scheduler):
    """Our scheduler, which writes down what it decides.

    `stamp` gives the pass or the time to write beside it. After `most_events` it raises `TooManyEvents`.
    """

    def __init__(self, flags: EngineFlags, names: list[str], most_events: int = 100_000) -> None:
        super().__init__(flags)
        self.events: list[Event] = []
        self.steps = 0
        self.stamp: Callable[[], Event] = dict
        self._names = names
        self._most_events = most_events
        self._scheduled: list[tuple[int, list[Request]]] = []  # number and sampling requests of steps in flight

    def add(self, request: Request) -> None:
        super().add(request)
        if not self.events or self.events[-1]["ev"] != "add":
            self.events.append({"ev": "add", "ids": []})
        self.events[-1]["ids"].append(self._names[request.request_id])

    def schedule(self) -> Step:
        resumable = {request for request in self.waiting if request.preempted}
        step = super().schedule()
        chunks = {chunk.request: chunk.tokens for chunk in step.chunks}
        tokens = {
            request: chunks.get(request, 1)
            for request in self.running
            if request in chunks or (request.decoding and step.decodes)
        }
        chunks_that_sample = {*step.samplers, *step.joined}
        samples = [request for request in tokens if request not in chunks or request in chunks_that_sample]
        self.steps += 1
        self._scheduled.append((self.steps, samples))
        self._record(
            ev="schedule",
            step=self.steps,
            n={self._names[request.request_id]: n for request, n in tokens.items()},
            total=sum(tokens.values()),
            samples=self._ids(samples),
            new=self._ids(request for request in step.admitted if request not in resumable),
            resumed=sorted(self._ids(request for request in step.admitted if request in resumable)),
            admitted=self._ids(step.admitted),
            preempted=self._ids(step.preempted),
            running=self._ids(self.running),
            waiting=self._ids(self.waiting),
            free=self.kv_cache.free_blocks,
        )
        return step

    def update(self, step: Step) -> list[Request]:
        number, samples = self._scheduled.pop(0)
        delivered = [request for request in samples if not request.finished]
        finished = super().update(step)
        self._record(
            ev="update",
            step=number,
            tokens=self._ids(delivered),
            finished=self._ids(finished),
            free=self.kv_cache.free_blocks,
        )
        return finished

    def _record(self, **event: Any) -> None:
        self.events.append(event | self.stamp())
        if len(self.events) > self._most_events:
            raise TooManyEvents

    def _ids(self, requests: Iterable[Request]) -> list[str]:
        return [self._names[request.request_id] for request in requests]


def replay(dump: Dump) -> list[Event]:
    """The events of a dump, made by our scheduler; it is stopped when it has made one more than vLLM's."""
    scheduler = WatchedScheduler(flags_of(dump["head"]), names_of(dump), most_events=len(dump["events"]))
    with contextlib.suppress(TooManyEvents):
        if "arrival_time" in dump["workload"][0]:
            replay_in_time(dump, scheduler)
        else:
            replay_in_steps(dump, scheduler)
    return scheduler.events


def replay_in_steps(dump: Dump, scheduler: WatchedScheduler) -> None:
    """Requests arrive before numbered passes of the loop; only the scheduler is ours, the loop is written out here."""
    iteration = 0
    scheduler.stamp = lambda: {"it": iteration}
    pending = requests_of(dump)
    depth = 2 if scheduler.flags.async_scheduling else 1
    in_flight: list[Step] = []
    while pending or in_flight or scheduler.has_requests:
        if not in_flight and not scheduler.has_requests:
            iteration = max(iteration, int(min(arrival for arrival, _ in pending)))
        for arrival, request in pending:
            if arrival <= iteration:
                scheduler.add(request)
        pending = [entry for entry in pending if entry[0] > iteration]
        is_full = True
        if scheduler.has_requests:
            in_flight.append(scheduler.schedule())
            is_full = in_flight[-1].is_empty or len(in_flight) == depth
        if is_full and in_flight:
            scheduler.update(in_flight.pop(0))
        iteration += 1


class CostedCore(EngineCore):
    """Our engine loop with the step cost of a dump."""

    def __init__(self, scheduler: Scheduler, cost: dict[str, float]) -> None:
        super().__init__(scheduler, StepTime(constant=cost["base"]), Recorder(), single_steps=True)
        self._cost = cost

    def _duration(self, step: Step) -> float:
        tokens = step.decodes + sum(chunk.tokens for chunk in step.chunks)
        return self._cost["base"] + self._cost["per_token"] * tokens


def replay_in_time(dump: Dump, scheduler: WatchedScheduler) -> None:
    """Requests arrive at moments of SimPy's time; engine loop, engine and scheduler are ours."""
    env = simpy.Environment()
    core = CostedCore(scheduler, dump["head"]["config"]["cost"])
    scheduler.stamp = lambda: {"t": core.now}
    engine = Engine(env, core)

    def source() -> Generator[simpy.Event, Any, None]:
        for moment, request in sorted(requests_of(dump), key=lambda entry: entry[0]):
            if moment > env.now:
                yield env.timeout(moment - env.now)
            engine.submit(request)

    env.process(source())
    env.run()


def first_difference(ours: list[Event], theirs: list[Event]) -> str:
    """The first event that is not vLLM's, in words; empty if there is none."""
    for number, (our, their) in enumerate(zip_longest(ours, theirs)):
        if our is None or their is None:
            return f"event {number}: ours {our}, vLLM's {their}"
        for key, value in our.items():
            if not _same(key, value, their[key]):
                return f"event {number}, {their['ev']} {their.get('step', '')}: {key} is {value}, vLLM's {their[key]}"
    return ""


def _same(key: str, our: Any, their: Any) -> bool:
    if key == "t":
        return bool(abs(our - their) < CLOCK_TOLERANCE)
    return our == their and (key != "n" or list(our) == list(their))

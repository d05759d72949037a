"""Clients and engines as SimPy processes, and `simulate_level`, which plays one level of load."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import simpy
from simpy.events import EventPriority

from simulator.engine_core import EngineCore
from simulator.engine_flags import EngineFlags
from simulator.recorder import Recorder
from simulator.request import Request
from simulator.run import Level
from simulator.scheduler import Scheduler
from simulator.step_time import HostTime, StepTime
from simulator.workload import ClosedLoop, Workload

Process = Generator[simpy.Event, Any, None]

AFTER_ALL_ELSE = EventPriority(
    2
)  # behind SimPy's urgent (0) and normal (1): a step is planned when all else of its moment happened


class Engine:
    """One engine in SimPy's time. `submit` hands it a request; the event that it returns happens at the last token."""

    def __init__(self, env: simpy.Environment, core: EngineCore) -> None:
        self._env = env
        self._core = core
        self._wake: simpy.Event | None = None
        self._ends: dict[Request, simpy.Event] = {}
        env.process(self._serve())

    def submit(self, request: Request) -> simpy.Event:
        """Hand over a request. Raises `simulator.scheduler.CannotFit` if it can never be served."""
        self._core.scheduler.check(request)
        request.arrived = request.arrival_time = self._env.now
        self._core.inbox.append(request)
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None
        end = self._ends[request] = self._env.event()
        return end

    def _serve(self) -> Process:
        core, env = self._core, self._env
        while True:
            if core.is_idle:
                self._wake = env.event()
                yield self._wake
                yield self._after(0.0)  # others may arrive in the same moment
                core.now = env.now
            ended = core.advance(env.peek())
            yield self._after(max(core.now - env.now, 0.0))
            for request in ended:
                self._ends.pop(request).succeed()
            if ended:
                yield self._after(0.0)

    def _after(self, delay: float) -> simpy.Event:
        event = simpy.Event(self._env)
        event._ok, event._value = True, None
        self._env.schedule(event, AFTER_ALL_ELSE, delay)
        return event


def simulate_level(
    workload: Workload,
    flags: EngineFlags,
    step_time: StepTime,
    host_time: HostTime | None = None,
    single_steps: bool = False,
) -> Level:
    """Play one level of load on one engine. Raises `simulator.scheduler.CannotFit`.

    `single_steps` simulates every step as an event of its own instead of runs of equal decode steps: the same result,
    slower.
    """
    env = simpy.Environment()
    recorder = Recorder()
    core = EngineCore(Scheduler(flags), step_time, recorder, single_steps)
    engine = Engine(env, core)
    delay = (host_time or HostTime()).per_request
    requests = _requests(workload)
    if isinstance(workload.arrivals, ClosedLoop):
        for _ in range(min(workload.arrivals.concurrency, workload.num_prompts)):
            env.process(_client(env, engine, requests, delay))
    else:
        env.process(_source(env, engine, requests, workload, delay))
    env.run()
    table = recorder.requests()
    return Level(
        workload=workload,
        duration=float((table["arrival"] + table["e2el"]).max()),
        requests=table,
        gaps=recorder.gaps(),
        timeline=recorder.timeline(),
    )


def _requests(workload: Workload) -> Iterator[Request]:
    prompts, outputs = workload.lengths()
    for number, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True)):
        yield Request(number, prompt, output)


def _client(env: simpy.Environment, engine: Engine, requests: Iterator[Request], delay: float) -> Process:
    """A client of a closed loop: sends its next request when its last one has ended."""
    for request in requests:
        request.sent = env.now
        if delay:
            yield env.timeout(delay)
        yield engine.submit(request)


def _source(
    env: simpy.Environment, engine: Engine, requests: Iterator[Request], workload: Workload, delay: float
) -> Process:
    """Sends requests at their times, whether or not earlier ones have ended."""
    times = workload.arrival_times()
    assert times is not None
    for request, time in zip(requests, times.tolist(), strict=True):
        wait = time + delay - env.now
        if wait > 0:
            yield env.timeout(wait)
        request.sent = time
        engine.submit(request)

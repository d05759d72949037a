"""Clients and engines as SimPy processes, and `simulate_level`, which plays one level of load."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
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
from simulator.workload import Load, Workload

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
        self._last_arrival = -math.inf
        env.process(self._serve())

    def submit(self, request: Request) -> simpy.Event:
        """Hand over a request. Raises `simulator.scheduler.CannotFit` if it can never be served."""
        self._core.scheduler.check(request)
        request.arrived = self._env.now
        # no two arrive at once: vLLM's priority policy would let equal ones preempt each other for ever
        request.arrival_time = self._last_arrival = max(self._env.now, math.nextafter(self._last_arrival, math.inf))
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


class ApiServer:
    """What stands between clients and engine: takes requests in one after the other, passes answers on.

    `response` is the time in seconds from the engine's token to the client.
    """

    def __init__(self, host_time: HostTime) -> None:
        self.response = host_time.per_request
        self._intake = host_time.per_request_serial
        self._free = 0.0  # s, when it has taken in all that was sent

    def take_in(self, sent: float) -> float:
        """When the engine gets a request that is sent at `sent`, no earlier than the one before."""
        self._free = max(self._free, sent) + self._intake
        return self._free


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
    recorder = play(workload, flags, step_time, host_time, single_steps)
    requests = recorder.requests()
    return Level(
        workload=workload,
        duration=float((requests["arrival"] + requests["e2el"]).max()),
        requests=requests,
        gaps=recorder.gaps(),
        timeline=recorder.timeline(),
    )


def play(
    load: Load,
    flags: EngineFlags,
    step_time: StepTime,
    host_time: HostTime | None = None,
    single_steps: bool = False,
) -> Recorder:
    """Play any load on one engine; returns what was written down. As `simulate_level`, without making tables."""
    env = simpy.Environment()
    host_time = host_time or HostTime()
    api_server = ApiServer(host_time)
    recorder = Recorder(host_time)
    engine = Engine(env, EngineCore(Scheduler(flags), step_time, recorder, single_steps))
    requests = _requests(load)
    times = load.arrival_times()
    if times is None:
        for _ in range(min(load.concurrency or 1, load.num_prompts)):
            env.process(_client(env, engine, requests, api_server))
    else:
        env.process(_source(env, engine, requests, times.tolist(), api_server))
    env.run()
    return recorder


def _requests(load: Load) -> Iterator[Request]:
    prompts, outputs = load.lengths()
    for number, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True)):
        yield Request(number, prompt, output)


def _client(env: simpy.Environment, engine: Engine, requests: Iterator[Request], api_server: ApiServer) -> Process:
    """A client of a closed loop: sends its next request when it has its last answer."""
    for request in requests:
        request.sent = env.now
        wait = api_server.take_in(env.now) - env.now
        if wait > 0:
            yield env.timeout(wait)
        yield engine.submit(request)
        if api_server.response:
            yield env.timeout(api_server.response)


def _source(
    env: simpy.Environment, engine: Engine, requests: Iterator[Request], times: Sequence[float], api_server: ApiServer
) -> Process:
    """Sends requests at their times, whether or not earlier ones have ended."""
    for request, sent in zip(requests, times, strict=True):
        request.sent = sent
        wait = api_server.take_in(sent) - env.now
        if wait > 0:
            yield env.timeout(wait)
        engine.submit(request)

"""Engines as SimPy processes, and `simulate_level`, which plays one level of load."""

from __future__ import annotations

import math
from collections.abc import Callable

import simpy
from simpy.events import EventPriority

from simulator.engine.clients import ApiServer, Clients, Process
from simulator.engine.engine_core import EngineCore
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.recorder import Recorder
from simulator.engine.request import Request
from simulator.engine.scheduler import Scheduler
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import Load
from simulator.results.run import Level

AFTER_ALL_ELSE = EventPriority(
    2
)  # behind SimPy's urgent (0) and normal (1): a step is planned when all else of its moment happened


class Engine:
    """One engine in SimPy's time. `submit` hands it a request; the event that it returns happens at the last token."""

    def __init__(self, env: simpy.Environment, core: EngineCore, horizon: Callable[[], float] | None = None) -> None:
        """`horizon` tells the next moment at which a request might arrive: SimPy's next event unless given."""
        self._env = env
        self._core = core
        self._horizon = horizon or env.peek
        self._ended: list[Request] = []  # at the core's own time, which SimPy has yet to reach
        self._wake: simpy.Event | None = None
        self._ends: dict[Request, simpy.Event] = {}
        self._last_arrival = -math.inf
        self._earliest_end: float | None = None  # once it has been asked for, until something happens here
        env.process(self._serve())

    def submit(self, request: Request) -> simpy.Event:
        """Hand over a request. Raises `simulator.engine.scheduler.CannotFit` if it can never be served."""
        self._core.scheduler.check(request)
        request.arrived = self._env.now
        # no two arrive at once: vLLM's priority policy would let equal ones preempt each other for ever
        request.arrival_time = self._last_arrival = max(self._env.now, math.nextafter(self._last_arrival, math.inf))
        self._core.inbox.append(request)
        self._earliest_end = None
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None
        end = self._ends[request] = self._env.event()
        return end

    @property
    def earliest_end(self) -> float:
        """No request ends before this moment if none arrives until then."""
        if self._earliest_end is None:
            self._earliest_end = self._now_earliest_end()
        return self._earliest_end

    def _now_earliest_end(self) -> float:
        if self._core.is_idle and not self._ended:
            return math.inf
        return self._core.now if self._ended else self._core.earliest_end

    def _serve(self) -> Process:
        core, env = self._core, self._env
        while True:
            if core.is_idle:
                self._wake = env.event()
                yield self._wake
                yield self._after(0.0)  # others may arrive in the same moment
                core.now = env.now
            self._ended = ended = core.advance(self._horizon())
            self._earliest_end = None
            yield self._after(max(core.now - env.now, 0.0))
            self._ended, self._earliest_end = [], None
            for request in ended:
                self._ends.pop(request).succeed()
            if ended or core.pause:
                yield self._after(core.pause)

    def _after(self, delay: float) -> simpy.Event:
        event = simpy.Event(self._env)
        event._ok, event._value = True, None
        self._env.schedule(event, AFTER_ALL_ELSE, delay)
        return event


def simulate_level(
    workload: Load,
    flags: EngineFlags,
    step_time: StepTime,
    host_time: HostTime | None = None,
    single_steps: bool = False,
) -> Level:
    """Play one level of load on one engine. Raises `simulator.engine.scheduler.CannotFit`.

    `single_steps` simulates every step as an event of its own instead of runs of equal decode steps: the same result,
    slower.
    """
    recorder = play(workload, flags, step_time, host_time, single_steps)
    requests = recorder.requests()
    return Level(
        workload=workload,
        duration=float((requests["arrival"] + requests["e2el"]).max() - requests["arrival"].min()),
        requests=requests,
        gaps=recorder.gaps(),
        timeline=recorder.timeline(),
        steps=recorder.steps(),
        cached_tokens=recorder.cached_tokens,
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
    recorder = Recorder(host_time)
    engine = Engine(env, EngineCore(Scheduler(flags), step_time, recorder, single_steps))
    block_size = flags.block_size if flags.enable_prefix_caching else None
    Clients(env, load, engine, ApiServer(host_time), block_size)
    env.run()
    return recorder

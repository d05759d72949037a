"""Several engines in one simulated time: replicas behind a router, and vLLM's data parallelism within a replica.

Each replica is a server of its own, with its own API server in front of one engine, or of several under
``--data-parallel-size``. Engines of dense models do not wait for each other; those of mixture-of-experts models run in
step, which is not modelled.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd
import simpy
from simpy.events import NORMAL, EventPriority

from simulator.engine.clients import ApiServer, Clients, Process
from simulator.engine.engine_core import EngineCore
from simulator.engine.engine_flags import EngineFlags, FlagError
from simulator.engine.recorder import Recorder
from simulator.engine.request import Request
from simulator.engine.routers import DataParallelBalancer, Router, make_router
from simulator.engine.scheduler import Scheduler
from simulator.engine.simulation import AFTER_ALL_ELSE, Engine, simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.sessions import Sessions
from simulator.loads.workload import ClosedLoop, Load, Workload
from simulator.results.run import GAP_COLUMNS, REQUEST_COLUMNS, TIMELINE_COLUMNS, Level

MOST_ENGINES = 10_000


@dataclass(frozen=True)
class Fleet:
    """How many servers, behind which router, and how many engines each of them has.

    Attributes
        replicas: servers behind the router
        router: one of `simulator.engine.routers.ROUTERS`
        data_parallel_size: engines of each server, between which vLLM balances itself
        seed: of a random router
    """

    replicas: int = 1
    router: str = "least-requests"
    data_parallel_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise FlagError(f"--replicas must be at least 1, got {self.replicas}")
        if self.data_parallel_size < 1:
            raise FlagError(f"--data-parallel-size must be at least 1, got {self.data_parallel_size}")
        if self.engines > MOST_ENGINES:
            raise FlagError(f"a fleet may have up to {MOST_ENGINES:,} engines, got {self.engines}")
        make_router(self.router)

    @property
    def engines(self) -> int:
        return self.replicas * self.data_parallel_size

    def __str__(self) -> str:
        parallel = f", --data-parallel-size {self.data_parallel_size}" if self.data_parallel_size > 1 else ""
        if self.replicas == 1:
            return f"1 replica{parallel}"
        return f"{self.replicas} replicas, {self.router}{parallel}"

    def share(self, load: Load) -> Load:
        """The load as one engine sees it, to hold against what was measured: with its share of the clients."""
        if isinstance(load, (Workload, Sessions)) and isinstance(load.arrivals, ClosedLoop):
            clients = math.ceil(load.arrivals.concurrency / self.engines)
            return replace(load, arrivals=replace(load.arrivals, concurrency=clients))
        return load

    def simulate(
        self,
        load: Load,
        flags: EngineFlags,
        step_time: StepTime,
        host_time: HostTime | None = None,
        single_steps: bool = False,
    ) -> Level:
        """Play one level of load on the fleet; all engines have the same flags. A fleet of one engine is
        `simulate_level`. Raises `simulator.engine.scheduler.CannotFit`.

        Both gauges of concurrency are sums over the engines. `Level.steps`, which tells of one engine, is None.
        """
        if self.engines == 1:
            return simulate_level(load, flags, step_time, host_time, single_steps)
        recorders = self._play(load, flags, step_time, host_time or HostTime(), single_steps)
        return _level(load, recorders)

    def _play(
        self, load: Load, flags: EngineFlags, step_time: StepTime, host_time: HostTime, single_steps: bool
    ) -> list[Recorder]:
        clock = FleetClock()
        recorders = [Recorder(host_time) for _ in range(self.engines)]
        cores = [EngineCore(Scheduler(flags), step_time, recorder, single_steps) for recorder in recorders]
        engines = _engines(clock, cores, answers_cause_requests(load))
        size = self.data_parallel_size
        replicas = [Replica(clock, engines[start : start + size], host_time) for start in range(0, self.engines, size)]
        router = make_router(self.router, _sessions(load), self.seed)
        block_size = flags.block_size if flags.enable_prefix_caching else None
        front = ApiServer(replace(host_time, per_request_serial=0.0))
        Clients(clock, load, RoutedFleet(router, replicas), front, block_size)
        clock.run()
        return recorders


def answers_cause_requests(load: Load) -> bool:
    """Whether a request may be sent because another one has ended."""
    return load.concurrency is not None or load.conversations() is not None or load.max_concurrency is not None


class FleetClock(simpy.Environment):
    """SimPy's clock, which also tells the next event that is no engine's own."""

    def __init__(self) -> None:
        super().__init__()
        self._outside: list[float] = []

    def schedule(self, event: simpy.Event, priority: EventPriority = NORMAL, delay: float = 0) -> None:
        super().schedule(event, priority, delay)
        if priority != AFTER_ALL_ELSE:
            heapq.heappush(self._outside, self.now + delay)

    def next_outside(self) -> float:
        """For an engine that acts after all else of this moment."""
        while self._outside and self._outside[0] <= self.now:
            heapq.heappop(self._outside)
        return self._outside[0] if self._outside else math.inf


class BusyEngine:
    """An engine of a fleet, and what routers and balancers see of it."""

    def __init__(self, engine: Engine, core: EngineCore) -> None:
        self._engine, self._core, self._scheduler = engine, core, core.scheduler
        self._sent_tokens = 0  # prompt tokens of all requests so far
        self.in_flight = 0

    def submit(self, request: Request) -> simpy.Event:
        end = self._engine.submit(request)
        self._sent_tokens += request.prompt_tokens
        self.in_flight += 1
        end.callbacks.append(self._count_end)
        return end

    def _count_end(self, _end: simpy.Event) -> None:
        self.in_flight -= 1

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def kv_usage(self) -> float:
        return self._scheduler.used_blocks / self._scheduler.flags.usable_blocks

    @property
    def kv_tokens(self) -> int:
        """Tokens held, and of the prompts that were never begun."""
        held = self._scheduler.used_blocks * self._scheduler.flags.block_size
        return held + self._sent_tokens - self._core.begun_tokens

    def cached_tokens(self, request: Request) -> int:
        blocks = self._scheduler.kv_cache.find_prefix(request, request.prompt_tokens)
        return len(blocks) * self._scheduler.flags.block_size


def _engines(clock: FleetClock, cores: Sequence[EngineCore], coupled: bool) -> list[BusyEngine]:
    """Engines on one clock. Where they are `coupled` by clients that wait for answers, none runs ahead of the moment
    at which another one might end a request."""
    engines: list[Engine] = []

    def horizon_of(number: int) -> float:
        next_event = clock.next_outside()
        if not coupled:
            return next_event
        ends = (other.earliest_end for place, other in enumerate(engines) if place != number)
        return min(next_event, min(ends, default=math.inf))

    for number, core in enumerate(cores):
        engines.append(Engine(clock, core, lambda number=number: horizon_of(number)))  # type: ignore[misc]
    return [BusyEngine(engine, core) for engine, core in zip(engines, cores, strict=True)]


class Replica:
    """A server: an API server before one engine, or before several between which vLLM balances."""

    def __init__(self, env: simpy.Environment, engines: Sequence[BusyEngine], host_time: HostTime) -> None:
        self._env = env
        self._engines = engines
        self._api_server = ApiServer(host_time)
        self._balancer = DataParallelBalancer(lambda: float(env.now))
        self.in_flight = 0

    def submit(self, request: Request) -> simpy.Event:
        """Take a request in; the event happens at its last token."""
        self.in_flight += 1
        wait = self._api_server.take_in(self._env.now) - self._env.now
        end = self._env.process(self._after_intake(wait, request)) if wait > 0 else self._hand_over(request)
        end.callbacks.append(self._count_end)
        return end

    def _after_intake(self, wait: float, request: Request) -> Process:
        yield self._env.timeout(wait)
        yield self._hand_over(request)

    def _hand_over(self, request: Request) -> simpy.Event:
        number = self._balancer.choose(self._engines) if len(self._engines) > 1 else 0
        return self._engines[number].submit(request)

    def _count_end(self, _end: simpy.Event) -> None:
        self.in_flight -= 1

    @property
    def kv_tokens(self) -> int:
        return sum(engine.kv_tokens for engine in self._engines)

    def cached_tokens(self, request: Request) -> int:
        return max(engine.cached_tokens(request) for engine in self._engines)


class RoutedFleet:
    """What clients reach: a router before its replicas."""

    def __init__(self, router: Router, replicas: Sequence[Replica]) -> None:
        self._router, self._replicas = router, replicas

    def submit(self, request: Request) -> simpy.Event:
        return self._replicas[self._router.choose(request, self._replicas)].submit(request)


def _sessions(load: Load) -> list[int] | None:
    """The session of every request, by its number."""
    turns = load.conversations()
    return None if turns is None else np.repeat(np.arange(len(turns)), turns).tolist()


# --- one level from what every engine wrote down


def _level(load: Load, recorders: Sequence[Recorder]) -> Level:
    parts = [recorder.requests() for recorder in recorders]
    requests = _joined(parts, "request_id", REQUEST_COLUMNS)
    return Level(
        workload=load,
        duration=float((requests["arrival"] + requests["e2el"]).max() - requests["arrival"].min()),
        requests=requests,
        gaps=_joined([recorder.gaps() for recorder in recorders], "time", GAP_COLUMNS),
        timeline=_summed([recorder.timeline() for recorder in recorders]),
        cached_tokens=sum(recorder.cached_tokens for recorder in recorders),
        replica_tokens=[int((part["prompt_tokens"] + part["output_tokens"]).sum()) for part in parts],
    )


def _joined(tables: Sequence[pd.DataFrame], order: str, columns: dict[str, str]) -> pd.DataFrame:
    table = pd.concat(tables).sort_values(order, kind="stable", ignore_index=True)
    return table.astype(columns)


def _summed(timelines: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Gauges summed over engines, at every moment at which one of them planned a step."""
    times = np.unique(np.concatenate([timeline["time"].to_numpy() for timeline in timelines]))
    sums: dict[str, npt.NDArray[np.float64]] = {"time": times}
    for name in list(TIMELINE_COLUMNS)[1:]:
        stepwise = name in ("running", "waiting")
        sums[name] = np.sum(list(_gauges(timelines, name, times, stepwise)), axis=0)
    return pd.DataFrame(sums).astype(TIMELINE_COLUMNS)


def _gauges(
    timelines: Sequence[pd.DataFrame], name: str, times: npt.NDArray[np.float64], stepwise: bool
) -> Iterator[npt.NDArray[np.float64]]:
    """One engine's gauge at `times`; nothing before its first step and after its last."""
    for timeline in timelines:
        time, value = timeline["time"].to_numpy(), timeline[name].to_numpy(np.float64)
        if not len(time):
            yield np.zeros(len(times))
        elif stepwise:
            place = np.searchsorted(time, times, side="right") - 1
            yield np.where(place >= 0, value[place], 0.0)
        else:
            yield np.interp(times, time, value, left=0.0, right=0.0)

"""Capacity: the highest level of load that meets its targets, by simulation.

A level is simulated several times with different seeds, the same seeds at every level (common random numbers), until
the 90 % interval of the replications lies on one side of the targets (`simulator.planning.replications`). What is
undecided after `MAX_REPLICATIONS` does not count as met. Levels are doubled until one does not meet the targets, then
the range is bisected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.levels import NUM_PROMPTS
from simulator.loads.sessions import Sessions
from simulator.loads.workload import Arrivals, ClosedLoop, OpenLoop
from simulator.planning.ceilings import Ceilings, ceilings
from simulator.planning.limits import Limits, phase_of, what_limits
from simulator.planning.operating_point import power
from simulator.planning.replications import AnyLoad, Replication, Trial, judge
from simulator.planning.steady_state import START_ROUNDS
from simulator.planning.targets import tightened
from simulator.results.run import Level

MIN_REPLICATIONS, MAX_REPLICATIONS = 3, 8
ROUNDS = 8  # requests of each client that count, at least; twice as many where nothing is random and one run decides
MIN_REQUESTS = {"closed": 300, "open": 800}  # that count in one replication, at least
MIN_OPEN = 16  # requests of an open loop that has a middle, whatever was asked for
TAIL_REQUESTS = 6  # at least this many lie beyond a percentile that has a target
RATE_TOLERANCE = 1.02  # a rate is found when the next one tried is no more than 2 % higher
PAST_THE_KNEE = 0.95  # of the greatest power, below which the knee has been passed
CLEARLY_BEYOND = 1.1  # times the capacity: there one sees what limits it
MARGIN = 0.1  # to spare at the level to fall back to


@dataclass(frozen=True)
class Capacity:
    """The answer of a search.

    Attributes
        targets: milliseconds by name, a share for an error rate
        best: the highest level found to meet them; None if not even the lowest one does
        beyond: the lowest level above `best` that was tried and does not; None if every level tried meets them
        limits: what requests spend their time on in the phase of the target that `beyond` misses first, at
            `limits_at`, the lowest level tried that lies at least `CLEARLY_BEYOND` times as high
        fallback: the level to run at: every target is met with `MARGIN` to spare, at least one step below `best`
        tried: all levels, in ascending order
        ceilings: what the engine can hold at once
    """

    targets: dict[str, float]
    best: Trial | None
    beyond: Trial | None
    limits: Limits | None
    limits_at: Trial | None
    fallback: Trial | None
    tried: list[Trial]
    ceilings: Ceilings


class CapacitySearch:
    """Searches that share their simulations: one load, at any level, on one engine."""

    def __init__(
        self,
        load: AnyLoad,
        flags: EngineFlags,
        step_time: StepTime,
        host_time: HostTime | None = None,
        *,
        whole_runs: bool = False,
        num_prompts: int | None = None,
        on_trial: Callable[[Trial], None] | None = None,
    ) -> None:
        """`load` is one level of it: its arrivals say what is searched for, clients or a request rate.

        `whole_runs` counts the start burst and the end of a level as well, as a load generator does; else only what
        `simulator.planning.steady_state.steady_part` leaves. `num_prompts` is the number of requests of one
        replication, or what the level needs at least; unless given, as many as its percentiles need, and for whole runs
        1,000 as a load generator sends. `on_trial` is told of every level tried.
        """
        self.load = load
        self.ceilings = ceilings(load, flags)
        self._flags, self._step_time, self._host_time = flags, step_time, host_time
        self.whole_runs = whole_runs
        self._num_prompts = NUM_PROMPTS if whole_runs and num_prompts is None else num_prompts
        self._on_trial = on_trial
        self._played: dict[tuple[float, int], list[Replication]] = {}  # by value and number of requests

    @property
    def is_open(self) -> bool:
        return isinstance(self.load.arrivals, OpenLoop)

    def find(self, targets: Mapping[str, float]) -> Capacity:
        """The capacity under `targets`. Raises `simulator.engine.scheduler.CannotFit`."""
        tried: dict[float, Trial] = {}

        def meets(value: float) -> bool:
            tried[value] = self.trial(value, targets)
            return tried[value].meets

        low, high = self._bracket(meets, targets)
        low, high = self._narrow(meets, low, high)
        best, beyond = tried.get(low), tried.get(high)
        above = [tried[value] for value in sorted(tried) if beyond and value >= max(CLEARLY_BEYOND * low, beyond.value)]
        return Capacity(
            targets=dict(targets),
            best=best,
            beyond=beyond,
            limits=self._limits(above[0], beyond) if above and beyond else None,
            limits_at=above[0] if above else None,
            fallback=self._fallback(low, targets) if best else None,
            tried=[tried[value] for value in sorted(tried)],
            ceilings=self.ceilings,
        )

    def trial(self, value: float, targets: Mapping[str, float]) -> Trial:
        """One level, simulated until it is decided. Raises `simulator.engine.scheduler.CannotFit`."""
        requests = self._requests(value, targets)
        played = self._played.setdefault((value, requests), [])
        fewest, most = (MIN_REPLICATIONS, MAX_REPLICATIONS) if self.load.is_random else (1, 1)
        while True:
            while len(played) < fewest:
                played.append(self._replicate(value, requests, len(played)))
            judged = judge(self._at(value, requests), played, targets)
            if judged.verdict != "undecided" or len(played) >= most:
                break
            fewest = len(played) + 1
        if self._on_trial is not None:
            self._on_trial(judged)
        return judged

    def curve(self, targets: Mapping[str, float]) -> list[Trial]:
        """Levels with a steady state, each twice the last, until throughput over latency has passed its best.

        For `simulator.planning.operating_point.knee`. `targets` are those of a search, whose simulations are used
        again.
        """
        found: list[Trial] = []
        value, best = self._start(), 0.0
        while value <= self._highest(targets):
            trial = self.trial(value, targets)
            if trial.verdict == "no steady state":
                return found
            found.append(trial)
            best = max(best, power(trial.numbers))
            if power(trial.numbers) < PAST_THE_KNEE * best:
                return found
            value = self._rounded(2 * value)
        return found

    def met_in(
        self, trial: Trial, targets: Mapping[str, float], times: Iterable[tuple[StepTime, HostTime]]
    ) -> tuple[int, int]:
        """In how many of these step and host times the level meets the targets, and how many there are.

        `simulator.uncertainty.drawn_times` spreads them over what a profile is unsure of.
        """
        requests, met = self._requests(trial.value, targets), []
        for number, (step_time, host_time) in enumerate(times):
            level = simulate_level(self._at(trial.value, requests, number), self._flags, step_time, host_time)
            met.append(judge(trial.load, [Replication.of(level, self.whole_runs)], targets).meets)
        return sum(met), len(met)

    def _limits(self, trial: Trial, beyond: Trial) -> Limits:
        played = next(played for (value, _), played in self._played.items() if value == trial.value)
        phase = phase_of(beyond.missed[0]) if beyond.missed else "e2el"
        return what_limits(played[0].counted, self._flags, self._step_time, self._host_time, phase)

    # --- where to look

    def _bracket(self, meets: Callable[[float], bool], targets: Mapping[str, float]) -> tuple[float, float]:
        """A level that meets the targets, 0 for none, and one above that does not, infinity for none."""
        low, high = 0.0, self._start()
        while meets(high):
            low = high
            if low >= self._highest(targets):
                return low, math.inf
            high = min(self._rounded(2 * high), self._highest(targets))
        if low or not self.is_open:
            return low, high
        lowest = high / 1024
        while high > lowest:
            low = self._rounded(high / 2)
            if meets(low):
                return low, high
            high = low
        return 0.0, high

    def _narrow(self, meets: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
        """Bisect until no level lies between, or rates are close enough."""
        while low and math.isfinite(high):
            middle = self._between(low, high)
            if middle is None:
                break
            low, high = (middle, high) if meets(middle) else (low, middle)
        return low, high

    def _fallback(self, best: float, targets: Mapping[str, float]) -> Trial | None:
        """The highest level with `MARGIN` to spare, in the targets and below the capacity."""
        tight = tightened(targets, 1 - MARGIN)
        high = self._rounded(best * (1 - MARGIN)) if self.is_open else min(math.floor(best * (1 - MARGIN)), best - 1)
        if high <= 0:
            return None
        found: dict[float, Trial] = {}

        def meets(value: float) -> bool:
            found[value] = self.trial(value, tight)
            return found[value].meets

        low = high
        while not meets(low):
            high, low = low, self._rounded(low / 2) if self.is_open else low // 2
            if low < (best / 1024 if self.is_open else 1):
                return None
        low, _ = self._narrow(meets, low, high)
        return self._judged_again(found[low], targets)

    def _judged_again(self, trial: Trial, targets: Mapping[str, float]) -> Trial:
        """The same simulations against the targets themselves."""
        return judge(trial.load, self._played[trial.value, self._requests(trial.value, targets)], targets)

    def _start(self) -> float:
        """The first level: one client, or a sixteenth of the rate at which lone requests would fill the engine."""
        if not self.is_open:
            return 1
        return self._rounded(self.ceilings.running / self._lone_seconds() / 16)

    def _highest(self, targets: Mapping[str, float]) -> float:
        """The last level to try. Beyond what the engine holds, more clients only wait longer for their first token."""
        if self.is_open:
            return math.inf
        waiting_counts = any(name.endswith(("ttft", "e2el")) for name in targets)
        return max(self.ceilings.running, 1) * (32 if waiting_counts else 2) * self._per_request_in_flight()

    def _per_request_in_flight(self) -> float:
        """Clients for each request in flight, as long as nobody waits: more than one where they think in between."""
        one = self.load if isinstance(self.load, Sessions) else self.load.arrivals
        think = None if isinstance(one, OpenLoop) else one.think_time
        return 1.0 if think is None else 1.0 + think.mean / self._lone_seconds()

    def _lone_seconds(self) -> float:
        """What a request takes that is alone."""
        lone = self._run(_resized(self.load, ClosedLoop(1), 8))
        return float(lone.requests["e2el"].mean())

    def _between(self, low: float, high: float) -> float | None:
        if not self.is_open:
            return (low + high) // 2 if high - low > 1 else None
        middle = self._rounded(math.sqrt(low * high))
        return middle if high / low > RATE_TOLERANCE and low < middle < high else None

    def _rounded(self, value: float) -> float:
        """A rate of three digits, or a whole number of clients."""
        return float(f"{value:.3g}") if self.is_open else round(value)

    # --- one level

    def _replicate(self, value: float, num_prompts: int, number: int) -> Replication:
        level = self._run(self._at(value, num_prompts, number))
        return Replication.of(level, self.whole_runs)

    def _run(self, load: AnyLoad) -> Level:
        return simulate_level(load, self._flags, self._step_time, self._host_time)

    def _at(self, value: float, num_prompts: int, number: int = 0) -> AnyLoad:
        """Replication `number` of a level."""
        arrivals = self.load.arrivals
        if isinstance(arrivals, OpenLoop):
            return _resized(self.load.redrawn(number), replace(arrivals, request_rate=value), num_prompts)
        return _resized(self.load.redrawn(number), replace(arrivals, concurrency=int(value)), num_prompts)

    def _requests(self, value: float, targets: Mapping[str, float]) -> int:
        """Requests of one replication."""
        clients = 0 if self.is_open else math.ceil(value * _turns(self.load))  # requests in one round
        least = MIN_OPEN if self.is_open else (START_ROUNDS + 2) * clients
        if self._num_prompts is not None:
            return self._num_prompts if self.whole_runs else max(self._num_prompts, least)
        ranks = [int(name[1 : name.index("_")]) for name in targets if name[0] == "p"]
        tail = max((round(TAIL_REQUESTS * 100 / (100 - rank)) for rank in ranks), default=0)
        if not self.is_open:
            rounds = ROUNDS if self.load.is_random else 2 * ROUNDS
            return max(MIN_REQUESTS["closed"], tail, rounds * clients) + (START_ROUNDS + 1) * clients
        # long enough for the backlog to fill up and show whether it stays
        counted = max(MIN_REQUESTS["open"], tail, 6 * self.ceilings.running)
        return round(counted * 4 / 3)


def _resized(load: AnyLoad, arrivals: Arrivals, num_prompts: int) -> AnyLoad:
    """The same load arriving otherwise, with about so many requests."""
    if isinstance(load, Sessions):
        return replace(load, arrivals=arrivals, num_sessions=math.ceil(num_prompts / _turns(load)))
    return replace(load, arrivals=arrivals, num_prompts=num_prompts)


def _turns(load: AnyLoad) -> float:
    """Requests of a session, mean; a request of a `Workload` stands alone."""
    return load.talk.turns.mean if isinstance(load, Sessions) else 1.0

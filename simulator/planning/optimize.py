"""The cheapest configuration of a server that meets its targets under a load, and the Pareto front of cost and latency.

A race: every configuration is simulated on a few requests first, and those that miss a target by far are out. The rest
play the whole load once. Of those that meet the targets the cheapest are simulated again, with other seeds and with
coefficients spread over the profile's uncertainty (`simulator.uncertainty.drawn_times`), until one meets every target
with the upper end of its 90 % interval. All configurations get the same requests (common random numbers).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from simulator.engine.engine_flags import EngineFlags, FlagError
from simulator.engine.fleet import Fleet
from simulator.engine.scheduler import CannotFit
from simulator.engine.step_time import HostTime, StepTime
from simulator.hardware.gpus import GpuError
from simulator.hardware.memory import MemoryAccountError
from simulator.hardware.model_config import ModelError
from simulator.loads.load_files import workload_to_json
from simulator.loads.sessions import Sessions
from simulator.loads.trace import Trace
from simulator.loads.workload import Load, Workload
from simulator.planning.replications import Replication
from simulator.planning.search_log import Result, SearchLog
from simulator.planning.search_space import Builder, Configuration, Server, canonical_gpu
from simulator.planning.steady_state import START_ROUNDS, TooShort, turns
from simulator.planning.targets import ERROR_RATE, STEADY_STATE, TARGET_NAMES
from simulator.planning.workers import Workers
from simulator.profile import Profile
from simulator.results.backlog import MAX_GROWTH
from simulator.results.run import Level
from simulator.uncertainty import drawn_times, intervals_from, reach_of
from simulator.yaml_file import suggestion

REFUSALS = (FlagError, GpuError, ModelError, MemoryAccountError, CannotFit)

# requests that count, beyond the start and the end of a level
FEW, FEW_ROUNDS = 60, 1
MANY, MANY_ROUNDS = {"closed": 300, "open": 800}, 8
TAIL_REQUESTS = 6  # at least this many lie beyond a percentile that has a target
BY_FAR = 1.5  # times a target, on few requests
GROWS, GROWS_BY_FAR = 0.05, 0.2  # of the arrivals by which the backlog grows, in one run of all and of few requests
MOST_TRIES = 3  # of configurations that cost the same, to find one that is sure
BLOCK_SIZE = 16  # tokens, by which prefixes of traces are told apart
MODEL_VERSION = 1  # of what a simulation returns; another one does not find the results of this one

Verdict = Literal["refused", "out early", "misses", "meets", "unsure", "sure"]
Number = float
AnyLoad = Workload | Sessions | Trace


class OptimizeError(ValueError):
    """A search that makes no sense. The message is one line."""


@dataclass(frozen=True)
class Play:
    """One simulation, complete in itself, so that any worker can do it."""

    load: AnyLoad
    flags: EngineFlags
    step_time: StepTime
    host_time: HostTime
    fleet: Fleet

    @property
    def key(self) -> str:
        """The same for the same simulation, on any machine."""
        parts = [asdict(part) for part in (self.flags, self.step_time, self.host_time, self.fleet)]
        text = json.dumps([MODEL_VERSION, _content(self.load), *parts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=32)
def _content(load: AnyLoad) -> str:
    """All that makes a load what it is; a digest, since a trace is long."""
    content = workload_to_json(load)
    if isinstance(load, Trace):
        times = load.arrival_times()
        content |= {
            "lengths": [column.tolist() for column in load.lengths()],
            "times": None if times is None else times.tolist(),
            "prefixes": [load.prefix(number, BLOCK_SIZE) for number in range(load.num_prompts)],
        }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def play(one: Play) -> Result:
    """Simulate; returns plain numbers, or why it cannot be: "numbers" by the names of
    `Summary.flat`, "figures" in targets' units, "growth" of the backlog, "peak" requests running."""
    try:
        level = one.fleet.simulate(one.load, one.flags, one.step_time, one.host_time)
        seen = _replication(level)
    except CannotFit as refusal:
        return {"refused": str(refusal)}
    growth = None if seen.growth is None or math.isnan(seen.growth) else seen.growth
    return {
        "numbers": seen.numbers,
        "figures": seen.in_target_units,
        "growth": growth,
        "peak": int(level.timeline["running"].max()),
    }


def _replication(level: Level) -> Replication:
    try:
        return Replication.of(level, whole=False)
    except TooShort:
        return Replication.of(level, whole=True)


@dataclass
class Candidate:
    """A configuration and what is known of it.

    Attributes
        verdict: "refused" by vLLM or by what is known of the card; "out early" missed by far on few requests; "misses"
            and "meets" the targets in one simulation of the whole load; "sure" where the 90 % interval meets them too,
            "unsure" where it does not
        reason: why it is refused, or which targets it misses
        cost: what an hour costs: money where GPUs have prices, else GPUs
        numbers: of the last simulation, by the names of `simulator.results.summary.Summary.flat`; times in seconds
        figures: what has a target, in its unit
        intervals: 90 % intervals of the figures, for "sure" and "unsure"
    """

    configuration: Configuration
    server: Server | None
    cost: float = math.nan
    verdict: Verdict = "refused"
    reason: str = ""
    numbers: dict[str, Number] = field(default_factory=dict)
    figures: dict[str, Number] = field(default_factory=dict)
    intervals: dict[str, tuple[Number, Number]] = field(default_factory=dict)

    @property
    def meets(self) -> bool:
        """Whether one simulation of the whole load met the targets."""
        return self.verdict in ("meets", "sure", "unsure")

    @property
    def cost_per_million(self) -> float:
        """Cost of a million output tokens."""
        rate = self.numbers.get("output_throughput", math.nan)
        return self.cost / 3600 / rate * 1e6 if rate > 0 else math.nan


@dataclass(frozen=True)
class Found:
    """The answer of a search.

    Attributes
        candidates: all of them, in the order of the space
        best: the cheapest that surely meets the targets; without one, None
        front: those that meet the targets and of which no other has both a lower cost of a million tokens and a lower
            `latency`, the cheapest first
        latency: the name of the latency that the front weighs
    """

    candidates: list[Candidate]
    best: Candidate | None
    front: list[Candidate]
    latency: str


class Optimizer:
    """One search. `load` is the whole load of its simulations, `targets` are milliseconds by name."""

    def __init__(
        self,
        profile: Profile,
        load: Load,
        targets: Mapping[str, float],
        *,
        given: Mapping[str, str | bool] | None = None,
        prices: Mapping[str, float] | None = None,
        num_prompts: int | None = None,
        latency: str | None = None,
        workers: Workers | None = None,
        log: SearchLog | None = None,
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """`load` is one level of it. `num_prompts` are the requests of the whole load; as many as its percentiles need
        unless given. `prices` are those of an hour by GPU. `latency` has the front weigh another one than the first
        that has a target. `on_progress` is told the stage, simulations done, and their number. Raises `OptimizeError`.
        """
        latencies = [name for name in targets if name != ERROR_RATE]
        if not latencies and latency is None:
            raise OptimizeError("at least one latency needs a target, such as p95_ttft:1000")
        self.targets = dict(targets)
        if latency is not None and latency not in TARGET_NAMES:
            raise OptimizeError(f"{latency!r} is no latency; {suggestion(latency, TARGET_NAMES)}")
        self._profile = profile
        self._builder = Builder(profile, given)
        self._prices = dict(prices or {})
        self._latency = latency or latencies[0]
        self._workers = workers or Workers(jobs=1)
        self._log = SearchLog() if log is None else log
        self._tell = on_progress or _say_nothing
        self.load = shortened(load, num_prompts or many_requests(load, targets))
        self._few = shortened(self.load, few_requests(load))

    def find(self, space: Sequence[Configuration]) -> Found:
        """The cheapest configuration of a space. Raises `OptimizeError` where a GPU has no price and others have."""
        candidates = [self._candidate(configuration) for configuration in space]
        running = [one for one in candidates if one.server is not None]
        if self._few.num_prompts < self.load.num_prompts:
            self._race("first heat", running, self._few, self._judge_few)
        self._race("whole load", [one for one in running if one.verdict == "meets"], self.load, self._judge_whole)
        best = self._confirm([one for one in running if one.verdict == "meets"])
        meeting = [one for one in running if one.meets]
        points = [(one.cost_per_million, one.numbers[self._latency]) for one in meeting]
        return Found(candidates, best, [meeting[place] for place in pareto_front(points)], self._latency)

    def _candidate(self, configuration: Configuration) -> Candidate:
        try:
            server = self._builder.build(configuration)
        except REFUSALS as refusal:
            return Candidate(configuration, None, reason=str(refusal))
        return Candidate(configuration, server, self._cost(server), "meets")

    def _cost(self, server: Server) -> float:
        if not self._prices:
            return float(server.gpus)
        gpu = canonical_gpu(server.configuration.gpu or self._profile.gpu or "")
        if gpu not in self._prices:
            raise OptimizeError(f"{gpu or 'the measured GPU'} has no price; add --price '{gpu or 'GPU'}=PRICE/h'")
        return server.gpus * self._prices[gpu]

    # --- the race

    def _race(
        self, stage: str, runners: Sequence[Candidate], load: AnyLoad, judge: Callable[[Candidate, Result], None]
    ) -> None:
        plays = [_measured_play(one.server, load) for one in runners if one.server is not None]
        for one, result in zip(runners, self._played(stage, plays), strict=True):
            if "refused" in result:
                one.verdict, one.reason = "refused", result["refused"]
                continue
            one.numbers, one.figures = result["numbers"], {name: result["figures"][name] for name in self.targets}
            judge(one, result)

    def _played(self, stage: str, plays: Sequence[Play]) -> list[Result]:
        """Results of simulations, those that the log knows from there."""
        keys = [one.key for one in plays]
        due = {key: one for key, one in zip(keys, plays, strict=True) if self._log.get(key) is None}
        new = list(due)
        self._tell(stage, 0, len(new))
        for done, (number, result) in enumerate(self._workers.run(play, list(due.values())), 1):
            self._log.add(new[number], result)
            self._tell(stage, done, len(new))
        found = [self._log.get(key) for key in keys]
        return [result for result in found if result is not None]

    def _judge_few(self, one: Candidate, result: Result) -> None:
        by_far = {name: bound * (1 if name == ERROR_RATE else BY_FAR) for name, bound in self.targets.items()}
        missed = missed_of(one.figures, by_far)
        missed += [STEADY_STATE] if (result["growth"] or 0.0) > GROWS_BY_FAR else []
        if missed:
            one.verdict, one.reason = "out early", ", ".join(missed)

    def _judge_whole(self, one: Candidate, result: Result) -> None:
        missed = missed_of(one.figures, self.targets)
        missed += [STEADY_STATE] if (result["growth"] or 0.0) > GROWS else []
        if missed:
            one.verdict, one.reason = "misses", ", ".join(missed)

    # --- sure or not

    def _confirm(self, meeting: Sequence[Candidate]) -> Candidate | None:
        """The cheapest that surely meets the targets, of equally cheap ones that with the most to spare."""
        tries: Counter[float] = Counter()
        for one in sorted(meeting, key=lambda one: (one.cost, _tightest(one.figures, self.targets))):
            if tries[one.cost] == MOST_TRIES:
                continue
            tries[one.cost] += 1
            if self._is_sure(one):
                return one
        return None

    def _is_sure(self, one: Candidate) -> bool:
        assert one.server is not None
        plays = [_measured_play(one.server, self.load), *_drawn_plays(one.server, self.load)]
        centre, *drawn = results = self._played("sure or not", plays)
        if refused := [result["refused"] for result in results if "refused" in result]:
            one.verdict, one.reason = "refused", refused[0]
            return False
        one.intervals = self._intervals(one.server, centre, drawn)
        missed = missed_of({name: high for name, (_low, high) in one.intervals.items()}, self.targets)
        growth = float(np.mean([result["growth"] or 0.0 for result in results]))
        missed += [STEADY_STATE] if growth > MAX_GROWTH else []
        one.verdict, one.reason = ("unsure", ", ".join(missed)) if missed else ("sure", "")
        return not missed

    def _intervals(self, server: Server, centre: Result, drawn: Sequence[Result]) -> dict[str, tuple[Number, Number]]:
        """90 % intervals of what has a target, in its unit, as `simulator.uncertainty.intervals` has them."""
        numbers = [result["numbers"] for result in drawn]
        ends = intervals_from(
            server.profile,
            centre["numbers"],
            centre["numbers"],
            numbers,
            widening(server, self.load, centre["peak"]),
            reach_of(len(drawn), self.load.is_random),
        )
        failed = [result["figures"].get(ERROR_RATE, 0.0) for result in (centre, *drawn)]
        found = {name: (low * 1000, high * 1000) for name, (low, high) in ends.items() if name in self.targets}
        return found | ({ERROR_RATE: (min(failed), max(failed))} if ERROR_RATE in self.targets else {})


def _say_nothing(_stage: str, _done: int, _of: int) -> None:
    """Nobody asked."""


def _measured_play(server: Server, load: AnyLoad) -> Play:
    return Play(load, server.flags, server.profile.step_time, server.profile.host_time, server.fleet)


def _drawn_plays(server: Server, load: AnyLoad) -> Iterable[Play]:
    """The same load with other random numbers and other coefficients."""
    times = drawn_times(server.profile, at_least_one=load.is_random)
    for number, (step_time, host_time) in enumerate(times, 1):
        yield Play(load.redrawn(number), server.flags, step_time, host_time, replace(server.fleet, seed=number))


def widening(server: Server, load: Load, peak_running: int) -> float:
    """`simulator.uncertainty.widening` of one engine of a fleet, which has its share of the clients."""
    share, peak = server.fleet.share(load), math.ceil(peak_running / server.fleet.engines)
    return 1.0 + server.profile.doublings_outside(share, server.flags, peak)


def missed_of(values: Mapping[str, float], targets: Mapping[str, float]) -> list[str]:
    """Names of the targets that are missed; what was not seen misses them."""
    return [name for name, bound in targets.items() if not values[name] <= bound]


def _tightest(values: Mapping[str, float], targets: Mapping[str, float]) -> float:
    """The largest share of a target that is used."""
    return max((values[name] / bound for name, bound in targets.items() if bound), default=0.0)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the points of which no other is at least as low in both and lower in one, by the first number.

    Of equal points the first one stays. Points with a NaN are never on it.
    """
    known = [place for place, point in enumerate(points) if not any(math.isnan(value) for value in point)]
    front: list[int] = []
    lowest = math.inf
    for place in sorted(known, key=lambda place: (*points[place], place)):
        if points[place][1] < lowest:
            front.append(place)
            lowest = points[place][1]
    return front


# --- how many requests


def many_requests(load: Load, targets: Mapping[str, float]) -> int:
    """Requests of the whole load: what every percentile with a target needs, in a middle without start and end."""
    if isinstance(load, Trace):
        return load.num_prompts
    ranks = [int(name[1 : name.index("_")]) for name in targets if name[0] == "p"]
    tail = max((round(TAIL_REQUESTS * 100 / (100 - rank)) for rank in ranks), default=0)
    if load.concurrency is None:
        return round(max(MANY["open"], tail) * 4 / 3)
    clients = _round(load)
    return max(MANY["closed"], tail, MANY_ROUNDS * clients) + (START_ROUNDS + 1) * clients


def few_requests(load: Load) -> int:
    """Requests of the first heat."""
    clients = _round(load)
    return max(FEW, FEW_ROUNDS * clients) + (START_ROUNDS + 1) * clients if clients else 2 * FEW


def _round(load: Load) -> int:
    """Requests of one round of all clients; 0 in an open loop."""
    return math.ceil((load.concurrency or 0) * turns(load))


def shortened(load: Load, requests: int) -> AnyLoad:
    """The same load with so many requests, or about so many in whole sessions."""
    if isinstance(load, Sessions):
        return replace(load, num_sessions=max(1, math.ceil(requests / load.talk.turns.mean)))
    if isinstance(load, Trace):
        return load.first(requests)
    if isinstance(load, Workload):
        return replace(load, num_prompts=requests)
    raise OptimizeError(f"a load of the kind {type(load).__name__} cannot be shortened")

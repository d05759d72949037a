"""Replications of one level: simulations with different seeds, and what they say of it together.

Their 90 % intervals decide against targets. A level meets its targets when the upper end of every interval does, and
misses them when a lower end lies above. What is neither is undecided, and more replications are due. An open loop must
have a steady state too: its backlog must not grow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from simulator.loads.sessions import Sessions
from simulator.loads.workload import OpenLoop, Workload
from simulator.planning.steady_state import delivery_rates, mean_in_flight, middle, steady_part
from simulator.planning.targets import figures, request_bounds
from simulator.results.backlog import MAX_GROWTH, backlog_growth
from simulator.results.run import Level
from simulator.results.summary import summarize

CONFIDENCE = 0.9

AnyLoad = Workload | Sessions
Verdict = Literal["meets", "misses", "undecided", "no steady state"]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Trial:
    """What the replications of one level came to, against one set of targets.

    Attributes
        load: the level, as its first replication
        verdict: see the module
        missed: the targets that are missed, or undecided
        replications: how often the level was simulated
        numbers: means over the replications by the names of `simulator.results.summary.Summary.flat`; times in seconds
        intervals: 90 % intervals of the same
        goodput: completed requests a second that keep the targets of a request,
            `simulator.planning.targets.request_bounds`
        growth: 90 % interval of `simulator.results.backlog.backlog_growth`; None in a closed loop
    """

    load: AnyLoad
    verdict: Verdict
    missed: tuple[str, ...]
    replications: int
    numbers: dict[str, float]
    intervals: dict[str, Interval]
    goodput: float
    growth: Interval | None

    @property
    def value(self) -> float:
        """Clients, or requests a second; sessions a second of an open loop of `Sessions`."""
        arrivals = self.load.arrivals
        return arrivals.request_rate if isinstance(arrivals, OpenLoop) else arrivals.concurrency

    @property
    def meets(self) -> bool:
        return self.verdict == "meets"


@dataclass(frozen=True)
class Replication:
    """One simulation of a level.

    Attributes
        counted: what counts of it
        numbers: by the names of `simulator.results.summary.Summary.flat`; times in seconds
        in_target_units: what may have a target, see `simulator.planning.targets.figures`
        growth: `simulator.results.backlog.backlog_growth`; None in a closed loop
    """

    counted: Level
    numbers: dict[str, float]
    in_target_units: dict[str, float]
    growth: float | None

    @classmethod
    def of(cls, level: Level, whole: bool) -> Replication:
        """`whole` counts the start and the end of the level as well."""
        growth = backlog_growth(level) if level.workload.concurrency is None else None
        part = None if whole else middle(level)
        counted = level if part is None else steady_part(level, part)
        summary = summarize(counted)
        numbers = {name: float(value) for name, value in summary.flat().items() if value is not None}
        if part is not None:
            ended, tokens = delivery_rates(level, part)
            numbers |= {"request_throughput": ended, "output_throughput": tokens}
            numbers["mean_concurrency"] = mean_in_flight(level, part)
        return cls(counted, numbers, figures(summary), growth)


def judge(load: AnyLoad, played: Sequence[Replication], targets: Mapping[str, float]) -> Trial:
    """Put the replications of a level against the targets."""
    seen = {name: _interval([one.in_target_units[name] for one in played]) for name in targets}
    growths = [one.growth for one in played if one.growth is not None]
    growth = _interval(growths) if growths else None
    verdict, missed = _verdict(seen, targets, growth)
    intervals = {name: _interval([one.numbers[name] for one in played]) for name in played[0].numbers}
    return Trial(
        load=load,
        verdict=verdict,
        missed=missed,
        replications=len(played),
        numbers={name: (low + high) / 2 for name, (low, high) in intervals.items()},
        intervals=intervals,
        goodput=float(np.mean([_goodput(one.counted, targets) for one in played])),
        growth=growth,
    )


def _interval(values: list[float]) -> Interval:
    """90 % interval of the mean by Student's t; the value itself where it is not random."""
    sample = np.array(values)
    mean = float(sample.mean())
    if len(sample) == 1:
        return mean, mean
    half = float(stdtrit(len(sample) - 1, (1 + CONFIDENCE) / 2) * sample.std(ddof=1) / math.sqrt(len(sample)))
    return mean - half, mean + half


def _verdict(
    seen: Mapping[str, Interval], targets: Mapping[str, float], growth: Interval | None
) -> tuple[Verdict, tuple[str, ...]]:
    if growth is not None and growth[0] > MAX_GROWTH:
        return "no steady state", tuple(name for name in targets if not seen[name][0] <= targets[name])
    missed = tuple(name for name in targets if seen[name][0] > targets[name] or math.isnan(seen[name][0]))
    if missed:
        return "misses", missed
    open_ones = tuple(name for name in targets if seen[name][1] > targets[name])
    if open_ones or (growth is not None and not growth[1] <= MAX_GROWTH):
        return "undecided", open_ones
    return "meets", ()


def _goodput(level: Level, targets: Mapping[str, float]) -> float:
    done = level.completed
    kept = np.ones(len(done), bool)
    for latency, bound in request_bounds(targets).items():
        values = done[latency].to_numpy()
        kept &= np.isnan(values) | (values <= bound)  # a single token has no TPOT
    return float(kept.sum() / level.duration) if level.duration > 0 else math.nan

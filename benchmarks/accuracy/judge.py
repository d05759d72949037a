"""Predictions beside repeated measurements: signed errors, the noise floor, and whether the goal is met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from calibration.validate import flags_of
from simulator.loads.workload import Load, Workload
from simulator.prediction import predict
from simulator.profile import Profile
from simulator.results.percentiles import weighted_percentiles
from simulator.results.run import Level, Run
from simulator.results.summary import summarize

RANKS = 2.0  # percent of the sample, or one value: where so many more on one side move a percentile far, it jumps
HEADER = f"{'level':<17} {'metric':<17} {'measured':>9} {'predicted':>9} {'error':>7} {'noise':>6} {'goal':>5}"

Verdict = Literal["met", "noise", "jump", "missed"]


@dataclass(frozen=True)
class Judgement:
    """One metric of one level of load, measured several times. Latencies in seconds, throughput in tokens/s.

    `measured` is the median of the repeats, `noise` their spread (largest minus smallest) over that median; `goal` is
    the largest relative error that was asked for. `nearby` is the measured value `RANKS` lower and higher; for a figure
    that is no percentile it is the value itself.
    """

    level: str
    metric: str
    measured: float
    predicted: float
    noise: float
    goal: float
    nearby: tuple[float, float]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def jumps(self) -> bool:
        """Whether the percentile sits between two modes, so that a few requests more on one side move it far."""
        return max(abs(value / self.measured - 1) for value in self.nearby) > self.goal

    @property
    def verdict(self) -> Verdict:
        """Within the goal, within the noise of repeats, at a jump no further than its other side, or none of these."""
        if abs(self.error) <= self.goal:
            return "met"
        if abs(self.error) <= self.noise:
            return "noise"
        low, high = self.nearby
        if self.jumps and low * (1 - self.goal) <= self.predicted <= high * (1 + self.goal):
            return "jump"
        return "missed"

    def __str__(self) -> str:
        scale = 1.0 if self.metric == "output_throughput" else 1e3
        said = {"met": "", "noise": " noise", "jump": " jump", "missed": " MISSED, jumps" if self.jumps else " MISSED"}
        return (
            f"{self.level:<17} {self.metric:<17} {self.measured * scale:>9.2f} {self.predicted * scale:>9.2f} "
            f"{self.error:>+7.1%} {self.noise:>6.1%} {self.goal:>5.0%}{said[self.verdict]}"
        )


def judge(
    measured: Run, profile: Profile, goals: Mapping[str, float], name: Callable[[Load], str] | None = None
) -> list[Judgement]:
    """Judge every level of load by the metrics in `goals`; levels that differ in no more than the seed are repeats.

    `name` is what to call a load.
    """
    groups: dict[Load, list[Level]] = {}
    for level in measured.levels:
        groups.setdefault(_repeated(level.workload), []).append(level)
    predicted = predict(profile, list(groups), flags_of(measured, profile.engine_flags))
    found = []
    for (load, repeats), prediction in zip(groups.items(), predicted.levels, strict=True):
        found += _judged((name or short_name)(load), repeats, prediction, goals)
    return found


def short_name(load: Load) -> str:
    """A load in a few letters, such as ``C=8 1024/256``."""
    return f"{load.label} {load.lengths_label}"


def _repeated(load: Load) -> Load:
    """What repeats of a level have in common."""
    return replace(load, seed=0) if isinstance(load, Workload) else load


def _judged(name: str, repeats: Sequence[Level], prediction: Level, goals: Mapping[str, float]) -> list[Judgement]:
    ours, theirs = pd.DataFrame([summarize(level).flat() for level in repeats]), summarize(prediction).flat()
    found = []
    for metric, goal in goals.items():
        measured, predicted = ours[metric].to_numpy(np.float64), theirs[metric]
        middle = float(np.median(measured))
        nearby = np.median([_nearby(level, metric) or (middle, middle) for level in repeats], axis=0)
        found.append(
            Judgement(
                level=name,
                metric=metric,
                measured=middle,
                predicted=float("nan") if predicted is None else float(predicted),
                noise=float(np.ptp(measured)) / middle,
                goal=goal,
                nearby=(float(nearby[0]), float(nearby[1])),
            )
        )
    return found


def _nearby(level: Level, metric: str) -> tuple[float, float] | None:
    """The value of a percentile `RANKS` lower and higher; None for a figure that is no percentile."""
    percentile, _, latency = metric.partition("_")
    if not percentile[1:].isdigit():
        return None
    rank = float(percentile[1:])
    values = level.gaps["gap"] if latency == "itl" else level.completed[latency].dropna()
    counts = level.gaps["count"] if latency == "itl" else np.ones(len(values), np.int64)
    step = max(RANKS, 100 / max(1, int(np.sum(counts)) - 1))
    low, high = weighted_percentiles(values, counts, [max(0.0, rank - step), min(100.0, rank + step)])
    return float(low), float(high)


def show(title: str, judgements: Sequence[Judgement]) -> None:
    """Print a table in milliseconds and tokens/s, and how many goals are met."""
    print(f"\n{title}\n{HEADER}")
    for judgement in judgements:
        print(judgement)
    print(summary(judgements))


def summary(judgements: Sequence[Judgement]) -> str:
    """How many goals are met, in one line."""
    found = Counter(judgement.verdict for judgement in judgements)
    return (
        f"{found['met']} of {len(judgements)} within the goal, {found['noise']} within the noise of repeats, "
        f"{found['jump']} at a jump, {found['missed']} missed"
    )

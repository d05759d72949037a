"""Predictions beside repeated measurements: signed errors, the noise floor, and whether the goal is met."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from calibration.validate import LevelValidation, Validation

HEADER = f"{'level':<24} {'metric':<18} {'measured':>10} {'predicted':>10} {'error':>8} {'noise':>7} {'goal':>7}"


@dataclass(frozen=True)
class Judgement:
    """One metric of one level of load, measured several times. Latencies in seconds, throughput in tokens/s.

    `measured` is the median of the repeats, `noise` their spread (largest minus smallest) over that median; `goal` is
    the largest relative error that was asked for. `longest_step` is the largest p99 ITL measured on this server,
    in seconds: about what a full engine step takes.
    """

    level: str
    metric: str
    measured: float
    predicted: float
    noise: float
    goal: float
    longest_step: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_met(self) -> bool:
        """Within the goal, or within the noise where that is larger."""
        return abs(self.error) <= max(self.goal, self.noise)

    @property
    def is_one_step_off(self) -> bool:
        """Whether a TTFT is off by no more than one engine step.

        A request that reaches the engine a moment late waits for a whole step more. Where most requests arrive about
        then, a few milliseconds of host time decide for all of them, and the median jumps by one step.
        """
        return self.metric.endswith("ttft") and abs(self.predicted - self.measured) <= 1.05 * self.longest_step

    def __str__(self) -> str:
        scale = 1.0 if self.metric == "output_throughput" else 1e3
        missed = " MISSED by one step" if self.is_one_step_off else " MISSED"
        verdict = "" if abs(self.error) <= self.goal else " (within noise)" if self.is_met else missed
        return (
            f"{self.level:<24} {self.metric:<18} {self.measured * scale:>10.2f} {self.predicted * scale:>10.2f} "
            f"{self.error:>+8.2%} {self.noise:>7.2%} {self.goal:>7.1%}{verdict}"
        )


def judge(validation: Validation, goals: Mapping[str, float]) -> list[Judgement]:
    """Judge every level of load that was measured, by the metrics in `goals`."""
    ordered = sorted(validation.levels, key=_load)
    longest_step = max(level.metrics["p99_itl"].measured for level in ordered)
    return [
        _judgement(load, metric, goal, longest_step, list(repeats))
        for load, group in groupby(ordered, key=_load)
        for repeats in [list(group)]
        for metric, goal in goals.items()
    ]


def _load(level: LevelValidation) -> tuple[float, str]:
    workload = level.workload
    shapes = ", ".join(str(shape) for shape in workload.shapes)
    return (workload.concurrency or math.inf, f"{workload.arrivals} {shapes} x{workload.num_prompts}")


def _judgement(
    load: tuple[float, str], metric: str, goal: float, longest_step: float, repeats: list[LevelValidation]
) -> Judgement:
    measured = np.array([level.metrics[metric].measured for level in repeats])
    predicted = np.array([level.metrics[metric].predicted for level in repeats])
    middle = float(np.median(measured))
    return Judgement(
        level=load[1],
        metric=metric,
        measured=middle,
        predicted=float(np.median(predicted)),
        noise=float(np.ptp(measured)) / middle,
        goal=goal,
        longest_step=longest_step,
    )


def show(title: str, judgements: list[Judgement]) -> None:
    """Print a table in milliseconds and tokens/s, and how many goals are met."""
    print(f"\n{title}\n{HEADER}")
    for judgement in judgements:
        print(judgement)
    met = sum(judgement.is_met for judgement in judgements)
    print(f"{met} of {len(judgements)} within the goal or the noise of repeats")

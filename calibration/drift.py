"""Whether a profile still holds: one level is measured again and compared with what the profile says of it.

A figure may be off by its prediction's 90 % interval, by the noise between repeats of a level, or by `LEAST_ALLOWED`,
whichever is the most. Of the five figures that are judged one in ten is outside its interval by chance, and four of
them move together, so one that is a little outside tells nothing: a profile has drifted when two are, or when one is
by far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from calibration.level_notes import FAILED, RESTARTED
from calibration.next_level import Array, Expected, expected
from calibration.step_rows import TERMS
from calibration.sweep_plan import LEAST_PER_CLIENT, LEAST_PER_LEVEL, SweepPlan, closed_level, warm_up_of
from calibration.validate import METRICS, differences, flags_of
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.step_time import StepTime
from simulator.loads.workload import Load, Workload
from simulator.prediction import predict
from simulator.profile import Profile
from simulator.results.run import Level, Run
from simulator.results.summary import summarize

JUDGED = ("output_throughput", "p50_ttft", "p50_tpot", "p50_itl", "p50_e2el")
LEAST_ALLOWED = 0.02  # relative; two starts of the same server differ by as much
WITHOUT_INTERVAL = 0.05  # relative, where the profile does not know its own errors
FAR = 2.0  # times what is allowed
DOUBTFUL = ("measured: client-bound", "measured: other traffic", f"measured: {RESTARTED}")
SECONDS = 45.0  # to measure, about

LENGTHS = ((128, 128), (512, 128), (1024, 256), (2048, 128), (4096, 128))  # prompt and output tokens to choose from
CHANGE = 0.1  # relative, of a coefficient, that a level should show
BLUR = 0.02  # relative, of a figure


class DriftError(ValueError):
    """A measurement that cannot judge the profile. The message is one line."""


@dataclass(frozen=True)
class Figure:
    """One figure of the level. Latencies are seconds, throughput is tokens a second.

    `allowed` is the largest difference from `predicted` that does not count, in the same unit.
    """

    metric: str
    measured: float
    predicted: float
    allowed: float

    @property
    def error(self) -> float:
        """(measured - predicted) / predicted: how the server has changed, if the profile was right."""
        return (self.measured - self.predicted) / self.predicted

    @property
    def excess(self) -> float:
        """How far off, in what is allowed."""
        return abs(self.measured - self.predicted) / self.allowed


@dataclass(frozen=True)
class Drift:
    """The verdict on a profile. `notes` are sentences that a reader must know."""

    workload: Load
    figures: dict[str, Figure]
    notes: list[str]

    @property
    def outside(self) -> list[Figure]:
        """The judged figures that are further off than allowed, the worst first."""
        judged = [self.figures[name] for name in JUDGED if name in self.figures]
        return sorted((figure for figure in judged if figure.excess > 1), key=lambda figure: -figure.excess)

    @property
    def doubts(self) -> list[str]:
        """What the measurement says against itself."""
        return [note for note in self.notes if note.startswith(DOUBTFUL) or FAILED in note]

    @property
    def state(self) -> Literal["holds", "drifted", "unclear"]:
        """A measurement that another cause may have disturbed cannot tell that the server has changed."""
        outside = self.outside
        if len(outside) < 2 and not any(figure.excess > FAR for figure in outside):
            return "holds"
        return "unclear" if self.doubts else "drifted"


def drift_level(profile: Profile, flags: EngineFlags | None = None) -> Workload:
    """The closed loop inside the measured range, of about `SECONDS`, that shows changed coefficients best.

    Raises `DriftError` where the range is too small for any.
    """
    flags = flags or profile.engine_flags
    found = [item for workload in _inside(profile, flags) if (item := _expected(workload, profile, flags)) is not None]
    if not found:
        raise DriftError(f"the measured range of {profile.name} holds no level to measure again; give one with a load")
    coefficients = _coefficients(profile)
    best = max(found, key=lambda item: _shown(item, profile.step_time, coefficients))
    rounds = max(1, round(SECONDS / best.seconds))
    return replace(best.workload, num_prompts=rounds * best.workload.num_prompts)


def drift_plan(workload: Workload) -> SweepPlan:
    """The level after a warm-up."""
    return SweepPlan(levels=(workload,), warm_up=warm_up_of([workload]))


def judge_drift(measured: Run, profile: Profile, flags: EngineFlags | None = None) -> Drift:
    """Compare a run of one level with the profile.

    `flags` default to the profile's, with those that the run states in their place. Raises `DriftError` for a run that
    cannot tell: another model, or no answers.
    """
    level = measured.levels[0]
    model = measured.server.get("model")
    if model is not None and model != profile.model:
        raise DriftError(f"the server serves {model}, the profile is of {profile.model}: calibrate anew")
    if level.completed.empty:
        raise DriftError("no request was answered: see the server's log")
    flags = flags or flags_of(measured, profile.engine_flags)
    predicted = predict(profile, [level.workload], flags, with_intervals=True).levels[0]
    figures = _figures(level, predicted, profile.noise)
    said = [*differences(measured.server, profile, flags), *(f"measured: {note}" for note in level.notes)]
    return Drift(level.workload, figures, [*said, *(f"predicted: {note}" for note in predicted.notes)])


def _figures(measured: Level, predicted: Level, noise: Mapping[str, float]) -> dict[str, Figure]:
    ours, theirs = summarize(measured).flat(), summarize(predicted).flat()
    found = {}
    for name in METRICS:
        seen, said = ours[name], theirs[name]
        if seen is None or not said or not (math.isfinite(seen) and math.isfinite(said)):
            continue
        allowed = max(_width(predicted, name, said, seen), noise.get(name, 0.0) * said, LEAST_ALLOWED * said)
        found[name] = Figure(name, float(seen), float(said), allowed)
    return found


def _width(predicted: Level, name: str, value: float, seen: float) -> float:
    """Of the 90 % interval, on the side on which the figure was seen; without an interval what is usual."""
    if name not in predicted.intervals:
        return WITHOUT_INTERVAL * value
    low, high = predicted.intervals[name]
    return high - value if seen > value else value - low


def _inside(profile: Profile, flags: EngineFlags) -> list[Workload]:
    """Closed loops that the profile was measured for, as far as their ends go."""
    measured = profile.measured_range
    least, most = measured.concurrency
    clients = sorted({most, *(2**power for power in range(1, 12) if least <= 2**power <= most)})
    found = []
    for count in clients:
        for prompt, output in LENGTHS:
            level = closed_level(count, prompt, output, max(LEAST_PER_LEVEL, LEAST_PER_CLIENT * count))
            if prompt + output <= flags.max_model_len and not profile.outside_range(level, flags):
                found.append(level)
    return found


def _expected(workload: Workload, profile: Profile, flags: EngineFlags) -> Expected | None:
    return expected(workload, flags, profile.step_time, replace(profile.host_time, gap_noise=()))


def _coefficients(profile: Profile) -> Array:
    """The profile's coefficients by `TERMS`; both parts of a request's host time are one there."""
    values = {name: term.value for name, term in profile.coefficients.step_time.items()}
    host = profile.host_time
    values |= {
        "per_request": host.per_request + host.per_request_serial,
        "per_prompt_token": host.per_prompt_token,
    }
    return np.array([values.get(name, 0.0) for name in TERMS])


def _shown(item: Expected, step_time: StepTime, coefficients: Array) -> float:
    """How much the level's figures tell of a change of any coefficient: the logarithm of a determinant, D-optimal."""
    slopes, seconds = item.figures(step_time)
    moves = CHANGE * slopes * coefficients / (BLUR * seconds[:, None])
    return float(np.linalg.slogdet(np.eye(len(coefficients)) + moves.T @ moves)[1])


def verdict(drift: Drift) -> str:
    """The verdict in a sentence."""
    outside = drift.outside
    if drift.state == "holds":
        aside = f"; {_change(outside[0])}, a little outside of what is expected" if outside else ""
        return f"the profile still holds{aside}"
    changes = ", ".join(_change(figure) for figure in outside)
    if drift.state == "unclear":
        cause = drift.doubts[0].removeprefix("measured: ").partition(":")[0]
        return f"it cannot be told whether the profile holds: {changes}, but the measurement was disturbed ({cause})"
    return f"the profile has drifted: {changes}; calibrate anew"


def _change(figure: Figure) -> str:
    statistic, _, latency = figure.metric.partition("_")
    name = "output throughput" if figure.metric == "output_throughput" else f"{statistic} {latency.upper()}"
    direction = "above" if figure.error > 0 else "below"
    return f"{name} is {abs(figure.error):.1%} {direction} the prediction, +-{figure.allowed / figure.predicted:.1%}"

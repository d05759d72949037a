"""Fits the step-time model to stated figures alone, such as a published table of throughputs and percentiles.

No step is seen here. The simulator plays each level of load with trial coefficients, and least squares moves them until
its figures are the stated ones. A few figures cannot pin down every coefficient, so each one starts from a prior, and
one that the figures say nothing about stays there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from calibration.roofline import Prior
from simulator.engine import simulate_level
from simulator.engine_flags import EngineFlags
from simulator.run import Level
from simulator.step_time import HostTime, StepTime
from simulator.summary import summarize
from simulator.workload import Load, Workload

TRIAL_STEP = 0.01  # relative; below it a percentile may not move, since a simulated level is made of whole steps
IDENTIFIED = 0.5  # a coefficient is identified if the figures shrink its prior's uncertainty below this share
HOST_TERMS = tuple(field.name for field in fields(HostTime))

Array = npt.NDArray[np.float64]
Measure = Callable[[Level], float]


@dataclass(frozen=True)
class Figure:
    """A stated number about one load.

    Attributes
        workload: a `Workload`, a recorded trace, or any other load
        metric: a name of `simulator.summary.Summary.flat`, or ``p50_decode_time``: first to last token of a request
        value: seconds, tokens a second, or whatever the metric counts
        uncertainty: relative standard error, rounding included
        flags: of the server that this number was measured on, where it differs from the other figures'
        measure: takes the number from the simulated level where others define it in another way; `metric` is then no
            more than its name
    """

    workload: Load
    metric: str
    value: float
    uncertainty: float
    flags: EngineFlags | None = None
    measure: Measure | None = None

    def __post_init__(self) -> None:
        if not (self.value > 0 and self.uncertainty > 0):
            raise ValueError(f"{self.metric} of {self._load()}: value and uncertainty must be positive")

    def __str__(self) -> str:
        return f"{self._load()} {self.metric}"

    def _load(self) -> str:
        load = self.workload
        return str(load.arrivals) if isinstance(load, Workload) else str(getattr(load, "name", load))


@dataclass(frozen=True)
class FittedTerm:
    """A coefficient after the fit. `stderr` is in the unit of `value`; see `IDENTIFIED` for `identified`."""

    value: float
    stderr: float
    prior: Prior
    identified: bool

    def interval(self) -> tuple[float, float]:
        """Bounds with 90 % confidence, from the normal posterior of the logarithm."""
        factor = math.exp(1.645 * self.stderr / self.value)
        return self.value / factor, self.value * factor


@dataclass(frozen=True)
class AggregateFit:
    """Coefficients of `StepTime` and `HostTime` by name, and what they make of the figures, in the order given."""

    terms: dict[str, FittedTerm]
    figures: tuple[Figure, ...]
    reproduced: tuple[float, ...]
    formula: type[StepTime] = StepTime

    @property
    def step_time(self) -> StepTime:
        return _step_time(self.formula, {name: term.value for name, term in self.terms.items()})

    @property
    def host_time(self) -> HostTime:
        return _host_time({name: term.value for name, term in self.terms.items()})

    @property
    def errors(self) -> tuple[float, ...]:
        """(reproduced - stated) / stated."""
        return tuple(value / figure.value - 1 for figure, value in zip(self.figures, self.reproduced, strict=True))


def fit_figures(
    figures: Sequence[Figure],
    flags: EngineFlags,
    priors: Mapping[str, Prior],
    formula: type[StepTime] = StepTime,
    tolerance: float = 1e-6,
) -> AggregateFit:
    """Fit the coefficients that have a prior; the others are zero.

    The logarithm of a coefficient has a normal prior, so none becomes negative. Standard errors are those of the
    posterior. `formula` is the step-time model whose coefficients are fitted. `tolerance` is relative: the fit stops
    when neither the misses nor the coefficients still change by more.
    """
    trial = _Trial(tuple(figures), flags, dict(priors), formula)
    start, ftol = np.zeros(len(priors)), max(tolerance, 1e-8)
    result = least_squares(trial.residuals, start, jac=trial.jacobian, method="lm", xtol=tolerance, ftol=ftol)
    slopes = trial.jacobian(result.x)
    spread = np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)))  # in standard deviations of the prior
    values = trial.coefficients(result.x)
    terms = {
        name: FittedTerm(
            value=values[name],
            stderr=float(values[name] * prior.uncertainty * share),
            prior=prior,
            identified=bool(share < IDENTIFIED),
        )
        for (name, prior), share in zip(priors.items(), spread, strict=True)
    }
    return AggregateFit(terms, tuple(figures), tuple(trial.reproduce(values)), formula)


def figure_of(level: Level, metric: str) -> float:
    """The figure that a level gives, by a name that `Figure.metric` may have."""
    if metric == "p50_decode_time":
        done = level.completed
        return float((done["e2el"] - done["ttft"]).median())
    return _named(summarize(level).flat(), metric)


def figures_of(level: Level, figures: Sequence[Figure]) -> list[float]:
    """What one level makes of several figures; it is summed up once."""
    numbers: dict[str, float | int | None] = {}
    values = []
    for figure in figures:
        if figure.measure is not None:
            values.append(figure.measure(level))
        elif figure.metric == "p50_decode_time":
            values.append(figure_of(level, figure.metric))
        else:
            numbers = numbers or summarize(level).flat()
            values.append(_named(numbers, figure.metric))
    return values


def _named(numbers: Mapping[str, float | int | None], metric: str) -> float:
    if (number := numbers.get(metric)) is None:
        raise ValueError(f"{metric!r} is no figure of a level; known are p50_decode_time, {', '.join(numbers)}")
    return float(number)


def play_load(load: Load, flags: EngineFlags, step_time: StepTime, host_time: HostTime | None = None) -> Level:
    """Any load played on one engine."""
    return simulate_level(cast(Workload, load), flags, step_time, host_time)  # it asks no more of it than of a load


@dataclass(frozen=True)
class _Trial:
    """Residuals at a point: standard deviations from the prior's logarithm, one coordinate a coefficient."""

    figures: tuple[Figure, ...]
    flags: EngineFlags
    priors: dict[str, Prior]
    formula: type[StepTime]

    def coefficients(self, point: Array) -> dict[str, float]:
        return {
            name: float(prior.value * np.exp(prior.uncertainty * shift))
            for (name, prior), shift in zip(self.priors.items(), point, strict=True)
        }

    def reproduce(self, coefficients: Mapping[str, float]) -> list[float]:
        """What the simulator makes of the figures; each load is played once."""
        step_time, host_time = _step_time(self.formula, coefficients), _host_time(coefficients)
        made = [math.nan] * len(self.figures)
        for numbers in self._by_load():
            first = self.figures[numbers[0]]
            level = play_load(first.workload, first.flags or self.flags, step_time, host_time)
            values = figures_of(level, [self.figures[number] for number in numbers])
            for number, value in zip(numbers, values, strict=True):
                made[number] = value
        return made

    def _by_load(self) -> list[list[int]]:
        """The places of the figures that one simulation gives."""
        groups: dict[tuple[Load, EngineFlags | None], list[int]] = {}
        for number, figure in enumerate(self.figures):
            groups.setdefault((figure.workload, figure.flags), []).append(number)
        return list(groups.values())

    def residuals(self, point: Array) -> Array:
        """Misses of the figures, then of the priors, each in its own standard deviation."""
        made = self.reproduce(self.coefficients(point))
        misses = [
            (value / figure.value - 1) / figure.uncertainty for figure, value in zip(self.figures, made, strict=True)
        ]
        return np.concatenate([misses, point])

    def jacobian(self, point: Array) -> Array:
        """Central differences over `TRIAL_STEP` of each coefficient."""
        columns = []
        for number, prior in enumerate(self.priors.values()):
            step = np.zeros(len(point))
            step[number] = TRIAL_STEP / prior.uncertainty
            columns.append((self.residuals(point + step) - self.residuals(point - step)) / (2 * step[number]))
        return np.column_stack(columns)


def _step_time(formula: type[StepTime], coefficients: Mapping[str, float]) -> StepTime:
    return formula(**{name: value for name, value in coefficients.items() if name not in HOST_TERMS})


def _host_time(coefficients: Mapping[str, Any]) -> HostTime:
    return HostTime(**{name: value for name, value in coefficients.items() if name in HOST_TERMS})

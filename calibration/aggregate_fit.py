"""Fits the step-time model to stated figures alone, such as a published table of throughputs and percentiles.

No step is seen here. The simulator plays each level of load with trial coefficients, and least squares moves them until
its figures are the stated ones. A few figures cannot pin down every coefficient, so each one starts from a prior, and
one that the figures say nothing about stays there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from calibration.roofline import Prior
from calibration.trial import Array, Figure, Trial
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.step_time import HostTime, StepTime

TRIAL_STEP = 0.01  # relative; below it a percentile may not move, since a simulated level is made of whole steps
IDENTIFIED = 0.5  # a coefficient is identified if the figures shrink its prior's uncertainty below this share
HOST_TERMS = tuple(field.name for field in fields(HostTime))


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

    @property
    def step_time(self) -> StepTime:
        return _step_time({name: term.value for name, term in self.terms.items()})

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
    tolerance: float = 1e-6,
) -> AggregateFit:
    """Fit the coefficients that have a prior; the others are zero.

    The logarithm of a coefficient has a normal prior, so none becomes negative. Standard errors are those of the
    posterior. `tolerance` is relative: the fit stops when neither the misses nor the coefficients still change by more.
    """

    def coefficients(point: Array) -> dict[str, float]:
        return {
            name: float(prior.value * np.exp(prior.uncertainty * shift))
            for (name, prior), shift in zip(priors.items(), point, strict=True)
        }

    def times(point: Array) -> tuple[StepTime, HostTime]:
        values = coefficients(point)
        return _step_time(values), _host_time(values)

    trial = Trial(tuple(figures), flags, times)
    steps = np.array([TRIAL_STEP / prior.uncertainty for prior in priors.values()])
    prior_slopes = np.eye(len(steps))

    def residuals(point: Array) -> Array:
        """Misses of the figures, then of the priors, each in its own standard deviation."""
        return np.concatenate([trial.misses(point), point])

    def jacobian(point: Array) -> Array:
        return np.vstack([trial.slopes(point, steps), prior_slopes])

    start, ftol = np.zeros(len(steps)), max(tolerance, 1e-8)
    result = least_squares(residuals, start, jac=jacobian, method="lm", xtol=tolerance, ftol=ftol)
    slopes = jacobian(result.x)
    spread = np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)))  # in standard deviations of the prior
    values = coefficients(result.x)
    terms = {
        name: FittedTerm(
            value=values[name],
            stderr=float(values[name] * prior.uncertainty * share),
            prior=prior,
            identified=bool(share < IDENTIFIED),
        )
        for (name, prior), share in zip(priors.items(), spread, strict=True)
    }
    return AggregateFit(terms, tuple(figures), tuple(trial.reproduce(result.x).tolist()))


def _step_time(coefficients: Mapping[str, float]) -> StepTime:
    return StepTime(**{name: value for name, value in coefficients.items() if name not in HOST_TERMS})


def _host_time(coefficients: Mapping[str, Any]) -> HostTime:
    return HostTime(**{name: value for name, value in coefficients.items() if name in HOST_TERMS})

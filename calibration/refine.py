"""The second stage of a fit: the simulator plays the measured levels, and their percentiles move the coefficients.

The first stage (`calibration.step_fit`) sees single steps. What it found, with its covariance, is the prior here, so
nothing moves that the steps have settled. What they do not show does: above all the share of a request's host time that
the API server spends on one request after the other, before the engine has it. A lone request shows the sum only, but
under load the share decides who waits for whom, and so the percentiles of TTFT.

Only a queue at the API server tells it: all else looks the same if the way there is longer and the way back shorter.

Percentiles of a level made of whole steps jump as coefficients change, so derivatives mean nothing. Instead the levels
are played at points spread over the coefficients' uncertainty, and a plane is laid through what comes out. A figure
counts the less, the farther it scatters about its plane.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from calibration.step_fit import SERIAL_SHARE, Coefficient, StepTimeFit
from calibration.trial import Array, Figure, Trial
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.step_time import HostTime, StepTime
from simulator.results.resampling import resampled_intervals
from simulator.results.run import Level
from simulator.results.summary import summarize
from simulator.uncertainty import NORMAL_90, covariance_root

# relative errors that even the right coefficients leave, by metric: the model is no more exact than this
MODEL_ERRORS = {
    "output_throughput": 0.01,
    "mean_ttft": 0.03,
    "p50_ttft": 0.03,
    "p90_ttft": 0.03,
    "p99_ttft": 0.05,
    "p50_tpot": 0.01,
    "p50_itl": 0.01,
    "p90_itl": 0.02,
    "p99_itl": 0.03,
    "p50_e2el": 0.01,
    "p90_e2el": 0.01,
    "p99_e2el": 0.02,
}
UNBOUNDED = 0.1  # relative standard error of a percentile that the sample is too small to bound
LEAST_REQUESTS = 8  # of a level whose percentiles count
INDEPENDENT = 3  # what a level's figures tell of each other's: pace, wait for the first token, tail
SHARE_UNCERTAINTY = 0.25  # standard deviation of the serial share before anything was measured
SHARES = np.linspace(0.0, 1.0, 11)  # tried; what lies between two of them is not told apart
IDENTIFIED = 0.5  # the share is measured if the figures shrink its uncertainty below this part
ROUNDS = 4
NEAR = 0.1  # standard deviations; a move shorter than this ends the search
HUBER = 1.5  # misses beyond this many standard errors count less
HOST_FIELDS = tuple(field.name for field in fields(HostTime))
LEAST_CONSTANT = 0.05  # of the fitted constant, in any trial


@dataclass(frozen=True)
class Refinement:
    """What the second stage made of the first one's coefficients.

    Attributes
        coefficients: as `StepTimeFit.coefficients`, with `per_request` split into itself and `per_request_serial`
        correlations: of the errors of every pair that is not fixed
        moved: first-stage standard errors by which each coefficient was moved
        serial_share: of a request's host time, with its standard error
        step_time, host_time: the coefficients
        misfit: half the sum of squared misses, those of the prior among them, before and after
    """

    coefficients: dict[str, Coefficient]
    correlations: tuple[tuple[str, str, float], ...]
    moved: dict[str, float]
    serial_share: Coefficient
    step_time: StepTime
    host_time: HostTime
    misfit: tuple[float, float]

    @property
    def share_is_measured(self) -> bool:
        """Whether the levels told the share, or it stayed where it was assumed."""
        return self.serial_share.stderr < IDENTIFIED * SHARE_UNCERTAINTY


def refine(fit: StepTimeFit, levels: Sequence[Level], flags: EngineFlags) -> Refinement:
    """Refine `fit` on the percentiles of the `levels` that it was made from."""
    space, figures = _Space.of(fit), tuple(measured_figures(levels))
    point, spread = np.zeros(len(space.names)), np.eye(len(space.names))
    if not figures or not len(point):
        return space.refinement(point, spread, (0.0, 0.0))
    before = _misfit(Trial(figures, flags, space.times).misses(point), point)
    space = _tell_share(space, figures, flags, point)
    trial, reach = Trial(figures, flags, space.times), spread
    misses = trial.misses(point)
    for _ in range(ROUNDS):
        plane = _Plane.through(trial, point, misses, reach)
        target, spread = plane.best(point)
        moved = _lower(trial, plane, point, misses, target)
        if moved is None:
            break
        step = float(np.linalg.norm(moved[0] - point))
        point, misses = moved
        if step < NEAR:
            break
        reach = np.asarray(np.linalg.cholesky(spread))
    return space.refinement(point, spread, (before, _misfit(misses, point)))


def _tell_share(space: _Space, figures: tuple[Figure, ...], flags: EngineFlags, point: Array) -> _Space:
    """The space with the share that the figures tell, and its standard error.

    Nothing is normal here: whole ranges of shares give the same figures, and others are out of the question. So each of
    `SHARES` is tried, and mean and deviation are those of what is believed of them afterwards.
    """
    if "per_request" not in space.names:
        return space
    misses = [Trial(figures, flags, replace(space, share=share).times).misses(point) for share in SHARES.tolist()]
    misfits = np.array([_misfit(miss, point) for miss in misses])
    usual = max(1.0, 1.4826 * float(np.median(np.abs(misses[int(np.argmin(misfits))]))))
    belief = -misfits / usual**2 - ((SHARES - SERIAL_SHARE) / SHARE_UNCERTAINTY) ** 2 / 2
    chances = np.exp(belief - belief.max())
    chances /= chances.sum()
    mean = float(chances @ SHARES)
    between = float((SHARES[1] - SHARES[0]) ** 2 / 12)
    error = math.sqrt(float(chances @ (SHARES - mean) ** 2) + between)
    return replace(space, share=mean, share_error=min(error, SHARE_UNCERTAINTY))


def measured_figures(levels: Sequence[Level]) -> Iterator[Figure]:
    """The percentiles of levels with enough requests, each as uncertain as its sample and the model make it."""
    for level in levels:
        if len(level.completed) < LEAST_REQUESTS:
            continue
        numbers, intervals = summarize(level).flat(), level.intervals or resampled_intervals(level)
        known = {name: float(numbers[name] or math.nan) for name in MODEL_ERRORS}
        known = {name: value for name, value in known.items() if value > 0}
        shared = math.sqrt(max(1.0, len(known) / INDEPENDENT))  # they repeat each other
        for name, value in known.items():
            sampling = UNBOUNDED
            if name in intervals:
                low, high = intervals[name]
                sampling = (high - low) / (2 * NORMAL_90 * value)
            yield Figure(level.workload, name, value, shared * math.hypot(sampling, MODEL_ERRORS[name]))


@dataclass(frozen=True)
class _Space:
    """Points in standard deviations of the prior, one coordinate a coefficient, at a given serial share."""

    fit: StepTimeFit
    names: tuple[str, ...]
    values: Array
    root: Array
    share: float = SERIAL_SHARE
    share_error: float = SHARE_UNCERTAINTY

    @classmethod
    def of(cls, fit: StepTimeFit) -> _Space:
        errors = {name: term.stderr for name, term in fit.coefficients.items() if term.stderr > 0}
        values = np.array([fit.coefficients[name].value for name in errors])
        return cls(fit, tuple(errors), values, covariance_root(errors, fit.correlations))

    def times(self, point: Array) -> tuple[StepTime, HostTime]:
        terms = self.coefficients(point)
        step = {name: value for name, value in terms.items() if name not in HOST_FIELDS}
        host: dict[str, Any] = {name: value for name, value in terms.items() if name in HOST_FIELDS}
        least = LEAST_CONSTANT * self.fit.step_time.constant  # a vague fit must not try steps that take no time
        step["constant"] = max(least, step.get("constant", self.fit.step_time.constant))
        return replace(self.fit.step_time, **step), replace(self.fit.host_time, **host)

    def coefficients(self, point: Array) -> dict[str, float]:
        """By name; both parts of a request's host time in place of its sum."""
        drawn = np.maximum(self.values + self.root @ point, 0.0)
        terms = dict(zip(self.names, drawn.tolist(), strict=True))
        if "per_request" in terms:
            whole = terms["per_request"]
            terms |= {"per_request": (1 - self.share) * whole, "per_request_serial": self.share * whole}
        return terms

    def covariance(self, point: Array, spread: Array) -> Array:
        """Of the coefficients, in the order of `coefficients`, where that of the point is `spread`."""
        slopes = dict(zip(self.names, self.root, strict=True))
        terms = self.coefficients(point)
        by_share = dict.fromkeys(terms, 0.0)
        if "per_request" in terms:
            moved = self.share_error * (terms["per_request"] + terms["per_request_serial"])
            by_share |= {"per_request": -moved, "per_request_serial": moved}
            whole = slopes["per_request"]
            slopes |= {"per_request": (1 - self.share) * whole, "per_request_serial": self.share * whole}
        rows, share = np.array([slopes[name] for name in terms]), np.array(list(by_share.values()))
        return np.asarray(rows @ spread @ rows.T + np.outer(share, share))

    def refinement(self, point: Array, spread: Array, misfit: tuple[float, float]) -> Refinement:
        """The result at a point whose covariance is `spread`."""
        values, first = self.coefficients(point), self.fit.coefficients
        covariance = self.covariance(point, spread) if values else np.zeros((0, 0))
        errors = np.sqrt(np.diag(covariance)).tolist()
        kept = {
            name: Coefficient(*pair)
            for name, pair in zip(values, zip(values.values(), errors, strict=True), strict=True)
        }
        rest = {"per_request_serial": first["per_request"], **first}
        shift = (self.root @ point).tolist()
        step_time, host_time = self.times(point)
        return Refinement(
            coefficients=rest | kept,
            correlations=tuple(_correlations(list(values), covariance)),
            moved={name: by / first[name].stderr for name, by in zip(self.names, shift, strict=True)},
            serial_share=Coefficient(self.share, self.share_error),
            step_time=step_time,
            host_time=host_time,
            misfit=misfit,
        )


def _correlations(names: Sequence[str], covariance: Array) -> Iterator[tuple[str, str, float]]:
    size = np.sqrt(np.diag(covariance))
    for row, one in enumerate(names):
        for column, other in enumerate(names[:row]):
            if size[row] > 0 and size[column] > 0:
                yield one, other, float(covariance[row, column] / (size[row] * size[column]))


@dataclass(frozen=True)
class _Plane:
    """Misses as linear functions of the point about a centre, and the weight of each figure.

    `scatter` is the standard deviation of what the simulator gives about the plane, in standard errors of the figure.
    """

    level: Array
    slopes: Array
    scatter: Array

    @classmethod
    def through(cls, trial: Trial, centre: Array, misses: Array, reach: Array) -> _Plane:
        """Play the levels at the centre and on both sides of it, spread over `reach`, a root of a covariance."""
        count = len(centre)
        turned = np.linalg.qr(np.random.default_rng(0).standard_normal((count, count)))[0] * math.sqrt(count)
        offsets = np.vstack([np.zeros(count), turned, -turned]) @ reach.T
        seen = np.vstack([misses, *(trial.misses(centre + offset) for offset in offsets[1:])])
        design = np.column_stack([np.ones(len(offsets)), offsets])
        solved = np.linalg.lstsq(design, seen, rcond=None)[0]
        scatter = np.sqrt(((seen - design @ solved) ** 2).sum(axis=0) / count)
        return cls(solved[0], solved[1:].T, scatter)

    def weights(self, misses: Array) -> Array:
        """Of squared misses: less for a figure that jumps, for one far off, and for all if the model is off."""
        size = np.abs(misses) / np.sqrt(1 + self.scatter**2)
        usual = max(1.0, 1.4826 * float(np.median(size)))
        return np.asarray(np.minimum(1.0, HUBER * usual / np.maximum(size, 1e-9)) / (1 + self.scatter**2) / usual**2)

    def best(self, centre: Array) -> tuple[Array, Array]:
        """The point of the least misfit on the plane, and the covariance there."""
        point = centre
        for _ in range(10):
            weights = self.weights(self.level + self.slopes @ (point - centre))
            precision = np.eye(len(centre)) + (self.slopes.T * weights) @ self.slopes
            pull = (self.slopes.T * weights) @ (self.level - self.slopes @ centre)
            point = np.asarray(np.linalg.solve(precision, -pull))
        return point, np.asarray(np.linalg.inv(precision))


def _lower(trial: Trial, plane: _Plane, point: Array, misses: Array, target: Array) -> tuple[Array, Array] | None:
    """The first of a few points on the way to `target` at which the misfit is really lower, None if none is."""
    weights = plane.weights(misses)
    here = _misfit(misses * np.sqrt(weights), point)
    for part in (1.0, 0.5, 0.25):
        other = point + part * (target - point)
        found = trial.misses(other)
        if _misfit(found * np.sqrt(weights), other) < here:
            return other, found
    return None


def _misfit(misses: Array, point: Array) -> float:
    """Half the squared misses of figures and prior; those beyond `HUBER` count as their size."""
    size = np.abs(misses)
    return float(np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2)).sum() + (point**2).sum() / 2)

"""How sure a prediction is: the same level simulated again with coefficients as uncertain as their fit was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from simulator.engine import simulate_level
from simulator.engine_flags import EngineFlags
from simulator.profile import Profile
from simulator.step_time import HostTime, StepTime
from simulator.summary import summarize
from simulator.workload import Workload

DRAWS = 16
CONFIDENCE = 0.9


def intervals(
    profile: Profile, workload: Workload, flags: EngineFlags | None = None, draws: int = DRAWS
) -> dict[str, tuple[float, float]]:
    """90 % intervals of every number of `simulator.summary.Summary.flat` that a prediction of this level gives.

    Every one of `draws` simulations takes coefficients from the profile's joint uncertainty and, where arrivals or
    lengths are random, another seed: so the interval is that of a measurement of this many requests.
    """
    flags = flags or profile.engine_flags
    seen: dict[str, list[float]] = {}
    for number, (step_time, host_time) in enumerate(drawn_times(profile, draws)):
        level = simulate_level(replace(workload, seed=workload.seed + number), flags, step_time, host_time)
        for name, value in summarize(level).flat().items():
            if value is not None:
                seen.setdefault(name, []).append(value)
    tail = 100 * (1 - CONFIDENCE) / 2
    return {name: _range(values, tail) for name, values in seen.items()}


def _range(values: list[float], tail: float) -> tuple[float, float]:
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def drawn_times(profile: Profile, count: int) -> Iterator[tuple[StepTime, HostTime]]:
    """Step and host times drawn from the profile's uncertainty; always the same ones."""
    names, values, covariance = _joint(profile)
    # a covariance of terms that move together is singular, so its root is taken by eigenvalues
    variances, directions = np.linalg.eigh(covariance)
    root = directions * np.sqrt(np.maximum(variances, 0.0))
    rng = np.random.default_rng(0)
    for _ in range(count):
        drawn = np.maximum(values + root @ rng.standard_normal(len(names)), 0.0)
        terms = dict(zip(names, drawn.tolist(), strict=True))
        step = {name: value for name, value in terms.items() if name in profile.coefficients.step_time}
        host = {name: value for name, value in terms.items() if name in profile.coefficients.host_time}
        yield replace(profile.step_time, **step), replace(profile.host_time, **host)


def _joint(profile: Profile) -> tuple[list[str], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Names, values and covariance of the coefficients whose error is known."""
    terms = profile.coefficients.step_time | profile.coefficients.host_time
    uncertain = {name: term for name, term in terms.items() if term.stderr}
    names = list(uncertain)
    errors = np.array([term.stderr or 0.0 for term in uncertain.values()])
    correlation = np.eye(len(names))
    for one, other, value in profile.coefficients.correlations:
        if one in uncertain and other in uncertain:
            correlation[names.index(one), names.index(other)] = value
            correlation[names.index(other), names.index(one)] = value
    return names, np.array([term.value for term in uncertain.values()]), correlation * np.outer(errors, errors)

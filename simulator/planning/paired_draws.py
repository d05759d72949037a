"""The same uncertainty for several servers at once, so that what is unsure about all of them cancels in a difference.

A draw moves a coefficient of every server by the same share. What a server's coefficients are less sure of than the
first one's, as on another GPU, is drawn apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from simulator.engine.step_time import HostTime, StepTime
from simulator.profile import Coefficient, Profile
from simulator.uncertainty import DRAWS, LEAST_CONSTANT, covariance_root, even_draws

Times = tuple[StepTime, HostTime]


def paired_times(profiles: Sequence[Profile], at_least_one: bool = False) -> Iterator[list[Times]]:
    """Step and host times of each profile, draw by draw; always the same ones.

    Where no coefficient is uncertain there are none, or with `at_least_one` `DRAWS` times the fitted ones.
    """
    first = _terms(profiles[0])
    errors = {name: term.stderr for name, term in first.items() if term.stderr and term.value}
    more = [_more_doubt(first, _terms(profile)) for profile in profiles]
    apart = sorted({name for doubt in more for name in doubt})
    if not errors and not apart and not at_least_one:
        return
    values = np.array([first[name].value for name in errors])
    root = covariance_root(errors, profiles[0].coefficients.correlations)
    dimensions = len(errors) + len(apart)
    for point in even_draws(dimensions, max(DRAWS, dimensions + 1)):
        drawn = np.maximum(1.0 + (root @ point[: len(errors)]) / values, 0.0)
        common = dict(zip(errors, drawn.tolist(), strict=True))
        own = dict(zip(apart, point[len(errors) :].tolist(), strict=True))
        yield [_drawn(profile, common, own, doubt) for profile, doubt in zip(profiles, more, strict=True)]


def _terms(profile: Profile) -> dict[str, Coefficient]:
    return profile.coefficients.step_time | profile.coefficients.host_time


def _more_doubt(first: dict[str, Coefficient], terms: dict[str, Coefficient]) -> dict[str, float]:
    """By how much more each term is uncertain, as relative standard error that adds to the first one's in squares."""
    more = {}
    for name, term in terms.items():
        squares = _relative(term) ** 2 - (_relative(first[name]) ** 2 if name in first else 0.0)
        if squares > 1e-9:
            more[name] = math.sqrt(squares)
    return more


def _relative(term: Coefficient) -> float:
    return (term.stderr or 0.0) / term.value if term.value else 0.0


def _drawn(profile: Profile, common: dict[str, float], own: dict[str, float], doubt: dict[str, float]) -> Times:
    factors = {
        name: common.get(name, 1.0) * math.exp(doubt.get(name, 0.0) * own.get(name, 0.0)) for name in _terms(profile)
    }
    step: dict[str, Any] = {name: term.value * factors[name] for name, term in profile.coefficients.step_time.items()}
    host: dict[str, Any] = {name: term.value * factors[name] for name, term in profile.coefficients.host_time.items()}
    step["constant"] = max(LEAST_CONSTANT * profile.step_time.constant, step["constant"])  # steps take time in any draw
    return replace(profile.step_time, **step), replace(profile.host_time, **host)

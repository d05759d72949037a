"""Simulates levels of load with trial coefficients and compares their figures with what was measured or stated.

Both fits that have the simulator in the loop stand on it: `calibration.aggregate_fit` and `calibration.refine`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import Load, Workload
from simulator.results.run import Level
from simulator.results.summary import summarize

Array = npt.NDArray[np.float64]
Measure = Callable[[Level], float]


@dataclass(frozen=True)
class Figure:
    """A number that is known about one load.

    Attributes
        workload: a `Workload`, a recorded trace, or any other load
        metric: a name of `simulator.results.summary.Summary.flat`, or ``p50_decode_time``: first to last token of a
            request
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
class Trial:
    """Figures to be met, and what coefficients a point stands for.

    A point has one coordinate for each thing that is fitted, in standard deviations from its prior. `times` turns it
    into the coefficients.
    """

    figures: tuple[Figure, ...]
    flags: EngineFlags
    times: Callable[[Array], tuple[StepTime, HostTime]]

    def reproduce(self, point: Array) -> Array:
        """What the simulator makes of the figures, in their order; each load is played once."""
        step_time, host_time = self.times(point)
        made = np.full(len(self.figures), math.nan)
        for numbers in self._by_load():
            first = self.figures[numbers[0]]
            level = play_load(first.workload, first.flags or self.flags, step_time, host_time)
            made[numbers] = figures_of(level, [self.figures[number] for number in numbers])
        return made

    def misses(self, point: Array) -> Array:
        """By how many of its standard errors each figure is missed; positive where too much is predicted."""
        values = np.array([figure.value for figure in self.figures])
        errors = np.array([figure.uncertainty for figure in self.figures])
        return np.asarray((self.reproduce(point) / values - 1) / errors)

    def slopes(self, point: Array, steps: Array) -> Array:
        """Derivatives of the misses, a column for each coordinate, by central differences over `steps`."""
        columns = [
            (self.misses(point + step) - self.misses(point - step)) / (2 * size)
            for size, step in zip(steps, np.diag(steps), strict=True)
        ]
        return np.column_stack(columns)

    def _by_load(self) -> list[list[int]]:
        """The places of the figures that one simulation gives."""
        groups: dict[tuple[Load, EngineFlags | None], list[int]] = {}
        for number, figure in enumerate(self.figures):
            groups.setdefault((figure.workload, figure.flags), []).append(number)
        return list(groups.values())

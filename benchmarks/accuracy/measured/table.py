"""Predictions beside measurements, with signed errors."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from calibration.aggregate_fit import AggregateFit
from calibration.trial import Figure, figures_of, play_load
from simulator.engine.engine_flags import EngineFlags

DataRow = dict[str, str]


@dataclass(frozen=True)
class Row:
    """One number of one load, in seconds, tokens a second or requests. `fitted`: the fit has seen this load."""

    load: str
    metric: str
    measured: float
    predicted: float
    fitted: bool = False

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        scale = 1e3 if self.metric.endswith("ms") else 1.0
        numbers = f"{self.measured * scale:>11.2f} {self.predicted * scale:>11.2f} {self.error:>+9.1%}"
        return f"  {self.load:<30} {self.metric:<20} {numbers}{'  fitted' if self.fitted else ''}"


def compare(load: str, figures: Sequence[Figure], flags: EngineFlags, fit: AggregateFit, fitted: bool) -> list[Row]:
    """The figures of one load beside what the fit makes of it."""
    level = play_load(figures[0].workload, figures[0].flags or flags, fit.step_time, fit.host_time)
    return [
        Row(load, figure.metric + " ms" * ("throughput" not in figure.metric), figure.value, value, fitted)
        for figure, value in zip(figures, figures_of(level, figures), strict=True)
    ]


@dataclass(frozen=True)
class Goal:
    """The median absolute error over the unseen rows of these metrics shall be at most `limit`."""

    name: str
    metrics: tuple[str, ...]
    limit: float


@dataclass
class Report:
    """What came of one source. `notes` are sentences a reader must know."""

    source: str
    rows: list[Row]
    fits: dict[str, AggregateFit] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ()
    notes: tuple[str, ...] = ()

    def unseen(self, metrics: Sequence[str] = ()) -> list[Row]:
        """The rows of `metrics`, of all if none is named, that the fit has not seen."""
        return [row for row in self.rows if not row.fitted and (not metrics or row.metric in metrics)]

    def median_error(self, metrics: Sequence[str] = ()) -> float:
        """Median absolute error over the unseen rows."""
        return float(np.median([abs(row.error) for row in self.unseen(metrics)]))

    def lines(self) -> Iterator[str]:
        yield f"\n{self.source}"
        yield from (f"  note: {note}" for note in self.notes)
        for name, fit in self.fits.items():
            yield f"  coefficients {name}"
            for term, found in fit.terms.items():
                origin = "measured" if found.identified else f"assumed: {found.prior.source}"
                yield f"    {term:<24}{found.value:>11.4g} s +-{found.stderr:.2g}  {origin}"
        yield f"  {'load':<30} {'metric':<20} {'measured':>11} {'predicted':>11} {'error':>9}"
        yield from map(str, self.rows)
        for metric in dict.fromkeys(row.metric for row in self.unseen()):
            errors = [row.error for row in self.unseen((metric,))]
            spread = f"median {np.median(np.abs(errors)):.1%}, worst {max(errors, key=abs):+.1%}"
            yield f"  unseen {metric:<20} {len(errors):>3} rows: absolute error {spread}"
        for goal in self.goals:
            error = self.median_error(goal.metrics)
            yield f"  goal {goal.name} {goal.limit:.0%}: {error:.1%} {'met' if error <= goal.limit else 'MISSED'}"


def read(data: Path, name: str) -> list[DataRow]:
    """The rows of one of the sources' files."""
    with (data / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))

"""Runs as curves: levels of one kind of load, in ascending order, repeats of a level taken together.

For figures and the report. A measured and a predicted run of the same kind of load make one family, one beside the
other.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from simulator.loads.sessions import Sessions
from simulator.loads.workload import ClosedLoop, Load, Workload
from simulator.results.run import Level, Run
from simulator.results.summary import Summary, stated, summarize

SOURCES = {"measured": "measured", "simulated": "predicted"}
Kind = Literal["closed", "open", "burst"]
KINDS: dict[Kind, str] = {"closed": "Closed loop", "open": "Open loop", "burst": "All requests at once"}
UNITS: dict[Kind, str] = {"closed": "client", "open": "request/s", "burst": "request"}
AXES: dict[Kind, str] = {
    "closed": "clients (closed loop)",
    "open": "request rate, requests/s",
    "burst": "requests at once",
}


@dataclass(frozen=True)
class Point:
    """One level of load.

    Attributes
        value: clients, requests a second, or requests that are sent at once
        label: a few letters, such as ``C=8``
        level: what came of it, all repeats taken together
        summary: its numbers
        decode: s, median of E2EL - TTFT; NaN where nothing was completed
        repeats: the numbers of each repeat, where the level was repeated
    """

    value: float
    label: str
    level: Level
    summary: Summary
    decode: float
    repeats: tuple[Summary, ...] = ()

    def number(self, name: str) -> float:
        """A number of the level by the name of `Summary.flat`; NaN where it was not seen."""
        value = self.summary.flat()[name]
        return math.nan if value is None else float(value)

    def interval(self, name: str) -> tuple[float, float]:
        """The 90 % interval of a number; NaN where there is none."""
        return self.level.intervals.get(name, (math.nan, math.nan))


@dataclass(frozen=True)
class Curve:
    """The levels of one kind of load of one run. `source` is "measured" or "predicted"."""

    source: str
    points: tuple[Point, ...]

    @property
    def run(self) -> Run:
        """The same as a run, one level a point."""
        return Run("measured" if self.source == "measured" else "simulated", [point.level for point in self.points])

    def at(self, value: float) -> Point | None:
        """The point of a level."""
        return next((point for point in self.points if math.isclose(point.value, value)), None)


@dataclass(frozen=True)
class Family:
    """One kind of load: how requests are sent, and their lengths. The measured curve comes before the predicted one."""

    name: str
    kind: Kind
    curves: tuple[Curve, ...]

    @property
    def unit(self) -> str:
        """One more of what the levels are numbers of."""
        return UNITS[self.kind]

    @property
    def axis(self) -> str:
        """What the levels are numbers of."""
        return AXES[self.kind]

    @property
    def first(self) -> Curve:
        """The measured curve, or the predicted one where nothing was measured."""
        return self.curves[0]

    def of(self, source: str) -> Curve | None:
        """The curve of a source."""
        return next((curve for curve in self.curves if curve.source == source), None)

    @property
    def values(self) -> list[float]:
        """The levels of all curves, ascending."""
        return sorted({point.value for curve in self.curves for point in curve.points})

    def label(self, value: float) -> str:
        """The label of a level."""
        return next(point.label for curve in self.curves if (point := curve.at(value)) is not None)


def families(runs: Sequence[Run]) -> list[Family]:
    """The levels of the runs by their kind of load; the kind with most levels first, closed loops before open ones."""
    found: dict[Hashable, dict[str, dict[float, list[Level]]]] = {}
    for run in sorted(runs, key=lambda one: list(SOURCES).index(one.source)):
        for level in run.levels:
            by_value = found.setdefault(_kind(level.workload), {}).setdefault(SOURCES[run.source], {})
            by_value.setdefault(_value(level.workload), []).append(level)
    made = [
        _family([Curve(source, _points(by_value, source)) for source, by_value in sources.items()])
        for sources in found.values()
    ]
    return sorted(made, key=lambda family: (-len(family.values), [*KINDS].index(family.kind)))


def _family(curves: list[Curve]) -> Family:
    load = curves[0].points[-1].level.workload
    kind = _sending(load)
    return Family(f"{KINDS[kind]}, {load.lengths_label} tokens in/out", kind, tuple(curves))


def _points(by_value: dict[float, list[Level]], source: str) -> tuple[Point, ...]:
    return tuple(_point(value, levels, source) for value, levels in sorted(by_value.items()))


def _point(value: float, levels: list[Level], source: str) -> Point:
    level = _together(levels)
    done = level.completed
    decode = float((done["e2el"] - done["ttft"]).median()) if len(done) else math.nan
    repeats = tuple(summarize(one) for one in levels) if len(levels) > 1 else ()
    summary = summarize(level)
    if repeats:  # played one after the other they have a backlog that comes and goes
        summary = replace(summary, state=repeats[0].state, held_rate=repeats[0].held_rate)
    label = f"N={value:g}" if _sending(level.workload) == "burst" else level.workload.label
    return Point(value, label, level, stated(summary, source), decode, repeats)


def _together(levels: list[Level]) -> Level:
    """Repeats of a level, played one after the other."""
    if len(levels) == 1:
        return levels[0]
    starts = np.concatenate([[0.0], np.cumsum([level.duration for level in levels])])
    return Level(
        workload=levels[0].workload,
        duration=float(starts[-1]),
        requests=_shifted([level.requests for level in levels], starts, "arrival"),
        gaps=_shifted([level.gaps for level in levels], starts, "time"),
        timeline=_shifted([level.timeline for level in levels], starts, "time"),
        notes=list(dict.fromkeys(note for level in levels for note in level.notes)),
    )


def _shifted(tables: list[pd.DataFrame], starts: np.typing.NDArray[np.float64], name: str) -> pd.DataFrame:
    moved = [
        table.assign(**{name: table[name] + start})
        for table, start in zip(tables, starts.tolist()[:-1], strict=True)
        if len(table)
    ]
    return pd.concat(moved, ignore_index=True) if moved else tables[0]


def _kind(load: Load) -> Hashable:
    """What levels of one kind of load have in common: all but how much of it there is, and the seed."""
    if isinstance(load, (Workload, Sessions)):
        what = load.shapes if isinstance(load, Workload) else (load.talk, load.think_time)
        arrivals = load.arrivals
        if isinstance(arrivals, ClosedLoop):
            return what, "closed", arrivals.think_time
        kind = _sending(load)
        return what, kind, replace(arrivals, request_rate=1.0) if kind == "open" else None
    return type(load).__name__, _sending(load), load.lengths_label


def _sending(load: Load) -> Kind:
    """How the requests of a load are sent."""
    if load.concurrency is not None:
        return "closed"
    return "open" if math.isfinite(load.request_rate or math.inf) else "burst"


def _value(load: Load) -> float:
    kind = _sending(load)
    if kind == "burst":  # no more than `max_concurrency` are there at once
        return float(load.max_concurrency or load.num_prompts)
    return float((load.concurrency if kind == "closed" else load.request_rate) or math.nan)

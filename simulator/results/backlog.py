"""Whether a level has a steady state: whether it lasts long enough for one, and whether its server keeps up at all.

Percentiles of a level without one say how long it was, and nothing of the server: in an open loop above capacity each
request waits longer than the one before.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from simulator.loads.sessions import Sessions
from simulator.loads.trace import Trace
from simulator.loads.workload import Load, OpenLoop, Workload
from simulator.results.run import Level
from simulator.results.steady_window import steady_window

Array = npt.NDArray[np.float64]
State = Literal["steady", "no steady state", "not reached", "all at once"]

MAX_GROWTH = 0.02  # of the arrivals; a backlog that grows faster has no steady state
START_SHARE = 0.25  # of the requests that are left out at the start of an open loop
GROWTH_POINTS = 64  # moments at which a backlog is looked at
CHANCE = 2.0  # standard errors by which a backlog may grow by chance
WAITS = 2.0  # times as long to the first token at the end of a level as at its start: requests wait for each other


def state_of(level: Level) -> State:
    """What the requests in flight come to.

    "steady": they have a plateau. "not reached": the level ends before they have one. "no steady state": they grow as
    long as the level lasts, since more requests arrive than are served. "all at once": nothing arrives after the start.
    """
    load = level.workload
    if load.concurrency is None:
        offered = offered_rate(load)
        if not math.isfinite(offered):
            return "all at once"
        if _is_above(level, offered):
            return "no steady state"
    seen = level.requests.dropna(subset=["arrival", "e2el"])
    start = seen["arrival"].to_numpy(np.float64)
    return "not reached" if steady_window(start, start + seen["e2el"].to_numpy(np.float64)) is None else "steady"


def _is_above(level: Level, offered: float) -> bool:
    """Whether more requests arrive than the server can hold, as far as is known or, without that, as a level shows."""
    if level.held_rate is not None:
        return offered * (1 - MAX_GROWTH) > level.held_rate
    return backlog_growth(level) > MAX_GROWTH + CHANCE * _chance(level) and _waits_grow(level)


def held_rate(level: Level) -> float:
    """Requests a second that the server of an open loop can hold: where it was not looked for, those that a level
    without steady state shows; else NaN."""
    if level.held_rate is not None:
        return level.held_rate
    offered = offered_rate(level.workload) if level.workload.concurrency is None else math.nan
    return offered * (1 - backlog_growth(level)) if state_of(level) == "no steady state" else math.nan


def in_terms_of(load: Load, rate: float) -> float:
    """Requests a second as the label of an open loop counts them: sessions, or the rate before its curve."""
    arrivals = load.arrivals if isinstance(load, (Workload, Sessions, Trace)) else None
    return rate / offered_rate(load) * arrivals.request_rate if isinstance(arrivals, OpenLoop) else rate


def offered_rate(load: Load) -> float:
    """Requests a second of an open loop in the long run; infinite where all come at once, NaN in a closed loop."""
    rate = load.request_rate
    if rate is None:
        return math.nan
    arrivals = load.arrivals if isinstance(load, (Workload, Sessions, Trace)) else None
    curve = arrivals.curve if isinstance(arrivals, OpenLoop) and not isinstance(load, Trace) else None
    if curve is None:
        return rate
    return rate * (curve.factors[-1] if curve.period is None else curve.area(curve.period) / curve.period)


def backlog_growth(level: Level) -> float:
    """Requests by which the backlog of an open loop grows with each one that arrives: 0 in a steady state, up to 1.

    The slope of the requests in the system over time, by least squares over `GROWTH_POINTS` moments from the end of the
    start until the last request is sent, over the arrival rate.
    """
    sent = _due(level)
    if len(sent) < 2:
        return math.nan
    ended = np.sort((level.requests["arrival"] + level.requests["e2el"]).dropna().to_numpy())
    first = int(START_SHARE * len(sent))
    moments = np.linspace(sent[first], sent[-1], GROWTH_POINTS)
    if moments[-1] <= moments[0]:
        return math.nan
    backlog = np.searchsorted(sent, moments, side="right") - np.searchsorted(ended, moments, side="right")
    rate = (len(sent) - 1 - first) / (moments[-1] - moments[0])
    return float(np.polyfit(moments - moments[0], backlog, 1)[0] / rate)


def _due(level: Level) -> Array:
    """When requests came, in order; those who wait at the client, for `max_concurrency`, have come too."""
    times = level.workload.arrival_times()
    if times is not None and len(times) == len(level.requests):
        return times
    return np.sort(level.requests["arrival"].to_numpy(np.float64))


def _chance(level: Level) -> float:
    """Standard error of `backlog_growth` at the edge of capacity.

    There a backlog is a random walk, and the slope of least squares over one has the variance 6/5 of that of a step,
    over their number: of gaps between arrivals and of the work that they bring.
    """
    gaps = np.diff(_due(level)[int(START_SHARE * len(level.requests)) :])
    outputs = level.requests["output_tokens"].to_numpy(np.float64)
    if not len(gaps) or not gaps.mean() or not outputs.mean():
        return math.inf
    variance = (gaps.std() / gaps.mean()) ** 2 + (outputs.std() / outputs.mean()) ** 2
    return math.sqrt(6 / 5 * float(variance) / len(gaps))


def _waits_grow(level: Level) -> bool:
    """Whether the last requests take much longer to their first token than the first ones; else a level is short."""
    done = level.completed.sort_values("arrival", kind="stable")
    waits = done["ttft"].to_numpy(np.float64)
    if level.workload.max_concurrency is not None:  # they wait at the client, in the order in which they came
        waits = waits + done["arrival"].to_numpy(np.float64) - _due(level)[: len(done)]
    quarter = len(waits) // 4
    if not quarter:
        return False
    return float(np.median(waits[-quarter:])) > WAITS * float(np.median(waits[:quarter]))

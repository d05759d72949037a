"""The steady part of a level: between the ramp at its start and the drain at its end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

AT_ONCE = 1e-9  # s, within which all tokens of a request count as one moment's
PLATEAU = 0.95  # of the usual number of requests in flight, from which on the ramp is over

Array = npt.NDArray[np.float64]


def steady_window(starts: npt.ArrayLike, ends: npt.ArrayLike) -> tuple[float, float] | None:
    """When the requests in flight were at their plateau, from requests that were sent at `starts` and ended at `ends`.

    A line sweeps over sends and ends. The plateau is the time-weighted median of the requests in flight while any were
    still sent. The window begins when their number first reaches `PLATEAU` of it, and ends with the last send, after
    which none takes the place of one that ends. None where that is shorter than the median request: a closed loop of a
    single round, or a few arrivals, has no steady part.

    In a closed loop whose clients run in step the window holds whole rounds, bursts of prompts included.
    """
    start, end = np.asarray(starts, np.float64), np.asarray(ends, np.float64)
    if not len(start):
        return None
    times = np.concatenate([end, start])  # a stable sort lets an end go before a start of the same moment
    order = np.argsort(times, kind="stable")
    in_flight = np.cumsum(np.repeat([-1, 1], len(start))[order])
    times, last = times[order], float(start.max())
    lasts = np.diff(np.minimum(times, last), append=last)  # how long each number was in flight, up to the last send
    steady = float(times[np.argmax(in_flight >= PLATEAU * _weighted_median(in_flight, lasts))])
    return (steady, last) if last > steady and last - steady >= np.median(end - start) else None


def tokens_within(window: tuple[float, float], first: Array, last: Array, tokens: Array) -> float:
    """Output tokens that came within the window: each request's first at `first`, the others evenly until `last`."""
    begin, end = window
    spans = last - first
    inside = np.clip(np.minimum(last, end) - np.maximum(first, begin), 0.0, None) / np.maximum(spans, AT_ONCE)
    firsts = (begin <= first) & (first <= end)
    return float((firsts + (tokens - 1) * np.where(spans < AT_ONCE, firsts, inside)).sum())


def _weighted_median(values: npt.NDArray[np.int64], weights: Array) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])

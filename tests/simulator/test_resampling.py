"""Intervals of measured latencies hold the truth as often as they say."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.results.percentiles import requests_for, unbounded_percentiles
from simulator.results.resampling import resampled_intervals
from simulator.results.run import GAP_COLUMNS, REQUEST_COLUMNS, TIMELINE_COLUMNS, TOKEN_COLUMNS, Level

TOKENS = 21
ONE_CLIENT = ClosedLoop(1)
SHAPE = Shape(Length.fixed(64), Length.fixed(TOKENS))


def level(requests: int, seed: int = 0, arrivals: ClosedLoop | OpenLoop = ONE_CLIENT) -> Level:
    """Requests one after the other: TTFT exponential with mean 1 s; equal gaps in a request, uniform on 1 to 2 s."""
    rng = np.random.default_rng(seed)
    ttft, gap = rng.exponential(size=requests), rng.uniform(1, 2, size=requests)
    e2el = ttft + gap * (TOKENS - 1)
    start = np.concatenate([[0.0], np.cumsum(e2el)[:-1]])
    columns = (start, 64, TOKENS, ttft, gap, e2el, np.nan, -1, "length", "")
    table = pd.DataFrame(dict(zip(REQUEST_COLUMNS, (np.arange(requests), *columns), strict=True))).astype(
        REQUEST_COLUMNS
    )
    count = np.tile(np.arange(1, TOKENS + 1), requests)
    times = np.repeat(start + ttft, TOKENS) + np.repeat(gap, TOKENS) * (count - 1)
    tokens = pd.DataFrame({"request_id": np.repeat(np.arange(requests), TOKENS), "time": times, "tokens": count})
    return Level(
        Workload(arrivals, (SHAPE,), requests),
        float(e2el.sum()),
        table,
        pd.DataFrame(columns=list(GAP_COLUMNS)).astype(GAP_COLUMNS),
        pd.DataFrame(columns=list(TIMELINE_COLUMNS)).astype(TIMELINE_COLUMNS),
        tokens=tokens.astype(TOKEN_COLUMNS),
    )


@pytest.mark.slow
def test_intervals_hold_the_truth_about_nine_times_in_ten() -> None:
    """The true figures of the distributions that `level` draws from; 40 levels of 80 requests."""
    truth = {
        "mean_ttft": 1.0,
        "p50_ttft": np.log(2),
        "p90_ttft": np.log(10),
        "p50_tpot": 1.5,
        "mean_itl": 1.5,
        "p50_itl": 1.5,
        "p90_itl": 1.9,
        "output_throughput": TOKENS / (1 + 1.5 * (TOKENS - 1)),
    }
    found = [resampled_intervals(level(80, seed)) for seed in range(40)]
    for name, value in truth.items():
        held = np.mean([intervals[name][0] <= value <= intervals[name][1] for intervals in found])
        assert 0.8 <= held <= 0.98, name


def test_gaps_of_a_request_are_not_taken_for_independent() -> None:
    """All gaps of a request are equal: the median gap is known as well as the median TPOT, and not much better."""
    found = resampled_intervals(level(80))
    widths = {name: high - low for name, (low, high) in found.items()}
    assert widths["p50_itl"] == pytest.approx(widths["p50_tpot"], rel=0.25)


def test_a_percentile_needs_enough_requests() -> None:
    assert [requests_for(percentile) for percentile in (50, 90, 95, 99)] == [5, 29, 59, 299]
    assert unbounded_percentiles(58) == [95, 99]
    assert unbounded_percentiles(299) == []
    for requests, last in ((5, "p50_ttft"), (29, "p90_ttft"), (59, "p95_ttft"), (299, "p99_ttft")):
        assert last in resampled_intervals(level(requests))
        assert last not in resampled_intervals(level(requests - 1))


def test_the_same_level_has_the_same_intervals() -> None:
    assert resampled_intervals(level(40)) == resampled_intervals(level(40))


def test_the_rate_of_an_open_loop_is_given_and_has_no_interval() -> None:
    assert "output_throughput" not in resampled_intervals(level(40, arrivals=OpenLoop(1.0)))

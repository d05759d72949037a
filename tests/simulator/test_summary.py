"""The numbers of a level are those that counting by hand gives."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.planning.targets import missed_targets, parse_targets
from simulator.results.run import GAP_COLUMNS, REQUEST_COLUMNS, TIMELINE_COLUMNS, Level, Run
from simulator.results.summary import summarize, summary_table
from simulator.yaml_file import KeyProblem

WORKLOAD = Workload(ClosedLoop(2), (Shape(Length.fixed(10), Length.fixed(5)),), 3)


def table(columns: dict[str, str], rows: list[tuple[object, ...]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def request(number: int, arrival: float, e2el: float, error: str = "", preemptions: int = 0) -> tuple[object, ...]:
    tokens = 0 if error else 5
    ttft = math.nan if error else 0.5
    tpot = math.nan if error else (e2el - 0.5) / 4
    return (number, arrival, 10, tokens, ttft, tpot, e2el, 0.0, preemptions, "" if error else "length", error)


def level(
    requests: list[tuple[object, ...]],
    gaps: list[tuple[float, float, int]] | None = None,
    timeline: list[tuple[float, int, int, float, float]] | None = None,
    duration: float = 4.0,
) -> Level:
    return Level(
        WORKLOAD,
        duration,
        table(REQUEST_COLUMNS, requests),
        table(GAP_COLUMNS, gaps or []),  # type: ignore[arg-type]
        table(TIMELINE_COLUMNS, timeline or []),  # type: ignore[arg-type]
    )


def test_throughput_counts_what_was_completed() -> None:
    summary = summarize(level([request(0, 0, 2), request(1, 0, 1, error="http 500"), request(2, 2, 2)]))
    assert (summary.requests, summary.completed, summary.errors) == (3, 2, 1)
    assert summary.request_throughput == 2 / 4
    assert summary.output_throughput == 10 / 4
    assert summary.total_throughput == 30 / 4


def test_latencies_leave_failed_requests_out() -> None:
    summary = summarize(level([request(0, 0, 2), request(1, 0, 100, error="timeout"), request(2, 2, 4)]))
    assert summary.e2el.mean == 3
    assert summary.e2el.p50 == 3
    assert summary.ttft.p99 == 0.5


def test_concurrency_is_the_integral_over_requests_in_the_system() -> None:
    summary = summarize(level([request(0, 0, 1), request(1, 1, 1), request(2, 1, 3)]))
    assert summary.mean_concurrency == pytest.approx((1 + 1 + 3) / 4)
    assert summary.peak_concurrency == 2  # the first ends as the others start


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=20),
)
def test_littles_law_holds(spans: list[tuple[int, int]]) -> None:
    requests = [request(number, float(start), float(length)) for number, (start, length) in enumerate(spans)]
    duration = float(max(start + length for start, length in spans))
    summary = summarize(level(requests, duration=duration))
    assert summary.mean_concurrency == pytest.approx(summary.request_throughput * summary.e2el.mean)
    occupied = [sum(start <= moment < start + length for start, length in spans) for moment in range(int(duration))]
    assert summary.peak_concurrency == max(occupied)
    assert summary.mean_concurrency == pytest.approx(np.mean(occupied))


def test_itl_weighs_every_gap() -> None:
    summary = summarize(level([request(0, 0, 2)], gaps=[(1.0, 0.1, 8), (2.0, 0.6, 2)]))
    assert summary.itl.mean == pytest.approx(0.2)
    assert summary.itl.p50 == 0.1
    assert summary.itl.p95 == np.percentile([0.1] * 8 + [0.6] * 2, 95)


def test_tokens_in_flight_are_weighed_by_time() -> None:
    rows = [(0.0, 1, 0, 16.0, 10.0), (1.0, 1, 0, 32.0, 30.0), (4.0, 2, 0, math.nan, 30.0)]
    summary = summarize(level([request(0, 0, 2)], timeline=rows))
    assert summary.mean_active_tokens == pytest.approx((20 * 1 + 30 * 3) / 4)
    assert summary.peak_active_tokens == 30
    assert summary.peak_kv_tokens == 32


def test_a_gauge_over_next_to_no_time_is_the_mean_of_what_was_seen() -> None:
    """Dividing an area by the smallest of numbers would overflow."""
    rows = [(0.0, 2, 0, 10.0, 10.0), (9.0, 2, 0, 30.0, 30.0), (5e-324, 2, 0, 20.0, 20.0)]
    assert summarize(level([request(0, 0, 2)], timeline=rows)).mean_active_tokens == 20


def test_what_was_not_seen_is_not_made_up() -> None:
    summary = summarize(level([request(0, 0, 2, preemptions=-1)]))
    assert summary.preemptions is None
    assert math.isnan(summary.itl.p50)
    assert math.isnan(summary.peak_kv_tokens)
    assert math.isnan(summarize(level([request(0, 0, math.nan, error="timeout")])).mean_concurrency)


def test_a_run_is_a_table_of_levels() -> None:
    open_level = level([request(0, 0, 2)])
    open_level.workload = Workload(OpenLoop(0.5), WORKLOAD.shapes, 1)
    rows = summary_table(Run("simulated", [level([request(0, 0, 2)]), open_level]))
    assert list(rows["level"]) == ["C=2", "0.5/s"]
    assert list(rows["lengths"]) == ["10/5", "10/5"]
    assert rows["concurrency"][0] == 2
    assert rows["request_rate"][1] == 0.5
    assert rows["p50_ttft"][0] == 0.5
    assert "p99_e2el" in rows


def test_targets_are_met_or_missed() -> None:
    summary = summarize(level([request(0, 0, 2)]))
    assert missed_targets(summary, {"p50_ttft": 500.0}) == []
    assert missed_targets(summary, {"p50_ttft": 499.0, "p99_e2el": 2000.0}) == ["p50_ttft"]
    assert missed_targets(summary, {"p99_itl": 1e9}) == ["p99_itl"]  # no gap was seen
    assert parse_targets("p99_ttft:2000, mean_itl:20") == {"p99_ttft": 2000, "mean_itl": 20}
    for text in ("p99_ttft", "p99_ttft:", "p99:3", "p99_ttft:nan", "p99_ttft:-1", ""):
        with pytest.raises(KeyProblem):
            parse_targets(text)

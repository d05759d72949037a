"""Targets as people write them, and what they ask of a level and of a single request."""

from __future__ import annotations

import pytest

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import StepTime
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload
from simulator.planning.targets import (
    figures,
    join_targets,
    missed_targets,
    parse_targets,
    request_bounds,
    targets_label,
    tightened,
)
from simulator.results.run import Level
from simulator.results.summary import summarize
from simulator.yaml_file import KeyProblem


@pytest.fixture
def level() -> Level:
    """Four requests, each with a first token after 10 ms and four gaps of 10 ms."""
    load = Workload(ClosedLoop(1), (Shape(Length.fixed(16), Length.fixed(5)),), 4)
    return simulate_level(load, EngineFlags(async_scheduling=False), StepTime(0.01))


def test_several_texts_hold_together() -> None:
    targets = join_targets(["p95_ttft:1000,P95-TPOT:50", "error_rate:0"])
    assert targets == {"p95_ttft": 1000, "p95_tpot": 50, "error_rate": 0}
    assert targets_label(targets) == "p95_ttft <= 1000 ms, p95_tpot <= 50 ms, error_rate <= 0"


@pytest.mark.parametrize("latency", ["ttft", "tpot", "itl", "e2el"])
@pytest.mark.parametrize("statistic", ["mean", "p50", "p90", "p95", "p99"])
def test_every_statistic_of_every_latency_may_have_a_target(latency: str, statistic: str, level: Level) -> None:
    (name,) = parse_targets(f"{statistic}_{latency}:50")
    assert figures(summarize(level))[name] == pytest.approx(50 if latency == "e2el" else 10)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("p95_tttf:1000", "did you mean 'p95_ttft'"),
        ("p95_ttft", "written p99_ttft:2000"),
        ("p95_ttft:0", "positive number of milliseconds"),
        ("error_rate:5", "0.01 for 1 %"),
        ("error_rate:-0.1", "share of the requests"),
        ("p95_ttft:1000,p95_ttft:2000", "give it once"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, says: str) -> None:
    with pytest.raises(KeyProblem, match=says):
        parse_targets(text)


def test_a_failed_request_misses_an_error_rate(level: Level) -> None:
    assert missed_targets(summarize(level), {"error_rate": 0}) == []
    level.requests.loc[0, "error"] = "timeout"
    assert missed_targets(summarize(level), {"error_rate": 0.2}) == ["error_rate"]
    assert missed_targets(summarize(level), {"error_rate": 0.25}) == []


def test_a_request_is_bound_by_the_loosest_percentile() -> None:
    targets = {"p50_ttft": 500.0, "p99_ttft": 2000.0, "mean_tpot": 20.0, "p99_itl": 100.0, "p90_e2el": 9000.0}
    assert request_bounds(targets) == {"ttft": 2.0, "e2el": 9.0}


def test_a_margin_tightens_times_and_not_errors() -> None:
    assert tightened({"p99_ttft": 1000, "error_rate": 0.01}, 0.9) == {"p99_ttft": 900, "error_rate": 0.01}


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "1e400", "", "\0", "9" * 5000, "2000ms", "\u200b1"])
def test_a_target_that_means_nothing_is_refused(value: str) -> None:
    with pytest.raises(KeyProblem, match=r"p99_ttft"):
        parse_targets(f"p99_ttft:{value}")

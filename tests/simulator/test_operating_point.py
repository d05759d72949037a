"""Where to run: the knee of a known curve, and the published sweep's own table."""

from __future__ import annotations

import pytest

from benchmarks import rtx4090
from simulator.loads.levels import plan_levels
from simulator.loads.workload import Length, Shape
from simulator.planning.operating_point import knee, power, recommend, slo_table
from simulator.prediction import predict
from simulator.profile import Profile
from simulator.results.run import Run


@pytest.fixture(scope="module")
def sweep() -> Run:
    """The RTX 4090 sweep: 1,024 / 256 tokens, ten requests a client."""
    profile = Profile.load(rtx4090.PROFILE)
    shape = Shape(Length.fixed(1024), Length.fixed(256))
    return predict(profile, plan_levels([shape], concurrency=[1, 2, 4, 8, 16, 32, 64], requests_per_client=10))


def test_power_peaks_where_a_queue_is_half_full() -> None:
    """M/M/1: rate over time in the system is rho (1 - rho), greatest at a utilization of one half (Kleinrock)."""
    rates = [0.1, 0.3, 0.5, 0.7, 0.9]
    levels = [{"output_throughput": rate, "mean_e2el": 1 / (1 - rate)} for rate in rates]
    assert power(levels[0]) == pytest.approx(0.1 * 0.9)
    assert rates[knee(levels)] == 0.5


def test_the_knee_of_nothing() -> None:
    with pytest.raises(ValueError, match="no knee"):
        knee([])


def test_for_each_slo_the_level_with_its_figures(sweep: Run) -> None:
    """The report recommends 16 clients: 683 tok/s, 17.4 ms median ITL; 32 give a p99 TTFT of 2.85 s."""
    slos = [{"p99_ttft": 2000.0, "p99_itl": 200.0}, {"p50_itl": 5.0}, {"p99_ttft": 100_000.0}]
    table = slo_table(sweep, slos)
    assert list(table["level"]) == ["C=16", "", "C=64"]
    assert list(table["misses"]) == ["p99_ttft", "p50_itl", ""]
    assert table["output_throughput"][0] == pytest.approx(683, rel=0.03)
    assert table["p50_itl"][0] == pytest.approx(17.4e-3, rel=0.03)
    assert table["output_throughput"].isna().tolist() == [False, True, False]


def test_the_recommended_level_says_why(sweep: Run) -> None:
    point = recommend(sweep, {"p99_ttft": 2000.0, "p99_itl": 200.0})
    assert point is not None
    assert point.label == "C=16"
    assert point.reason.endswith("C=32 misses p99_ttft.")
    assert recommend(sweep, {"p50_itl": 5.0}) is None
    best = recommend(sweep)
    assert best is not None
    assert "knee" in best.reason


def test_a_level_that_is_met_above_one_that_is_not_was_lucky(sweep: Run) -> None:
    shuffled = Run("simulated", [sweep.levels[0], sweep.levels[6], sweep.levels[1]])
    assert list(slo_table(shuffled, [{"p99_ttft": 500.0}])["level"]) == ["C=1"]

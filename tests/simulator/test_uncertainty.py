"""A prediction is as uncertain as the coefficients behind it, as chance, and as the model itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.prediction import predict
from simulator.profile import Coefficient, LevelErrors, Profile
from simulator.results.summary import summarize
from simulator.uncertainty import (
    LEAST_ERROR,
    SPREAD_OF_MEAN,
    covariance_root,
    drawn_times,
    even_draws,
    intervals,
    is_random,
    model_error,
    repeated,
)

SHAPE = (Shape(Length.fixed(200), Length.fixed(40)),)
LOAD = Workload(ClosedLoop(4), SHAPE, 40)


def known_to(profile: Profile, relative: float, correlations: list[tuple[str, str, float]] | None = None) -> Profile:
    """The profile with every coefficient known to a relative standard error, and a model that is never off."""
    terms = profile.coefficients
    changed = {
        kind: {
            name: Coefficient(value=term.value, stderr=relative * term.value)
            for name, term in getattr(terms, kind).items()
        }
        for kind in ("step_time", "host_time")
    }
    coefficients = terms.model_copy(update={**changed, "correlations": correlations or []})
    return profile.model_copy(update={"coefficients": coefficients, "hold_out": [], "fit": []})


def off_by(profile: Profile, **errors: float) -> Profile:
    """The profile with exact coefficients, off by `errors` on a level of 10 requests that it never saw."""
    exact = known_to(profile, 0.0)
    return exact.model_copy(update={"hold_out": [LevelErrors(level="C=4", num_prompts=10, errors=errors)]})


def half_width(profile: Profile, name: str, load: Workload = LOAD) -> float:
    """Relative, of the logarithm."""
    low, high = intervals(profile, load)[name]
    return float(np.log(high / low) / 2)


def test_a_profile_that_knows_no_errors_gives_no_intervals(profile: Profile) -> None:
    assert intervals(known_to(profile, 0.0), LOAD) == {}
    assert predict(known_to(profile, 0.0), [LOAD], with_intervals=True).levels[0].intervals == {}


def test_a_lone_clients_interval_is_that_of_the_constant_it_waits_for(profile: Profile) -> None:
    constant = profile.coefficients.step_time["constant"].value
    terms = {name: Coefficient(value=0.0) for name in profile.coefficients.step_time}
    terms["constant"] = Coefficient(value=constant, stderr=0.02 * constant)
    coefficients = profile.coefficients.model_copy(update={"step_time": terms, "host_time": {}, "correlations": []})
    flags = profile.engine_flags.changed(async_scheduling=False)  # else the engine sleeps before the next request
    alone = profile.model_copy(update={"coefficients": coefficients, "hold_out": [], "fit": [], "engine_flags": flags})
    lone = Workload(ClosedLoop(1), SHAPE, 20)
    expected = 1.645 * np.hypot(0.02, LEAST_ERROR)
    for name in ("p50_itl", "p50_ttft", "p99_e2el", "output_throughput"):
        assert half_width(alone, name, lone) == pytest.approx(expected, rel=0.03), name


def test_the_interval_grows_with_the_error_and_holds_the_prediction(profile: Profile) -> None:
    narrow, wide = (intervals(known_to(profile, error), LOAD) for error in (0.01, 0.05))
    predicted = summarize(predict(profile, [LOAD]).levels[0]).flat()
    for name in ("output_throughput", "p50_itl", "p50_e2el"):
        assert narrow[name][0] < float(predicted[name] or 0) < narrow[name][1]
        assert np.ptp(wide[name]) > 2 * np.ptp(narrow[name])


def test_random_arrivals_are_part_of_the_doubt(profile: Profile) -> None:
    calm = half_width(off_by(profile, p50_ttft=0.001), "p99_ttft")
    assert half_width(off_by(profile, p50_ttft=0.001), "p99_ttft", Workload(OpenLoop(5.0), SHAPE, 40)) > 5 * calm


@pytest.mark.slow
def test_other_random_arrivals_fall_inside_nine_times_of_ten(profile: Profile) -> None:
    load = Workload(OpenLoop(20.0), SHAPE, 60)
    exact = off_by(profile, p50_ttft=0.001)
    found, inside = intervals(exact, load), []
    for number in range(40):
        level = simulate_level(replace(load, seed=100 + number), exact.engine_flags, exact.step_time, exact.host_time)
        seen = summarize(level).flat()
        inside += [low <= float(seen[name] or 0) <= high for name, (low, high) in found.items() if "_ttft" in name]
    assert 0.75 <= np.mean(inside) <= 1.0


def test_the_models_error_is_part_of_the_doubt(profile: Profile) -> None:
    off = off_by(profile, p50_itl=-0.04, output_throughput=0.02)
    assert half_width(off, "p50_itl") == pytest.approx(1.645 * SPREAD_OF_MEAN * 0.04)
    assert half_width(off, "output_throughput") == pytest.approx(1.645 * SPREAD_OF_MEAN * 0.02)


def test_the_closest_known_error_speaks_for_a_metric_that_was_not_judged(profile: Profile) -> None:
    off = off_by(profile, p50_ttft=0.03, p99_itl=0.1, output_throughput=0.01)
    assert model_error(off, "mean_ttft") == pytest.approx(SPREAD_OF_MEAN * 0.03)
    assert model_error(off, "p90_itl") == pytest.approx(SPREAD_OF_MEAN * 0.1)
    assert model_error(off, "p99_e2el") == pytest.approx(SPREAD_OF_MEAN * 0.01)
    assert model_error(off, "peak_kv_tokens") == 0


def test_noise_between_repeats_counts_where_it_exceeds_the_error(profile: Profile) -> None:
    off = off_by(profile, p50_ttft=0.01).model_copy(update={"noise": {"p50_ttft": 0.1}})
    assert model_error(off, "p50_ttft") == pytest.approx(0.1 / 1.128)


def test_levels_weigh_by_their_requests(profile: Profile) -> None:
    brief = LevelErrors(level="", num_prompts=1, errors={"p50_itl": -0.5})
    long = LevelErrors(level="", num_prompts=99, errors={"p50_itl": 0.01})
    judged = profile.model_copy(update={"fit": [brief], "hold_out": [long]})
    assert model_error(judged, "p50_itl") == pytest.approx(SPREAD_OF_MEAN * (0.005 + 0.0099))


def test_outside_the_measured_range_the_models_error_counts_once_more_for_every_doubling(profile: Profile) -> None:
    off = off_by(profile, p50_itl=0.02)  # of a profile measured for 1 to 8 clients
    for clients, factor in ((8, 1), (16, 2), (32, 3)):
        load = Workload(ClosedLoop(clients), SHAPE, 4 * clients)
        assert half_width(off, "p50_itl", load) == pytest.approx(factor * 1.645 * SPREAD_OF_MEAN * 0.02)
    level = predict(off, [Workload(ClosedLoop(16), SHAPE, 32)], with_intervals=True).levels[0]
    assert level.notes == [
        "concurrency 16, measured 1 to 8",
        "so far outside, intervals take the model's own error 2.0 times",
    ]


def test_a_percentile_between_two_modes_may_be_in_either(profile: Profile) -> None:
    """Some coefficients put the second request into the first one's step, some do not: the interval holds both."""
    serial = HostTime(per_request_serial=0.005)
    flags, both = profile.engine_flags, Workload(ClosedLoop(2), (Shape(Length.fixed(64), Length.fixed(1)),), 2)
    fast, slow = (
        summarize(simulate_level(both, flags, StepTime(constant), serial)).ttft.p99 for constant in (0.0035, 0.0065)
    )
    terms = profile.coefficients.model_copy(
        update={
            "step_time": {"constant": Coefficient(value=0.005, stderr=0.0015)},
            "host_time": {"per_request_serial": Coefficient(value=0.005)},
        }
    )
    low, high = intervals(profile.model_copy(update={"coefficients": terms}), both)["p99_ttft"]
    assert low < min(fast, slow)
    assert max(fast, slow) < high


def test_what_the_load_alone_decides_is_certain(profile: Profile) -> None:
    found = intervals(known_to(profile, 0.05), LOAD)
    assert found["peak_concurrency"] == pytest.approx((4, 4))
    assert "requests" not in found


def test_only_what_chance_decides_is_random() -> None:
    fixed, drawn = Shape(Length.fixed(8), Length.fixed(8)), Shape(Length(8, 80), Length.fixed(8))
    assert not is_random(Workload(ClosedLoop(2), (fixed,), 50))
    assert not is_random(Workload(OpenLoop(2.0, float("inf")), (fixed,), 50))
    assert is_random(Workload(OpenLoop(2.0), (fixed,), 50))
    assert is_random(Workload(ClosedLoop(2), (drawn,), 50))
    assert is_random(Workload(ClosedLoop(2), (fixed, Shape(Length.fixed(9), Length.fixed(8))), 50))


@pytest.mark.slow
def test_a_shorter_level_shows_what_a_long_one_repeats(profile: Profile) -> None:
    load = Workload(ClosedLoop(4), SHAPE, 600)
    assert repeated(load).num_prompts < 500
    assert repeated(replace(load, shapes=(Shape(Length(100, 300), Length.fixed(40)),))).num_prompts == 600
    uncertain = known_to(profile, 0.03)
    whole = replace(load, num_prompts=240)
    for name in ("p50_itl", "p50_e2el", "output_throughput"):
        assert half_width(uncertain, name, load) == pytest.approx(half_width(uncertain, name, whole), rel=0.1), name


def test_draws_have_exactly_the_mean_and_covariance_that_they_stand_for() -> None:
    draws = even_draws(5, 8)
    assert draws.mean(axis=0) == pytest.approx(np.zeros(5), abs=1e-12)
    assert draws.T @ draws / 8 == pytest.approx(np.eye(5), abs=1e-12)


def test_the_root_gives_the_covariance_back() -> None:
    root = covariance_root({"a": 1.0, "b": 2.0, "c": 0.5}, [("a", "b", -0.6), ("a", "unknown", 0.3)])
    assert root @ root.T == pytest.approx(np.array([[1, -1.2, 0], [-1.2, 4, 0], [0, 0, 0.25]]))
    together = covariance_root({"a": 1.0, "b": 2.0}, [("a", "b", 1.0)])
    assert together @ together.T == pytest.approx(np.array([[1, 2], [2, 4]]))


def test_errors_that_move_together_are_drawn_together(profile: Profile) -> None:
    one, other = list(profile.coefficients.step_time)[:2]
    linked = known_to(profile, 0.1, [(one, other, -1.0)])
    drawn = [step_time for step_time, _ in drawn_times(linked)]
    values = np.array([[getattr(step_time, one), getattr(step_time, other)] for step_time in drawn])
    assert np.corrcoef(values.T)[0, 1] == pytest.approx(-1.0, abs=1e-6)


def test_the_same_profile_gives_the_same_interval(profile: Profile) -> None:
    assert intervals(known_to(profile, 0.03), LOAD) == intervals(known_to(profile, 0.03), LOAD)

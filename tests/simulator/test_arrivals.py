"""Arrivals come at the rate that was asked for, at every time of the curve."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.arrivals import (
    DAY,
    ClosedLoop,
    OpenLoop,
    RateCurve,
    ThinkTime,
    parse_curve,
    parse_seconds,
    parse_think_time,
)
from simulator.loads.workload import Length, Shape, Workload
from simulator.results.run import Level

STEP = StepTime(0.01, 1e-5, 1e-8, 2e-5)
FLAGS = EngineFlags(max_num_seqs=64, num_gpu_blocks=4000)
SHAPES = (Shape(Length.fixed(100), Length.fixed(20)),)


def play(arrivals: ClosedLoop | OpenLoop, num_prompts: int = 100, host: HostTime | None = None) -> Level:
    return simulate_level(Workload(arrivals, SHAPES, num_prompts), FLAGS, STEP, host)


def counts(curve: str, rate: float, count: int, width: float, burstiness: float = 1.0) -> np.ndarray:
    """Arrivals a second in slices of `width` seconds."""
    times = OpenLoop(rate, burstiness, curve=parse_curve(curve)).times(count, 0)
    assert (np.diff(times) >= 0).all()
    return np.bincount((times / width).astype(int)) / width


def test_a_ramp_climbs_evenly_and_stays() -> None:
    found = counts("ramp(0-1,1000s)", 50, 75_000, 100)
    assert found[:10] == pytest.approx(50 * (np.arange(10) + 0.5) / 10, rel=0.06)
    assert found[10:19] == pytest.approx(50, rel=0.06)


def test_bursts_come_in_turn_with_silence() -> None:
    times = OpenLoop(100, curve=parse_curve("bursts(5s,20s)")).times(20_000, 3)
    assert (times % 25 <= 5).all()
    whole = np.bincount((times // 25).astype(int))[:-1]
    assert whole.mean() == pytest.approx(500, rel=0.02)
    assert whole.var() == pytest.approx(500, rel=0.5)  # Poisson within the bursts


def test_between_bursts_the_rate_may_be_low_instead() -> None:
    times = OpenLoop(100, curve=parse_curve("bursts(5s,15s,0.2)")).times(20_000, 3)
    low = times[times % 20 > 5]
    assert len(low) / len(times) == pytest.approx(15 * 0.2 / (5 + 15 * 0.2), rel=0.03)


def test_a_day_follows_its_curve_and_comes_again() -> None:
    curve = parse_curve("daily(6h:0.2,12h:1,18h:0.6)")
    at = np.array([6, 9, 12, 15, 18, 24, 27, 30, 36]) * 3600.0
    little = 1.0
    rate = np.array([curve.area(time + little) - curve.area(time - little) for time in at]) / (2 * little)
    assert rate == pytest.approx([0.2, 0.6, 1.0, 0.8, 0.6, 0.4, 0.3, 0.2, 1.0], rel=1e-3)
    found = counts("daily(6h:0.2,12h:1,18h:0.6)", 0.5, 43_200, 3600)
    assert found[9] == pytest.approx(0.5 * (0.6 + 0.2 / 3), rel=0.1)
    assert found[24:40] == pytest.approx(found[:16], rel=0.15)


@pytest.mark.parametrize("text", ["ramp(0.1-1,10min)", "ramp(2-0.5,1h)", "bursts(3s,4s)", "daily(0h:1,8h:0,20h:3)"])
def test_moments_undo_the_area(text: str) -> None:
    curve = parse_curve(text)
    areas = np.sort(np.random.default_rng(0).uniform(0, 3 * curve.area(DAY), 1000))
    moments = curve.moments(areas)
    assert [curve.area(moment) for moment in moments.tolist()] == pytest.approx(areas.tolist(), rel=1e-9)


def test_even_arrivals_stay_even_under_a_curve() -> None:
    times = OpenLoop(10, math.inf, curve=parse_curve("bursts(1s,9s)")).times(30, 0)
    assert times == pytest.approx([k // 10 * 10 + (k % 10 + 1) / 10 for k in range(30)])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_burstiness_that_was_asked_for(burstiness: float) -> None:
    gaps = np.diff(OpenLoop(5, burstiness).times(100_000, 0))
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.05)


def test_as_many_arrive_in_a_time_as_are_expected() -> None:
    arrivals = OpenLoop(20, curve=parse_curve("ramp(0-1,100s)"))
    assert arrivals.expected(100) == pytest.approx(1000)
    assert arrivals.expected(150) == pytest.approx(2000)
    assert arrivals.times(1000, 0)[-1] == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "factors", "period", "words"),
    [
        ((1.0,), (1.0,), None, "start at 0"),
        ((0.0, 2.0, 1.0), (1.0, 1.0, 1.0), None, "in order"),
        ((0.0,), (-1.0,), None, "must be 0, or"),
        ((0.0,), (1e308,), None, "must be 0, or"),
        ((0.0, math.nan), (1.0, 1.0), None, "be numbers up to"),
        ((0.0, 1e300), (1.0, 1.0), None, "be numbers up to"),
        ((0.0, 1.0), (1.0, 0.0), 1e9, "go on for ever"),
        ((0.0,), (1.0,), 0.0, "take some time"),
        ((0.0, 5.0), (1.0, 0.0), None, "go on for ever"),
        ((0.0,), (0.0,), 5.0, "go on for ever"),
        ((0.0, 5.0), (1.0, 1.0), 4.0, "hold all its moments"),
        ((0.0,), (1.0, 1.0), None, "a factor for each"),
    ],
)
def test_a_curve_that_makes_no_sense_is_refused(
    seconds: tuple[float, ...], factors: tuple[float, ...], period: float | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        RateCurve(seconds, factors, period)


@pytest.mark.parametrize("text", ["", "ramp", "ramp(1)", "ramp(a-b,5s)", "bursts(5s)", "daily(25h:1)", "sine(1,2)"])
def test_what_is_no_curve_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_curve(text)


def test_times_are_read_with_their_units() -> None:
    assert [parse_seconds(text) for text in ("2", "2s", "500ms", "10min", "1.5h", "1d")] == [2, 2, 0.5, 600, 5400, DAY]
    assert parse_think_time("2s") == ThinkTime(2.0)
    assert parse_think_time("exponential(500ms)") == ThinkTime(0.5, "exponential")
    with pytest.raises(ValueError, match="no time such as"):
        parse_think_time("soon")


def test_a_lone_client_thinks_between_its_requests() -> None:
    load = Workload(ClosedLoop(1, think_time=ThinkTime(3.0)), SHAPES, 10)
    requests = simulate_level(load, FLAGS.changed(async_scheduling=False), STEP).requests
    ends = (requests["arrival"] + requests["e2el"]).to_numpy()
    assert requests["arrival"].to_numpy()[1:] - ends[:-1] == pytest.approx([3.0] * 9)


def test_throughput_of_thinking_clients_follows_the_response_time_law() -> None:
    """N = X (R + Z), for any distribution of the think time Z."""
    for think in (ThinkTime(2.0), ThinkTime(2.0, "exponential")):
        level = play(ClosedLoop(20, think_time=think), 4000)
        rate = len(level.requests) / level.duration
        assert rate * (level.requests["e2el"].mean() + 2.0) == pytest.approx(20, rel=0.03)


def test_a_cap_holds_and_what_waits_at_the_client_is_in_no_latency() -> None:
    host = HostTime(0.004)
    free, capped = (play(OpenLoop(30, max_concurrency=cap), 300, host) for cap in (None, 4))
    start, end = (
        capped.requests["arrival"].to_numpy(),
        (capped.requests["arrival"] + capped.requests["e2el"]).to_numpy(),
    )
    in_flight = [(start <= moment).sum() - (end <= moment).sum() for moment in start]
    assert max(in_flight) == 4
    alone = play(ClosedLoop(4), 300, host)
    assert capped.requests["e2el"].mean() < 1.1 * alone.requests["e2el"].mean() < free.requests["e2el"].mean()
    assert capped.duration > free.duration
    due = Workload(OpenLoop(30), SHAPES, 300).arrival_times()
    assert due is not None
    assert (start >= due - 1e-9).all()


def test_a_cap_above_all_need_changes_nothing() -> None:
    free, capped = (play(OpenLoop(5, max_concurrency=cap), 60) for cap in (None, 1000))
    assert capped.requests["e2el"].to_numpy() == pytest.approx(free.requests["e2el"].to_numpy())


def test_the_same_seed_draws_the_same_thoughts() -> None:
    load = Workload(ClosedLoop(2, think_time=ThinkTime(1.0, "exponential")), SHAPES, 50)
    first, again, other = (one.think_times() for one in (load, load.redrawn(0), load.redrawn(1)))
    assert first is not None
    assert again is not None
    assert other is not None
    assert (first == again).all()
    assert not (first == other).any()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: OpenLoop(1e-300), "must be 1e-06 to 1e"),
        (lambda: OpenLoop(1e308), "must be 1e-06 to 1e"),
        (lambda: OpenLoop(math.nan), "must be positive"),
        (lambda: OpenLoop(1.0, 1e-9), "0.05 or more"),
        (lambda: OpenLoop(1.0, math.nan), "0.05 or more"),
        (lambda: ClosedLoop(10**12), "up to 10,000,000 clients"),
        (lambda: ThinkTime(1e308), "from 0 to 1e"),
        (lambda: ThinkTime(math.nan), "from 0 to 1e"),
        (lambda: parse_seconds("1e400"), "longer than 1e"),
        (lambda: parse_seconds("9999999999d"), "longer than 1e"),
        (lambda: parse_seconds("9" * 5000 + "d"), "longer than 1e"),
        (lambda: parse_seconds("1.2.3s"), "'1.2.3' is no number"),
        (lambda: parse_seconds("\u0662s"), "is no time"),
        (lambda: parse_think_time("exponential(nan)"), "is no time"),
        (lambda: parse_curve("bursts(1ms,400d)"), "ends at 0"),
        (lambda: parse_curve("ramp(0.1-1e308,10min)"), "must be 0, or"),
        (lambda: parse_curve("bursts(0s,0s)"), "take some time"),
        (lambda: parse_curve("ramp(0.1-1,1e-300s)"), "must be equal or 1e-06 s apart"),
        (lambda: parse_curve("daily(" + "," * 100_000 + ")"), "is no time"),
    ],
)
def test_arrivals_beyond_all_bounds_are_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


@pytest.mark.parametrize("burstiness", [0.05, 1e300, math.inf])
@pytest.mark.parametrize("rate", [1e-6, 1e9])
@pytest.mark.parametrize("curve", [None, "bursts(1s,900000s)", "ramp(0.000001-1000000,300d)"])
def test_at_their_bounds_arrivals_are_numbers_in_order(rate: float, burstiness: float, curve: str | None) -> None:
    times = OpenLoop(rate, burstiness, curve=parse_curve(curve) if curve else None).times(1000, 0)
    assert np.isfinite(times).all()
    assert (np.diff(times) >= 0).all()

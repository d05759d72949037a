"""Whether a level has a steady state: by what its server can hold, as queueing theory has it, and by its tables."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.fleet import Fleet
from simulator.engine.saturation import all_at_once, held_rate
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.arrivals import parse_curve
from simulator.loads.sessions import Sessions, Talk
from simulator.loads.trace import Trace
from simulator.loads.workload import Arrivals, ClosedLoop, Length, Load, OpenLoop, Shape, ThinkTime, Workload
from simulator.planning.operating_point import highest_that_meets, recommend
from simulator.planning.targets import missed_targets
from simulator.results.backlog import in_terms_of, offered_rate, state_of
from simulator.results.run import Level, Run
from simulator.results.summary import summarize, summary_table

FIXED = (Shape(Length.fixed(100), Length.fixed(40)),)
MIXED = (Shape(Length(50, 150), Length(20, 60)),)
STEP, HOST = StepTime(constant=0.01, per_sequence=1e-3), HostTime()
ONE_SLOT = EngineFlags(max_num_seqs=1, async_scheduling=False)
SLOTS = EngineFlags(max_num_seqs=8, async_scheduling=False)


def held(load: Load, flags: EngineFlags, fleet: Fleet | None = None, host: HostTime = HOST) -> float:
    rate = held_rate(load, flags, STEP, host, fleet or Fleet())
    assert rate is not None
    return rate


def play(arrivals: Arrivals, count: int = 400, flags: EngineFlags = SLOTS, seed: int = 0) -> Level:
    return simulate_level(Workload(arrivals, MIXED, count, seed), flags, STEP)


# --- what a server can hold


def test_one_slot_holds_the_inverse_of_the_service_time() -> None:
    service = 40 * (0.01 + 1e-3)
    assert held(Workload(OpenLoop(1.0), FIXED, 50), ONE_SLOT) == pytest.approx(1 / service, rel=1e-9)


def test_slots_hold_what_a_full_batch_delivers() -> None:
    """Eight at once take 40 steps of 18 ms, whatever the rate, the seed of arrivals or the level's length is."""
    batch = 8 / (40 * (0.01 + 8e-3))
    for load in (Workload(OpenLoop(0.1), FIXED, 5), Workload(OpenLoop(99.0, 0.3), FIXED, 3000, seed=4)):
        assert held(load, SLOTS) == pytest.approx(batch, rel=1e-9)


def test_the_api_server_and_a_limit_of_the_client_count_too() -> None:
    load = Workload(OpenLoop(1.0), FIXED, 50)
    assert held(load, SLOTS, host=HostTime(per_request_serial=0.5)) == pytest.approx(2.0, rel=0.01)
    capped = replace(load, arrivals=OpenLoop(1.0, max_concurrency=1))
    assert held(capped, SLOTS) == pytest.approx(1 / (40 * 0.011), rel=0.01)


def test_a_fleet_holds_what_its_engines_hold_together() -> None:
    load = Workload(OpenLoop(1.0), FIXED, 50)
    assert held(load, SLOTS, Fleet(3)) == pytest.approx(3 * held(load, SLOTS), rel=1e-6)


def test_only_an_open_loop_has_a_rate_to_hold() -> None:
    assert all_at_once(Workload(ClosedLoop(4), FIXED, 50)) is None
    assert held_rate(Workload(ClosedLoop(4), FIXED, 50), SLOTS, STEP, HOST, Fleet()) is None
    few = Trace("few", np.arange(5.0), np.full(5, 100), np.full(5, 40))
    assert held_rate(few, SLOTS, STEP, HOST, Fleet()) is None
    many = Trace("many", np.arange(300.0), np.full(300, 100), np.full(300, 40))
    assert held(many, SLOTS) == pytest.approx(held(Workload(OpenLoop(1.0), FIXED, 50), SLOTS), rel=1e-6)


def test_sessions_hold_their_turns() -> None:
    talk = Talk(Length.fixed(4), Length.fixed(30), Length.fixed(40))
    load = Sessions(OpenLoop(1.0), talk, 40, think_time=ThinkTime(5.0))
    rate = held(load, SLOTS)
    assert rate == pytest.approx(8 / (40 * 0.018), rel=0.05)
    assert offered_rate(load) == pytest.approx(4.0)
    assert in_terms_of(load, rate) == pytest.approx(rate / 4)


def test_what_is_offered_in_the_long_run_follows_the_curve() -> None:
    for text, share in (("bursts(5s,20s)", 0.2), ("ramp(0.1-0.5,10min)", 0.5), ("bursts(5s,5s,0.5)", 0.75)):
        load = Workload(OpenLoop(10.0, curve=parse_curve(text)), FIXED, 50)
        assert offered_rate(load) == pytest.approx(10 * share)
        assert in_terms_of(load, 10 * share) == pytest.approx(10.0)


# --- what that makes of a level


@pytest.mark.parametrize(("share", "state"), [(0.8, "steady"), (0.95, "steady"), (1.05, "no steady state")])
def test_a_level_is_steady_below_what_its_server_holds_and_not_above(share: float, state: str) -> None:
    for seed in range(3):
        load = Workload(OpenLoop(share * held(Workload(OpenLoop(1.0), MIXED, 400, seed), SLOTS)), MIXED, 400, seed)
        level = simulate_level(load, SLOTS, STEP)
        level.held_rate = held(load, SLOTS)
        assert summarize(level).state == state


def test_the_tables_alone_show_a_clear_overload_and_never_a_calm_one() -> None:
    """As of a measured level: what chance does to a backlog is allowed for."""
    rate = held(Workload(OpenLoop(1.0), MIXED, 400), SLOTS)
    for seed in range(8):
        assert state_of(play(OpenLoop(0.8 * rate), seed=seed)) == "steady"
        overload = play(OpenLoop(1.5 * rate), seed=seed)
        assert state_of(overload) == "no steady state"
        assert summarize(overload).held_rate == pytest.approx(rate, rel=0.25)


def test_waiting_at_the_client_is_no_steady_state_either() -> None:
    rate = held(Workload(OpenLoop(1.0, max_concurrency=3), MIXED, 400), SLOTS)
    assert state_of(play(OpenLoop(2 * rate, max_concurrency=3))) == "no steady state"
    assert state_of(play(OpenLoop(0.5 * rate, max_concurrency=3))) == "steady"


def test_a_level_that_is_only_short_is_not_overloaded() -> None:
    """Its requests in flight grow up to the end, but none waits for another."""
    assert state_of(play(OpenLoop(60.0), 8)) == "not reached"
    even = Workload(OpenLoop(10.0, math.inf), FIXED, 8)  # in which chance has no part
    assert state_of(simulate_level(even, EngineFlags(async_scheduling=False), STEP)) == "not reached"
    assert state_of(play(ClosedLoop(20), 20)) == "not reached"
    assert state_of(play(ClosedLoop(4), 80)) == "steady"
    assert state_of(play(OpenLoop(math.inf), 50)) == "all at once"


# --- what is stated of it


def test_a_prediction_without_steady_state_states_no_latency_that_grows_with_its_length() -> None:
    rate = held(Workload(OpenLoop(1.0), MIXED, 400), SLOTS)
    calm, crowd = play(OpenLoop(0.5 * rate)), play(OpenLoop(2 * rate))
    longer = play(OpenLoop(2 * rate), 1200)
    assert summarize(longer).ttft.p50 > 2 * summarize(crowd).ttft.p50
    table = summary_table(Run("simulated", [calm, crowd]))
    assert list(table["state"]) == ["steady", "no steady state"]
    for name in ("mean_ttft", "p50_ttft", "p99_ttft", "p50_e2el", "p99_e2el"):
        assert table[name].notna().tolist() == [True, False]
    assert table[["p99_itl", "p99_tpot", "output_throughput"]].notna().all(axis=None)
    assert table["held_rate"][1] == pytest.approx(rate, rel=0.1)
    measured = summary_table(Run("measured", [crowd]))
    assert measured["p99_ttft"].notna().all()
    assert list(measured["state"]) == ["no steady state"]


def test_no_level_without_steady_state_meets_a_target_or_is_recommended() -> None:
    """However short it was, and however long the target is."""
    rate = held(Workload(OpenLoop(1.0), MIXED, 400), SLOTS)
    levels = [play(OpenLoop(share * rate)) for share in (0.5, 2.0)]
    targets = {"p99_itl": 1e6}
    summaries = [summarize(level) for level in levels]
    assert [missed_targets(one, targets) for one in summaries] == [[], ["steady state"]]
    assert highest_that_meets(summaries, targets) == 0
    for wanted in (targets, None):
        point = recommend(Run("simulated", levels), wanted)
        assert point is not None
        assert point.place == 0


def test_percentiles_of_too_few_requests_are_named() -> None:
    few, enough = play(ClosedLoop(4), 100), play(ClosedLoop(4), 299)
    assert summarize(enough).too_few == ()
    assert summarize(few).too_few == ("p99_ttft", "p99_tpot", "p99_e2el")  # gaps are many
    assert list(summary_table(Run("measured", [few]))["too_few"]) == ["p99_ttft p99_tpot p99_e2el"]
    assert "p50_ttft" in summarize(play(ClosedLoop(1), 4)).too_few
    single = simulate_level(Workload(ClosedLoop(1), (Shape(Length.fixed(9), Length.fixed(1)),), 4), SLOTS, STEP)
    assert not any(name.endswith(("tpot", "itl")) for name in summarize(single).too_few)  # there is none to doubt

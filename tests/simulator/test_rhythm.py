"""Runs of equal steps, taken one by one or many at once, watched or not: the same tables to the last bit."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.fleet import Fleet
from simulator.engine.rhythm import Rhythm
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.arrivals import ThinkTime
from simulator.loads.sessions import Sessions, Talk
from simulator.loads.workload import ClosedLoop, Length, Load, OpenLoop, Shape, Workload
from simulator.prediction import predict
from simulator.profile import Profile
from simulator.results.run import Level
from simulator.results.summary import summarize
from simulator.steps.step_log import observe_level

# the last two make steps, arrivals and pauses meet in one moment: 10 ms divide all that people write
STEP_TIMES = (
    StepTime(0.00837, per_sequence=2.1e-5, per_kv_token=1.3e-8, per_prefill_token=5.3e-5),
    StepTime(0.01),
    StepTime(0.01, per_sequence=1e-4, per_prefill_token=1e-4),
)
HOSTS = (HostTime(), HostTime(0.002, 0.001), HostTime(0.002, 0.001, 1e-6, tuple(np.linspace(-1e-4, 1e-4, 11).tolist())))
FIXED = (Shape(Length.fixed(100), Length.fixed(50)),)
MIXED = (Shape(Length(50, 900), Length(20, 200)),)
LOADS: tuple[Load, ...] = (
    Workload(OpenLoop(10.0, math.inf), FIXED, 20),
    Workload(OpenLoop(4.0, math.inf), FIXED, 20),
    Workload(OpenLoop(5.0), MIXED, 20),
    Workload(OpenLoop(20.0, max_concurrency=6), MIXED, 20),
    Workload(ClosedLoop(16), MIXED, 20),
    Workload(ClosedLoop(8, think_time=ThinkTime(0.5, "fixed")), FIXED, 20),
    Sessions(ClosedLoop(4), Talk(Length(2, 4), Length(20, 90), Length(10, 30), 64), 10),
)
FLAGS = (
    EngineFlags(num_gpu_blocks=250, async_scheduling=True),
    EngineFlags(num_gpu_blocks=250, async_scheduling=False, enable_prefix_caching=True),
    EngineFlags(num_gpu_blocks=4001, async_scheduling=True),
)
tight_and_roomy = pytest.mark.parametrize("flags", FLAGS, ids=("tight", "tight-prefix", "roomy"))
any_load = pytest.mark.parametrize("load", LOADS, ids=lambda load: load.describe().replace(" ", "-"))


def assert_same_level(one: Level, other: Level) -> None:
    pd.testing.assert_frame_equal(one.requests, other.requests, check_exact=True)
    pd.testing.assert_frame_equal(one.gaps, other.gaps, check_exact=True)
    assert one.duration == other.duration
    assert one.cached_tokens == other.cached_tokens


def assert_same(one_by_one: Level, at_once: Level) -> None:
    """The timeline has a row only where a step is planned, so of steps taken at once it has fewer."""
    assert_same_level(one_by_one, at_once)
    every = {tuple(row) for row in one_by_one.timeline.itertuples(index=False)}
    some = [tuple(row) for row in at_once.timeline.itertuples(index=False)]
    assert len(some) < len(every)
    assert every.issuperset(some)


@any_load
@tight_and_roomy
def test_steps_taken_one_by_one_give_the_same_bits(load: Load, flags: EngineFlags) -> None:
    for step_time, host_time in zip(STEP_TIMES, HOSTS, strict=True):
        one_by_one, at_once = (simulate_level(load, flags, step_time, host_time, single) for single in (True, False))
        assert_same(one_by_one, at_once)


@settings(max_examples=15)
@given(
    constant=st.sampled_from([0.001, 0.01, 0.00731]),
    per_kv_token=st.sampled_from([0.0, 1e-8, 3.7e-7]),
    rate=st.sampled_from([0.5, 2.0, 10.0, 3.3]),
    burstiness=st.sampled_from([1.0, math.inf, 0.4]),
    outputs=st.tuples(st.integers(1, 90), st.integers(0, 300)),
    blocks=st.integers(90, 400),
    asynchronous=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_open_loop_gives_the_same_bits(
    constant: float,
    per_kv_token: float,
    rate: float,
    burstiness: float,
    outputs: tuple[int, int],
    blocks: int,
    asynchronous: bool,
    seed: int,
) -> None:
    shape = Shape(Length(1, 700), Length(outputs[0], sum(outputs)))
    load = Workload(OpenLoop(rate, burstiness), (shape,), 30, seed)
    flags = EngineFlags(max_model_len=1400, num_gpu_blocks=blocks, async_scheduling=asynchronous)
    step_time = StepTime(constant, 2e-5, per_kv_token, 5e-5)
    assert_same_level(*(simulate_level(load, flags, step_time, HOSTS[1], single) for single in (True, False)))


@pytest.mark.parametrize("step_time", STEP_TIMES[:2], ids=("crooked", "round"))
def test_a_fleet_gives_the_same_bits(step_time: StepTime) -> None:
    fleet = Fleet(2, data_parallel_size=2)
    for load in (LOADS[0], LOADS[2], LOADS[4]):
        assert_same_level(*(fleet.simulate(load, FLAGS[2], step_time, HOSTS[1], single) for single in (True, False)))


@any_load
def test_a_level_that_is_watched_is_the_same(load: Load) -> None:
    for step_time, host_time in zip(STEP_TIMES, HOSTS, strict=True):
        alone = simulate_level(load, FLAGS[0], step_time, host_time)
        watched = observe_level(load, FLAGS[0], step_time, host_time).level
        assert_same_level(alone, watched)
        pd.testing.assert_frame_equal(alone.timeline, watched.timeline, check_exact=True)
        assert alone.steps is not None
        assert watched.steps is not None
        assert all(np.array_equal(alone.steps[name], watched.steps[name]) for name in alone.steps)


def test_intervals_and_listeners_change_nothing(profile: Profile) -> None:
    loads = [LOADS[2], LOADS[4]]
    told: list[float] = []
    plain = predict(profile, loads)
    listened = predict(profile, loads, on_level=told.append, with_intervals=True)
    assert told
    for one, other in zip(plain.levels, listened.levels, strict=True):
        assert other.intervals
        assert_same_level(one, other)
        pd.testing.assert_frame_equal(one.timeline, other.timeline, check_exact=True)


def test_clients_of_a_closed_loop_are_never_more_than_there_are() -> None:
    """Whoever sends on an answer has sent at its very moment, however the times were rounded."""
    for clients in (1, 4, 16):
        for seed in range(5):
            load = Workload(ClosedLoop(clients), (Shape(Length(64, 300), Length(4, 40)),), 40, seed)
            level = simulate_level(load, EngineFlags(), STEP_TIMES[0], HOSTS[1])
            assert summarize(level).peak_concurrency == clients


# --- the arithmetic


@given(
    first=st.floats(1e-4, 0.1),
    growth=st.floats(0, 1e-4),
    start=st.floats(0, 1e4),
    done=st.integers(0, 3000),
    most=st.integers(1, 3000),
    share=st.floats(0, 1.2),
)
def test_as_many_steps_are_taken_as_it_takes_to_reach_a_moment(
    first: float, growth: float, start: float, done: int, most: int, share: float
) -> None:
    rhythm = Rhythm(start, first, growth, 4)
    begin = rhythm.end(done)
    moment = begin + share * (rhythm.end(done + most) - begin)
    steps = rhythm.steps_until(moment, done, most)
    assert 1 <= steps <= most
    assert steps == 1 or rhythm.end(done + steps - 1) < moment
    assert steps == most or rhythm.end(done + steps) >= moment


def test_a_step_goes_on_where_it_takes_as_long_as_it_should() -> None:
    rhythm = Rhythm(1.0, 0.01, 1e-6, 4)
    assert rhythm.goes_on(4, 0.010001)
    assert not rhythm.goes_on(4, 0.010002)
    assert not rhythm.goes_on(5, 0.010001)

"""A fleet is its engines, each with its own requests: nothing more, and nothing less."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from simulator.engine.engine_flags import EngineFlags, FlagError
from simulator.engine.fleet import Fleet, _level
from simulator.engine.routers import ROUTERS
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.lengths import Length
from simulator.loads.sessions import Sessions, Talk
from simulator.loads.trace import Trace
from simulator.loads.workload import Arrivals, ClosedLoop, OpenLoop, Shape, Workload
from simulator.results.run import Level
from simulator.results.summary import summarize

STEP = StepTime(0.01, 1e-5, 1e-8, 2e-5)
FLAGS = EngineFlags(max_num_seqs=16, num_gpu_blocks=3000)
CACHING = EngineFlags(max_num_seqs=32, num_gpu_blocks=20_000, max_model_len=32_000, enable_prefix_caching=True)
CHATS = Sessions(ClosedLoop(12), Talk(Length(2, 6), Length(50, 300), Length(10, 60)), 60)


def load(arrivals: Arrivals, requests: int = 120) -> Workload:
    return Workload(arrivals, (Shape(Length(100, 900), Length(20, 120)),), requests)


LOADS = [load(ClosedLoop(24)), load(OpenLoop(6.0)), load(OpenLoop(9.0, max_concurrency=10)), CHATS]


def assert_same(one: Level, other: Level) -> None:
    pd.testing.assert_frame_equal(one.requests, other.requests)
    pd.testing.assert_frame_equal(one.gaps, other.gaps)
    pd.testing.assert_frame_equal(one.timeline, other.timeline)
    assert one.duration == other.duration


@pytest.mark.parametrize("played", LOADS, ids=lambda played: played.label)
def test_a_fleet_of_one_is_one_engine(played: Workload) -> None:
    alone = simulate_level(played, FLAGS, STEP, HostTime(0.002))
    assert_same(Fleet(1).simulate(played, FLAGS, STEP, HostTime(0.002)), alone)
    behind_a_router = _level(played, Fleet(1)._play(played, FLAGS, STEP, HostTime(0.002), single_steps=False))
    pd.testing.assert_frame_equal(behind_a_router.requests, alone.requests)
    pd.testing.assert_frame_equal(behind_a_router.gaps, alone.gaps)


@pytest.mark.parametrize("played", LOADS, ids=lambda played: played.label)
def test_running_ahead_gives_what_single_steps_give(played: Workload) -> None:
    fast = Fleet(3).simulate(played, FLAGS, STEP, HostTime(0.002, 0.0005))
    slow = Fleet(3).simulate(played, FLAGS, STEP, HostTime(0.002, 0.0005), single_steps=True)
    pd.testing.assert_frame_equal(fast.requests, slow.requests, rtol=1e-9)
    assert fast.replica_tokens == slow.replica_tokens


def test_without_feedback_each_replica_does_what_it_would_do_alone() -> None:
    """Round robin in an open loop: replica i serves every third request, at the same moments."""
    played = load(OpenLoop(9.0))
    times, (prompts, outputs) = played.arrival_times(), played.lengths()
    assert times is not None
    together = Fleet(3, "round-robin").simulate(played, FLAGS, STEP).requests
    for first in range(3):
        part = slice(first, None, 3)
        alone = simulate_level(Trace("part", times[part], prompts[part], outputs[part]), FLAGS, STEP).requests
        for name in ("ttft", "e2el"):
            np.testing.assert_allclose(together[name].to_numpy()[part], alone[name].to_numpy(), rtol=1e-9)


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_is_served_once_and_the_same_way_again(router: str) -> None:
    level = Fleet(4, router).simulate(load(ClosedLoop(24)), FLAGS, STEP)
    assert list(level.requests["request_id"]) == list(range(120))
    assert level.replica_tokens is not None
    assert sum(level.replica_tokens) == int(level.requests[["prompt_tokens", "output_tokens"]].to_numpy().sum())
    assert_same(level, Fleet(4, router).simulate(load(ClosedLoop(24)), FLAGS, STEP))


def test_round_robin_deals_equal_requests_equally() -> None:
    same = Workload(ClosedLoop(8), (Shape(Length.fixed(100), Length.fixed(20)),), 80)
    assert Fleet(4, "round-robin").simulate(same, FLAGS, STEP).replica_tokens == [2400] * 4


def test_vllm_deals_equal_requests_equally_to_its_engines() -> None:
    same = Workload(ClosedLoop(8), (Shape(Length.fixed(100), Length.fixed(20)),), 80)
    level = Fleet(data_parallel_size=4).simulate(same, FLAGS, STEP)
    assert level.replica_tokens == [2400] * 4


def test_gauges_are_sums_over_the_engines() -> None:
    """Twice the replicas and twice the clients: the same latencies, and twice in flight and held."""
    shapes = (Shape(Length.fixed(100), Length.fixed(50)),)
    one = summarize(Fleet(1).simulate(Workload(ClosedLoop(4), shapes, 40), FLAGS, STEP))
    two = summarize(Fleet(2, "round-robin").simulate(Workload(ClosedLoop(8), shapes, 80), FLAGS, STEP))
    assert two.e2el.p50 == pytest.approx(one.e2el.p50)
    assert two.peak_kv_tokens == 2 * one.peak_kv_tokens
    assert two.mean_active_tokens == pytest.approx(2 * one.mean_active_tokens, rel=0.02)
    assert two.output_throughput == pytest.approx(2 * one.output_throughput)


# --- queueing theory

SERVICE = 0.01
ONE_SLOT = EngineFlags(max_num_seqs=1, async_scheduling=False)


def mean_wait(router: str, servers: int, utilization: float) -> float:
    """Seconds in the queue, of servers that take one request at a time and 10 ms for it."""
    arrivals = OpenLoop(utilization * servers / SERVICE)
    poisson = Workload(arrivals, (Shape(Length.fixed(16), Length.fixed(1)),), 6000)
    level = Fleet(servers, router).simulate(poisson, ONE_SLOT, StepTime(SERVICE))
    return float(level.requests["e2el"].iloc[1000:].mean()) - SERVICE


def test_random_routing_makes_independent_md1_queues() -> None:
    """Pollaczek and Khinchine: rho S / 2 (1 - rho)."""
    assert mean_wait("random", 4, 0.7) == pytest.approx(0.7 * SERVICE / (2 * 0.3), rel=0.12)


def test_the_shortest_queue_waits_less_than_chance_and_no_less_than_one_queue_for_all() -> None:
    """M/D/4 waits about half of M/M/4, whose Erlang C at 70 % is 0.429."""
    one_queue = 0.429 / (4 * 0.3 / SERVICE) / 2
    chance = 0.7 * SERVICE / (2 * 0.3)
    assert 0.9 * one_queue < mean_wait("least-requests", 4, 0.7) < 0.5 * chance


# --- prefixes


def cached(router: str, played: Sessions = CHATS) -> int:
    tokens = Fleet(3, router).simulate(played, CACHING, STEP).cached_tokens
    assert tokens is not None
    return tokens


def test_a_session_that_sticks_finds_all_that_one_engine_would_find() -> None:
    alone = simulate_level(CHATS, CACHING, STEP).cached_tokens
    assert cached("session-sticky") == alone
    assert cached("round-robin") < 0.6 * cached("session-sticky")


def test_a_router_that_knows_the_prefixes_finds_more_than_round_robin() -> None:
    assert cached("prefix-aware") > 1.5 * cached("round-robin")


def test_a_fleet_needs_at_least_one_engine() -> None:
    with pytest.raises(FlagError, match="--replicas must be at least 1"):
        Fleet(0)
    with pytest.raises(FlagError, match="--data-parallel-size must be at least 1"):
        Fleet(data_parallel_size=0)

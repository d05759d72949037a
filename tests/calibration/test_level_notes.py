"""A measured level says what its numbers cannot be trusted for."""

from __future__ import annotations

import asyncio

import pytest
from fake_server import Manners, serve
from played_levels import SHORT, closed, measure

from calibration.clients import Job, Recording, record
from calibration.dialect import Dialect
from calibration.endpoint import discover
from calibration.load import level_of
from calibration.stream import Answer
from calibration.token_times import TokenTimes


def test_other_traffic_is_noticed() -> None:
    with serve(Manners(strangers=2)) as server:
        level = measure(server, closed(1, 3))
    assert "other traffic: the server finished 6 requests that were not ours" in level.notes
    with serve() as server:
        server.running = 1  # somebody else's
        level = measure(server, closed(1, 1))
        assert any("busy when the level began" in note for note in level.notes)
    with serve(Manners(strange_tokens=30)) as server:
        level = measure(server, closed(1, 3))
    assert "other traffic: the server generated 90 tokens that were not ours" in level.notes
    with serve() as server:
        assert not any("traffic" in note for note in measure(server, closed(1, 3)).notes)


@pytest.mark.parametrize(
    "manners",
    [
        Manners(cached_tokens=32),
        Manners(cached_tokens=32, old_metrics=True),
        Manners(cached_tokens=32, shows_metrics=False, tells_cached=True),
    ],
)
def test_hits_of_the_prefix_cache_are_noticed(manners: Manners) -> None:
    with serve(manners) as server:
        level = measure(server, closed(1, 3))
    assert "96 prompt tokens came from the prefix cache" in level.notes


def test_a_distant_server_is_said_to_be_distant() -> None:
    with serve(Manners(seconds_away=0.02)) as server:
        endpoint = discover(server.url)
        job = Job(endpoint, closed(1, 1), 1, patience=SHORT)
        level = level_of(job, asyncio.run(record(job, lambda _: None)))
    assert endpoint.round_trip is not None
    assert endpoint.round_trip >= 0.02
    assert endpoint.server()["round_trip"] == endpoint.round_trip
    assert any(note.startswith("a round trip to the server takes 2") for note in level.notes)


def test_how_sure_the_latencies_are_is_said_as_far_as_the_requests_go() -> None:
    with serve() as server:
        level = measure(server, closed(4, 30))
    done = level.completed
    for latency in ("ttft", "tpot", "e2el"):
        assert {f"{name}_{latency}" for name in ("mean", "p50", "p90")} <= set(level.intervals)
        assert f"p95_{latency}" not in level.intervals
        low, high = level.intervals[f"p50_{latency}"]
        assert low <= done[latency].median() <= high
    assert "p99_itl" in level.intervals  # of 450 gaps


def test_a_client_that_is_too_slow_says_so() -> None:
    answers = [Answer(0, 64, 3, 0.0, sent=0.0, ended=1.0, arrivals=TokenTimes([(0.1, 1), (0.11, 2), (0.12, 3)]))]
    with serve() as server:
        job = Job(discover(server.url), closed(1, 1), 1)
    late = Recording(Dialect(), answers=answers, loop_lags=[0.004] * 100)
    assert any(note.startswith("client-bound") for note in level_of(job, late).notes)
    busy = Recording(Dialect(), answers=answers, loop_lags=[0.0005] * 100, cpu_share=0.9)
    assert any(note.startswith("client-bound: the load generator used 90%") for note in level_of(job, busy).notes)
    fast = Recording(Dialect(), answers=answers, loop_lags=[0.0005] * 100, cpu_share=0.1)
    assert not any(note.startswith("client-bound") for note in level_of(job, fast).notes)

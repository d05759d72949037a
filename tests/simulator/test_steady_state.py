"""The middle of a level: without the start burst and the end, whatever is asked of it follows from queueing theory."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import StepTime
from simulator.loads.workload import Arrivals, ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.planning.steady_state import (
    TooShort,
    delivery_rates,
    mean_in_flight,
    middle,
    steady_part,
)
from simulator.results.backlog import backlog_growth
from simulator.results.run import Level

SHAPES = (Shape(Length(50, 150), Length(20, 60)),)
STEP = StepTime(constant=0.01, per_prefill_token=1e-5)
ROOMY = EngineFlags()
ONE_SLOT = EngineFlags(max_num_seqs=1, async_scheduling=False)


def play(arrivals: Arrivals, count: int, flags: EngineFlags = ROOMY) -> Level:
    return simulate_level(Workload(arrivals, SHAPES, count), flags, STEP)


def test_the_start_burst_and_the_end_are_left_out() -> None:
    level = play(ClosedLoop(10), 100)
    part = middle(level)
    inner = steady_part(level, part)
    assert (part.first, part.last) == (20, 90)
    assert len(inner.requests) == 70
    assert inner.requests["arrival"].iloc[0] == 0
    assert inner.duration == pytest.approx(part.end - part.start)
    assert inner.gaps["time"].between(0, inner.duration).all()
    assert level.requests["arrival"].iloc[0] == 0  # the level itself is as it was


def test_clients_that_never_think_are_all_in_flight() -> None:
    level = play(ClosedLoop(10), 200)
    assert mean_in_flight(level, middle(level)) == pytest.approx(10)


@pytest.mark.parametrize("arrivals", [ClosedLoop(10), OpenLoop(5.0)])
def test_littles_law(arrivals: Arrivals) -> None:
    """Mean requests in flight = throughput x mean time in the system."""
    level = play(arrivals, 1000)
    part = middle(level)
    requests, tokens = delivery_rates(level, part)
    inner = steady_part(level, part)
    assert mean_in_flight(level, part) == pytest.approx(requests * inner.requests["e2el"].mean(), rel=0.03)
    assert tokens == pytest.approx(requests * inner.requests["output_tokens"].mean(), rel=0.03)


def test_a_backlog_grows_by_what_is_not_served() -> None:
    """One slot serves a request in a step of 10 ms for each of about 40 tokens: 2.5 a second."""
    service = float(play(ClosedLoop(1), 200, ONE_SLOT).requests["e2el"].mean())
    for load in (1.5, 2.0):
        level = play(OpenLoop(load / service), 600, ONE_SLOT)
        assert backlog_growth(level) == pytest.approx(1 - 1 / load, abs=0.05)
    growths = []
    for seed in range(5):
        calm = Workload(OpenLoop(0.5 / service), SHAPES, 600, seed)
        growths.append(backlog_growth(simulate_level(calm, ONE_SLOT, STEP)))
    assert abs(np.mean(growths)) < 0.01


def test_requests_that_wait_at_the_client_are_backlog() -> None:
    """With --max-concurrency the server looks calm, but the clients' queue grows."""
    service = float(play(ClosedLoop(1), 200, ONE_SLOT).requests["e2el"].mean())
    level = play(OpenLoop(2 / service, max_concurrency=1), 400, ONE_SLOT)
    assert backlog_growth(level) == pytest.approx(0.5, abs=0.06)


def test_a_level_may_be_too_short() -> None:
    with pytest.raises(TooShort, match="30 requests are too few"):
        middle(play(ClosedLoop(10), 30))

"""Ramp and drain are cut off where counting by hand would cut them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.results.steady_window import steady_window, tokens_within
from simulator.results.summary import summarize


def test_a_closed_loop_is_steady_from_its_first_to_its_last_send() -> None:
    """Two clients, three requests of 2 s each: the third round only drains."""
    starts = np.array([0, 0, 2, 2, 4, 4], float)
    assert steady_window(starts, starts + 2) == (0, 4)


def test_clients_that_begin_one_by_one_are_a_ramp() -> None:
    starts = np.array([0, 1, 2, 3, 10, 11, 12, 13], float)
    assert steady_window(starts, starts + 10) == (3, 13)


def test_a_single_round_has_no_steady_part() -> None:
    assert steady_window([0, 0.001, 0.002], [5, 5, 5]) is None
    assert steady_window([0.0], [5.0]) is None
    assert steady_window([], []) is None
    assert steady_window([1.0, 1.0], [1.0, 1.0]) is None


def test_an_open_loop_is_steady_once_as_many_are_in_flight_as_usual() -> None:
    """One request a second, each in the system for 10.8 s: eleven in flight from the eleventh on."""
    starts = np.arange(100.0)
    assert steady_window(starts, starts + 10.8) == (10, 99)


def test_tokens_are_counted_where_they_came() -> None:
    """First token at 1 s, nine more until 10 s: one a second."""
    first, last, tokens = np.array([1.0]), np.array([10.0]), np.array([10.0])
    assert tokens_within((0, 20), first, last, tokens) == 10
    assert tokens_within((5, 8), first, last, tokens) == pytest.approx(3)
    assert tokens_within((0, 4), first, last, tokens) == pytest.approx(4)
    assert tokens_within((11, 20), first, last, tokens) == 0
    assert tokens_within((0, 2), np.array([1.0]), np.array([1.0]), np.array([4.0])) == 4


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20)), min_size=1, max_size=40),
    st.lists(st.floats(0, 130), min_size=1, max_size=5, unique=True),
)
def test_windows_side_by_side_hold_all_tokens(times: list[tuple[float, float]], cuts: list[float]) -> None:
    starts = np.array([start for start, _ in times])
    ends = starts + [length for _, length in times]
    tokens = np.full(len(starts), 7.0)
    window = steady_window(starts, ends)
    if window is not None:
        assert starts.min() <= window[0] < window[1] <= starts.max()
    edges = [-1.0, *sorted(cuts), 131.0]
    parts = [tokens_within((low, np.nextafter(high, -1)), starts, ends, tokens) for low, high in pairwise(edges)]
    assert sum(parts) == pytest.approx(7 * len(starts), rel=1e-6)


def simulate(workload: Workload) -> tuple[float, float]:
    """Output tokens a second over the level and over its steady window; a step takes 10 ms whatever it holds."""
    flags = EngineFlags(max_num_seqs=64, max_num_batched_tokens=8192, num_gpu_blocks=10_000)
    summary = summarize(simulate_level(workload, flags, StepTime(constant=0.01), HostTime()))
    return summary.output_throughput, summary.steady_output_throughput


def test_the_steady_throughput_does_not_depend_on_how_long_a_level_is() -> None:
    """Lengths are jittered, so that clients do not run in step; the drain of a short level lowers its throughput."""
    shape = Shape(Length(10, 20), Length(50, 150))
    short, long = (simulate(Workload(ClosedLoop(16), (shape,), count)) for count in (64, 3200))
    assert short[0] < 0.9 * long[0]
    assert short[1] == pytest.approx(long[1], rel=0.04)
    assert long[0] == pytest.approx(long[1], rel=0.03)


def test_a_steady_open_loop_puts_out_what_it_takes_in() -> None:
    shape = Shape(Length.fixed(10), Length.fixed(100))
    whole, steady = simulate(Workload(OpenLoop(10.0, burstiness=float("inf")), (shape,), 200))
    assert steady == pytest.approx(1000, rel=0.01)
    assert whole < 0.97 * steady

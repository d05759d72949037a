"""The rate that a server can hold a trace at, without all of its requests existing at once."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.engine import saturation
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.fleet import Fleet
from simulator.engine.saturation import held_rate
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.trace import Trace
from simulator.results.run import Level

FLAGS = EngineFlags(max_num_seqs=4, num_gpu_blocks=500)


def test_a_long_trace_is_played_with_no_more_requests_than_keep_the_server_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(50, 500, 200), random.integers(5, 50, 200)
    trace = Trace("a day", np.linspace(0.0, 12_000.0, 200), *lengths)
    in_flight = []

    plain = Fleet.simulate

    def simulate(fleet: Fleet, load: Trace, flags: EngineFlags, step_time: StepTime, host_time: HostTime) -> Level:
        level = plain(fleet, load, flags, step_time, host_time)
        start = level.requests["arrival"].to_numpy()
        end = start + level.requests["e2el"].to_numpy()
        in_flight.append(max(int(((start <= moment) & (moment < end - 1e-9)).sum()) for moment in start))
        return level

    def rate(more_than_enough: int) -> float | None:
        monkeypatch.setattr(saturation, "MORE_THAN_ENOUGH", more_than_enough)
        saturation.saturated_rate.cache_clear()
        return held_rate(trace, FLAGS, StepTime(0.01, 1e-4, 0.0, 1e-5), HostTime(0.002), Fleet())

    monkeypatch.setattr(Fleet, "simulate", simulate)
    assert rate(2) == rate(1000)
    assert in_flight == [8, 200]

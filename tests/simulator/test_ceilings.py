"""How many requests an engine can hold: against a published server, by hand, and against the simulated engine."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import StepTime
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload
from simulator.planning.ceilings import ceilings
from simulator.planning.steady_state import middle, steady_part

RTX4090 = EngineFlags(max_num_seqs=128, num_gpu_blocks=86_896 // 16)
BIGGER_POOL = RTX4090.changed(num_gpu_blocks=6_569_114_112 // (16 * 57_344))


def load(*shapes: Shape) -> Workload:
    return Workload(ClosedLoop(1), shapes, 1)


def fixed(prompt: int, output: int, weight: float = 1.0) -> Shape:
    return Shape(Length.fixed(prompt), Length.fixed(output), weight)


def test_the_published_server_holds_67_requests_and_89_with_the_larger_pool() -> None:
    """The report of the RTX 4090: requests of 1,280 tokens, --max-num-seqs 128."""
    before, after = ceilings(load(fixed(1024, 256)), RTX4090), ceilings(load(fixed(1024, 256)), BIGGER_POOL)
    assert (before.slots, before.kv_full_length, after.kv_full_length) == (128, 67, 89)
    assert before.binding == "kv_pool"
    assert "67 requests at full length" in before.sentence()


def test_slots_are_the_ceiling_where_the_pool_holds_more() -> None:
    few_slots = ceilings(load(fixed(1024, 256)), RTX4090.changed(max_num_seqs=32))
    assert (few_slots.binding, few_slots.running) == ("slots", 32)


def test_blocks_over_the_life_of_a_request_are_counted_one_by_one() -> None:
    """A request of 30 prompt and 40 output tokens holds 30, 31, ... 69 tokens, in blocks of 16."""
    held = np.mean([-(-tokens // 16) for tokens in range(30, 70)])
    flags = EngineFlags(num_gpu_blocks=10_001)
    found = ceilings(load(fixed(30, 40)), flags)
    assert found.kv_average == int(10_000 / held)
    assert found.kv_full_length == 10_000 // 5
    assert found.held_tokens == np.mean(range(30, 70))


def test_a_mix_is_weighted_by_how_long_its_requests_stay() -> None:
    """Half of the requests are short, but of those that run at once only a tenth."""
    found = ceilings(load(fixed(16, 100), fixed(16, 900)), EngineFlags())
    assert found.full_tokens == pytest.approx(0.1 * 115 + 0.9 * 915, rel=0.02)


def test_a_request_cut_at_max_model_len_holds_no_more() -> None:
    flags = EngineFlags(max_model_len=100, num_gpu_blocks=1001)
    assert ceilings(load(fixed(90, 500)), flags).full_tokens == 99


def test_the_engine_runs_as_many_as_the_pool_holds_on_average() -> None:
    """More clients than fit: the mean of the running requests is the ceiling, less what stands empty for a prompt."""
    flags = EngineFlags(max_num_seqs=256, max_num_batched_tokens=8192, num_gpu_blocks=1001)
    shape = Shape(Length(50, 150), Length(100, 500))
    level = simulate_level(Workload(ClosedLoop(120), (shape,), 1200), flags, StepTime(0.01))
    seen = steady_part(level, middle(level)).timeline
    widths = np.diff(seen["time"])
    running = float((seen["running"].to_numpy()[:-1] * widths).sum() / widths.sum())
    assert running == pytest.approx(ceilings(level.workload, flags).kv_average, rel=0.06)

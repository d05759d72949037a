"""Durations of steps, with and without computing that overlaps with the reading of weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload

LINEAR = StepTime(7e-3, 20e-6, 40e-9, 22e-6, 0.6e-9, mixed_per_sequence=2e-6)
ROOFLINE = replace(LINEAR, weights=4e-3)


def test_without_weights_a_step_costs_the_sum_of_its_terms() -> None:
    told = 7e-3 + 20e-6 * 5 + 40e-9 * 3000 + (22e-6 * 900 + 0.6e-9 * 4e5 + 2e-6 * 5)
    assert LINEAR.duration(5, 3000, 900, 4e5) == told


def test_few_tokens_hide_behind_the_weights_and_many_cost_what_computing_takes() -> None:
    base = ROOFLINE.constant + ROOFLINE.per_sequence
    assert ROOFLINE.duration(1, 0) == pytest.approx(base, abs=0.1e-6)
    many = 20_000
    computing = ROOFLINE.per_prefill_token * (many + 1) - ROOFLINE.weights
    assert ROOFLINE.duration(1, 0, many) - ROOFLINE.mixed_per_sequence == pytest.approx(base + computing, rel=0.001)


@given(st.integers(1, 512), st.integers(0, 8192))
def test_overlapping_never_costs_more_than_computing_after_reading(sequences: int, prompt: int) -> None:
    apart = replace(LINEAR, per_sequence=LINEAR.per_sequence + LINEAR.per_prefill_token)
    overlapped = ROOFLINE.duration(sequences, 0, prompt)
    assert LINEAR.duration(sequences, 0) <= overlapped <= apart.duration(sequences, 0, prompt) + 1e-12


def test_runs_of_equal_steps_last_as_long_as_the_steps_one_by_one() -> None:
    shape = Shape(Length(20, 900), Length(1, 80))
    load, flags = Workload(ClosedLoop(16), (shape,), 60), EngineFlags(max_num_seqs=12, num_gpu_blocks=2000)
    levels = [simulate_level(load, flags, ROOFLINE, single_steps=single) for single in (False, True)]
    assert levels[0].duration == pytest.approx(levels[1].duration, rel=1e-12)


def test_a_first_token_is_delayed_by_the_tokens_of_its_last_step_only() -> None:
    flags = EngineFlags(max_num_seqs=4, max_num_batched_tokens=2048, max_model_len=8192, num_gpu_blocks=2000)

    def delay(prompt: int) -> float:
        load = Workload(ClosedLoop(1), (Shape(Length.fixed(prompt), Length.fixed(4)),), 1)
        hosts = (HostTime(per_prompt_token=2e-6), HostTime())
        late, at_once = (simulate_level(load, flags, LINEAR, host).requests["ttft"][0] for host in hosts)
        return float(late - at_once)

    for prompt, counted in ((1000, 1000), (2048, 2048), (6000, 6000 - 2 * 2048)):
        assert delay(prompt) == pytest.approx(counted * 2e-6)


def test_negative_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="weights"):
        StepTime(1e-3, weights=-1e-3)

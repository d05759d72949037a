"""Durations of steps, with and without computing that overlaps with the reading of weights."""

from __future__ import annotations

import math
from dataclasses import fields, replace

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


def test_computing_beside_the_weights_counts_prompt_tokens_and_sequences() -> None:
    step = StepTime(10e-3, per_prefill_token=10e-6, weights=4e-3)
    assert step.duration(100, 0) == pytest.approx(10e-3 + math.hypot(4e-3, 1e-3) - 4e-3)
    assert step.duration(100, 0, 200) == pytest.approx(10e-3 + math.hypot(4e-3, 3e-3) - 4e-3) == 11e-3


def test_a_batch_costs_its_empty_places_in_a_graph_or_that_it_has_none() -> None:
    step = StepTime(1.0, per_padded_sequence=0.25, without_graph=3.0)
    assert [step.graph_cost(padding) for padding in (0, 5, None)] == [0.0, 1.25, 3.0]


def test_what_is_not_told_costs_nothing() -> None:
    step = StepTime(1.0)
    assert step.duration(5, 1000, 500, 1e6) == 1.0
    assert step.graph_cost(3) == step.graph_cost(None) == step.decode_growth(5) == 0.0
    assert HostTime() == HostTime(per_request=0.0, per_request_serial=0.0, per_prompt_token=0.0, gap_noise=())


def test_attention_of_a_prompt_costs_nothing_unless_it_is_told() -> None:
    assert StepTime(1e-3, per_prefill_attention=1e-3).duration(1, 0, 1) == 1e-3


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


@pytest.mark.parametrize("name", [field.name for field in fields(StepTime)])
@pytest.mark.parametrize("value", [-1e-9, math.inf, math.nan])
def test_a_term_that_is_no_time_is_refused(name: str, value: float) -> None:
    terms = {"constant": 1e-3, name: value}
    with pytest.raises(ValueError, match=f"^step time: {name} must be a finite number of seconds >= 0, got {value}$"):
        StepTime(**terms)


def test_a_step_takes_some_time() -> None:
    with pytest.raises(
        ValueError, match=r"^step time: constant and per_sequence are both zero; a step cannot take no time$"
    ):
        StepTime(0.0, per_kv_token=1e-9)
    assert StepTime(1e-9).duration(1, 0) == 1e-9
    assert StepTime(0.0, per_sequence=1e-3).duration(2, 100) == 2e-3
    assert StepTime(1e-3, per_sequence=2e-3).duration(2, 100) == 5e-3


@pytest.mark.parametrize("name", ["per_request", "per_request_serial", "per_prompt_token"])
@pytest.mark.parametrize("value", [-1e-9, math.inf, math.nan])
def test_a_host_time_that_is_no_time_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^host time: {name} must be a finite number of seconds >= 0, got {value}$"):
        HostTime(**{name: value})


def test_gap_noise_is_eleven_percentiles_in_order() -> None:
    noise = tuple(1e-6 * (number - 5) for number in range(11))
    assert HostTime(gap_noise=noise).gap_noise == noise
    assert HostTime().gap_noise == ()
    with pytest.raises(ValueError, match=r"^host time: gap_noise needs 11 percentiles, got 10$"):
        HostTime(gap_noise=noise[1:])
    with pytest.raises(ValueError, match=r"^host time: the percentiles of gap_noise must not decrease$"):
        HostTime(gap_noise=noise[::-1])

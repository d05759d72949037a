"""Known coefficients are found again in what a client would have measured."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

import numpy as np
import pytest
from synthetic import closed, measured_level

from calibration.fit import fit_profile
from calibration.roofline import Prior
from calibration.step_fit import FitError, StepTimeFit, fit_step_time
from calibration.step_rows import TERMS
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import NOISE_PERCENTILES, HostTime, StepTime
from simulator.results.percentiles import weighted_percentiles
from simulator.results.run import Level, Run

FLAGS = EngineFlags(max_num_seqs=128, max_num_batched_tokens=2048, num_gpu_blocks=5431)
HOST_TIME = HostTime(per_request=0.004, per_request_serial=0.004)
SERVERS = {
    "like an RTX 4090": StepTime(15.7e-3, 35e-6, 62e-9, 80e-6, 3.1e-9),
    "host-bound": StepTime(8e-3, 150e-6, 20e-9, 20e-6, 0.5e-9),
    "dear mixed steps": StepTime(10e-3, 20e-6, 40e-9, 50e-6, 1e-9, mixed_per_sequence=120e-6),
    "computing behind weights": StepTime(7e-3, 20e-6, 40e-9, 22e-6, 0.6e-9, weights=4.5e-3),
}


def seen_terms(step_time: StepTime) -> dict[str, float]:
    """The coefficients that steps seen from outside can tell."""
    return {term: value for term, value in asdict(step_time).items() if term in TERMS}


@cache
def sweep(step_time: StepTime, jitter: float) -> list[Level]:
    lone = [closed(1, length, 8, 5, seed=length) for length in (64, 256, 512, 1024, 2048, 4096)]
    loads = [*lone, closed(1, 1024, 256, 8), closed(4, 1024, 256, 24), closed(8, 1024, 256, 40)]
    return [measured_level(load, FLAGS, step_time, HOST_TIME, jitter, seed=number) for number, load in enumerate(loads)]


@cache
def fitted(step_time: StepTime, jitter: float) -> StepTimeFit:
    return fit_step_time(sweep(step_time, jitter), FLAGS)


@pytest.mark.parametrize("name", SERVERS)
def test_exact_times_give_the_exact_coefficients(name: str) -> None:
    fit = fitted(SERVERS[name], jitter=0.0)
    for term, value in seen_terms(SERVERS[name]).items():
        assert fit.coefficients[term].value == pytest.approx(value, rel=0.01, abs=1e-10), term
    assert fit.host_time.per_request_serial == pytest.approx(HOST_TIME.per_request_serial, rel=0.02)


@pytest.mark.parametrize("name", SERVERS)
def test_late_packets_move_the_coefficients_by_no_more_than_their_errors_say(name: str) -> None:
    fit = fitted(SERVERS[name], jitter=0.15e-3)
    for term, value in seen_terms(SERVERS[name]).items():
        found = fit.coefficients[term]
        if found.dropped:
            assert value == 0, f"{term} is there and was dropped"
        elif value == 0:
            assert found.value <= 4 * found.stderr, f"{term} is not there and was found"
        else:
            assert abs(found.value - value) <= 4 * found.stderr + 0.003 * value, term


@pytest.mark.parametrize("name", SERVERS)
def test_weights_are_found_only_where_computing_hides_behind_them(name: str) -> None:
    found = fitted(SERVERS[name], jitter=0.15e-3).coefficients["weights"]
    assert found.dropped == (SERVERS[name].weights == 0)


@pytest.mark.slow
def test_padding_and_missing_graphs_are_found_where_batches_show_them() -> None:
    step_time = StepTime(10e-3, 20e-6, 40e-9, 50e-6, 1e-9, per_padded_sequence=50e-6, without_graph=2e-3)
    wide = FLAGS.changed(max_num_seqs=1024, max_num_batched_tokens=1024, num_gpu_blocks=10_000)
    loads = [closed(1, length, 8, 3) for length in (64, 1024, 3000)]
    loads += [closed(count, 64, 60, 2 * count) for count in (3, 11, 520)]
    levels = [
        measured_level(load, wide, step_time, HOST_TIME, 0.02e-3, seed=number) for number, load in enumerate(loads)
    ]
    found = fit_step_time(levels, wide).coefficients
    assert found["per_padded_sequence"].value == pytest.approx(50e-6, rel=0.05)
    assert found["without_graph"].value == pytest.approx(2e-3, rel=0.05)


def test_what_the_data_do_not_tell_is_held_at_its_prior_and_named() -> None:
    """Prompts of one length and answers of eight tokens say next to nothing of a KV token's cost."""
    step_time = SERVERS["like an RTX 4090"]
    loads = [closed(1, 500, 8, 6), closed(4, 500, 8, 24)]
    levels = [measured_level(load, FLAGS, step_time, HOST_TIME, 0.3e-3, seed) for seed, load in enumerate(loads)]
    prior = Prior(62e-9, 0.15, "the data sheet")
    fit = fit_step_time(levels, FLAGS, {"per_kv_token": prior})
    assert fit.held == {"per_kv_token": "the data sheet"}
    assert fit.coefficients["per_kv_token"].value == pytest.approx(prior.value, rel=0.2)
    assert fit.coefficients["per_kv_token"].stderr <= 1.01 * prior.value * prior.uncertainty
    told = fit_step_time(sweep(step_time, 0.0), FLAGS, {"per_kv_token": prior})
    assert not told.held, "where the data tell it, no prior is needed"


@pytest.mark.slow
def test_a_level_that_the_fit_never_saw_is_predicted() -> None:
    step_time = SERVERS["like an RTX 4090"]
    levels = [
        *sweep(step_time, 0.1e-3),
        measured_level(closed(16, 1024, 256, 48), FLAGS, step_time, HOST_TIME, 0.1e-3, 9),
    ]
    profile = fit_profile(Run("measured", levels, {"model": "m"}), FLAGS, hold_out=[16])
    (held_out,) = profile.hold_out
    assert abs(held_out.errors["output_throughput"]) < 0.005
    assert abs(held_out.errors["p50_itl"]) < 0.01
    assert profile.measured_range.concurrency == (1, 8)


def test_a_run_without_lone_prompts_is_refused_with_what_is_missing() -> None:
    level = measured_level(closed(4, 100, 50, 12), FLAGS, SERVERS["host-bound"], HOST_TIME)
    with pytest.raises(FitError, match="concurrency 1"):
        fit_step_time([level], FLAGS)


def test_too_few_steps_are_refused() -> None:
    level = measured_level(closed(1, 100, 3, 2), FLAGS, SERVERS["host-bound"], HOST_TIME)
    with pytest.raises(FitError, match="decode steps"):
        fit_step_time([level], FLAGS)


def test_the_noise_of_single_gaps_is_kept_and_comes_back_in_a_prediction() -> None:
    step_time = SERVERS["like an RTX 4090"]
    fit = fit_step_time(sweep(step_time, jitter=0.5e-3), FLAGS)
    assert fit.gap_noise[NOISE_PERCENTILES.index(50)] == pytest.approx(0, abs=0.1e-3)
    load = closed(2, 1024, 256, 8, seed=77)
    measured = measured_level(load, FLAGS, step_time, HOST_TIME, 0.5e-3, 77)
    gaps = measured.tokens.groupby("request_id")["time"].diff().dropna()
    predicted = simulate_level(load, FLAGS, fit.step_time, fit.host_time).gaps
    for percentile in (1, 50, 99):
        told = weighted_percentiles(predicted["gap"], predicted["count"], [percentile])[0]
        assert told == pytest.approx(np.percentile(gaps, percentile), rel=0.02), percentile

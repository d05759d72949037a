"""A run that the model made itself shows no error, one of a slower server shows by how much it is slower."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from calibration.validate import METRICS, compare, flags_of, validate
from simulator.loads.levels import plan_levels
from simulator.loads.workload import Length, Shape
from simulator.prediction import predict
from simulator.profile import Coefficient, Coefficients, Profile
from simulator.results.run import Run

SHAPE = Shape(Length(256, 512), Length(16, 64))


def measured(profile: Profile, *clients: int, slower: float = 1.0) -> Run:
    """What a server would have shown whose steps take `slower` times as long as the profile says."""
    terms = {name: Coefficient(value=term.value * slower) for name, term in profile.coefficients.step_time.items()}
    coefficients = Coefficients(step_time=terms, host_time=profile.coefficients.host_time)
    server = profile.model_copy(update={"coefficients": coefficients})
    workloads = plan_levels([SHAPE], concurrency=clients, num_prompts=24)
    run = predict(server, [replace(load, seed=seed) for seed, load in enumerate(workloads)])
    return Run("measured", run.levels, run.server)


def test_a_perfect_model_has_no_error(profile: Profile) -> None:
    outcome = validate(measured(profile, 1, 4), profile)
    for level in outcome.levels:
        assert level.errors == dict.fromkeys(METRICS, 0.0)
    assert outcome.notes == []


def test_errors_are_signed_and_relative_to_the_measurement(profile: Profile) -> None:
    outcome = validate(measured(profile, 4, slower=1.25), profile)
    errors = outcome.levels[0].errors
    assert errors["p50_itl"] == pytest.approx(-0.2, abs=0.01)  # predicted faster than measured
    assert errors["output_throughput"] == pytest.approx(0.25, abs=0.02)
    metric = outcome.levels[0].metrics["p50_itl"]
    assert metric.error == (metric.predicted - metric.measured) / metric.measured


def test_repeats_of_a_level_give_its_noise(profile: Profile) -> None:
    outcome = validate(measured(profile, 4, 4, 2), profile)
    first, second, alone = outcome.levels
    assert first.metrics["p50_e2el"].noise == second.metrics["p50_e2el"].noise
    values = [level.metrics["p50_e2el"].measured for level in (first, second)]
    assert first.metrics["p50_e2el"].noise == pytest.approx((max(values) - min(values)) / (sum(values) / 2))
    assert alone.metrics["p50_e2el"].noise is None


def test_the_table_has_a_row_for_each_metric_of_each_level(profile: Profile) -> None:
    table = validate(measured(profile, 1, 4), profile).table()
    assert len(table) == 2 * len(METRICS)
    assert list(table.columns) == ["level", "workload", "metric", "measured", "predicted", "error", "noise", "too_few"]


def test_the_flags_of_the_measured_server_are_used_and_named(profile: Profile) -> None:
    run = measured(profile, 4)
    run.server |= {"max_num_batched_tokens": 512, "num_gpu_blocks": 2 * 600, "engines": 2, "max_model_len": None}
    flags = flags_of(run, profile.engine_flags)
    assert (flags.max_num_batched_tokens, flags.num_gpu_blocks) == (512, 600)
    assert flags.max_model_len == profile.engine_flags.max_model_len
    assert validate(run, profile).notes == [
        "predicted with other flags than the profile's: max_num_batched_tokens 512 (not 2048), "
        "num_gpu_blocks 600 (not 1001)"
    ]


def test_another_model_or_version_is_named(profile: Profile) -> None:
    run = measured(profile, 1)
    run.server |= {"model": "other", "engine_version": "0.27.1"}
    run.levels[0].notes = ["client-bound"]
    notes = validate(run, profile).notes
    assert notes[0] == "measured was other, the profile is of demo-7b"
    assert notes[1].startswith("measured was version 0.27.1")
    assert notes[-1] == "measured C=1: client-bound"


def test_what_was_not_measured_has_no_error(profile: Profile) -> None:
    run = measured(profile, 1)
    run.levels[0].gaps = run.levels[0].gaps.iloc[:0]
    level = validate(run, profile).levels[0]
    assert math.isnan(level.metrics["p50_itl"].error)
    assert "p50_itl" not in level.errors


def test_only_runs_of_the_same_load_are_compared(profile: Profile) -> None:
    with pytest.raises(ValueError, match="not of the same levels"):
        compare(measured(profile, 1), measured(profile, 2))


def test_percentiles_of_too_few_samples_are_marked(profile: Profile) -> None:
    """Of 24 requests: p90 takes 29, p50 no more than 5."""
    metrics = validate(measured(profile, 4), profile).levels[0].metrics
    assert all(metrics[name].too_few for name in ("p90_ttft", "p99_ttft", "p99_e2el"))
    assert not any(metrics[name].too_few for name in ("p50_ttft", "output_throughput", "p90_itl"))

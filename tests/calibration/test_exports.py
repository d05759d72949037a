"""Levels as vLLM bench's results, for the tools that read those, and back again."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from synthetic import closed, measured_level

from calibration.exports import save_vllm_bench, vllm_bench_result
from calibration.imports import import_files, import_stated
from calibration.step_fit import fit_step_time
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.results.run import Level, Run
from simulator.results.summary import summarize

STEP_TIME = StepTime(constant=0.008, per_sequence=2e-5, per_kv_token=1e-8, per_prefill_token=4e-5)
HOST_TIME = HostTime(per_request=0.002, per_request_serial=0.002)
FLAGS = EngineFlags(max_num_seqs=32, num_gpu_blocks=4001)


def measured(concurrency: int, prompts: int, output: int = 32) -> Level:
    return measured_level(closed(concurrency, 256, output, prompts), FLAGS, STEP_TIME, HOST_TIME)


def test_a_measured_level_comes_back_as_it_was(tmp_path: Path) -> None:
    level = measured(4, 24)
    level.requests.loc[5, "error"] = "http 500"
    level.requests.loc[5, "finish_reason"] = ""
    run = Run(
        "measured", [level, measured(1, 4)], {"model": "m", "max_num_seqs": 32, "gpu": "a GPU"}, "2026-01-02T03:04:05"
    )
    save_vllm_bench(run, tmp_path / "r.json")
    back = import_files([tmp_path / "r.json"])
    assert (back.started_at, back.server["max_num_seqs"], back.server["gpu"]) == (run.started_at, 32, "a GPU")
    for ours, theirs in zip(run.levels, back.levels, strict=True):
        assert theirs.workload == ours.workload
        good = ours.requests["error"] == ""
        columns = ["arrival", "prompt_tokens", "output_tokens", "ttft", "tpot", "e2el"]
        pd.testing.assert_frame_equal(theirs.requests.loc[good, columns], ours.requests.loc[good, columns], atol=2e-9)
        assert theirs.requests["error"].tolist() == ours.requests["error"].tolist()
        assert summarize(theirs).ttft.p50 == pytest.approx(summarize(ours).ttft.p50)
        assert theirs.tokens is not None


def test_steps_are_seen_in_an_imported_run_as_in_the_one_that_was_exported(tmp_path: Path) -> None:
    levels = [measured_level(closed(1, size, 8, 3), FLAGS, STEP_TIME, HOST_TIME) for size in (64, 512, 1024)]
    levels += [measured(1, 3), measured(8, 32)]
    save_vllm_bench(Run("measured", levels), tmp_path / "r.json")
    fit, ours = fit_step_time(import_files([tmp_path / "r.json"]).levels, FLAGS), fit_step_time(levels, FLAGS)
    assert fit.observations == ours.observations
    for name, coefficient in ours.coefficients.items():
        assert fit.coefficients[name].value == pytest.approx(coefficient.value, rel=1e-3), name


def test_a_simulated_level_keeps_its_figures_and_invents_no_gaps(tmp_path: Path) -> None:
    level = simulate_level(closed(4, 256, 32, 24), FLAGS, STEP_TIME, HOST_TIME)
    save_vllm_bench(Run("simulated", [level], {"model": "m"}), tmp_path / "r.json")
    (back,) = import_files([tmp_path / "r.json"]).levels
    assert summarize(back).tpot.p99 == pytest.approx(summarize(level).tpot.p99)
    assert back.gaps.empty
    (stated,) = import_stated([tmp_path / "r.json"])
    assert stated.value("p99_itl") == pytest.approx(summarize(level).itl.p99)


def test_the_keys_are_those_of_vllm_bench() -> None:
    result = vllm_bench_result(measured(2, 4), Run("measured", [], {"model": "m"}))
    wanted = "date backend model_id num_prompts request_rate burstiness max_concurrency duration completed failed"
    wanted += (
        " input_lens output_lens ttfts itls latencies start_times errors generated_texts p99_ttft_ms median_itl_ms"
    )
    assert set(wanted.split()) <= result.keys()
    assert result["request_rate"] == "inf"
    assert len(result["itls"][0]) == result["output_lens"][0] - 1
    json.dumps(result, allow_nan=False)

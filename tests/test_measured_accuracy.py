"""Predictions against measurements that others made on real GPUs, where their tables are at hand."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy.measured import dennislee, llm_inferno, llmservingsim
from benchmarks.accuracy.measured.table import Report, read
from calibration.aggregate_fit import fit_figures
from calibration.roofline import Prior
from calibration.trial import Figure, play_load
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.trace import Trace

DATA = Path(__file__).parents[2] / "shared" / "measured"

pytestmark = pytest.mark.slow
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no measurements of others in {DATA}")


def missed(report):
    return [goal.name for goal in report.goals if report.median_error(goal.metrics) > goal.limit]


@needs_data
def test_an_overloaded_rtx_4090_is_predicted_from_its_first_30_seconds():
    report = llmservingsim.report(DATA)
    assert not missed(report)
    (span,) = report.unseen(("span",))
    assert span.measured == pytest.approx(183.6, abs=0.1)


@needs_data
def test_other_mixes_and_loads_of_an_h100_are_predicted_from_four_rows():
    step_time = StepTime(**llm_inferno.RECORDED_STEP_TIME)
    host_time = HostTime(**llm_inferno.RECORDED_HOST_TIME)
    sample = [
        row
        for number, row in enumerate(read(DATA, llm_inferno.FILE))
        if number % 8 == 2 or row["strategy"] == "throughput"
    ]
    rows = [made for row in sample for made in llm_inferno.predict(row, step_time, host_time)]
    report = Report("llm-inferno", rows, goals=llm_inferno.GOALS)
    assert len(report.unseen(("itl ms",))) >= 12
    assert not missed(report)


@needs_data
def test_a_burst_on_an_a100_is_predicted_from_single_requests_and_the_data_sheet():
    report = dennislee.report(DATA)
    assert report.median_error() < 0.06


def test_a_recorded_trace_and_a_measure_of_ones_own_can_be_fitted_with_known_weights():
    def longest(level):
        return float(level.requests["e2el"].max())

    trace = Trace("recorded", np.array([0.0, 0.1, 0.4]), np.array([900, 30, 1500]), np.array([40, 50, 60]))
    flags = EngineFlags(num_gpu_blocks=1000)
    truth = StepTime(constant=9e-3, per_prefill_token=60e-6, weights=7e-3)
    level = play_load(trace, flags, truth)
    figures = [
        Figure(trace, "longest", longest(level), 0.001, measure=longest),
        Figure(trace, "mean_ttft", float(level.requests["ttft"].mean()), 0.001, flags),
    ]
    priors = {
        "constant": Prior(8e-3, 0.5, "a guess"),
        "per_prefill_token": Prior(80e-6, 0.5, "a guess"),
        "weights": Prior(7e-3, 1e-3, "known"),
    }
    fit = fit_figures(figures, flags, priors)
    assert fit.step_time.constant == pytest.approx(truth.constant, rel=0.01)
    assert fit.step_time.per_prefill_token == pytest.approx(truth.per_prefill_token, rel=0.03)

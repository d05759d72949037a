"""The second stage moves what the steps left open and the percentiles show, and nothing else."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from synthetic import closed

from calibration.refine import MODEL_ERRORS, SHARE_UNCERTAINTY, UNBOUNDED, measured_figures, refine
from calibration.step_fit import Coefficient, StepTimeFit
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import Workload
from simulator.results.run import Level

FLAGS = EngineFlags(max_num_seqs=64, max_num_batched_tokens=2048, num_gpu_blocks=6000)
TRUTH = StepTime(8e-3, 80e-6, 40e-9, 40e-6, 1e-9)
REQUEST = 0.008  # s, host time of a request
LONG = closed(4, 400, 60, 24)
BURST = closed(16, 64, 8, 64)  # all 16 end in one step, and their successors queue for the API server


def host_time(share: float = 0.5) -> HostTime:
    return HostTime(per_request=(1 - share) * REQUEST, per_request_serial=share * REQUEST)


def measured(*loads: Workload, share: float = 0.5, step_time: StepTime = TRUTH) -> list[Level]:
    return [simulate_level(load, FLAGS, step_time, host_time(share)) for load in loads]


def first_stage(uncertainty: float = 0.002, **values: float) -> StepTimeFit:
    """What the steps might have told: the truth but for `values`, each coefficient as uncertain."""
    terms = asdict(TRUTH) | {"per_request": REQUEST, "per_prompt_token": 0.0} | values
    coefficients = {name: Coefficient(value, uncertainty * value, dropped=value == 0) for name, value in terms.items()}
    return StepTimeFit(coefficients, noise={}, observations={}, correlations=(("constant", "per_sequence", -0.5),))


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_requests_that_queue_for_the_api_server_show_how_long_it_takes_each(share: float) -> None:
    found = refine(first_stage(), measured(LONG, BURST, share=share), FLAGS)
    assert found.share_is_measured
    assert abs(found.serial_share.value - share) < 2 * found.serial_share.stderr
    serial = found.coefficients["per_request_serial"]
    assert abs(serial.value - share * REQUEST) < 2 * serial.stderr
    both = serial.value + found.coefficients["per_request"].value
    assert both == pytest.approx(REQUEST, rel=0.01)  # the sum was measured by the steps
    assert found.misfit[1] <= found.misfit[0]


def test_without_a_queue_the_share_stays_assumed_about_as_uncertain_as_it_was() -> None:
    found = refine(first_stage(), measured(LONG, share=0.2), FLAGS)
    assert not found.share_is_measured
    assert 0.8 * SHARE_UNCERTAINTY < found.serial_share.stderr <= SHARE_UNCERTAINTY
    assert found.serial_share.value == pytest.approx(0.5, abs=0.05)
    pairs = {frozenset(pair[:2]): pair[2] for pair in found.correlations}
    assert pairs[frozenset(("per_request", "per_request_serial"))] < -0.99  # what one loses, the other gains


def test_shares_that_the_levels_do_not_tell_apart_are_all_within_the_error() -> None:
    """Six clients that start at once: up to a serial share of 0.5 all of them reach the same step."""
    found = refine(first_stage(), measured(closed(6, 400, 60, 18), share=0.1), FLAGS)
    for share in (0.1, 0.5):
        assert abs(found.serial_share.value - share) < 2 * found.serial_share.stderr


@pytest.mark.slow
def test_a_coefficient_that_the_steps_left_open_goes_where_the_percentiles_are() -> None:
    wrong = first_stage(uncertainty=0.05, constant=1.08 * TRUTH.constant)
    found = refine(wrong, measured(LONG, closed(2, 400, 60, 24)), FLAGS)
    assert found.step_time.constant == pytest.approx(TRUTH.constant, rel=0.015)
    assert found.moved["constant"] == pytest.approx((found.step_time.constant / TRUTH.constant - 1.08) / 0.05 / 1.08)
    assert found.coefficients["constant"].stderr < 0.5 * wrong.coefficients["constant"].stderr
    assert found.misfit[1] < found.misfit[0] / 3


def test_what_the_steps_have_settled_does_not_move() -> None:
    settled = first_stage(uncertainty=1e-5)
    found = refine(settled, measured(LONG, step_time=replace(TRUTH, constant=1.03 * TRUTH.constant)), FLAGS)
    assert found.step_time.constant == pytest.approx(TRUTH.constant, rel=1e-4)


def test_the_right_coefficients_stay() -> None:
    found = refine(first_stage(), measured(LONG, BURST), FLAGS)
    assert all(abs(by) < 0.2 for by in found.moved.values()), found.moved
    for name in ("constant", "per_sequence", "per_prefill_token"):
        assert found.coefficients[name].stderr <= 1.0001 * first_stage().coefficients[name].stderr


def test_a_dropped_term_stays_zero() -> None:
    found = refine(first_stage(), measured(LONG), FLAGS)
    assert found.coefficients["mixed_per_sequence"].dropped
    assert found.step_time.mixed_per_sequence == 0
    assert "mixed_per_sequence" not in found.moved


def test_no_host_time_has_no_share() -> None:
    found = refine(first_stage(per_request=0.0), measured(LONG), FLAGS)
    assert found.host_time.per_request_serial == found.host_time.per_request == 0
    assert found.coefficients["per_request_serial"].dropped


def test_a_few_requests_are_no_percentiles() -> None:
    assert not list(measured_figures(measured(closed(1, 64, 8, 5))))
    found = refine(first_stage(), measured(closed(1, 64, 8, 5)), FLAGS)
    assert found.step_time == TRUTH
    assert found.misfit == (0.0, 0.0)


def test_a_figure_is_as_uncertain_as_its_sample_and_the_model() -> None:
    (level,) = measured(LONG)
    figures = {figure.metric: figure for figure in measured_figures([level])}
    assert set(figures) == set(MODEL_ERRORS)
    assert all(figure.uncertainty > MODEL_ERRORS[name] for name, figure in figures.items())
    assert figures["p99_ttft"].uncertainty > UNBOUNDED  # 24 requests do not bound their 99th percentile
    level.intervals = {"p50_ttft": (0.5 * figures["p50_ttft"].value, 1.5 * figures["p50_ttft"].value)}
    wide = {figure.metric: figure for figure in measured_figures([level])}
    assert wide["p50_ttft"].uncertainty == pytest.approx(
        2 * np.hypot(1 / 2 / 1.645, MODEL_ERRORS["p50_ttft"]), rel=0.01
    )


@pytest.mark.slow
def test_the_same_levels_give_the_same_refinement() -> None:
    levels = measured(LONG)
    assert refine(first_stage(), levels, FLAGS) == refine(first_stage(), levels, FLAGS)

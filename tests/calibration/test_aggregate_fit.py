"""Fitting to stated figures alone."""

import pytest

from calibration.aggregate_fit import fit_figures
from calibration.roofline import Prior
from calibration.trial import Figure, figure_of
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload

FLAGS = EngineFlags(max_num_seqs=64, num_gpu_blocks=6000)
TRUTH = StepTime(12e-3, 50e-6, 40e-9, 60e-6, 2e-9)
HOST = HostTime(6e-3)


def level(clients, input_len=512, output_len=64, rounds=4):
    shape = Shape(Length.fixed(input_len), Length.fixed(output_len))
    return Workload(ClosedLoop(clients), (shape,), clients * rounds)


def stated(workload, metric, uncertainty=0.002):
    """A figure as the simulated truth gives it."""
    value = figure_of(simulate_level(workload, FLAGS, TRUTH, HOST), metric)
    return Figure(workload, metric, value, uncertainty)


def loose(value):
    return Prior(value, 1.0, "a guess")


@pytest.mark.slow
def test_recovers_the_coefficients_that_made_the_figures():
    figures = [
        stated(level(1), "p50_itl"),
        stated(level(1), "p50_ttft"),
        stated(level(1, 2048), "p50_ttft"),
        stated(level(1, 64), "p50_ttft"),
        stated(level(16), "p50_itl"),
        stated(level(16), "output_throughput"),
    ]
    priors = {
        "constant": loose(8e-3),
        "per_sequence": loose(80e-6),
        "per_prefill_token": loose(90e-6),
        "per_request": loose(4e-3),
        "per_kv_token": Prior(TRUTH.per_kv_token, 1e-3, "known"),
        "per_prefill_attention": Prior(TRUTH.per_prefill_attention, 1e-3, "known"),
    }
    fitted = fit_figures(figures, FLAGS, priors)
    assert max(abs(error) for error in fitted.errors) < 0.002
    assert fitted.step_time.constant == pytest.approx(TRUTH.constant, rel=0.01)
    assert fitted.step_time.per_sequence == pytest.approx(TRUTH.per_sequence, rel=0.05)
    assert fitted.step_time.per_prefill_token == pytest.approx(TRUTH.per_prefill_token, rel=0.02)
    assert fitted.host_time.per_request == pytest.approx(HOST.per_request, rel=0.1)
    for name in ("constant", "per_sequence", "per_prefill_token", "per_request"):
        assert fitted.terms[name].identified, name


def test_what_the_figures_do_not_see_stays_at_its_prior_and_says_so():
    prior = Prior(80e-6, 0.4, "a data sheet")
    fitted = fit_figures([stated(level(1), "p50_itl")], FLAGS, {"constant": loose(8e-3), "mixed_per_sequence": prior})
    assert fitted.terms["constant"].identified
    held = fitted.terms["mixed_per_sequence"]
    assert not held.identified
    assert held.value == pytest.approx(prior.value, rel=1e-3)
    assert held.stderr == pytest.approx(prior.value * prior.uncertainty, rel=0.01)


def test_a_term_without_a_prior_is_zero():
    fitted = fit_figures([stated(level(1), "p50_itl")], FLAGS, {"constant": loose(8e-3)})
    assert fitted.step_time == StepTime(fitted.terms["constant"].value)
    assert fitted.host_time == HostTime()


@pytest.mark.slow
def test_the_interval_covers_the_value_and_stays_positive():
    fitted = fit_figures([stated(level(1), "p50_itl")], FLAGS, {"constant": loose(8e-3), "per_kv_token": loose(1e-8)})
    for term in fitted.terms.values():
        low, high = term.interval()
        assert 0 < low < term.value < high


def test_the_same_figures_give_the_same_fit():
    figures = [stated(level(4), "p99_itl"), stated(level(4), "output_throughput")]
    priors = {"constant": loose(8e-3), "per_prefill_token": loose(90e-6)}
    assert fit_figures(figures, FLAGS, priors) == fit_figures(figures, FLAGS, priors)


def test_decode_time_is_from_the_first_to_the_last_token():
    played = simulate_level(level(1), FLAGS, TRUTH, HOST)
    assert figure_of(played, "p50_decode_time") == pytest.approx(63 * figure_of(played, "mean_itl"))


def test_an_unknown_figure_is_named():
    with pytest.raises(ValueError, match="'p98_itl' is no figure of a level"):
        figure_of(simulate_level(level(1), FLAGS, TRUTH), "p98_itl")


def test_a_figure_must_be_positive():
    with pytest.raises(ValueError, match="p50_itl of C=1"):
        Figure(level(1), "p50_itl", 0.0, 0.01)

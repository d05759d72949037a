"""Both stages of the fit together: the profile of a server whose coefficients are known."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest

from benchmarks.accuracy.intervals import METRICS, as_client_saw, show
from calibration.fit import REPORTED, fit_profile
from calibration.step_fit import FitError
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.step_time import HostTime, StepTime
from simulator.prediction import predict
from simulator.profile import Profile
from simulator.results.run import Run
from simulator.results.summary import summarize
from tests.calibration.synthetic import Noise, closed, measured_level

FLAGS = EngineFlags(max_num_seqs=128, max_num_batched_tokens=2048, num_gpu_blocks=8000)
TRUTH, HOST = StepTime(8e-3, 150e-6, 20e-9, 20e-6, 0.5e-9), HostTime(per_request=0.0012, per_request_serial=0.0048)
NOISE = Noise(step=0.005, jitter=0.05e-3)
BURST = closed(16, 64, 16, 96)  # all 16 end in one step, and their successors queue for the API server


@cache
def run(with_burst: bool = True) -> Run:
    lone = [closed(1, length, 8, 5) for length in (64, 512, 2048, 6000)]
    loads = [*lone, closed(1, 512, 64, 8), closed(2, 3000, 32, 8), closed(6, 512, 64, 36), closed(4, 512, 64, 24)]
    levels = [
        as_client_saw(measured_level(load, FLAGS, TRUTH, HOST, NOISE, number))
        for number, load in enumerate([*loads, BURST] if with_burst else loads)
    ]
    return Run("measured", levels, {"model": "m", "url": "http://a-server", "gpu_memory_utilization": 0.9})


@cache
def profile(with_burst: bool = True) -> Profile:
    return fit_profile(run(with_burst), FLAGS, hold_out=[1, 4])


@pytest.mark.slow
def test_known_coefficients_are_recovered_within_their_intervals() -> None:
    terms = profile().coefficients.step_time | profile().coefficients.host_time
    truth = asdict(TRUTH) | asdict(HOST)
    found = {name: term for name, term in terms.items() if term.stderr}
    assert {"constant", "per_sequence", "per_prefill_token", "per_request", "per_request_serial"} <= set(found)
    for name, term in found.items():
        assert abs(term.value - truth[name]) < 2.6 * (term.stderr or 0), name  # 99 %, for each of several
    inside = [(term.low or 0) <= truth[name] <= (term.high or 0) for name, term in found.items()]
    assert sum(inside) >= 0.7 * len(inside)


def test_the_profile_keeps_what_the_server_told_of_its_memory(tmp_path: Path) -> None:
    profile().save(tmp_path / "profile.yaml")
    assert Profile.load(tmp_path / "profile.yaml").gpu_memory_utilization == 0.9


def test_the_percentiles_tell_the_split_of_a_requests_host_time() -> None:
    host = profile().coefficients.host_time
    assert host["per_request_serial"].value == pytest.approx(HOST.per_request_serial, rel=0.25)
    assert (host["per_request_serial"].stderr or 1) < 0.25 * HOST.per_request_serial
    assert host["per_request_serial"].origin == "measured"
    assert profile().assumed == []


@pytest.mark.slow
def test_a_split_that_no_level_tells_is_assumed_and_says_so() -> None:
    assumed = profile(with_burst=False)
    assert assumed.coefficients.host_time["per_request_serial"].origin == "assumed"
    assert assumed.coefficients.host_time["per_request"].origin == "assumed"
    (sentence,) = assumed.assumed
    assert "host time of a request is spent in the API server one request after the other" in sentence


def test_the_profile_keeps_its_errors_on_fitted_and_on_held_out_levels() -> None:
    (held_out,) = profile().hold_out
    assert held_out.level.startswith("C=4, 512/64")
    assert len(profile().fit) == len(run().levels) - 1
    for level in (held_out, profile().fit[-1]):
        assert set(level.errors) == set(REPORTED)
        assert abs(level.errors["output_throughput"]) < 0.02
        assert abs(level.errors["p50_e2el"]) < 0.02


def test_levels_never_measured_fall_inside_their_intervals() -> None:
    inside = []
    for number, load in enumerate((closed(3, 512, 64, 24), closed(10, 256, 64, 60), closed(24, 512, 64, 72))):
        shown = show(load, FLAGS, TRUTH, HOST, NOISE, 100 + number)
        (level,) = predict(profile(), [load], with_intervals=True).levels
        predicted = summarize(level).flat()
        for name in METRICS:
            low, high = level.intervals[name]
            assert low < float(predicted[name] or 0) < high
            inside.append(low <= shown[name] <= high)
    assert sum(inside) >= 0.8 * len(inside)


def test_the_profile_is_the_same_when_read_again(tmp_path: Path) -> None:
    profile().save(tmp_path / "profile.yaml")
    assert Profile.load(tmp_path / "profile.yaml") == profile()


def test_lone_prompts_enter_the_fit_even_where_their_concurrency_is_held_out() -> None:
    assert [level.level[:3] for level in profile().fit[:5]] == ["C=1"] * 5
    assert [level.level[:3] for level in profile().hold_out] == ["C=4"]


def test_a_run_with_every_level_held_out_is_refused() -> None:
    with pytest.raises(FitError, match="every level is held out"):
        fit_profile(Run("measured", run().levels[6:8]), FLAGS, hold_out=[4, 6])

"""A profile holds as long as a level that is measured again differs no more than prediction and noise allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calibration.drift import JUDGED, SECONDS, Drift, DriftError, Figure, drift_level, drift_plan, judge_drift, verdict
from simulator.engine.simulation import simulate_level
from simulator.loads.levels import parse_shape, plan_levels
from simulator.loads.workload import Workload
from simulator.profile import MeasuredRange, Profile
from simulator.results.run import Run


@pytest.fixture(scope="module")
def workload() -> Workload:
    return plan_levels([parse_shape("256-512/32-64")], concurrency=[4], num_prompts=48)[0]


def measured(profile: Profile, workload: Workload, slower: float = 1.0, **notes: str) -> Run:
    """What a server would show today whose steps take `slower` times as long as when the profile was made."""
    step_time = replace(
        profile.step_time,
        constant=slower * profile.step_time.constant,
        per_prefill_token=slower * profile.step_time.per_prefill_token,
    )
    level = simulate_level(workload, profile.engine_flags, step_time, profile.host_time)
    level.notes += notes.values()
    return Run("measured", [level], {"model": profile.model, "engine_version": profile.engine_version})


def test_the_same_server_holds(profile: Profile, workload: Workload) -> None:
    drift = judge_drift(measured(profile, workload), profile)
    assert drift.state == "holds"
    assert drift.outside == []
    assert all(figure.error == 0 for figure in drift.figures.values())
    assert set(JUDGED) <= drift.figures.keys()
    assert verdict(drift) == "the profile still holds"


@pytest.mark.parametrize("slower", [0.8, 1.25])
def test_a_server_of_another_speed_has_drifted(profile: Profile, workload: Workload, slower: float) -> None:
    drift = judge_drift(measured(profile, workload, slower), profile)
    assert drift.state == "drifted"
    assert drift.figures["p50_itl"].error == pytest.approx(slower - 1, abs=0.01)
    word = "above" if slower > 1 else "below"
    assert f"{word} the prediction" in verdict(drift)
    assert verdict(drift).endswith("calibrate anew")


def test_what_the_noise_explains_is_no_drift(profile: Profile, workload: Workload) -> None:
    noisy = profile.model_copy(update={"noise": dict.fromkeys(JUDGED, 0.3)})
    assert judge_drift(measured(profile, workload, 1.25), noisy).state == "holds"
    assert judge_drift(measured(profile, workload, 1.8), noisy).state == "drifted"


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"p50_itl": 1.5}, "holds"),
        ({"p50_itl": -1.5}, "holds"),
        ({"p50_itl": 2.5}, "drifted"),
        ({"p50_itl": 1.5, "p50_ttft": 1.2}, "drifted"),
        ({"p99_itl": 5.0, "p90_ttft": 5.0}, "holds"),
    ],
)
def test_one_figure_a_little_outside_is_chance(workload: Workload, changes: dict[str, float], state: str) -> None:
    """Changes are in what is allowed; tails are shown and not judged."""
    names = {*JUDGED, *changes}
    figures = {name: Figure(name, 10.0 + changes.get(name, 0.0) * 0.5, 10.0, allowed=0.5) for name in names}
    drift = Drift(workload, figures, [])
    assert drift.state == state
    assert ("a little outside" in verdict(drift)) == (changes.keys() == {"p50_itl"} and state == "holds")


def test_a_disturbed_measurement_cannot_tell(profile: Profile, workload: Workload) -> None:
    disturbed = measured(profile, workload, 1.5, note="client-bound: the load generator was late")
    drift = judge_drift(disturbed, profile)
    assert drift.state == "unclear"
    assert "the measurement was disturbed (client-bound)" in verdict(drift)
    assert judge_drift(measured(profile, workload, note="client-bound: a little"), profile).state == "holds"
    failing = measured(profile, workload, 1.5, note="4 of 12 requests failed: http 500 (4)")
    assert "the measurement was disturbed (4 of 12 requests failed)" in verdict(judge_drift(failing, profile))


def test_another_model_cannot_be_judged(profile: Profile, workload: Workload) -> None:
    run = measured(profile, workload)
    run.server["model"] = "other"
    with pytest.raises(DriftError, match="serves other, the profile is of demo-7b"):
        judge_drift(run, profile)


def test_another_version_is_named(profile: Profile, workload: Workload) -> None:
    run = measured(profile, workload)
    run.server["engine_version"] = "0.33.0"
    assert any("version 0.33.0 of the engine" in note for note in judge_drift(run, profile).notes)


def test_the_level_lies_in_the_measured_range_and_takes_less_than_a_minute(profile: Profile) -> None:
    level = drift_level(profile)
    assert profile.outside_range(level) == []
    assert level.concurrency is not None
    assert level.concurrency >= 4, "a lone client shows nothing of what others cost"
    seconds = simulate_level(level, profile.engine_flags, profile.step_time, profile.host_time).duration
    assert SECONDS / 2 < seconds < 60
    plan = drift_plan(level)
    assert plan.levels == (level,)
    assert any(warm.concurrency == level.concurrency for warm in plan.warm_up)


def test_a_range_without_any_level_is_said(profile: Profile) -> None:
    narrow = MeasuredRange(concurrency=(1, 1), sequences=(1, 1), context_tokens=(10, 20), prompt_chunk_tokens=(10, 12))
    with pytest.raises(DriftError, match="give one with a load"):
        drift_level(profile.model_copy(update={"measured_range": narrow}))

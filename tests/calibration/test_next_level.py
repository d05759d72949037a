"""The next level is the one whose steps tell most of what is not known yet, for the time that it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from synthetic import closed, measured_level

from calibration import next_level
from calibration.next_level import (
    Expected,
    LevelChooser,
    as_measured,
    candidate_levels,
    expected,
    hold_out_levels,
    most_telling,
    start_plan,
)
from calibration.step_fit import StepTimeFit, fit_step_time
from calibration.sweep import OVERHEAD
from calibration.sweep_plan import is_probe
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.levels import plan_levels
from simulator.loads.workload import Length, Shape, Workload
from simulator.results.run import Level

STEP_TIME = StepTime(constant=0.01, per_sequence=1e-4, per_kv_token=2e-8, per_prefill_token=5e-5)
HOST_TIME = HostTime(per_request=0.002, per_request_serial=0.002)
FLAGS = EngineFlags(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=8192, num_gpu_blocks=8001)


def levels(*clients: int) -> list[Workload]:
    return plan_levels([Shape(Length.fixed(256), Length.fixed(64))], concurrency=clients, num_prompts=1)


def measured(workload: Workload, seed: int = 0) -> Level:
    return measured_level(workload, FLAGS, STEP_TIME, HOST_TIME, noise=5e-5, seed=seed)


@pytest.fixture(scope="module")
def start() -> list[Level]:
    return [measured(workload, seed) for seed, workload in enumerate(start_plan(levels(1, 2, 4, 8), 4096).levels)]


@pytest.fixture(scope="module")
def fit(start: list[Level]) -> StepTimeFit:
    return fit_step_time(start, FLAGS)


def expect(workload: Workload) -> Expected:
    found = expected(workload, FLAGS, STEP_TIME, HOST_TIME)
    assert found is not None
    return found


def test_a_start_has_lone_prompts_crowds_one_client_and_the_most() -> None:
    plan = start_plan(levels(1, 2, 4, 8), 4096)
    assert [level.label for level in plan.levels[plan.probes :]] == ["C=1", "C=8"]
    probes = plan.levels[: plan.probes]
    lone = [level.longest()[0] for level in probes if not is_probe(level)]
    assert (lone[0], lone[-1]) == (64, 4088), "as far as the server's longest context"
    assert [level.label for level in probes[len(lone) :]] == ["C=16", "C=16"]
    assert plan.level_seconds is None, "the start does not grow with the budget"


def test_candidates_reach_around_the_lengths_asked_for_and_leave_the_hold_out() -> None:
    found = candidate_levels(levels(1, 2, 4, 8), 4096, keep_out=[4])
    assert {level.concurrency for level in found} == {1, 2, 8}
    assert max(level.longest()[1] for level in found) <= 4096
    prompts = {level.longest()[0] for level in found}
    assert min(prompts) < 256 < max(prompts)
    assert any(len(level.shapes) == 2 for level in found)
    assert [level.concurrency for level in hold_out_levels(levels(1, 2, 4, 8), [4])] == [4]


def test_a_simulated_level_is_seen_step_for_step_as_a_measured_one() -> None:
    workload = closed(4, 128, 16, 12)
    ours = as_measured(simulate_level(workload, FLAGS, STEP_TIME, HOST_TIME)).tokens
    theirs = measured_level(workload, FLAGS, STEP_TIME, HOST_TIME).tokens
    assert ours is not None
    assert theirs is not None
    assert ours[["request_id", "tokens"]].equals(theirs[["request_id", "tokens"]])
    assert np.allclose(ours["time"], theirs["time"])


def test_a_level_that_preempts_is_no_candidate() -> None:
    tight = replace(FLAGS, num_gpu_blocks=40, max_model_len=512)
    assert expected(closed(8, 200, 100, 16), tight, STEP_TIME, HOST_TIME) is None


def test_more_clients_are_chosen_where_only_one_was_measured() -> None:
    lone = [measured(closed(1, size, 16, 3), seed) for seed, size in enumerate((64, 512, 2048))]
    only_lone = fit_step_time(lone, FLAGS)
    choices = [expect(closed(1, 256, 64, 8)), expect(closed(16, 256, 64, 48))]
    assert most_telling(choices, choices, lone, only_lone, FLAGS) == choices[1].workload


def test_of_two_levels_that_tell_the_same_the_quicker_is_chosen(
    start: list[Level], fit: StepTimeFit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_level, "NEGLIGIBLE", 0.0)
    quick = expect(closed(16, 256, 64, 32))
    slow = replace(quick, workload=closed(16, 256, 64, 33), seconds=10 * quick.seconds)
    assert most_telling([slow, quick], [quick], start[:-1], fit, FLAGS) == quick.workload


def test_nothing_is_chosen_that_would_tell_next_to_nothing(
    start: list[Level], fit: StepTimeFit, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = expect(start[-1].workload)  # type: ignore[arg-type]
    monkeypatch.setattr(next_level, "NEGLIGIBLE", 0.05)
    assert most_telling([known], [known], start, fit, FLAGS) is None


@pytest.mark.slow
def test_a_budget_is_kept_and_ends_with_the_hold_out_and_the_repeat(
    start: list[Level], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_level, "NEGLIGIBLE", 0.0)
    budget = 150.0
    candidates = candidate_levels(levels(1, 2, 8), 4096, keep_out=[4])[:6]
    chooser = LevelChooser(FLAGS, budget, candidates, hold_out_levels(levels(4), [4]))
    done, spent = list(start), sum(level.duration for level in start)
    while (workload := chooser(done, spent)) is not None:
        done.append(measured(workload, len(done)))
        spent += done[-1].duration + OVERHEAD
        assert len(done) < 30
    assert spent <= budget
    labels = [level.workload.label for level in done]
    assert labels[-2] == "C=4"
    assert done[-1].workload in [level.workload for level in done[:-1]]
    assert len(done) > len(start) + 2, "there was time for others"


def test_without_time_nothing_follows_the_start(start: list[Level]) -> None:
    chooser = LevelChooser(FLAGS, 30.0, candidate_levels(levels(1, 8), 4096, [])[:2], hold_out_levels(levels(4), [4]))
    assert chooser(start, 29.9) is None

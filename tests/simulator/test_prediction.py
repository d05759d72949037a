"""A prediction is a run like a measured one, the same bytes for the same question."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.engine.scheduler import CannotFit
from simulator.loads.levels import plan_levels
from simulator.loads.workload import Length, Shape
from simulator.prediction import predict
from simulator.profile import Profile
from simulator.results.run_files import load_run, save_run
from simulator.results.summary import summarize

SHAPE = Shape(Length.fixed(512), Length.fixed(64))


def test_a_lone_request_takes_what_the_coefficients_say(profile: Profile) -> None:
    (level,) = predict(profile, plan_levels([SHAPE], concurrency=[1], num_prompts=3)).levels
    first = 0.002 + 0.01 + 2e-5 + 5e-5 * 512
    decode = sum(0.01 + 2e-5 + 1e-8 * context for context in range(512, 512 + 63))
    assert level.requests["ttft"].to_numpy() == pytest.approx([first] * 3, rel=1e-3)
    assert level.requests["e2el"].to_numpy() == pytest.approx([first + decode] * 3, rel=1e-3)


def test_notes_the_levels_that_leave_the_measured_range(profile: Profile) -> None:
    run = predict(profile, plan_levels([SHAPE], concurrency=[8, 16], num_prompts=40))
    assert [level.notes for level in run.levels] == [[], ["concurrency 16, measured 1 to 8"]]


def test_an_open_loop_is_judged_by_what_it_led_to(profile: Profile) -> None:
    calm, crowd = predict(profile, plan_levels([SHAPE], request_rate=[0.5, 20], num_prompts=40)).levels
    assert calm.notes == []
    assert crowd.notes[0].startswith("sequences in a step")


def test_says_what_served_it(profile: Profile) -> None:
    flags = profile.with_flags(max_num_seqs=4)
    run = predict(profile, plan_levels([SHAPE], concurrency=[8], num_prompts=16), flags)
    assert run.source == "simulated"
    assert run.server["max_num_seqs"] == 4
    assert run.server["model"] == "demo-7b"
    assert run.server["kv_tokens"] == flags.kv_tokens
    assert run.levels[0].timeline["running"].max() == 4


def test_the_same_question_gives_the_same_bytes(profile: Profile, tmp_path: Path) -> None:
    workloads = plan_levels([Shape(Length(64, 512), Length(8, 64))], concurrency=[1, 4], num_prompts=20)
    for name in ("first", "second"):
        save_run(predict(profile, workloads), tmp_path / name)
    first, second = (
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file()
        }
        for name in ("first", "second")
    )
    assert first == second
    assert summarize(load_run(tmp_path / "first").levels[1]).completed == 20


def test_tells_after_every_level(profile: Profile) -> None:
    told: list[int] = []
    predict(profile, plan_levels([SHAPE], concurrency=[1, 2], num_prompts=4), on_level=told.append)
    assert told == [1, 2]


def test_a_request_that_cannot_be_served_is_refused(profile: Profile) -> None:
    with pytest.raises(CannotFit, match="--max-model-len"):
        predict(profile, plan_levels([Shape(Length.fixed(9000), Length.fixed(1))], concurrency=[1]))
    with pytest.raises(CannotFit, match="KV blocks"):
        predict(profile, plan_levels([SHAPE], concurrency=[1]), profile.with_flags(num_gpu_blocks_override=20))

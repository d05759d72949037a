"""A sweep fits its time, keeps every finished level, and says how long it will take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fake_server import Manners, serve

from calibration.endpoint import EndpointError, discover
from calibration.resume import ResumeError
from calibration.sweep import OVERHEAD, SweepProgress, run_sweep
from calibration.sweep_plan import Pace, SweepPlan, fitted_levels, is_probe, plan_sweep
from simulator.loads.levels import plan_levels
from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.results.run import Level
from simulator.results.run_files import RunFileError, load_run

RTX_4090 = Pace(prefill=0.1 / 1024, decode=0.016)  # about what Qwen2.5-7B does there


def closed(clients: int, requests: int, prompt: int = 32, output: int = 8) -> Workload:
    return Workload(ClosedLoop(clients), (Shape(Length.fixed(prompt), Length.fixed(output)),), requests)


def lengths(prompt: int, output: int, *clients: int, requests: int = 1) -> list[Workload]:
    """Levels of a plan, whose number of requests the pace will choose."""
    return plan_levels([Shape(Length.fixed(prompt), Length.fixed(output))], concurrency=clients, num_prompts=requests)


def levels_of(plan: SweepPlan) -> list[tuple[int, int]]:
    """(clients, requests) of the levels after the probes."""
    return [
        (level.arrivals.concurrency, level.num_prompts)
        for level in plan.levels[plan.probes :]
        if isinstance(level.arrivals, ClosedLoop)
    ]


def test_a_plan_has_isolated_prompts_then_the_levels() -> None:
    plan = plan_sweep(lengths(1024, 256, 1, 2, 4, 8, 16), max_model_len=8192)
    *lone, mixed, together, in_turn = plan.levels[: plan.probes]
    assert [probe.shapes[0].input_len.low for probe in lone] == [64, 256, 512, 1024, 2048, 4096, 8184]
    assert mixed.concurrency == 2, "one client's gaps show what the other's prompts cost"
    assert mixed.shapes[0].input_len == Length(64, 8160)
    assert all(probe.arrivals == ClosedLoop(1) and probe.num_prompts >= 3 for probe in lone)
    assert together.concurrency == in_turn.concurrency == 16
    assert [is_probe(level) for level in plan.levels] == [False] * len(lone) + [True] * 3 + [False] * 5
    assert levels_of(plan) == [(1, 8), (2, 8), (4, 12), (8, 24), (16, 48)]
    assert len({level.seed for level in plan.levels}) == len(plan.levels)


def test_the_warm_up_covers_every_shape_and_the_whole_batch() -> None:
    plan = plan_sweep(lengths(1024, 256, 1, 16), max_model_len=8192)
    warmed = {workload.shapes[0].input_len.low for workload in plan.warm_up}
    assert warmed >= {level.shapes[0].input_len.low for level in plan.levels}
    assert ClosedLoop(16) in [workload.arrivals for workload in plan.warm_up]


def test_a_plan_keeps_to_the_servers_longest_context() -> None:
    plan = plan_sweep(lengths(200, 56, 1), max_model_len=256)
    assert all(level.shapes[0].input_len.high + level.shapes[0].output_len.high <= 256 for level in plan.levels)
    with pytest.raises(ValueError, match="200 input and 57 output tokens exceed the server's max_model_len of 256"):
        plan_sweep(lengths(200, 57, 1), max_model_len=256)
    with pytest.raises(ValueError, match="at least one level"):
        plan_sweep([])


def test_a_long_prompt_is_measured_alone_too() -> None:
    plan = plan_sweep(lengths(16_000, 100, 1), max_model_len=32_768)
    assert Length.fixed(16_000) in [probe.shapes[0].input_len for probe in plan.levels[: plan.probes]]


def test_a_server_that_does_not_tell_its_longest_context_is_not_tried_out() -> None:
    plan = plan_sweep(lengths(200, 56, 1))
    assert max(level.shapes[0].input_len.high for level in plan.levels) == 4096


def test_the_default_sweep_takes_under_four_minutes_where_a_step_takes_16_ms() -> None:
    seconds = {}
    for repeat in (False, True):
        plan = plan_sweep(lengths(1024, 256, 1, 2, 4, 8, 16), max_model_len=8192, repeat=repeat)
        fitted = fitted_levels(plan, RTX_4090)
        seconds[repeat] = sum(RTX_4090.seconds(workload) + OVERHEAD for workload in [*plan.warm_up, *fitted])
        assert all(level.num_prompts >= 8 for level in fitted[plan.probes :])
    assert 150 < seconds[False] < 240
    assert seconds[True] < 270, "with a repeat, as calibrate does"


def test_the_pace_foretells_what_was_measured() -> None:
    """Durations of a vLLM server with that pace, 1024/256."""
    for clients, requests, measured in ((1, 8, 33.1), (4, 28, 31.5), (16, 112, 40.9)):
        assert RTX_4090.seconds(closed(clients, requests, 1024, 256)) == pytest.approx(measured, rel=0.05)
    open_loop = Workload(OpenLoop(2.0), (Shape(Length.fixed(1024), Length.fixed(256)),), 60)
    assert RTX_4090.seconds(open_loop) == pytest.approx(30 + 4.2, rel=0.01)


def test_a_quick_server_gets_more_requests_and_a_slow_one_the_fewest() -> None:
    plan = plan_sweep(lengths(1024, 256, 1, 8))
    counts = {}
    for name, factor in (("quick", 0.1), ("slow", 10.0)):
        fitted = fitted_levels(plan, Pace(RTX_4090.prefill * factor, RTX_4090.decode * factor))
        counts[name] = [level.num_prompts for level in fitted[plan.probes :]]
    assert counts == {"quick": [12, 96], "slow": [8, 24]}
    asked = plan_sweep(lengths(1024, 256, 1, 8, requests=5), paced=False)
    assert levels_of(asked) == [(1, 5), (8, 5)]
    assert fitted_levels(asked, RTX_4090) == list(asked.levels)


def test_an_open_loop_gets_arrivals_for_a_minute_or_as_long_as_there_is_time() -> None:
    shape = [Shape(Length.fixed(1024), Length.fixed(256))]
    two, many = plan_levels(shape, request_rate=[1.0, 2.0]), plan_levels(shape, request_rate=[1.0, 2.0] * 3)
    fitted = fitted_levels(plan_sweep(two, probes=False), RTX_4090)
    assert [level.num_prompts for level in fitted] == [60, 120]
    fitted = fitted_levels(plan_sweep(many, probes=False), RTX_4090)
    assert sum(RTX_4090.seconds(level) for level in fitted) <= 180
    assert all(level.num_prompts >= 8 for level in fitted)


def test_the_repeat_comes_last_and_is_the_same_load() -> None:
    plan = plan_sweep(lengths(1024, 256, 1, 2, 4, 8, 16), repeat=True)
    fitted = fitted_levels(plan, RTX_4090)
    again = fitted[-1]
    assert again.concurrency == 4, "the fewest clients of which some share their steps with prompts"
    assert fitted.count(again) == 2
    assert len(set(fitted)) == len(fitted) - 1
    few = plan_sweep(lengths(64, 16, 1, 2), repeat=True)
    assert few.levels[-1].concurrency == 2


@pytest.mark.slow
def test_a_sweep_saves_what_it_returns(tmp_path: Path) -> None:
    plan = SweepPlan((closed(1, 2), closed(2, 4)), warm_up=(closed(1, 1),))
    told: list[SweepProgress] = []
    with serve(Manners(token_seconds=0.01)) as server:
        run = run_sweep(discover(server.url), plan, tmp_path / "run", told.append)
    saved = load_run(tmp_path / "run")
    assert [level.workload for level in saved.levels] == list(plan.levels)
    for returned, kept in zip(run.levels, saved.levels, strict=True):
        assert returned.requests.equals(kept.requests)
        assert returned.gaps.equals(kept.gaps)
    assert saved.source == "measured"
    assert saved.server["model"] == "demo"
    assert saved.server["system_fingerprint"] == "vllm-0.32.0-tp2-0123abcd"
    assert saved.started_at.endswith("+00:00")
    assert [
        (step.level, step.requests_done, step.requests) for step in told if step.requests_done == step.requests
    ] == [
        (0, 1, 1),
        (1, 2, 2),
        (2, 4, 4),
    ]


@pytest.mark.slow
def test_the_estimate_is_sensible_from_the_first_request_on(tmp_path: Path) -> None:
    plan = SweepPlan(tuple(closed(1, 2, output=30) for _ in range(2)), warm_up=(closed(1, 1, output=20),))
    told: list[SweepProgress] = []
    with serve(Manners(token_seconds=0.01)) as server:
        run_sweep(discover(server.url), plan, tmp_path / "run", told.append)
    end = told[-1].elapsed
    levels = [step for step in told if step.level > 0]
    assert all(step.remaining is not None for step in levels)
    for step in levels:
        assert step.remaining == pytest.approx(end - step.elapsed, abs=0.35 * end + 0.5)
    assert told[0].remaining is None  # nothing is known yet
    assert levels[-1].remaining == pytest.approx(0, abs=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_sweep_keeps_its_finished_levels(tmp_path: Path, how: signal.Signals) -> None:
    script = (
        "import sys; from calibration.endpoint import discover; from calibration.sweep import *\n"
        "from simulator.loads.workload import *\n"
        "def level(output): return Workload(ClosedLoop(1), (Shape(Length.fixed(8), Length.fixed(output)),), 1)\n"
        "run_sweep(discover(sys.argv[1]), SweepPlan((level(2), level(3000))), sys.argv[2])\n"
    )
    with serve(Manners(token_seconds=0.01)) as server:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(
            [sys.executable, "-c", script, server.url, str(tmp_path / "run")],
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + 20
        while not (server.finished == 2 and server.running == 1):  # the trial and the first level are done
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(how)
        assert process.wait(10) != 0
        while server.running:  # its clients have left
            assert time.monotonic() < end
            time.sleep(0.02)
    assert [level.workload.lengths_label for level in load_run(tmp_path / "run").levels] == ["8/2"]


def test_a_sweep_takes_no_folder_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with serve() as server, pytest.raises(RunFileError, match="not empty"):
        run_sweep(discover(server.url), SweepPlan((closed(1, 1),)), tmp_path)
    assert server.requests == []  # said before anything was measured


def test_a_server_that_fails_in_the_warm_up_leaves_no_folder(tmp_path: Path) -> None:
    plan = SweepPlan((closed(1, 1),), warm_up=(closed(1, 1),))
    with (
        serve(Manners(added_prompt_tokens=6)) as server,
        pytest.raises(
            EndpointError, match=r"every warm-up request failed .*prompt miscounted .*38 tokens instead of 32"
        ),
    ):
        run_sweep(discover(server.url), plan, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_server_that_fails_later_ends_the_sweep_and_keeps_the_rest(tmp_path: Path) -> None:
    def break_down(step: SweepProgress) -> None:
        if step.level == 2 and step.requests_done == 1:
            server.manners.status = 500

    plan = SweepPlan((closed(1, 1), closed(1, 4, output=25)))
    with (
        serve(Manners(token_seconds=0.02)) as server,
        pytest.raises(EndpointError, match="every request of level 3 failed; levels kept: 2"),
    ):
        run_sweep(discover(server.url), SweepPlan((*plan.levels, closed(1, 2))), tmp_path / "run", break_down)
    kept = load_run(tmp_path / "run").levels
    assert len(kept) == 2
    assert 1 <= len(kept[1].completed) < 4
    assert "of 4 requests failed: http 500" in kept[1].notes[0]


# --- resuming


def interrupted(folder: Path, server_url: str, plan: SweepPlan, after: int) -> None:
    """A sweep that ends by Ctrl-C in the level after `after`."""

    def stop(step: SweepProgress) -> None:
        if step.level > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(discover(server_url), plan, folder, stop)
    assert len(load_run(folder).levels) == after


@pytest.mark.slow
def test_a_resumed_sweep_keeps_what_was_finished_and_measures_the_rest(tmp_path: Path) -> None:
    plan = SweepPlan((closed(1, 2), closed(2, 4), closed(3, 3)), warm_up=(closed(1, 1),))
    with serve() as server:
        interrupted(tmp_path / "run", server.url, plan, after=2)
        kept = load_run(tmp_path / "run")
        before = len(server.requests)
        run = run_sweep(discover(server.url), plan, tmp_path / "run", resume=True)
        asked = len(server.requests) - before
    assert asked == 1 + 1 + 3, "the trial, the warm-up and the level that was missing"
    assert [level.workload for level in load_run(tmp_path / "run").levels] == list(plan.levels)
    assert run.levels[0].requests.equals(kept.levels[0].requests)
    assert run.started_at == kept.started_at


def test_a_finished_sweep_is_not_measured_again(tmp_path: Path) -> None:
    plan = SweepPlan((closed(1, 2),), warm_up=(closed(1, 1),))
    with serve() as server:
        run_sweep(discover(server.url), plan, tmp_path / "run", resume=True)  # nothing there yet: from the start
        before = len(server.requests)
        assert len(run_sweep(discover(server.url), plan, tmp_path / "run", resume=True).levels) == 1
        assert len(server.requests) == before


@pytest.mark.slow
def test_a_resumed_repeat_has_as_many_requests_as_what_it_repeats(tmp_path: Path) -> None:
    """The pace that is measured anew may allow others levels more requests."""
    plan = plan_sweep(lengths(16, 4, 1, 2), probes=False, repeat=True)
    with serve(Manners(token_seconds=0.001)) as server:
        interrupted(tmp_path / "run", server.url, plan, after=2)
        server.manners.token_seconds = 0.01
        run = run_sweep(discover(server.url), plan, tmp_path / "run", resume=True)
    assert run.levels[-1].workload == run.levels[1].workload


@pytest.mark.slow
def test_another_plan_or_another_server_is_not_continued(tmp_path: Path) -> None:
    plan = SweepPlan((closed(1, 2), closed(2, 2)))
    with serve() as server:
        endpoint = discover(server.url)
        interrupted(tmp_path / "run", server.url, plan, after=1)
        other = SweepPlan((closed(1, 2, prompt=40), closed(2, 2)))
        with pytest.raises(ResumeError, match=r"its level 1 is C=1, 32/8 tokens, .* here it is C=1, 40/8 tokens"):
            run_sweep(endpoint, other, tmp_path / "run", resume=True)
        with pytest.raises(ResumeError, match=r"measured with engine_version 0\.32\.0, the server now has 0\.33\.0"):
            run_sweep(replace(endpoint, engine_version="0.33.0"), plan, tmp_path / "run", resume=True)
        with pytest.raises(ResumeError, match="a KV pool of 1,001 blocks, the server now has 500"):
            run_sweep(replace(endpoint, num_gpu_blocks=500), plan, tmp_path / "run", resume=True)
        almost = replace(endpoint, num_gpu_blocks=995)  # a restart finds a little less memory
        assert len(run_sweep(almost, plan, tmp_path / "run", resume=True).levels) == 2


@pytest.mark.slow
def test_a_sweep_can_choose_its_levels_as_it_goes(tmp_path: Path) -> None:
    told: list[tuple[int, bool]] = []

    def choose(done: Sequence[Level], spent: float) -> Workload | None:
        told.append((len(done), spent > 0))
        return closed(len(done) + 1, 4) if len(done) < 3 else None

    with serve() as server:
        run = run_sweep(discover(server.url), SweepPlan((closed(1, 2),)), tmp_path / "run", choose=choose)
    assert [level.workload.concurrency for level in run.levels] == [1, 2, 3]
    assert told == [(1, True), (2, True), (3, True)]


def test_what_else_is_known_of_the_server_is_kept(tmp_path: Path) -> None:
    with serve() as server:
        facts = {"gpu": "a GPU", "model": "not this"}
        run_sweep(discover(server.url), SweepPlan((closed(1, 1),)), tmp_path / "run", facts=facts)
    saved = load_run(tmp_path / "run").server
    assert (saved["gpu"], saved["model"]) == ("a GPU", "demo")

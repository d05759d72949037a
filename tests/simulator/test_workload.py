"""Loads are planned from a few words, draw the same requests for the same seed, and come back from their files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import StepTime
from simulator.loads.arrivals import OpenLoop, ThinkTime, parse_curve
from simulator.loads.lengths import Length, parse_length
from simulator.loads.levels import Levels, LoadError, parse_shape, parse_shapes, plan_load
from simulator.loads.sessions import Sessions, Talk, parse_talk, split_outside_brackets
from simulator.loads.trace import HashIds, Trace
from simulator.loads.workload import ClosedLoop, Load, Shape, Workload
from simulator.profile import Profile
from simulator.results.run import Run
from simulator.results.run_files import RunFileError, load_run, save_run, workload_from_json, workload_to_json
from simulator.results.summary import summary_table

STEP = StepTime(0.01, 1e-5, 1e-8, 2e-5)
FLAGS = EngineFlags(max_num_seqs=64, num_gpu_blocks=4000, max_model_len=32_000, enable_prefix_caching=True)
SHAPE = Shape(Length.fixed(100), Length.fixed(20))
MIX = (SHAPE, Shape(Length(50, 400), Length(5, 60), 2.5))
TALK = parse_talk("turns=2-5,user=10-90,output=30,system=64")
TRACE = Trace("rec", np.array([0.0, 0.5, 0.5, 4.0]), np.array([10, 20, 30, 40]), np.array([5, 6, 7, 8]))
UNTIMED = Trace("said", None, TRACE.prompt_tokens, TRACE.generated_tokens)
SHARED = HashIds(np.array([1, 2, 3, 1, 2, 4, 9, 1]), np.array([3, 6, 7, 8]), 16)
HASHED = Trace("hashed", TRACE.times, np.array([40, 40, 17, 33]), TRACE.generated_tokens, SHARED)


def test_uniform_lengths_and_arrivals_are_those_that_a_seed_always_gave() -> None:
    load = Workload(OpenLoop(2.0, 0.5), MIX, 200, 7)
    rng = np.random.default_rng([7, 0])
    kinds = rng.choice(2, size=200, p=np.array([1.0, 2.5]) / 3.5)
    few = int((kinds == 0).sum())
    rng.integers(100, 100, size=few, endpoint=True)
    rng.integers(20, 20, size=few, endpoint=True)
    prompts, outputs = load.lengths()
    assert prompts[kinds == 1].tolist() == rng.integers(50, 400, size=200 - few, endpoint=True).tolist()
    assert outputs[kinds == 1].tolist() == rng.integers(5, 60, size=200 - few, endpoint=True).tolist()
    gaps = np.random.default_rng([7, 1]).gamma(0.5, 2.0, size=200)
    times = load.arrival_times()
    assert times is not None
    assert times == pytest.approx(np.cumsum(gaps) * 100 / gaps.sum())


# --- planning


def test_words_make_levels_of_every_kind_of_request() -> None:
    closed = Levels(concurrency=[2, 4], requests_per_client=10, think_time=ThinkTime(1.0), seed=3)
    assert plan_load([SHAPE], closed) == [
        Workload(ClosedLoop(clients, think_time=ThinkTime(1.0)), (SHAPE,), 10 * clients, 3) for clients in (2, 4)
    ]
    assert plan_load(TALK, closed)[0] == Sessions(
        ClosedLoop(2, think_time=ThinkTime(1.0)), TALK, round(20 / 3.5), ThinkTime(1.0), 3
    )
    assert [load.concurrency for load in plan_load(TRACE, Levels(concurrency=[2, 4]))] == [2, 4]


def test_sessions_make_about_as_many_requests_as_were_asked_for() -> None:
    (load,) = plan_load(TALK, Levels(request_rate=[1.0], num_prompts=2000))
    assert load.num_prompts == pytest.approx(2000, rel=0.05)


def test_a_duration_stands_for_the_requests_that_are_expected_in_it() -> None:
    curve = parse_curve("ramp(0-1,100s)")
    (load,) = plan_load([SHAPE], Levels(request_rate=[10], rate_curve=curve, duration=200))
    assert load.num_prompts == 500 + 1000
    (sessions,) = plan_load(TALK, Levels(request_rate=[0.5], duration=60))
    assert isinstance(sessions, Sessions)
    assert sessions.num_sessions == 30


def test_a_trace_keeps_its_pattern_unless_told_otherwise() -> None:
    (as_recorded,) = plan_load(TRACE, Levels())
    assert as_recorded == TRACE
    (fast,) = plan_load(TRACE, Levels(speed=2.0, num_prompts=3, max_concurrency=2))
    assert fast.arrival_times() == pytest.approx([0, 0.25, 0.25])
    assert fast.max_concurrency == 2
    (brief,) = plan_load(TRACE, Levels(speed=2.0, duration=1.0))
    assert brief.num_prompts == 3
    (stretched,) = plan_load(TRACE, Levels(request_rate=[2.0]))
    assert stretched.arrival_times() == pytest.approx([0, 0.25, 0.25, 2.0])
    (poisson,) = plan_load(TRACE, Levels(request_rate=[2.0], burstiness=1.0, seed=4))
    assert poisson.arrival_times() == pytest.approx(OpenLoop(2.0).times(4, 4))
    (untimed,) = plan_load(UNTIMED, Levels(request_rate=[2.0]))
    assert untimed.arrival_times() == pytest.approx(OpenLoop(2.0).times(4, 0))


@pytest.mark.parametrize(
    ("requests", "levels", "words"),
    [
        ([SHAPE], Levels(), "either concurrency or request_rate"),
        ([SHAPE], Levels(concurrency=[1], request_rate=[1.0]), "either concurrency or request_rate"),
        (TRACE, Levels(concurrency=[1], request_rate=[1.0]), "either concurrency or request_rate"),
        ([SHAPE], Levels(concurrency=[1], speed=2.0), "speed goes with a trace"),
        (TRACE, Levels(request_rate=[1.0], speed=2.0), "speed goes with a trace, and not with"),
        (TRACE, Levels(speed=0.0), "speed must be positive"),
        ([SHAPE], Levels(request_rate=[1.0], think_time=ThinkTime(1)), "think_time goes with concurrency"),
        ([SHAPE], Levels(concurrency=[1], max_concurrency=3), "max_concurrency goes with request_rate"),
        ([SHAPE], Levels(concurrency=[1], duration=3), "duration goes with request_rate"),
        ([SHAPE], Levels(request_rate=[1], duration=3, num_prompts=3), "duration goes with request_rate"),
        ([SHAPE], Levels(request_rate=[1], duration=math.inf), "positive number of seconds"),
        ([SHAPE], Levels(concurrency=[1], rate_curve=parse_curve("ramp(0-1,9s)")), "rate_curve goes with"),
        ([SHAPE], Levels(request_rate=[math.inf], rate_curve=parse_curve("ramp(0-1,9s)")), "infinite request rate"),
        (UNTIMED, Levels(speed=2.0), "give concurrency or request_rate"),
        (UNTIMED, Levels(duration=2.0), "give concurrency or request_rate"),
        (TALK, Levels(request_rate=[1], max_concurrency=3), "number of users"),
        ([SHAPE], Levels(concurrency=[]), "the list of levels is empty"),
    ],
)
def test_words_that_contradict_each_other_are_refused(
    requests: list[Shape] | Talk | Trace, levels: Levels, words: str
) -> None:
    with pytest.raises(LoadError, match=words):
        plan_load(requests, levels)


def test_shapes_may_hold_distributions() -> None:
    assert parse_shapes("512/128:0.7,lognormal(4000,2000,1-8000)/exponential(100,1-500):0.3, 8~0.5/1") == [
        parse_shape("512/128:0.7"),
        Shape(parse_length("lognormal(4000,2000,1-8000)"), parse_length("exponential(100,1-500)"), 0.3),
        Shape(Length(4, 12), Length.fixed(1)),
    ]
    with pytest.raises(LoadError, match="'zipf' is no distribution"):
        parse_shapes("zipf(1,2)/5")


# --- what a load tells


@dataclass(frozen=True)
class Stated(Load):
    """A load that states its requests and nothing else."""

    clients: int | None

    @property
    def num_prompts(self) -> int:
        return 3

    @property
    def concurrency(self) -> int | None:
        return self.clients

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array([10, 20, 30]), np.array([5, 5, 5])

    def arrival_times(self) -> np.ndarray | None:
        return None if self.clients else np.array([0.0, 1.0, 1.5])


def test_a_load_that_states_its_requests_tells_the_rest() -> None:
    assert Stated(2).describe() == "C=2, ~20/5 tokens, 3 requests"
    assert Stated(None).describe() == "2/s, ~20/5 tokens, 3 requests"
    assert Stated(2).longest() == (30, 35)
    assert len(simulate_level(Stated(None), FLAGS, STEP).requests) == 3


LOADS: list[Load] = [
    Workload(ClosedLoop(2, think_time=ThinkTime(0.1 + 0.2, "exponential")), MIX, 12, 3),
    Workload(OpenLoop(2 / 3, math.inf, curve=parse_curve("daily(1h:0.1,7h:1)"), max_concurrency=3), MIX, 5),
    Workload(
        ClosedLoop(1), tuple(parse_shapes("lognormal(40,20)/exponential(9),histogram(1-9:2,50:1)/normal(9,2)")), 12
    ),
    Sessions(OpenLoop(3.0), TALK, 4, ThinkTime(0.2), 9),
    Sessions(ClosedLoop(2, think_time=ThinkTime(1.0)), Talk(Length(1, 3), Length(1, 9), Length(1, 9), 5, 200), 4),
    TRACE,
    HASHED,
    TRACE.sent_by(ClosedLoop(2)),
    UNTIMED.sent_by(OpenLoop(1 / 3, max_concurrency=2), seed=2),
]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.describe())
def test_every_load_is_saved_with_its_run_and_comes_back(load: Load, tmp_path: Path) -> None:
    level = simulate_level(load, FLAGS, STEP)
    save_run(Run("simulated", [level]), tmp_path)
    (again,) = load_run(tmp_path).levels
    assert again.workload == load
    assert again.cached_tokens == level.cached_tokens
    replayed = simulate_level(again.workload, FLAGS, STEP)
    assert replayed.requests.to_csv() == level.requests.to_csv()


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.describe())
def test_tables_and_the_measured_range_take_every_load(load: Load, profile: Profile) -> None:
    level = simulate_level(load, FLAGS, STEP)
    (row,) = summary_table(Run("simulated", [level])).to_dict("records")
    assert row["level"] == load.label
    assert math.isnan(row["concurrency"]) == (load.concurrency is None)
    assert math.isnan(row["request_rate"]) == (load.concurrency is not None)
    longest = (level.requests["prompt_tokens"] + level.requests["output_tokens"]).max()
    assert longest <= load.longest()[1]
    profile.outside_range(load)


def test_a_recorded_load_alone_is_not_read_from_json(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="'trace' is not known here"):
        workload_from_json(workload_to_json(TRACE))
    save_run(Run("simulated", [simulate_level(TRACE, FLAGS, STEP)]), tmp_path)
    (tmp_path / "levels/000/load.csv").unlink()
    with pytest.raises(RunFileError, match=r"load\.csv: no such file"):
        load_run(tmp_path)


def test_a_mix_is_labelled_with_the_shares_of_its_lengths() -> None:
    long, short = Length.fixed(12_000), Length.fixed(256)
    shapes = (Shape(short, Length.fixed(128), 7), Shape(long, Length.fixed(300), 3))
    assert Workload(ClosedLoop(1), shapes, 10).lengths_label == "256/128:0.7 12000/300:0.3"
    assert Workload(ClosedLoop(1), shapes[:1], 10).lengths_label == "256/128"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"concurrency": [1], "num_prompts": 10**12}, "num_prompts may be up to 10,000,000 a level"),
        ({"concurrency": [10**6], "requests_per_client": 10**6}, "num_prompts may be up to 10,000,000 a level"),
        ({"request_rate": [1e6], "duration": 1e8}, "num_prompts may be up to 10,000,000 a level"),
        ({"request_rate": [math.inf], "duration": 1.0}, "give num_prompts, not duration"),
    ],
)
def test_more_requests_than_anyone_simulates_are_refused(words: dict[str, Any], told: str) -> None:
    with pytest.raises(LoadError, match=told):
        plan_load([parse_shape("1/1")], Levels(**words))


@pytest.mark.parametrize(
    "text", ["1/1:1e308", "1/1:nan", "1/1:-1", "1/1:1e400", "1/1:0", "1/1:\0", "9999999999/1", "/" * 100_000]
)
def test_shapes_beyond_all_bounds_are_refused(text: str) -> None:
    with pytest.raises(LoadError, match="is not a shape such as"):
        parse_shape(text)


def test_commas_without_end_are_split_at_once() -> None:
    """Looking ahead from each of them would take hours."""
    assert len(split_outside_brackets("1/1," * 200_000)) == 200_001
    assert split_outside_brackets("a(1,2),b,,c(") == ["a(1,2)", "b", "", "c("]

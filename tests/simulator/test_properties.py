"""What holds for any load on any engine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import pytest
import simpy
from conformance import Event, WatchedScheduler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator.engine.engine_core import IDLE_SLEEP, EngineCore
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.recorder import Recorder
from simulator.engine.request import Request
from simulator.engine.simulation import Engine, simulate_level
from simulator.engine.step_time import StepTime
from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload

examples = settings(
    max_examples=40,
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

STEP_TIME = StepTime(
    constant=15.7e-3,
    per_sequence=35e-6,
    per_kv_token=62e-9,
    per_prefill_token=80e-6,
    per_prefill_attention=3.1e-9,
    mixed_per_sequence=5e-6,
)


# --- any load on any engine


@dataclass(frozen=True)
class Ask:
    """What a client wants: lengths in tokens; `shared` KV blocks of its prompt are the same for all who share."""

    prompt: int
    output: int
    max_tokens: int
    priority: int
    shared: int
    wait: float  # s, after the request before it, in an open loop

    def request(self, number: int) -> Request:
        prefix = tuple(range(self.shared))
        return Request(number, self.prompt, self.output, self.max_tokens, self.priority, prefix=prefix)


@dataclass(frozen=True)
class Scenario:
    """Requests for one engine; `clients` of a closed loop, or None for an open one."""

    flags: EngineFlags
    asks: tuple[Ask, ...]
    clients: int | None


@st.composite
def asks(draw: st.DrawFn, flags: EngineFlags) -> Ask:
    prompt = draw(st.integers(1, flags.max_model_len - 1))
    max_tokens = draw(st.integers(1, 60))
    return Ask(
        prompt=prompt,
        output=draw(st.one_of(st.just(max_tokens), st.integers(1, max_tokens))),
        max_tokens=max_tokens,
        priority=draw(st.integers(0, 2)),
        shared=draw(st.integers(0, prompt // flags.block_size)),
        wait=draw(st.sampled_from([0.0, 0.003, 0.05, 0.4])),
    )


@st.composite
def scenarios(draw: st.DrawFn, /, **fixed: Any) -> Scenario:
    """Pools from barely enough for the longest request to more than enough for all."""
    max_model_len = draw(st.integers(30, 250))
    is_chunked = draw(st.booleans())
    max_num_seqs = draw(st.integers(1, 12))
    chosen: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(max_num_seqs, 1 if is_chunked else max_model_len) + draw(st.integers(0, 100)),
        "max_model_len": max_model_len,
        "block_size": draw(st.sampled_from([4, 16])),
        "enable_chunked_prefill": is_chunked,
        "enable_prefix_caching": draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 10])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "async_scheduling": draw(st.booleans()),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.1])),
    }
    flags = EngineFlags(**(chosen | fixed))
    wanted = draw(st.lists(asks(flags), min_size=1, max_size=25))
    longest = max(min(ask.prompt + ask.output - 1, max_model_len) for ask in wanted)
    needed = 1 + -(-longest // flags.block_size)
    flags = flags.changed(num_gpu_blocks=needed + draw(st.sampled_from([0, 1, 3, 10, 5000])))
    return Scenario(flags, tuple(wanted), clients=draw(st.one_of(st.none(), st.integers(1, 10))))


class Outcome:
    """A scenario, played."""

    def __init__(self, scenario: Scenario, single_steps: bool = True, idle_sleep: float = IDLE_SLEEP) -> None:
        self.env = simpy.Environment()
        self.scenario = scenario
        self.requests = [ask.request(number) for number, ask in enumerate(scenario.asks)]
        names = [str(number) for number in range(len(self.requests))]
        self.scheduler = WatchedScheduler(scenario.flags, names)
        self.recorder = Recorder()
        core = EngineCore(self.scheduler, STEP_TIME, self.recorder, single_steps, idle_sleep)
        self._engine = Engine(self.env, core)
        if scenario.clients is None:
            self.env.process(self._source())
        else:
            queue = iter(self.requests)
            for _ in range(scenario.clients):
                self.env.process(self._client(queue))
        self.env.run()

    @cached_property
    def table(self) -> pd.DataFrame:
        return self.recorder.requests()

    @cached_property
    def gaps(self) -> pd.DataFrame:
        return self.recorder.gaps()

    @cached_property
    def timeline(self) -> pd.DataFrame:
        return self.recorder.timeline()

    @property
    def events(self) -> list[Event]:
        return self.scheduler.events

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["ev"] == kind]

    def _client(self, queue: Any) -> Generator[simpy.Event, Any, None]:
        for request in queue:
            yield self.env.timeout(self._stagger(request))
            request.sent = self.env.now
            yield self._engine.submit(request)

    def _source(self) -> Generator[simpy.Event, Any, None]:
        for ask, request in zip(self.scenario.asks, self.requests, strict=True):
            yield self.env.timeout(ask.wait + self._stagger(request))
            request.sent = self.env.now
            self._engine.submit(request)

    def _stagger(self, request: Request) -> float:
        """vLLM's priority policy can preempt in turn for ever two requests of equal priority and arrival time."""
        return 1e-6 * (1 + request.request_id) if self.scenario.flags.scheduling_policy == "priority" else 0.0


@examples
@given(scenarios())
def test_kv_blocks_never_exceed_the_pool_and_all_come_back(scenario: Scenario) -> None:
    outcome = Outcome(scenario)
    pool = scenario.flags.usable_blocks
    assert all(0 <= event["free"] <= pool for event in outcome.of_kind("schedule") + outcome.of_kind("update"))
    assert outcome.scheduler.kv_cache.free_blocks == pool
    assert not outcome.scheduler.running
    assert not outcome.scheduler.waiting
    assert all(request.blocks == 0 for request in outcome.requests)


@examples
@given(scenarios(enable_prefix_caching=False))
def test_a_request_holds_the_blocks_of_the_tokens_it_was_given(scenario: Scenario) -> None:
    outcome = Outcome(scenario)
    computed: Counter[str] = Counter()
    for event in outcome.of_kind("schedule"):
        for name in event["preempted"]:
            computed[name] = 0
        computed.update(event["n"])
        used = sum(-(-computed[name] // scenario.flags.block_size) for name in event["running"])
        assert event["free"] == scenario.flags.usable_blocks - used


@examples
@given(scenarios())
def test_no_step_exceeds_its_limits(scenario: Scenario) -> None:
    for event in Outcome(scenario).of_kind("schedule"):
        assert event["total"] <= scenario.flags.max_num_batched_tokens
        assert len(event["running"]) <= scenario.flags.max_num_seqs
        assert all(tokens > 0 for tokens in event["n"].values())
        assert not (event["admitted"] and event["preempted"])
        assert not set(event["running"]) & set(event["waiting"])


@examples
@given(scenarios())
def test_every_request_ends_exactly_once_with_exactly_its_tokens(scenario: Scenario) -> None:
    outcome = Outcome(scenario)
    room = [scenario.flags.max_model_len - ask.prompt for ask in scenario.asks]
    wanted = {str(n): min(ask.output, room[n]) for n, ask in enumerate(scenario.asks)}
    updates = outcome.of_kind("update")
    assert Counter(name for event in updates for name in event["finished"]) == dict.fromkeys(wanted, 1)
    assert Counter(name for event in updates for name in event["tokens"]) == wanted
    assert outcome.table["request_id"].tolist() == list(range(len(wanted)))
    assert outcome.table["output_tokens"].tolist() == list(wanted.values())
    assert outcome.gaps["count"].sum() == sum(wanted.values()) - len(wanted)


@examples
@given(scenarios())
def test_gaps_of_tokens_fill_the_time_from_first_to_last_token(scenario: Scenario) -> None:
    for single_steps in (True, False):
        outcome = Outcome(scenario, single_steps)
        gaps = (outcome.gaps["gap"] * outcome.gaps["count"]).sum()
        assert gaps == pytest.approx((outcome.table["e2el"] - outcome.table["ttft"]).sum(), rel=1e-9, abs=1e-9)


@examples
@given(scenarios())
def test_active_tokens_are_prompt_and_generated_tokens_of_the_running_requests(scenario: Scenario) -> None:
    outcome = Outcome(scenario)
    generated: Counter[str] = Counter()
    expected = []
    for event in outcome.of_kind("schedule"):
        generated.update(event["samples"])
        expected.append(sum(scenario.asks[int(name)].prompt + generated[name] for name in event["running"]))
    assert outcome.timeline["active_tokens"].tolist() == expected


@pytest.mark.slow
@examples
@given(scenarios())
def test_running_steps_ahead_is_the_same_as_one_by_one(scenario: Scenario) -> None:
    one_by_one, ahead = Outcome(scenario, single_steps=True), Outcome(scenario, single_steps=False)
    assert_close(one_by_one.table, ahead.table)
    assert_close(pooled(one_by_one.gaps), pooled(ahead.gaps))
    assert_passes_through(one_by_one.timeline, ahead.timeline)


HEAVY = [
    pytest.param(flags, arrivals, id=f"{name}-{mode}-{arrivals.kind}")
    for mode, asynchronous in (("async", True), ("sync", False))
    for name, flags in (
        ("roomy", EngineFlags(max_num_seqs=24, async_scheduling=asynchronous)),
        ("tight", EngineFlags(num_gpu_blocks=250, async_scheduling=asynchronous)),
        ("tight-prefix", EngineFlags(num_gpu_blocks=250, async_scheduling=asynchronous, enable_prefix_caching=True)),
    )
    for arrivals in (ClosedLoop(16), OpenLoop(5.0))
]


@pytest.mark.parametrize(("flags", "arrivals"), HEAVY)
def test_running_steps_ahead_is_the_same_as_one_by_one_under_load(
    flags: EngineFlags, arrivals: ClosedLoop | OpenLoop
) -> None:
    workload = Workload(arrivals, (Shape(Length(50, 900), Length(20, 200)),), num_prompts=80)
    one_by_one = simulate_level(workload, flags, STEP_TIME, single_steps=True)
    ahead = simulate_level(workload, flags, STEP_TIME)
    assert (one_by_one.requests["preemptions"].sum() > 0) == (flags.num_gpu_blocks == 250)
    assert len(ahead.timeline) < 0.9 * len(one_by_one.timeline)
    assert_close(one_by_one.requests, ahead.requests)
    assert_close(pooled(one_by_one.gaps), pooled(ahead.gaps))
    assert_passes_through(one_by_one.timeline, ahead.timeline)


def assert_close(one: pd.DataFrame, other: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(one, other, rtol=1e-9, atol=1e-12)


def pooled(gaps: pd.DataFrame) -> pd.DataFrame:
    """One row a token, gaps and times each in order."""
    return pd.DataFrame({name: np.sort(np.repeat(gaps[name], gaps["count"])) for name in ("time", "gap")})


def assert_passes_through(every: pd.DataFrame, some: pd.DataFrame) -> None:
    """Every row of `some` is a row of `every`."""
    rows = every.to_numpy()
    for row in some.to_numpy():
        near = rows[np.isclose(rows[:, 0], row[0], rtol=1e-9, atol=1e-12)]
        assert (near[:, 1:] == row[1:]).all(axis=1).any(), row


@examples
@given(scenarios())
def test_littles_law_holds_for_the_running_requests(scenario: Scenario) -> None:
    """The engine looks at its gauges when it plans a step, so it must not sleep before it looks."""
    for single_steps in (True, False):
        outcome = Outcome(scenario, single_steps, idle_sleep=0.0)
        if outcome.table["preemptions"].sum():
            return
        residence = (outcome.table["e2el"] - outcome.table["queue_time"]).sum()
        assert time_integral(outcome.timeline, "running") == pytest.approx(residence, rel=1e-9, abs=1e-9)


@examples
@given(scenarios(scheduling_policy="fcfs"))
def test_littles_law_holds_in_a_closed_loop_with_preemptions_too(scenario: Scenario) -> None:
    """There a request is in the engine from the moment it is sent."""
    scenario = Scenario(scenario.flags, scenario.asks, clients=scenario.clients or 5)
    outcome = Outcome(scenario, idle_sleep=0.0)
    timeline = outcome.timeline
    inside = time_integral(timeline, "running") + time_integral(timeline, "waiting")
    assert inside == pytest.approx(outcome.table["e2el"].sum(), rel=1e-9, abs=1e-9)
    assert (timeline["running"] + timeline["waiting"]).max() == min(scenario.clients or 0, len(scenario.asks))


def time_integral(timeline: pd.DataFrame, gauge: str) -> float:
    """Of a gauge that keeps its value until the next row."""
    return float((timeline[gauge].iloc[:-1] * np.diff(timeline["time"])).sum())


# --- the same seed


def level_bytes(seed: int) -> bytes:
    """All tables of a level with preemptions and jitter."""
    workload = Workload(OpenLoop(6.0), (Shape(Length(100, 900), Length(20, 200)),), num_prompts=150, seed=seed)
    flags = EngineFlags(max_num_seqs=64, num_gpu_blocks=300, enable_prefix_caching=True)
    level = simulate_level(workload, flags, STEP_TIME)
    assert level.requests["preemptions"].sum() > 0
    return b"".join(table.to_csv().encode() for table in (level.requests, level.gaps, level.timeline))


def test_the_same_seed_gives_the_same_bytes() -> None:
    assert level_bytes(seed=1) == level_bytes(seed=1)
    assert level_bytes(seed=1) != level_bytes(seed=2)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_in_another_process() -> None:
    code = "import hashlib, test_properties as t; print(hashlib.sha256(t.level_bytes(seed=1)).hexdigest())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == hashlib.sha256(level_bytes(seed=1)).hexdigest()

"""Where latency comes from: the parts add up, and in cases whose truth is known they are that truth."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.trace import Trace
from simulator.loads.workload import Arrivals, ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.results.run import GAP_COLUMNS
from simulator.results.summary import summarize
from simulator.steps.chrome_trace import trace_events
from simulator.steps.explanation import DECODE_PARTS, TTFT_PARTS, Explanation, explain
from simulator.steps.step_log import PARTS, PREEMPTION, ObservedLevel, observe_level

STEP = StepTime(constant=8e-3, per_sequence=2e-5, per_kv_token=1e-8, per_prefill_token=1.5e-5)
ROOMY = EngineFlags(
    max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192, num_gpu_blocks=60_000, async_scheduling=False
)
PROMPT, OUTPUT = 512, 64


def observe(
    flags: EngineFlags,
    arrivals: Arrivals,
    requests: int,
    step_time: StepTime = STEP,
    host_time: HostTime | None = None,
    output: int = OUTPUT,
) -> ObservedLevel:
    shape = Shape(Length.fixed(PROMPT), Length.fixed(output))
    return observe_level(Workload(arrivals, (shape,), requests), flags, step_time, host_time)


def alone(prompt: int = PROMPT, output: int = OUTPUT) -> float:
    """Seconds of a lone request."""
    return STEP.duration(1, 0, prompt, prompt * prompt / 2) + sum(
        STEP.duration(1, context) for context in range(prompt, prompt + output - 1)
    )


def check_sums(observed: ObservedLevel, found: Explanation) -> None:
    requests = observed.level.requests
    assert np.abs(found.ttft.sum(axis=1).to_numpy() - requests["ttft"]).max() < 1e-9
    assert np.abs(found.decode.sum(axis=1).to_numpy() - (requests["e2el"] - requests["ttft"])).max() < 1e-9
    assert found.ttft.min().min() > -1e-9
    assert found.decode.min().min() > -1e-9
    columns = observed.log.columns()
    assert np.abs(columns["end"] - columns["start"] - sum(columns[part] for part in PARTS)).max() < 1e-9


@pytest.mark.slow
@settings(max_examples=25)
@given(
    clients=st.integers(1, 40),
    rate=st.none() | st.floats(0.5, 200),
    slots=st.integers(1, 40),
    budget=st.integers(40, 3000),
    blocks=st.integers(40, 400),
    version=st.sampled_from(["0.11.0", "0.27.1", "0.32.0"]),
    asynchronous=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
    weights=st.sampled_from([0.0, 6e-3]),
    seed=st.integers(0, 1000),
)
def test_parts_add_up_to_every_request_s_time(
    clients: int,
    rate: float | None,
    slots: int,
    budget: int,
    blocks: int,
    version: str,
    asynchronous: bool,
    policy: str,
    caching: bool,
    weights: float,
    seed: int,
) -> None:
    flags = EngineFlags(
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        max_model_len=1000,
        num_gpu_blocks=blocks,
        async_scheduling=asynchronous,
        scheduling_policy=policy,  # type: ignore[arg-type]
        enable_prefix_caching=caching,
        engine_version=version,
    )
    step = StepTime(8e-3, 2e-5, 1e-8, 1.5e-5, 1e-9, 1e-4, 1e-6, 3e-3, weights)
    host = HostTime(0.002, 0.001, 2e-6, tuple(np.linspace(-1e-3, 1e-3, 11)))
    arrivals = ClosedLoop(clients) if rate is None else OpenLoop(rate)
    load = Workload(arrivals, (Shape(Length(20, 400), Length(1, 120)),), 40, seed)
    observed = observe_level(load, flags, step, host)
    found = explain(observed)
    check_sums(observed, found)
    # watching changes nothing
    plain = simulate_level(load, flags, step, host)
    assert plain.requests.equals(observed.level.requests)
    assert plain.gaps.equals(observed.gaps[list(GAP_COLUMNS)])
    assert found.itl.percentiles[99] == summarize(plain).itl.p99


def test_a_queue_for_slots() -> None:
    """Three at once and one slot: each waits for exactly those before it."""
    found = explain(observe(ROOMY.changed(max_num_seqs=1), ClosedLoop(3), 3))
    assert found.ttft["slots"].to_numpy() == pytest.approx([0, alone(), 2 * alone()])
    assert found.ttft["own_prefill"].to_numpy() == pytest.approx([STEP.duration(1, 0, PROMPT)] * 3)
    rest = found.ttft.drop(columns=["slots", "own_prefill"])
    assert np.abs(rest.to_numpy()).max() < 1e-12


def test_a_queue_for_room_in_the_pool() -> None:
    """A pool that holds one request and a part of the next."""
    blocks = 1 + -(-(PROMPT + OUTPUT) // 16) + 10
    found = explain(observe(ROOMY.changed(num_gpu_blocks=blocks), ClosedLoop(3), 3))
    assert found.ttft["kv_pool"].to_numpy() == pytest.approx([0, alone(), 2 * alone()])
    assert np.abs(found.ttft.drop(columns=["kv_pool", "own_prefill"]).to_numpy()).max() < 1e-12
    assert found.gauges["kv_tokens"].peak <= (found.gauges["kv_tokens"].limit or 0)


def test_a_wait_for_the_step_token_budget() -> None:
    """Two prompts, and a budget for one: the second waits for a step, then shares one with the first's decoding."""
    flags = ROOMY.changed(max_num_batched_tokens=PROMPT + 1, max_num_seqs=8)
    found = explain(observe(flags, ClosedLoop(2), 2))
    # the budget's last token goes to the second prompt, so that its own prefill takes two steps
    one, rest = STEP.duration(1, 0, 1), STEP.duration(1, 0, PROMPT - 1)
    second = found.ttft.loc[1]
    assert second["own_prefill"] == pytest.approx(one + rest)
    assert second["other_prompts"] == pytest.approx(STEP.duration(2, 0, PROMPT + 1) - one)
    assert second["decoding"] == pytest.approx(STEP.duration(2, PROMPT, PROMPT - 1) - rest)
    flags = flags.changed(max_num_batched_tokens=PROMPT)
    second = explain(observe(flags, ClosedLoop(2), 2)).ttft.loc[1]
    assert second["token_budget"] == pytest.approx(STEP.duration(1, 0, PROMPT))
    assert second["slots"] == second["kv_pool"] == 0


def test_prompts_in_one_step_share_it() -> None:
    found = explain(observe(ROOMY, ClosedLoop(4), 4))
    own, step = STEP.duration(1, 0, PROMPT), STEP.duration(4, 0, 4 * PROMPT)
    assert found.ttft["own_prefill"].to_numpy() == pytest.approx([own] * 4)
    assert found.ttft["other_prompts"].to_numpy() == pytest.approx([step - own] * 4)
    assert found.itl.splits_at is None  # all decode together, no prompt comes later


@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_comes_in_the_middle_of_a_step_waits_for_its_end(asynchronous: bool) -> None:
    """Asynchronous scheduling has planned the next step too."""
    sent = 20e-3
    trace = Trace("two", np.array([0.0, sent]), np.array([PROMPT, PROMPT]), np.array([OUTPUT, OUTPUT]))
    found = explain(observe_level(trace, ROOMY.changed(async_scheduling=asynchronous), STEP))
    first = STEP.duration(1, 0, PROMPT)
    ends = first + np.cumsum([STEP.duration(1, PROMPT + step) for step in range(3)])
    assert first < sent < ends[0]
    second = found.ttft.loc[1]
    assert second["steps_under_way"] == pytest.approx(ends[1 if asynchronous else 0] - sent)
    context = PROMPT + (2 if asynchronous else 1)
    assert second["decoding"] == pytest.approx(STEP.duration(2, context, PROMPT) - first)


def test_the_host_s_part() -> None:
    """The second and the third come while the first is computed, and share a step."""
    host = HostTime(per_request=0.002, per_request_serial=0.004, per_prompt_token=1e-6)
    found = explain(observe(ROOMY, ClosedLoop(3), 3, host_time=host))
    intake = 0.004 * np.array([1, 2, 3])
    late = 1e-6 * PROMPT * np.array([1, 2, 2])
    assert found.ttft["host"].to_numpy() == pytest.approx(intake + 0.002 + late)


def test_a_lone_request_s_decoding() -> None:
    found = explain(observe(ROOMY, ClosedLoop(1), 1)).decode.loc[0]
    steps = OUTPUT - 1
    contexts = sum(range(PROMPT, PROMPT + steps))
    truth = {"step_constant": 8e-3 * steps, "sequence_cost": 2e-5 * steps, "kv_reading": 1e-8 * contexts}
    assert found.to_dict() == pytest.approx(dict.fromkeys(DECODE_PARTS, 0.0) | truth, abs=1e-12)


def test_prompts_of_others_stretch_decoding() -> None:
    """One request decodes while a second one comes: one of its gaps is longer by what that prompt adds."""
    trace = Trace("two", np.array([0.0, 0.1]), np.array([PROMPT, 1000]), np.array([OUTPUT, 1]))
    found = explain(observe_level(trace, ROOMY, STEP))
    added = 1.5e-5 * 1000 + 2e-5
    assert found.decode.loc[0, "prompt_cost"] == pytest.approx(added)
    assert found.itl.tail == {"prompts": 1.0}
    assert found.itl.splits_at == pytest.approx(100 * (1 - 1 / (OUTPUT - 1)))
    assert found.itl.longest == pytest.approx(STEP.duration(2, 0, 1000), rel=1e-3)
    assert found.steps.with_prompts == pytest.approx(2 / OUTPUT)
    assert found.steps.prompt_tokens == (PROMPT + 1000) / 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preemptions(asynchronous: bool) -> None:
    """Their gaps hold all the time that requests lose, and nothing else does."""
    flags = ROOMY.changed(num_gpu_blocks=300, async_scheduling=asynchronous)
    observed = observe(flags, ClosedLoop(32), 200, output=200)
    found = explain(observed)
    check_sums(observed, found)
    preempted = observed.level.requests.set_index("request_id")["preemptions"] > 0
    assert preempted.any()
    lost = found.decode["kv_stall"] + found.decode["preemption"]
    assert (lost[preempted] > 0).all()
    assert (lost[~preempted] == 0).all()
    gaps = observed.gaps[observed.gaps["cause"] == PREEMPTION]
    assert lost.sum() == pytest.approx((gaps["gap"] * gaps["count"]).sum())
    assert found.itl.preemptions == observed.level.requests["preemptions"].sum()
    assert found.itl.tail["preemption"] > 0
    assert found.decode["kv_stall"].sum() > found.decode["preemption"].sum() > 0
    # computing a prompt and its output again takes a step at least, and no request waits for less than nothing
    again = len(gaps) * STEP.duration(1, 0, PROMPT)
    assert found.decode["preemption"].sum() >= again * 0.99


def test_thrown_out_before_the_first_token() -> None:
    """vLLM 0.11 admits a prompt in parts without room for the whole, and gives the latest up again."""
    flags = ROOMY.changed(engine_version="0.11.0", num_gpu_blocks=300, max_num_batched_tokens=512)
    observed = observe(flags, ClosedLoop(40), 200)
    found = explain(observed)
    check_sums(observed, found)
    assert (found.ttft["preemption"] > 0).any()
    thrown = observed.level.requests["preemptions"].to_numpy() > 0
    assert not (found.ttft["preemption"].to_numpy() > 0)[~thrown].any()


def test_graph_edges() -> None:
    """Without CUDA graphs every step of pure decode costs more, and is told of as such."""
    step = StepTime(8e-3, without_graph=5e-3)
    found = explain(observe(ROOMY.changed(enforce_eager=True), ClosedLoop(1), 1, step))
    assert found.decode.loc[0, "graph_edges"] == pytest.approx(5e-3 * (OUTPUT - 1))
    assert found.itl.at_or_above[50] == {"graph_edges": 1.0}


def test_an_idle_engine_and_an_unused_budget() -> None:
    use = explain(observe(ROOMY, OpenLoop(0.2, float("inf")), 10)).steps
    assert use.busy < 0.3
    assert use.budget_with_prompts == pytest.approx(PROMPT / 8192)
    assert use.budget_without == pytest.approx(1 / 8192)
    assert use.full == 0


def test_the_slowest_requests_apart() -> None:
    found = explain(observe(ROOMY.changed(max_num_seqs=1), ClosedLoop(3), 3))
    assert found.parts("ttft", 99)["slots"] == pytest.approx(2 * alone())
    assert set(found.parts("ttft")) == set(TTFT_PARTS)


def test_single_tokens_have_no_gaps() -> None:
    found = explain(observe(ROOMY, ClosedLoop(2), 4, output=1))
    assert found.decode.to_numpy().sum() == 0
    assert found.itl.splits_at is None
    assert np.isnan(found.itl.longest)


# --- the trace


NEEDED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "C": {"name", "ph", "ts", "pid", "tid", "args"},
    "b": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "e": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
}


@pytest.fixture(scope="module")
def preempting() -> ObservedLevel:
    flags = ROOMY.changed(num_gpu_blocks=200, async_scheduling=True)
    return observe(flags, ClosedLoop(16), 40, host_time=HostTime(0.002, 0.001), output=200)


def test_every_event_has_the_fields_of_the_format(preempting: ObservedLevel) -> None:
    events = list(trace_events(preempting, explain(preempting)))
    for event in events:
        phase = event["ph"]
        assert NEEDED[phase] <= set(event) <= NEEDED[phase] | {"args"}
        assert isinstance(event["name"], str)
        assert all(type(event[name]) is int for name in ("pid", "tid"))
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        assert phase != "C" or all(type(value) in (int, float) for value in event["args"].values())
    named = {(event["name"], event["pid"]) for event in events if event["ph"] == "M"}
    assert {("process_name", 1), ("process_name", 2), ("thread_name", 1)} <= named


def test_steps_of_the_trace_follow_one_another(preempting: ObservedLevel) -> None:
    steps = [event for event in trace_events(preempting, explain(preempting)) if event["ph"] == "X"]
    for one, two in pairwise(steps):
        assert one["ts"] + one["dur"] <= two["ts"] + 1e-3
    assert sum(event["args"]["steps"] for event in steps) == explain(preempting).steps.steps
    prompts = sum(event["args"]["prefill_tokens"] for event in steps)
    assert prompts > preempting.level.requests["prompt_tokens"].sum()  # some were computed twice


def test_requests_of_the_trace_are_nested_and_whole(preempting: ObservedLevel) -> None:
    open_: dict[int, list[tuple[str, float]]] = {}
    spans: dict[int, list[tuple[str, float, float]]] = {}
    for event in trace_events(preempting, explain(preempting)):
        if event["ph"] == "b":
            open_.setdefault(event["id"], []).append((event["name"], event["ts"]))
        if event["ph"] == "e":
            name, start = open_[event["id"]].pop()
            assert name == event["name"]
            spans.setdefault(event["id"], []).append((name, start, event["ts"]))
    assert not any(open_.values())
    for row in preempting.level.requests.itertuples():
        *phases, (name, start, end) = spans[int(row.request_id)]
        assert name == f"request {row.request_id}"
        assert (end - start) / 1e6 == pytest.approx(row.e2el)
        assert sum(until - since for _, since, until in phases) == pytest.approx(end - start)
        count = Counter(name for name, _, _ in phases)
        assert count["preempted"] == count["recompute"] == row.preemptions
        (prefill,) = (until for name, _, until in phases if name == "prefill")
        assert (prefill - start) / 1e6 + 0.002 == pytest.approx(row.ttft)

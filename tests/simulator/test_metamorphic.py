"""How a result must change, or not, when its question is changed: no result needs to be known for that."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.flags.serve_line import read_line
from simulator.flags.vllm_flags import parse_flags
from simulator.loads.sessions import Sessions, Talk
from simulator.loads.trace import Trace
from simulator.loads.workload import Arrivals, ClosedLoop, Length, Load, OpenLoop, Shape, ThinkTime, Workload
from simulator.planning.alternative import Alternative, alternative
from simulator.planning.what_if import what_if
from simulator.profile import Profile
from simulator.results.run import Level
from simulator.scenario import Scenario

examples = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
STEP = StepTime(
    constant=10e-3,
    per_sequence=40e-6,
    per_kv_token=60e-9,
    per_prefill_token=80e-6,
    per_prefill_attention=3e-9,
    mixed_per_sequence=5e-6,
)
HOST = HostTime(per_request=2e-3, per_request_serial=1e-3, per_prompt_token=1e-6)
ROOMY = 100_000  # KV blocks
PLENTY = 10_000  # tokens of a step that all prompts together do not use up


@st.composite
def traces(draw: st.DrawFn, least: int = 2, wait: float = 0.3) -> Trace:
    """Requests with lengths and times of their own."""
    asks = draw(
        st.lists(st.tuples(st.integers(1, 200), st.integers(1, 50), st.floats(0.0, wait)), min_size=least, max_size=25)
    )
    prompts, outputs, gaps = (np.array(column) for column in zip(*asks, strict=True))
    return Trace("drawn", np.cumsum(gaps), prompts, outputs)


@st.composite
def engines(draw: st.DrawFn, /, **fixed: Any) -> EngineFlags:
    """Pools from one in which requests preempt each other to one that holds all."""
    slots = draw(st.integers(1, 10))
    chosen: dict[str, Any] = {
        "max_num_seqs": slots,
        "max_num_batched_tokens": slots + draw(st.integers(4, 300)),
        "num_gpu_blocks": draw(st.sampled_from([18, 30, 60, ROOMY])),
        "async_scheduling": draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 20])),
    }
    return EngineFlags(**(chosen | fixed))


LOOPS = st.one_of(st.none(), st.builds(ClosedLoop, st.integers(1, 8)))


def sent(trace: Trace, loop: Arrivals | None) -> Trace:
    """At its own times, or by clients that wait for their answers."""
    return trace if loop is None else trace.sent_by(loop)


def play(load: Load, flags: EngineFlags, step: StepTime = STEP) -> Level:
    return simulate_level(load, flags, step, HOST)


def assert_same(one: Level, other: Level) -> None:
    """Not nearly: to the last bit."""
    for name in ("requests", "gaps", "timeline"):
        pd.testing.assert_frame_equal(getattr(one, name), getattr(other, name), check_exact=True)


def with_output(trace: Trace, number: int, tokens: int) -> Trace:
    outputs = trace.generated_tokens.copy()
    outputs[number] = tokens
    return replace(trace, generated_tokens=outputs)


# --- room that is not needed


@examples
@given(trace=traces(), loop=LOOPS, flags=engines(num_gpu_blocks=ROOMY), more=st.sampled_from([1, 100, 10**6]))
def test_kv_blocks_beyond_what_all_need_together_change_nothing(
    trace: Trace, loop: ClosedLoop | None, flags: EngineFlags, more: int
) -> None:
    blocks = -(-(trace.prompt_tokens + trace.generated_tokens) // flags.block_size)
    enough = 1 + int(np.sort(blocks)[-flags.max_num_seqs :].sum()) + int(blocks.max())
    load = sent(trace, loop)
    assert_same(
        play(load, flags.changed(num_gpu_blocks=enough)), play(load, flags.changed(num_gpu_blocks=enough + more))
    )


@examples
@given(
    clients=st.integers(2, 12),
    prompt=st.integers(1, 150),
    output=st.integers(1, 60),
    blocks=st.lists(st.integers(15, 200), min_size=2, max_size=4, unique=True),
    asynchronous=st.booleans(),
)
def test_more_kv_never_lowers_throughput_where_nothing_is_preempted(
    clients: int, prompt: int, output: int, blocks: list[int], asynchronous: bool
) -> None:
    """Equal requests, all there from the start, in steps that take the same whatever is in them."""
    load = Workload(OpenLoop(math.inf), (Shape(Length.fixed(prompt), Length.fixed(output)),), 3 * clients)
    durations = []
    for pool in sorted(blocks):
        flags = EngineFlags(
            max_num_seqs=clients,
            max_num_batched_tokens=PLENTY,
            num_gpu_blocks=pool,
            async_scheduling=asynchronous,
            watermark=0.0,
        )
        level = simulate_level(load, flags, StepTime(constant=0.01))
        if not level.requests["preemptions"].sum():
            durations.append(level.duration)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(durations))


@examples
@given(trace=traces(), clients=st.integers(1, 8), flags=engines(), more=st.sampled_from([1, 7, 500]))
def test_slots_beyond_the_clients_change_nothing(trace: Trace, clients: int, flags: EngineFlags, more: int) -> None:
    """Graphs are captured by `max_num_seqs`, so their empty places must cost nothing, as in `STEP`."""
    flags = flags.changed(max_num_batched_tokens=clients + 600)
    load = trace.sent_by(ClosedLoop(clients))
    assert_same(play(load, flags.changed(max_num_seqs=clients)), play(load, flags.changed(max_num_seqs=clients + more)))


@examples
@given(trace=traces(), loop=LOOPS, flags=engines(), more=st.sampled_from([1, 5000]))
def test_a_step_token_budget_beyond_all_prompts_together_changes_nothing(
    trace: Trace, loop: ClosedLoop | None, flags: EngineFlags, more: int
) -> None:
    enough = int((trace.prompt_tokens + trace.generated_tokens).sum()) + trace.num_prompts
    load = sent(trace, loop)
    assert_same(
        play(load, flags.changed(max_num_batched_tokens=enough)),
        play(load, flags.changed(max_num_batched_tokens=enough + more)),
    )


@examples
@given(trace=traces(), loop=LOOPS, flags=engines(num_gpu_blocks=ROOMY))
def test_a_prefix_cache_that_finds_nothing_is_no_prefix_cache(
    trace: Trace, loop: ClosedLoop | None, flags: EngineFlags
) -> None:
    """Prompts have nothing in common; without preemption none meets its own blocks again."""
    load = sent(trace, loop)
    cached = play(load, flags.changed(enable_prefix_caching=True))
    assert cached.cached_tokens == 0
    assert_same(play(load, flags), cached)


@examples
@given(trace=traces(), loop=LOOPS, flags=engines(num_gpu_blocks=ROOMY))
def test_equal_priorities_are_first_come_first_served(
    trace: Trace, loop: ClosedLoop | None, flags: EngineFlags
) -> None:
    load = sent(trace, loop)
    assert_same(play(load, flags), play(load, flags.changed(scheduling_policy="priority")))


# --- time goes one way


@examples
@given(
    trace=traces(), flags=engines(), late=st.floats(0.0, 1.0), ask=st.tuples(st.integers(1, 200), st.integers(1, 50))
)
def test_a_request_changes_nothing_that_ended_before_it_came(
    trace: Trace, flags: EngineFlags, late: float, ask: tuple[int, int]
) -> None:
    before = play(trace, flags)
    ends = (before.requests["arrival"] + before.requests["e2el"]).to_numpy()
    assert trace.times is not None
    moment = max(float(trace.times[-1]), late * float(ends.max()))  # the last in line, after some have ended
    longer = Trace(
        "longer",
        np.append(trace.times, moment),
        np.append(trace.prompt_tokens, ask[0]),
        np.append(trace.generated_tokens, ask[1]),
    )
    after = play(longer, flags)
    over = ends < moment
    pd.testing.assert_frame_equal(before.requests[over], after.requests.iloc[:-1][over], rtol=1e-9, atol=1e-9)


@examples
@given(one=traces(), other=traces(), flags=engines(), idle=st.floats(0.01, 100.0))
def test_a_run_is_its_parts_where_it_falls_idle(one: Trace, other: Trace, flags: EngineFlags, idle: float) -> None:
    """Two runs, and the same requests in one with the server idle in between; without a cache that remembers."""
    first, second = play(one, flags), play(other, flags)
    gap = float((first.requests["arrival"] + first.requests["e2el"]).max()) + idle
    assert one.times is not None
    assert other.times is not None
    both = Trace(
        "both",
        np.concatenate([one.times, gap + other.times]),
        np.concatenate([one.prompt_tokens, other.prompt_tokens]),
        np.concatenate([one.generated_tokens, other.generated_tokens]),
    )
    whole = play(both, flags)
    count = one.num_prompts
    moved = second.requests.assign(
        arrival=second.requests["arrival"] + gap, request_id=second.requests["request_id"] + count
    )
    parts = pd.concat([first.requests, moved], ignore_index=True)
    pd.testing.assert_frame_equal(parts, whole.requests, rtol=1e-9, atol=1e-9)
    gaps = pd.concat([first.gaps, second.gaps.assign(time=second.gaps["time"] + gap)], ignore_index=True)
    assert int(gaps["count"].sum()) == int(whole.gaps["count"].sum())
    each = [np.sort(np.repeat(table["gap"], table["count"])) for table in (gaps, whole.gaps)]
    assert np.allclose(each[0], each[1], rtol=1e-9, atol=1e-9)


@examples
@given(
    trace=traces(), loop=LOOPS, flags=engines(async_scheduling=False), which=st.integers(0, 24), more=st.integers(1, 20)
)
def test_a_longer_output_never_shortens_its_request(
    trace: Trace, loop: ClosedLoop | None, flags: EngineFlags, which: int, more: int
) -> None:
    """Nobody knows beforehand when it ends: it goes as before up to there, and on."""
    number = which % trace.num_prompts
    longer = with_output(trace, number, int(trace.generated_tokens[number]) + more)
    before, after = (play(sent(one, loop), flags).requests for one in (trace, longer))
    assert after["e2el"][number] > before["e2el"][number]
    assert after["ttft"][number] == before["ttft"][number]
    end = before["arrival"][number] + before["e2el"][number]
    over = (before["arrival"] + before["e2el"]) < end - 0.05  # host and lateness are behind the engine
    pd.testing.assert_frame_equal(before[over], after[over])


@examples
@given(
    clients=st.integers(1, 8),
    slots=st.integers(1, 8),
    prompt=st.integers(1, 200),
    output=st.integers(1, 40),
    more=st.integers(1, 40),
    asynchronous=st.booleans(),
)
def test_longer_outputs_of_all_never_shorten_any(
    clients: int, slots: int, prompt: int, output: int, more: int, asynchronous: bool
) -> None:
    """A closed loop of equal requests, first come first served, without preemption."""
    flags = EngineFlags(
        max_num_seqs=slots, max_num_batched_tokens=PLENTY, num_gpu_blocks=ROOMY, async_scheduling=asynchronous
    )
    shapes = [(Shape(Length.fixed(prompt), Length.fixed(tokens)),) for tokens in (output, output + more)]
    before, after = (play(Workload(ClosedLoop(clients), each, 4 * clients), flags).requests for each in shapes)
    assert (after["e2el"] >= before["e2el"] - 1e-9).all()


# --- a slower card


@examples
@given(
    prompt=st.integers(1, 3000),
    output=st.integers(1, 50),
    budget=st.integers(8, 3000),
    factor=st.floats(1.0, 3.0),
    weights=st.sampled_from([0.0, 5e-3]),
    flags=engines(num_gpu_blocks=ROOMY),
)
@pytest.mark.parametrize(
    "term",
    ["constant", "per_sequence", "per_kv_token", "per_prefill_token", "per_prefill_attention", "mixed_per_sequence"],
)
def test_a_slower_card_never_serves_a_request_sooner(
    term: str, prompt: int, output: int, budget: int, factor: float, weights: float, flags: EngineFlags
) -> None:
    flags = flags.changed(max_num_batched_tokens=budget + flags.max_num_seqs)
    load = Workload(ClosedLoop(1), (Shape(Length.fixed(prompt), Length.fixed(output)),), 1)
    fast = replace(STEP, weights=weights)
    slow = replace(fast, **{term: factor * getattr(fast, term)})
    one, other = (play(load, flags, step).requests for step in (fast, slow))
    for name in ("ttft", "e2el"):
        assert other[name][0] >= one[name][0] * (1 - 1e-12)


# --- seeds


def test_loads_of_one_seed_have_the_same_lengths_however_they_arrive() -> None:
    shapes = (Shape(Length(10, 500), Length(5, 90), 2.0), Shape(Length(1000, 2000), Length(100, 200)))
    ways: list[Arrivals] = [
        ClosedLoop(3),
        ClosedLoop(40, think_time=ThinkTime(2.0, "exponential")),
        OpenLoop(0.5),
        OpenLoop(80.0, burstiness=0.2, max_concurrency=4),
        OpenLoop(math.inf),
    ]
    drawn = [Workload(way, shapes, 300, seed=5).lengths() for way in ways]
    for prompts, outputs in drawn[1:]:
        assert np.array_equal(prompts, drawn[0][0])
        assert np.array_equal(outputs, drawn[0][1])
    assert not np.array_equal(Workload(ways[0], shapes, 300, seed=6).lengths()[0], drawn[0][0])
    talk = Talk(Length(1, 5), Length(10, 90), Length(5, 50))
    one, other = Sessions(ClosedLoop(3), talk, 50, seed=5), Sessions(OpenLoop(2.0), talk, 50, seed=5)
    assert np.array_equal(one.lengths(), other.lengths())


def test_arrivals_of_one_seed_are_the_same_at_every_rate_but_for_the_clock() -> None:
    for burstiness in (0.3, 1.0, math.inf):
        slow, fast = (OpenLoop(rate, burstiness).times(200, seed=3) for rate in (1.0, 16.0))
        assert np.array_equal(slow, 16 * fast)


# --- the order in which things are said

WORDS = (
    "--max-num-seqs 64",
    "--max-num-batched-tokens=4096",
    "--block-size 32",
    "--enable-prefix-caching",
    "--no-async-scheduling",
    "--gpu-memory-utilization 0.85",
    "--replicas 2",
    "--router round-robin",
)


@pytest.fixture(scope="module")
def measured() -> Profile:
    return Profile.load(SCENARIOS / "profiles" / "rtx4090-qwen2.5-7b.yaml")


def without_words(server: Alternative) -> Alternative:
    """All but the label, which repeats the line."""
    return replace(server, name="")


@examples
@given(order=st.permutations(WORDS))
def test_the_order_of_flags_on_a_line_never_matters(measured: Profile, order: list[str]) -> None:
    plain, shuffled = (read_line("vllm serve Qwen/Qwen2.5-7B " + " ".join(words)) for words in (WORDS, order))
    assert plain.given == shuffled.given
    assert plain.words == shuffled.words
    one, other = (without_words(alternative(measured, line)) for line in (plain, shuffled))
    assert one.flags == other.flags
    assert one.fleet == other.fleet
    assert set(one.assumed) == set(other.assumed)
    assert set(one.notes) == set(other.notes)


@examples
@given(order=st.permutations([("max-num-seqs", 64), ("max-num-batched-tokens", 4096), ("block-size", 32)]))
def test_the_order_of_given_flags_never_matters(order: list[tuple[str, int]]) -> None:
    plain = {"max-num-seqs": 64, "max-num-batched-tokens": 4096, "block-size": 32}
    assert parse_flags(dict(order)) == parse_flags(plain)


def shuffled(content: object, pick: st.DataObject) -> object:
    """The same mapping with its keys in another order, all the way down."""
    if isinstance(content, dict):
        keys = pick.draw(st.permutations(list(content)))
        return {key: shuffled(content[key], pick) for key in keys}
    return [shuffled(part, pick) for part in content] if isinstance(content, list) else content


@settings(examples, max_examples=3)
@given(pick=st.data())
@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_order_of_keys_in_a_scenario_never_matters(path: Path, tmp_path: Path, pick: st.DataObject) -> None:
    plain = Scenario.read(path)
    # what a file names lies beside it
    text = path.read_text(encoding="utf-8").replace("profiles/", f"{SCENARIOS}/profiles/")
    content = yaml.safe_load(text.replace("traces/", f"{SCENARIOS}/traces/"))
    other = tmp_path / path.name
    other.write_text(yaml.safe_dump(shuffled(content, pick), sort_keys=False), encoding="utf-8")
    again = Scenario.read(other)
    servers = [scenario.servers(scenario.load_profile()) for scenario in (plain, again)]
    assert [(one.name, one.flags, one.fleet, one.assumed, one.notes) for one in servers[0]] == [
        (one.name, one.flags, one.fleet, one.assumed, one.notes) for one in servers[1]
    ]
    assert plain.slo == again.slo
    if plain.load.capacity is None:
        assert plain.workloads() == again.workloads()
    else:
        assert plain.searched_load() == again.searched_load()


@pytest.mark.slow
def test_alternatives_do_not_know_of_each_other(profile: Profile) -> None:
    """In any order, and alone, an alternative comes to the same."""
    lines = ["--max-num-seqs 4", "--max-num-batched-tokens 512", "--replicas 2"]
    servers = [alternative(profile, read_line(line)) for line in lines]
    baseline = Alternative("measured", profile)
    load = Workload(ClosedLoop(8), (Shape(Length(64, 256), Length(8, 32)),), 16)
    (together,) = what_if(baseline, servers, [load])
    (backwards,) = what_if(baseline, servers[::-1], [load])
    told = list(zip(together.alternatives, together.changes, together.reasons, strict=True))
    again = list(zip(backwards.alternatives, backwards.changes, backwards.reasons, strict=True))
    for one, other in zip(told, again[::-1], strict=True):
        assert repr(one) == repr(other)
    for server, one in zip(servers, told, strict=True):
        (alone,) = what_if(baseline, [server], [load])
        assert repr((alone.alternatives[0], alone.changes[0], alone.reasons[0])) == repr(one)


# --- what a preempted request may not gain


@examples
@given(trace=traces(), flags=engines(num_gpu_blocks=18))
def test_who_waits_for_room_gets_the_same_tokens_as_who_does_not(trace: Trace, flags: EngineFlags) -> None:
    assume(int((trace.prompt_tokens + trace.generated_tokens).max()) <= 16 * 16)
    tight, roomy = play(trace, flags), play(trace, flags.changed(num_gpu_blocks=ROOMY))
    columns = ["request_id", "arrival", "prompt_tokens", "output_tokens", "finish_reason", "error"]
    pd.testing.assert_frame_equal(tight.requests[columns], roomy.requests[columns])
    assert not roomy.requests["preemptions"].any()

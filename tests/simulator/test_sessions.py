"""Conversations grow turn by turn, and the prefix cache holds what was said before."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.arrivals import ClosedLoop, OpenLoop, ThinkTime
from simulator.loads.lengths import Length
from simulator.loads.sessions import Sessions, Talk, parse_talk

STEP = StepTime(0.01, 1e-5, 1e-8, 2e-5)
CACHING = EngineFlags(max_num_seqs=64, num_gpu_blocks=4000, max_model_len=32_000, enable_prefix_caching=True)
FORGETTING = CACHING.changed(enable_prefix_caching=False)
FIXED = Talk(Length.fixed(4), Length.fixed(100), Length.fixed(50), system=200)
MIXED = Talk(Length(1, 6), Length(10, 300), Length(5, 120), system=333)


def by_turn(load: Sessions) -> list[np.ndarray]:
    prompts, outputs = load.lengths()
    ends = np.cumsum(load.conversations())
    return [np.stack(part) for part in zip(np.split(prompts, ends[:-1]), np.split(outputs, ends[:-1]), strict=True)]


def test_a_prompt_is_all_that_was_said_before_and_what_the_user_says_now() -> None:
    load = Sessions(ClosedLoop(2), FIXED, 3)
    assert load.num_prompts == 12
    prompts, outputs = load.lengths()
    assert prompts.tolist() == [300, 450, 600, 750] * 3
    assert outputs.tolist() == [50] * 12


def test_random_sessions_keep_their_bounds() -> None:
    load = Sessions(ClosedLoop(2), MIXED, 500)
    assert set(load.conversations()) == {1, 2, 3, 4, 5, 6}
    for prompts, outputs in by_turn(load):
        said = prompts - np.concatenate([[333], (prompts + outputs)[:-1]])
        assert said.min() >= 10
        assert said.max() <= 300


def test_a_session_ends_before_it_outgrows_the_context() -> None:
    talk = Talk(Length.fixed(50), Length(10, 300), Length(5, 120), max_context=2000)
    load = Sessions(ClosedLoop(2), talk, 100)
    prompts, outputs = load.lengths()
    assert (prompts + outputs).max() <= 2000
    last = np.cumsum(load.conversations()) - 1
    assert ((prompts + outputs)[last] > 2000 - 420).all()


@pytest.mark.parametrize("single_steps", [False, True])
def test_hits_are_those_that_one_counts_by_hand(single_steps: bool) -> None:
    """One user, one session after the other, a pool that forgets nothing, blocks of 16 tokens."""
    level = simulate_level(Sessions(ClosedLoop(1), FIXED, 3), CACHING, STEP, single_steps=single_steps)
    # first turns: nothing, then the 12 full blocks of the system prompt. Later ones: what the turn before has computed,
    # its 300 + 50 tokens but the last one: 21 full blocks; then 499 and 649 tokens: 31 and 40
    later = (21 + 31 + 40) * 16
    assert level.cached_tokens == later + 2 * (12 * 16 + later)


def test_without_prefix_caching_all_is_computed_again() -> None:
    level = simulate_level(Sessions(ClosedLoop(1), FIXED, 3), FORGETTING, STEP)
    assert level.cached_tokens == 0
    assert level.steps is not None
    assert level.steps["prefill_tokens"].sum() == 3 * (300 + 450 + 600 + 750)


def test_what_is_cached_is_not_computed() -> None:
    load = Sessions(ClosedLoop(4), MIXED, 20)
    level = simulate_level(load, CACHING, STEP)
    assert level.steps is not None
    assert level.cached_tokens
    assert level.steps["prefill_tokens"].sum() + level.cached_tokens == load.lengths()[0].sum()
    forgetting = simulate_level(load, FORGETTING, STEP)
    assert level.requests["ttft"].mean() < forgetting.requests["ttft"].mean()


def test_sessions_share_the_system_prompt_and_nothing_else() -> None:
    load = Sessions(ClosedLoop(1), FIXED, 2)
    first, second, other = (load.prefix(number, 16) for number in (0, 1, 4))
    assert second[: len(first)] == first
    assert (len(first), len(second)) == (350 // 16, 500 // 16)
    assert [one == two for one, two in zip(first, other, strict=True)] == [True] * 12 + [False] * 9


def test_a_small_pool_forgets() -> None:
    load = Sessions(ClosedLoop(8), MIXED, 60, ThinkTime(1.0))
    large, small = (
        simulate_level(load, CACHING.changed(num_gpu_blocks=blocks), STEP).cached_tokens for blocks in (8000, 250)
    )
    assert large is not None
    assert small is not None
    assert 0 < small < large


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_user_waits_for_the_answer_and_thinks(asynchronous: bool) -> None:
    load = Sessions(ClosedLoop(1, think_time=ThinkTime(10.0)), FIXED, 2, ThinkTime(2.0))
    flags = CACHING.changed(async_scheduling=asynchronous)
    requests = simulate_level(load, flags, STEP).requests
    pauses = requests["arrival"].to_numpy()[1:] - (requests["arrival"] + requests["e2el"]).to_numpy()[:-1]
    assert pauses == pytest.approx([2, 2, 2, 10, 2, 2, 2], abs=1e-6)


def test_open_sessions_begin_at_their_times_and_overlap() -> None:
    load = Sessions(OpenLoop(2.0), MIXED, 50, ThinkTime(1.0, "exponential"))
    requests = simulate_level(load, CACHING, STEP).requests
    turns = np.array(load.conversations())
    starts = np.cumsum(turns) - turns
    times = load.arrival_times()
    assert times is not None
    assert requests["arrival"].to_numpy()[starts] == pytest.approx(times, abs=1e-9)
    ends = (requests["arrival"] + requests["e2el"]).to_numpy()
    follows = np.setdiff1d(np.arange(len(requests)), starts)
    assert (requests["arrival"].to_numpy()[follows] >= ends[follows - 1]).all()
    assert (np.diff(requests["arrival"].to_numpy()[starts]) >= 0).all()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("flags", [CACHING, FORGETTING, CACHING.changed(num_gpu_blocks=300)])
@pytest.mark.parametrize("arrivals", [ClosedLoop(6, think_time=ThinkTime(0.5)), OpenLoop(3.0)])
def test_single_steps_give_the_same(flags: EngineFlags, asynchronous: bool, arrivals: ClosedLoop | OpenLoop) -> None:
    load = Sessions(arrivals, MIXED, 25, ThinkTime(0.3, "exponential"))
    flags = flags.changed(async_scheduling=asynchronous)
    ahead, single = (
        simulate_level(load, flags, STEP, HostTime(0.002, 0.001), single_steps=single) for single in (False, True)
    )
    pd.testing.assert_frame_equal(ahead.requests, single.requests, rtol=1e-9, atol=1e-9)
    assert ahead.cached_tokens == single.cached_tokens


def test_the_same_seed_gives_the_same_bytes() -> None:
    load = Sessions(OpenLoop(3.0), MIXED, 20, ThinkTime(0.3, "exponential"), seed=5)
    first, again, other = (
        simulate_level(one, CACHING, STEP).requests.to_csv() for one in (load, load.redrawn(0), load.redrawn(1))
    )
    assert first == again != other


def test_the_cap_of_an_open_loop_is_refused() -> None:
    with pytest.raises(ValueError, match="number of users"):
        Sessions(OpenLoop(1.0, max_concurrency=3), FIXED, 2)


def test_is_told_in_one_line_and_in_a_few_letters() -> None:
    load = Sessions(ClosedLoop(8), FIXED, 3, ThinkTime(2.0))
    assert (load.label, load.lengths_label) == ("C=8", "4x(200+100/50)")
    assert load.describe() == (
        "C=8, 3 sessions of 4 turns, think 2s, 100/50 tokens a turn, system prompt 200, 12 requests"
    )
    assert Sessions(OpenLoop(0.5), FIXED, 3).label == "0.5/s sessions"
    assert Sessions(OpenLoop(0.5), FIXED, 3).request_rate == 2.0


def test_a_talk_is_read_from_a_line() -> None:
    text = "turns=1-6, user=lognormal(100,80,10-300), output=5-120, system=333, max-context=4096"
    talk = parse_talk(text)
    assert (talk.turns, talk.system, talk.max_context) == (Length(1, 6), 333, 4096)
    assert talk.user.high == 300


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("turns=3", "sessions need user, output"),
        ("turns=3,user=5,output=5,tokens=7", "no 'tokens'; known are"),
        ("3 turns", "write turns=3-8"),
        ("turns=3,user=5,output=5,system=many", "system must be a whole number"),
        ("turns=3,user=500,output=5,max_context=100", "more than max_context 100"),
        ("turns=3,user=x,output=5", "'x' is no length"),
    ],
)
def test_what_is_no_talk_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_talk(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("turns=2,user=10,output=10,system=99999999999999999999", "whole number of tokens, up to 10,000,000"),
        ("turns=2,user=10,output=10,system=10000001", "up to 10,000,000 tokens"),
        ("turns=2,user=10,output=10,system=-1", "whole number"),
        ("turns=2,user=10,output=10,system=\u0662", "whole number"),
        ("turns=10000000000,user=10,output=10", "up to 10,000,000 tokens"),
        ("turns=nan,user=10,output=10", "is no length"),
        ("turns=2,user=1e308,output=10", "is no length"),
        ("turns=2,user=10,output=10\0", "is no length"),
        ("," * 200_000, "write turns="),
        ("turns=2(" + ",(" * 100_000, "sessions need user"),
    ],
)
def test_sessions_beyond_all_bounds_are_refused_at_once(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_talk(text)


def test_more_requests_than_can_be_drawn_are_refused() -> None:
    talk = parse_talk("turns=1000000,user=1,output=1")
    with pytest.raises(ValueError, match="11 sessions of 1000000 turns are more than 10,000,000 requests"):
        Sessions(ClosedLoop(1), talk, 11)

"""vLLM's scheduling rules one by one, a few steps each, worked out by hand; test_conformance.py holds whole runs
against vLLM's own scheduler. Requests are called A, B, C, ... in the order in which they are added.
"""

from __future__ import annotations

import pytest
from stepping import NEWER, NEWEST, OLD, Engine

from simulator.engine.request import Request
from simulator.engine.scheduler import CannotFit

# --- the token budget: running requests first, in their order


def test_a_prompt_beyond_the_budget_goes_on_in_its_place_before_others_begin() -> None:
    engine = Engine()
    engine.ask(90)
    engine.ask(20)
    assert [engine.tokens() for _ in range(3)] == [{"A": 64}, {"A": 26, "B": 20}, {"A": 1, "B": 1}]


def test_prompts_get_what_decoding_requests_leave_of_the_budget() -> None:
    engine = Engine()
    engine.ask(10)
    engine.step()
    engine.ask(90)
    engine.ask(20)
    assert [engine.tokens() for _ in range(3)] == [
        {"A": 1, "B": 63},
        {"A": 1, "B": 27, "C": 20},
        {"A": 1, "B": 1, "C": 1},
    ]


def test_of_prompts_under_way_the_first_gets_what_it_lacks() -> None:
    """Three prompts cut to the threshold, then to the budget; the last one waits for the others."""
    engine = Engine(max_num_batched_tokens=20, long_prefill_token_threshold=8)
    for _ in range(3):
        engine.ask(20)
    assert [engine.tokens() for _ in range(4)] == [
        {"A": 8, "B": 8, "C": 4},
        {"A": 8, "B": 8, "C": 4},
        {"A": 4, "B": 4, "C": 8},
        {"A": 1, "B": 1, "C": 4},
    ]


def test_the_last_token_of_the_budget_is_given_too() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.ask(7)
    engine.ask(5)
    assert engine.tokens() == {"A": 7, "B": 1}


def test_a_request_that_samples_with_its_whole_prompt_decodes_in_the_next_step() -> None:
    engine = Engine()
    engine.ask(10, output=3)
    planned = [engine.step() for _ in range(3)]
    assert [event["samples"] for event in planned] == [["A"]] * 3
    assert [event["free"] for event in planned] == [97, 97, 97]
    assert not engine.running


# --- slots and the queue


def test_first_come_is_first_served_whatever_its_priority() -> None:
    engine = Engine(max_num_seqs=1)
    engine.ask(4, output=1, priority=2, arrival_time=2.0)
    engine.ask(4, output=1, priority=1, arrival_time=1.0)
    assert [engine.step()["admitted"] for _ in range(2)] == [["A"], ["B"]]


def test_no_more_requests_run_than_there_are_slots() -> None:
    engine = Engine(max_num_seqs=2)
    engine.ask(4, output=1)
    engine.ask(4)
    engine.ask(4)
    assert engine.step()["running"] == ["A", "B"]
    assert engine.step()["running"] == ["B", "C"]


def test_a_slot_is_held_until_the_last_token_has_come_back() -> None:
    engine = Engine(max_num_seqs=2, async_scheduling=True)
    engine.ask(4, output=1)
    engine.ask(4)
    engine.ask(4)
    engine.plan()
    second = engine.plan()
    assert second["n"] == {"B": 1}
    assert second["running"] == ["A", "B"]
    assert engine.process() == ["A"]
    assert engine.plan()["n"] == {"B": 1, "C": 4}


def test_a_request_for_which_there_is_no_room_holds_up_those_behind_it() -> None:
    engine = Engine(usable_blocks=10)
    engine.ask(24)
    engine.ask(20)
    engine.ask(1)
    first = engine.step()
    assert (first["n"], first["waiting"], first["free"]) == ({"A": 24}, ["B", "C"], 4)


def test_all_free_blocks_can_be_given_away() -> None:
    engine = Engine(usable_blocks=10)
    engine.ask(24)
    engine.ask(16)
    first = engine.step()
    assert (first["n"], first["free"]) == ({"A": 24, "B": 16}, 0)


# --- the admission rule (KVCacheManager.allocate_slots)


@pytest.mark.parametrize(("reserves", "admitted"), [(True, ["A", "B"]), (False, ["A", "B", "C"])])
def test_room_for_the_whole_prompt_is_asked_of_what_is_free_now_and_is_not_kept(
    reserves: bool, admitted: list[str]
) -> None:
    """A takes 1 block of the 6 it will need, so B's 5 count as free though both together ask for 11 of 10."""
    engine = Engine(usable_blocks=10, long_prefill_token_threshold=4, scheduler_reserve_full_isl=reserves)
    engine.ask(24)
    engine.ask(20)
    engine.ask(36)
    first = engine.step()
    assert first["admitted"] == admitted
    assert first["n"] == dict.fromkeys(admitted, 4)
    assert first["free"] == 10 - len(admitted)


@pytest.mark.parametrize(
    ("version", "prompt", "admitted"),
    [(NEWEST, 8, True), (NEWEST, 9, False), (NEWER, 9, False), (OLD, 9, True), (OLD, 32, True)],
)
def test_the_watermark_stays_free(version: str, prompt: int, admitted: bool) -> None:
    """A quarter of the pool of 24, its null block included, is 6: of the 8 free blocks 2 can be given."""
    engine = Engine(usable_blocks=23, watermark=0.25, engine_version=version)
    engine.ask(57)
    engine.step()
    engine.ask(prompt)
    assert (engine.step()["admitted"] == ["B"]) == admitted


def test_the_watermark_is_rounded_down() -> None:
    engine = Engine(usable_blocks=22, watermark=0.25)
    engine.ask(57)
    engine.step()
    engine.ask(8)  # 2 blocks of 7 and 5.75, of which vLLM takes the whole part, for the watermark
    assert engine.step()["admitted"] == ["B"]


def test_a_request_that_runs_alone_may_use_the_watermark() -> None:
    engine = Engine(usable_blocks=23, watermark=0.25, max_num_batched_tokens=100)
    engine.ask(92, output=1)
    assert engine.step()["free"] == 0


@pytest.mark.parametrize("version", [NEWEST, OLD])
def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_has_room_for_all_of_it(version: str) -> None:
    engine = Engine(max_num_batched_tokens=100, enable_chunked_prefill=False, engine_version=version)
    for prompt in (60, 50, 45, 30, 10):
        engine.ask(prompt)
    first, second = engine.step(), engine.step()
    if version == OLD:
        assert (first["admitted"], first["waiting"]) == (["A", "D", "E"], ["B", "C"])
        assert second["n"] == {"A": 1, "D": 1, "E": 1, "B": 50, "C": 45}
    else:
        assert (first["admitted"], first["waiting"]) == (["A"], ["B", "C", "D", "E"])
        assert second["n"] == {"A": 1, "B": 50, "C": 45}


# --- --long-prefill-token-threshold


def test_requests_that_were_passed_over_keep_their_place_when_the_blocks_run_out() -> None:
    engine = Engine(20, max_num_batched_tokens=100, enable_chunked_prefill=False, engine_version=OLD)
    for prompt in (60, 50, 30):
        engine.ask(prompt)
    first = engine.step()
    assert (first["admitted"], first["waiting"]) == (["A"], ["B", "C"]), "B exceeds the budget, C the 5 blocks left"


def test_the_threshold_cuts_every_prompt_but_adds_no_tokens() -> None:
    engine = Engine(long_prefill_token_threshold=10)
    engine.ask(30)
    engine.ask(12)
    engine.ask(10)
    assert [engine.tokens() for _ in range(3)] == [
        {"A": 10, "B": 10, "C": 10},
        {"A": 10, "B": 2, "C": 1},
        {"A": 10, "B": 1, "C": 1},
    ]


def test_the_threshold_may_be_a_single_token() -> None:
    engine = Engine(long_prefill_token_threshold=1)
    engine.ask(3)
    engine.ask(2)
    assert [engine.tokens() for _ in range(2)] == [{"A": 1, "B": 1}, {"A": 1, "B": 1}]
    assert engine.events[-2]["samples"] == ["B"]


@pytest.mark.parametrize(("version", "tokens"), [(NEWEST, 30), (NEWER, 10), (OLD, 10)])
def test_only_the_newest_scheduler_spares_a_request_that_is_alone(version: str, tokens: int) -> None:
    engine = Engine(long_prefill_token_threshold=10, engine_version=version)
    engine.ask(30)
    assert engine.tokens() == {"A": tokens}


def test_a_request_is_not_alone_beside_a_running_or_waiting_one() -> None:
    engine = Engine(long_prefill_token_threshold=10, max_num_seqs=1)
    engine.ask(30, output=2)
    engine.ask(30)
    assert engine.tokens() == {"A": 10}
    beside = Engine(long_prefill_token_threshold=10)
    beside.ask(5)
    beside.step()
    beside.ask(30)
    assert beside.tokens() == {"A": 1, "B": 10}


@pytest.mark.parametrize(
    ("threshold", "plans"),
    [(10, [{"A": 32, "B": 32}, {"A": 8, "B": 8}]), (40, [{"A": 40, "B": 24}, {"A": 1, "B": 16}])],
)
def test_an_adaptive_threshold_is_at_least_an_equal_share_of_the_budget(
    threshold: int, plans: list[dict[str, int]]
) -> None:
    engine = Engine(long_prefill_token_threshold=threshold, long_prefill_token_threshold_adaptive=True)
    engine.ask(40)
    engine.ask(40)
    assert [engine.tokens() for _ in plans] == plans


def test_waiting_requests_count_for_the_adaptive_threshold() -> None:
    engine = Engine(long_prefill_token_threshold=4, long_prefill_token_threshold_adaptive=True, max_num_seqs=2)
    for _ in range(4):
        engine.ask(40)
    assert engine.tokens() == {"A": 16, "B": 16}


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("version", [NEWEST, NEWER])
def test_a_step_without_requests_is_empty(adaptive: bool, version: str) -> None:
    """vLLM plans one to tell its workers who has ended."""
    engine = Engine(
        long_prefill_token_threshold=4, long_prefill_token_threshold_adaptive=adaptive, engine_version=version
    )
    assert not engine.has_requests
    assert engine.active_tokens == engine.used_blocks == 0
    engine.ask(4, output=1)
    engine.step()
    assert engine.has_requests
    assert engine.tokens() == {}
    assert not engine.has_requests


# --- what can be served


def test_what_can_never_be_served_is_refused() -> None:
    engine = Engine(usable_blocks=10)
    with pytest.raises(CannotFit, match=r"^a prompt of 100 tokens does not fit --max-model-len 100$"):
        engine.ask(100, output=1)
    with pytest.raises(
        CannotFit,
        match=r"^a request of 37 prompt and 5 output tokens needs 11 KV blocks of 4, the pool has 10$",
    ):
        engine.ask(37, output=5)
    assert not engine.has_requests
    engine.ask(36, output=5)  # the last token needs no place
    assert engine.has_requests


def test_a_request_ends_where_the_context_ends() -> None:
    engine = Engine(usable_blocks=25, max_num_batched_tokens=100)
    endless, stopped = Request(0, 97, 500), Request(1, 97, 2, max_tokens=500)
    engine.add(endless)
    engine.add(stopped)
    assert (endless.output_tokens, endless.max_tokens) == (3, 3)
    assert (stopped.output_tokens, stopped.max_tokens) == (2, 3)
    steps = 0
    while engine.running or engine.waiting:
        engine.step()
        steps += 1
    assert steps == 3 + 2, "one after the other: each needs all blocks"


# --- many equal steps at once


def steadily_decoding(usable_blocks: int = 100, **flags: object) -> Engine:
    """Requests of 5, 6 and 9 tokens, all computed; with asynchronous scheduling a first decode step is in flight."""
    engine = Engine(usable_blocks, **flags)
    for prompt, output in ((5, 12), (6, 14), (9, 12)):
        engine.ask(prompt, output)
    engine.plan()
    if engine.flags.async_scheduling:
        engine.plan()
    engine.process()
    return engine


@pytest.mark.parametrize(("free", "steps"), [(0, 2), (1, 3), (2, 3), (3, 6), (4, 7), (5, 7), (6, 10), (50, 10)])
@pytest.mark.parametrize("caching", [False, True])
def test_steps_repeat_until_a_block_is_lacking_or_a_request_ends(caching: bool, free: int, steps: int) -> None:
    """B opens a block in the 3rd and 7th step from now, A and C in the 4th and 8th; they end with the 11th."""
    assert steadily_decoding(7 + free, enable_prefix_caching=caching).repeatable() == steps


def test_nothing_repeats_where_the_next_step_lacks_a_block() -> None:
    engine = Engine(usable_blocks=3)
    engine.ask(8, output=4)
    engine.ask(1, output=5)
    assert engine.step()["free"] == 0
    assert engine.repeatable() == 0


def test_nothing_repeats_when_a_request_is_about_to_end() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.ask(4, output=4)
    engine.step()
    assert engine.repeatable() == 2
    engine.step()
    assert engine.repeatable() == 1
    engine.step()
    assert engine.repeatable() == 0, "the next step brings the last token"


def test_nothing_repeats_while_a_prompt_is_computed() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.ask(4, output=9)
    engine.step()
    engine.ask(12, output=5)
    engine.step()
    assert engine.repeatable() == 0
    engine.step()
    assert engine.repeatable() == 3, "B's first token has come, and the last of 4 more ends a run"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_repeated_steps_are_steps_taken_one_by_one(caching: bool, asynchronous: bool) -> None:
    flags = {"enable_prefix_caching": caching, "async_scheduling": asynchronous}
    leaping, walking = (steadily_decoding(13, **flags) for _ in range(2))
    steps = leaping.repeatable()
    assert steps == walking.repeatable() == (9 if asynchronous else 10)
    leaping.repeat(steps)
    for _ in range(steps):
        walking.plan()
        walking.process()
    for engine in (leaping, walking):
        engine.events.clear()
        engine.steps = 0
        engine._scheduled = [(0, samples) for _, samples in engine._scheduled]
    assert leaping.used_blocks == walking.used_blocks == 13 - engine.kv_cache.free_blocks
    assert leaping.active_tokens == walking.active_tokens
    assert [step.decode_kv_tokens for step in leaping.planned] == [step.decode_kv_tokens for step in walking.planned]
    for engine in (leaping, walking):
        while engine.has_requests:
            engine.plan()
            engine.process()
    assert leaping.events == walking.events

"""What the scheduler finds in the KV cache and leaves there, in a few steps worked out by hand."""

from __future__ import annotations

import pytest
from stepping import NEWER, NEWEST, OLD, Engine

from simulator.engine.request import Request


def test_requests_of_one_step_share_their_prefix() -> None:
    """Blocks are findable as soon as they are given, before they are computed."""
    engine = Engine(enable_prefix_caching=True)
    first = engine.ask(10, prefix=(1, 2))
    second = engine.ask(10, prefix=(1, 2))
    planned = engine.step()
    assert (planned["n"], planned["free"]) == ({"A": 10, "B": 2}, 96)
    assert (first.cached, second.cached) == (0, 8)


def test_a_prompt_that_is_cached_whole_computes_its_last_block_again() -> None:
    engine = Engine(enable_prefix_caching=True)
    engine.ask(8, prefix=(1, 2))
    engine.step()
    engine.ask(8, prefix=(1, 2))
    assert engine.tokens() == {"A": 1, "B": 4}


@pytest.mark.parametrize(("usable_blocks", "tokens"), [(7, {"B": 1, "C": 8}), (6, {"B": 1})])
def test_cached_blocks_that_nobody_holds_leave_the_free_ones_when_they_are_found(
    usable_blocks: int, tokens: dict[str, int]
) -> None:
    """C finds 4 of its 6 blocks. All 6 must be free, and B holds one."""
    engine = Engine(usable_blocks, enable_prefix_caching=True)
    engine.ask(17, output=1, prefix=(1, 2, 3, 4))
    engine.step()
    engine.ask(3, output=3)
    engine.step()
    engine.ask(24, output=1, prefix=(1, 2, 3, 4))
    assert engine.tokens() == tokens


def test_cached_blocks_that_others_hold_cost_nothing() -> None:
    engine = Engine(7, enable_prefix_caching=True)
    engine.ask(17, prefix=(1, 2, 3, 4))
    engine.step()
    engine.ask(24, output=1, prefix=(1, 2, 3, 4))
    assert engine.step()["n"] == {"A": 1, "B": 8}


def test_the_threshold_is_for_tokens_that_are_not_cached() -> None:
    engine = Engine(enable_prefix_caching=True, long_prefill_token_threshold=10, engine_version=NEWER)
    engine.ask(25, output=1, prefix=tuple(range(5)))
    assert [engine.tokens() for _ in range(3)] == [{"A": 10}, {"A": 10}, {"A": 5}]
    second = engine.ask(35, prefix=tuple(range(5)))
    assert [engine.tokens() for _ in range(3)] == [{"B": 10}, {"B": 5}, {"B": 1}]
    assert second.cached == 20


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    """Two of B's blocks were full. What was cached when it was first admitted, nothing, is what is told of it."""
    engine = Engine(usable_blocks=6, enable_prefix_caching=True)
    engine.ask(7, output=3)
    victim = engine.ask(12)
    assert engine.tokens() == {"A": 7, "B": 12}
    second = engine.step()
    assert (second["n"], second["preempted"]) == ({"A": 1, "B": 1}, [])
    third = engine.step()
    assert (third["n"], third["preempted"], third["free"]) == ({"A": 1}, ["B"], 3)
    resumed = engine.step()
    assert (resumed["resumed"], resumed["n"]) == (["B"], {"B": 2})
    assert (victim.cached, victim.preemptions) == (0, 1)


@pytest.mark.parametrize(("output", "cached"), [(4, 8), (5, 8), (6, 12), (7, 12)])
def test_the_answer_is_cached_but_for_its_last_token(output: int, cached: int) -> None:
    """B asks A's prompt and its answer. What A's last token would add to the cache is never computed."""
    engine = Engine(enable_prefix_caching=True)
    conversation = (1, 2, 3)
    engine.ask(7, output=output, prefix=conversation)
    for _ in range(output):
        engine.step()
    assert engine.used_blocks == 0
    engine.ask(20, prefix=conversation)
    assert engine.tokens() == {"B": 20 - cached}


def test_of_a_victim_only_tokens_whose_outcome_is_known_are_cached() -> None:
    """A has computed 5 tokens, the 6th is in flight and the 7th was granted when B took its blocks."""
    engine = Engine(usable_blocks=4, enable_prefix_caching=True, async_scheduling=True, scheduling_policy="priority")
    conversation = (1, 2, 3)
    engine.ask(5, priority=1, prefix=conversation)
    engine.plan()
    engine.ask(8)
    assert engine.plan()["n"] == {"A": 1, "B": 8}
    engine.process()
    assert engine.plan()["preempted"] == ["A"]
    assert len(engine.kv_cache.find_prefix(Request(7, 12, 1, prefix=conversation), 12)) == 1


def test_with_blocks_of_one_token_a_victim_leaves_as_many_as_it_computed() -> None:
    """A has computed 6 tokens, the 7th was granted and is taken back."""
    engine = Engine(10, block_size=1, enable_prefix_caching=True, async_scheduling=True, scheduling_policy="priority")
    conversation = tuple(range(9))
    engine.ask(5, priority=1, prefix=conversation)
    engine.plan()
    engine.ask(3)
    assert engine.plan()["n"] == {"A": 1, "B": 3}
    engine.process()
    assert engine.plan()["preempted"] == ["A"]
    assert len(engine.kv_cache.find_prefix(Request(7, 12, 1, prefix=conversation), 12)) == 6


@pytest.mark.parametrize(("output", "tokens"), [(3, 8), (4, 8), (5, 4)])
def test_while_a_last_token_is_in_flight_what_comes_before_it_is_cached(output: int, tokens: int) -> None:
    """A has computed 5 prompt tokens and all of its output but the last one, and of that the last is in flight."""
    engine = Engine(enable_prefix_caching=True, async_scheduling=True)
    conversation = (1, 2)
    engine.ask(5, output=output, prefix=conversation)
    engine.plan()
    for _ in range(output - 1):
        engine.plan()
        engine.process()
    engine.ask(12, prefix=conversation)
    assert engine.plan()["n"] == {"B": tokens}


@pytest.mark.parametrize(("version", "tokens"), [(NEWEST, 1), (OLD, 5)])
def test_blocks_without_findable_content_are_reused_first_but_in_the_old_version(version: str, tokens: int) -> None:
    """A leaves a cached and a plain block, and so does B. C takes 3 blocks of 5, in the old version A's cached one."""
    engine = Engine(5, enable_prefix_caching=True, engine_version=version)
    engine.ask(5, output=1, prefix=("A",))
    engine.step()
    engine.ask(5, output=1, prefix=("B",))
    engine.step()
    engine.ask(12, output=1)
    engine.step()
    engine.ask(5, output=1, prefix=("A",))
    assert engine.tokens() == {"D": tokens}


def test_a_token_thrown_away_is_not_cached() -> None:
    """0.11 computes A's only output token, the 8th, before it knows that A has ended."""
    engine = Engine(enable_prefix_caching=True, async_scheduling=True, engine_version=OLD)
    conversation = (1, 2)
    engine.ask(7, output=1, prefix=conversation)
    engine.plan()
    assert engine.plan()["n"] == {"A": 1}
    assert engine.process() == ["A"]
    engine.ask(12, prefix=conversation)
    assert engine.plan()["n"] == {"B": 8}


def test_with_prefix_caching_the_last_token_of_the_budget_is_given_too() -> None:
    engine = Engine(max_num_batched_tokens=8, enable_prefix_caching=True, long_prefill_token_threshold=6)
    engine.ask(4)
    engine.step()
    engine.ask(14)
    engine.ask(1)
    assert [engine.tokens() for _ in range(2)] == [{"A": 1, "B": 6, "C": 1}] * 2

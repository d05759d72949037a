"""Asynchronous scheduling plans a step before it knows the outcome of the one before: what it may and may not do."""

from __future__ import annotations

import pytest
from stepping import FLAGS, OLD, Engine

from simulator.engine.request import Request
from simulator.engine.scheduler import Scheduler


def test_nobody_is_scheduled_whose_last_token_is_in_flight() -> None:
    engine = Engine(async_scheduling=True)
    request = engine.ask(5, output=3)
    engine.ask(5, output=1)
    assert engine.plan()["n"] == {"A": 5, "B": 5}
    assert engine.plan()["n"] == {"A": 1}
    assert engine.process() == ["B"]
    assert engine.plan()["n"] == {"A": 1}
    assert engine.process() == []
    assert engine.plan()["n"] == {}
    assert (request.output, request.in_flight, engine.active_tokens) == (2, 1, 5 + 3)
    assert engine.process() == ["A"]
    assert engine.active_tokens == 0


def test_a_stop_token_is_not_foreseen_even_as_the_first_one() -> None:
    engine = Engine(async_scheduling=True)
    engine.ask(5, output=1, max_tokens=2)
    engine.plan()
    assert engine.plan()["n"] == {"A": 1}
    assert engine.process() == ["A"]


def test_active_tokens_are_whole_prompts_and_what_was_sampled_of_the_running_requests() -> None:
    engine = Engine(async_scheduling=True)
    engine.ask(5, output=2)
    engine.ask(90)
    assert engine.plan()["n"] == {"A": 5, "B": 59}
    assert engine.active_tokens == (5 + 1) + 90
    assert engine.plan()["n"] == {"A": 1, "B": 31}
    engine.process()
    assert engine.active_tokens == (5 + 2) + (90 + 1)
    engine.ask(70)
    assert engine.plan()["n"] == {"B": 1, "C": 63}
    assert engine.active_tokens == (5 + 2) + (90 + 2) + 70
    assert engine.process() == ["A"]
    assert engine.active_tokens == (90 + 2) + 70


def test_after_a_stop_token_one_more_is_computed_and_thrown_away() -> None:
    engine = Engine(async_scheduling=True)
    engine.ask(5, output=2, max_tokens=9)
    engine.plan()
    engine.plan()
    engine.process()
    third = engine.plan()
    assert third["n"] == {"A": 1}
    assert engine.process() == ["A"]
    assert engine.planned[0].decodes == 1
    assert engine.planned[0].tokens_out == 0
    assert engine.used_blocks == 0


@pytest.mark.parametrize(("prompt", "last"), [(97, {}), (96, {"A": 1})])
def test_the_old_scheduler_stops_in_time_only_at_the_end_of_the_context(prompt: int, last: dict[str, int]) -> None:
    engine = Engine(async_scheduling=True, max_num_batched_tokens=100, engine_version=OLD)
    engine.ask(prompt, output=3)
    engine.plan()
    engine.plan()
    engine.process()
    engine.plan()
    engine.process()
    assert engine.plan()["n"] == last
    assert engine.process() == ["A"]


@pytest.mark.parametrize(("prompt", "last"), [(99, {}), (98, {"A": 1})])
def test_the_same_holds_for_a_request_of_one_token(prompt: int, last: dict[str, int]) -> None:
    engine = Engine(async_scheduling=True, max_num_batched_tokens=100, engine_version=OLD)
    engine.ask(prompt, output=1)
    engine.plan()
    assert engine.plan()["n"] == last
    assert engine.process() == ["A"]


def test_a_preempted_request_gets_the_token_that_was_in_flight() -> None:
    """B is preempted in the third step, before the outcome of the second is known."""
    engine = Engine(usable_blocks=4, async_scheduling=True)
    engine.ask(7, output=4)
    victim = engine.ask(7, output=5)
    engine.plan()
    engine.plan()
    engine.process()
    assert engine.plan()["preempted"] == ["B"]
    engine.process()
    assert victim.output == 2
    while not engine.plan()["resumed"]:
        engine.process()
    assert engine.events[-1]["n"] == {"B": 9}


def test_a_victim_whose_stop_token_is_in_flight_ends_while_it_waits() -> None:
    engine = Engine(usable_blocks=4, async_scheduling=True)
    engine.ask(7)
    engine.ask(7, output=2, max_tokens=9)
    engine.plan()
    engine.plan()
    engine.process()
    third = engine.plan()
    assert (third["preempted"], third["free"]) == (["B"], 1)
    assert engine.process() == ["B"]
    assert list(engine.waiting) == []
    assert engine.kv_cache.free_blocks == 1


def passed_over(**more: int) -> Engine:
    """A cannot get its third block in the fourth step and preempts itself, so B, behind it, gets no token. The second
    tokens of A and B are in flight."""
    engine = Engine(usable_blocks=4, async_scheduling=True, scheduling_policy="priority")
    engine.ask(6, priority=1)
    engine.plan()
    engine.ask(5, **more)
    assert engine.plan()["n"] == {"A": 1, "B": 5}
    engine.process()
    assert engine.plan()["n"] == {"A": 1, "B": 1}
    engine.process()
    fourth = engine.plan()
    assert (fourth["n"], fourth["preempted"], fourth["running"]) == ({}, ["A"], ["B"])
    return engine


def test_a_request_that_was_passed_over_gets_its_token_in_flight_and_goes_on() -> None:
    engine = passed_over(output=4)
    in_flight, empty = engine.planned
    assert in_flight.tokens_out == 0, "both are delivered one by one"
    assert {request.request_id for request in in_flight.samplers} == {0, 1}
    assert {request.request_id for request in empty.left} == {0, 1}
    assert engine.active_tokens == 5 + 2
    assert engine.process() == []
    assert set(engine.events[-1]["tokens"]) == {"A", "B"}
    assert engine.plan()["n"] == {"B": 1}
    assert engine.plan()["n"] == {"B": 1}
    engine.process()
    assert engine.process() == []
    assert engine.process() == ["B"]


def test_a_request_that_was_passed_over_ends_if_its_last_token_was_in_flight() -> None:
    engine = passed_over(output=2, max_tokens=9)
    assert engine.planned[0].tokens_out == 1, "B's last token still comes with the batch"
    assert engine.process() == ["B"]
    assert not engine.running
    assert engine.used_blocks == 0
    assert engine.active_tokens == 0


def test_a_token_thrown_away_is_nobodys() -> None:
    """A's stop is not foreseen by 0.11: the second step computes one token for A, which has ended, and B's only one."""
    engine = Engine(async_scheduling=True, engine_version=OLD)
    engine.ask(5, output=1)
    engine.plan()
    engine.ask(5, output=1)
    assert engine.plan()["n"] == {"A": 1, "B": 5}
    assert engine.process() == ["A"]
    assert engine.process() == ["B"]
    assert engine.events[-1]["tokens"] == ["B"]


def test_steps_are_processed_in_their_order() -> None:
    engine = Scheduler(FLAGS.changed(async_scheduling=True))
    engine.add(Request(0, 5, 9))
    engine.schedule()
    second = engine.schedule()
    with pytest.raises(ValueError, match=r"^steps are processed in the order they were scheduled$"):
        engine.update(second)


def test_those_who_end_together_end_in_running_order() -> None:
    """B decodes before A, whose prompt takes two steps, but stands behind it."""
    engine = Engine(long_prefill_token_threshold=10)
    engine.ask(20, output=2)
    engine.ask(5, output=3)
    engine.step()
    engine.step()
    engine.plan()
    assert engine.process() == ["A", "B"]

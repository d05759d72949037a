"""Who is preempted, what is taken from it and how it comes back, in a few steps worked out by hand."""

from __future__ import annotations

import pytest
from stepping import NEWER, NEWEST, Engine

# --- preemption


def test_the_request_that_was_admitted_last_is_preempted_and_computed_anew() -> None:
    """Each takes 2 of 4 blocks. A needs a third one for its 9th token, and a fourth for its 13th."""
    engine = Engine(usable_blocks=4)
    first, second = engine.ask(7, output=7), engine.ask(7)
    assert [engine.tokens() for _ in range(2)] == [{"A": 7, "B": 7}, {"A": 1, "B": 1}]
    third = engine.step()
    assert (third["n"], third["preempted"], third["waiting"], third["free"]) == ({"A": 1}, ["B"], ["B"], 1)
    assert (second.output, second.computed, second.blocks, second.preemptions) == (2, 0, 0, 1)
    assert [engine.tokens() for _ in range(4)] == [{"A": 1}] * 4
    assert first.finished
    resumed = engine.step()
    assert (resumed["resumed"], resumed["n"], resumed["samples"]) == (["B"], {"B": 9}, ["B"])
    assert engine.tokens() == {"B": 1}
    assert second.output + 1 + engine.batch.clock - second.joined == 4
    assert engine.preemptions == 1


def test_a_step_that_preempts_admits_nobody_and_the_preempted_go_first() -> None:
    engine = Engine(usable_blocks=4)
    engine.ask(7)
    engine.ask(7)
    engine.step()
    engine.step()
    engine.ask(1)
    third = engine.step()
    assert (third["preempted"], third["admitted"], third["waiting"], third["free"]) == (["B"], [], ["B", "C"], 1)
    assert engine.step()["admitted"] == [], "B needs 3 blocks and stands before C"


def test_a_request_preempts_itself_when_it_is_the_last() -> None:
    engine = Engine(usable_blocks=4)
    engine.ask(5)
    engine.ask(8)
    engine.step()
    second = engine.step()
    assert (second["n"], second["preempted"], second["running"], second["free"]) == ({"A": 1}, ["B"], ["A"], 2)


def test_as_many_are_preempted_as_it_takes_and_they_keep_their_order() -> None:
    """A's next 16 tokens need 4 blocks and none is free; C has 3 and B has 3."""
    engine = Engine(usable_blocks=10, long_prefill_token_threshold=16)
    engine.ask(40, output=1)
    engine.ask(10)
    engine.ask(10)
    assert engine.step()["free"] == 0
    second = engine.step()
    assert (second["n"], second["preempted"], second["waiting"]) == ({"A": 16}, ["C", "B"], ["B", "C"])
    assert second["free"] == 2
    assert engine.preemptions == 2


def test_a_victim_that_still_computes_its_prompt_begins_again() -> None:
    """B has 8 of its 14 tokens when A takes its blocks."""
    engine = Engine(usable_blocks=4, max_num_batched_tokens=16, scheduler_reserve_full_isl=False)
    engine.ask(8, output=2)
    victim = engine.ask(14, output=2)
    assert engine.tokens() == {"A": 8, "B": 8}
    second = engine.step()
    assert (second["n"], second["preempted"], second["free"]) == ({"A": 1}, ["B"], 1)
    assert (victim.computed, victim.output) == (0, 0)
    assert engine.tokens() == {"B": 14}


# --- --scheduling-policy priority


def test_every_preemption_of_a_request_counts() -> None:
    engine = Engine(usable_blocks=8)
    engine.ask(7, output=20)
    engine.ask(7, output=5)
    victim = engine.ask(7, output=20)
    preempted = [name for _ in range(60) for name in engine.step()["preempted"]]
    assert preempted == ["C", "C"]
    assert (victim.preemptions, engine.preemptions) == (2, 2)
    assert victim.finished


def test_waiting_requests_are_admitted_by_priority_then_arrival_then_number() -> None:
    engine = Engine(max_num_seqs=1, scheduling_policy="priority")
    for priority, arrival in ((1, 0.0), (0, 2.0), (0, 1.0), (0, 1.0)):
        engine.ask(4, output=1, priority=priority, arrival_time=arrival)
    assert [engine.step()["admitted"] for _ in range(4)] == [["C"], ["D"], ["B"], ["A"]]


def test_a_waiting_request_of_higher_priority_preempts_nobody() -> None:
    engine = Engine(usable_blocks=4, scheduling_policy="priority")
    engine.ask(13, output=3, priority=1)
    engine.step()
    engine.ask(4, priority=0)
    second = engine.step()
    assert (second["n"], second["waiting"], second["preempted"]) == ({"A": 1}, ["B"], [])


def test_the_victim_has_the_lowest_priority_wherever_it_runs_and_its_token_is_taken_back() -> None:
    """A got its token when B finds no block for its 9th; C behind them must not lose its turn."""
    engine = Engine(usable_blocks=5, scheduling_policy="priority")
    victim = engine.ask(5, priority=1)
    engine.step()
    engine.ask(8, output=2)
    engine.ask(3)
    assert engine.tokens() == {"A": 1, "B": 8, "C": 3}
    third = engine.step()
    assert (third["n"], third["preempted"], third["total"]) == ({"B": 1, "C": 1}, ["A"], 2)
    assert (third["waiting"], third["free"]) == (["A"], 1)
    assert (victim.output, victim.computed) == (2, 0)
    resumed = engine.step()
    assert (resumed["n"], resumed["running"]) == ({"C": 1, "A": 7}, ["C", "A"]), "it comes back behind the others"


def test_tokens_taken_back_are_given_to_others() -> None:
    """C's prompt gets 14 of the budget of 15, B 1 and A, which was first to get a token, none."""
    engine = Engine(
        usable_blocks=10, max_num_batched_tokens=15, scheduler_reserve_full_isl=False, scheduling_policy="priority"
    )
    engine.ask(13, priority=1)
    engine.step()
    engine.ask(7)
    engine.step()
    engine.ask(40, output=1)
    assert engine.tokens() == {"A": 1, "B": 1, "C": 13}
    fourth = engine.step()
    assert (fourth["n"], fourth["preempted"]) == ({"B": 1, "C": 14}, ["A"])


def test_the_tokens_of_a_prompt_are_taken_back_too() -> None:
    """A's 12 tokens of the budget of 20 are C's when B takes A's 14 blocks for want of one."""
    engine = Engine(
        usable_blocks=18,
        max_num_batched_tokens=20,
        long_prefill_token_threshold=12,
        scheduler_reserve_full_isl=False,
        scheduling_policy="priority",
    )
    engine.ask(60, priority=1)
    assert engine.tokens() == {"A": 20}
    engine.ask(7)
    assert engine.tokens() == {"A": 12, "B": 7}
    engine.ask(40)
    assert engine.tokens() == {"A": 12, "B": 1, "C": 7}
    fourth = engine.step()
    assert (fourth["n"], fourth["preempted"], fourth["free"]) == ({"B": 1, "C": 12}, ["A"], 10)


def test_a_victim_before_the_last_request_stops_the_step_when_it_is_itself() -> None:
    engine = Engine(usable_blocks=4, scheduling_policy="priority")
    engine.ask(7, priority=1)
    engine.step()
    engine.ask(5)
    assert engine.tokens() == {"A": 1, "B": 5}
    third = engine.step()
    assert (third["n"], third["preempted"], third["running"], third["free"]) == ({}, ["A"], ["B"], 2)
    assert engine.tokens() == {"B": 1}


@pytest.mark.parametrize(("arrivals", "victim"), [((2.0, 1.0), "A"), ((1.0, 2.0), "B"), ((1.0, 1.0), "A")])
def test_of_equal_priorities_the_latest_arrival_is_the_victim_and_then_the_first_in_the_list(
    arrivals: tuple[float, float], victim: str
) -> None:
    engine = Engine(usable_blocks=5, scheduling_policy="priority")
    engine.ask(5, arrival_time=arrivals[0])
    engine.step()
    engine.ask(4, arrival_time=arrivals[1])
    engine.ask(7, arrival_time=0.0)
    assert engine.tokens() == {"A": 1, "B": 4, "C": 7}
    assert engine.step()["preempted"] == [victim], "B needs a block for its 5th token"


@pytest.mark.parametrize(("version", "served"), [(NEWEST, {"B": 1, "C": 1}), (NEWER, {"B": 1})])
def test_a_victim_whose_last_token_is_in_flight_is_not_spared_and_ends_while_it_waits(
    version: str, served: dict[str, int]
) -> None:
    """A was passed over in this step when B takes its blocks. 0.27 then passes over C as well."""
    engine = Engine(usable_blocks=5, scheduling_policy="priority", async_scheduling=True, engine_version=version)
    victim = engine.ask(5, output=2, priority=1)
    engine.plan()
    engine.ask(8)
    engine.ask(3)
    assert engine.plan()["n"] == {"A": 1, "B": 8, "C": 3}
    assert engine.process() == []
    third = engine.plan()
    assert (third["n"], third["preempted"], third["waiting"]) == (served, ["A"], ["A"])
    assert engine.process() == ["A"]
    assert victim.output == 2
    assert list(engine.waiting) == []
    assert engine.kv_cache.free_blocks == 1

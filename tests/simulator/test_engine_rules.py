"""Versions of vLLM differ in a few rules. Those of 0.27 and 0.32 are held against dumps; these are read from source."""

from __future__ import annotations

import pytest

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.engine_rules import rules_of, version_note
from simulator.engine.request import Request
from simulator.engine.scheduler import Scheduler

OLD, NEW = "0.11.0", "0.32.0"


def scheduler(version: str, **flags: object) -> Scheduler:
    small = EngineFlags(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, num_gpu_blocks=100, block_size=4)
    return Scheduler(small.changed(engine_version=version, **{"async_scheduling": False, **flags}))


@pytest.mark.parametrize(("version", "admitted"), [(OLD, [0, 2]), (NEW, [0])])
def test_only_the_old_scheduler_passes_over_a_prompt_that_does_not_fit_the_step(
    version: str, admitted: list[int]
) -> None:
    engine = scheduler(version, enable_chunked_prefill=False)
    for number, prompt in enumerate((40, 30, 10)):
        engine.add(Request(number, prompt, 2))
    assert [request.request_id for request in engine.schedule().admitted] == admitted
    assert next(iter(engine.waiting)).request_id == 1, "it keeps its place at the head"


@pytest.mark.parametrize(("version", "admitted"), [(OLD, 2), (NEW, 1)])
def test_only_the_new_scheduler_wants_room_for_the_whole_prompt(version: str, admitted: int) -> None:
    engine = scheduler(version, num_gpu_blocks=15, max_num_batched_tokens=32)
    for number in range(2):
        engine.add(Request(number, 30, 2))
    assert len(engine.schedule().admitted) == admitted, (
        "8 blocks go to the first, the second asks for 2 now and 8 in all"
    )


@pytest.mark.parametrize(("version", "wasted"), [(OLD, 1), (NEW, 0)])
def test_only_the_old_scheduler_computes_a_token_after_the_last_one(version: str, wasted: int) -> None:
    engine = scheduler(version, async_scheduling=True)
    engine.add(Request(0, 10, 3))
    steps = [engine.schedule()]
    ended = []
    while not ended:
        steps.append(engine.schedule())
        ended = engine.update(steps[-2])
    assert sum(step.decodes for step in steps) == 2 + wasted


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_old_rules_lose_nothing(asynchronous: bool) -> None:
    engine = scheduler(OLD, async_scheduling=asynchronous, num_gpu_blocks=30)
    for number in range(20):
        engine.add(Request(number, 5 + number, 1 + number % 7))
    in_flight, ended = [], []
    while engine.has_requests or in_flight:
        if engine.has_requests:
            in_flight.append(engine.schedule())
        if len(in_flight) == (2 if asynchronous else 1) or not engine.has_requests:
            ended += engine.update(in_flight.pop(0))
    assert sorted(request.request_id for request in ended) == list(range(20))
    assert engine.used_blocks == 0


def test_an_unknown_version_takes_the_newest_rules_and_says_so() -> None:
    assert rules_of("0.99.1") == rules_of("0.32.0")
    assert version_note("0.99.1") == "the scheduler of vLLM 0.99.1 is not known; simulated with the rules of 0.32"
    assert version_note("0.27.1") == version_note("0.32.0") == ""


def test_a_version_older_than_all_known_takes_the_oldest_rules() -> None:
    assert rules_of("0.10.2") == rules_of("0.11.0")
    assert "rules of 0.11" in version_note("0.10.2")

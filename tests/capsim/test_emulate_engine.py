"""The engine behind the twin: the simulator's times, token by token, and requests whose clients leave."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsim.emulator.clock import Clock
from capsim.emulator.engine_metrics import EngineMetrics
from capsim.emulator.live_engine import LiveEngine, Ticket
from capsim.emulator.live_scheduler import LiveScheduler
from simulator.engine.engine_core import EngineCore
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.request import Request
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import Length, OpenLoop, Shape, Workload

FLAGS = EngineFlags(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024, num_gpu_blocks=60)
STEP_TIME = StepTime(0.01, 1e-4, 1e-7, 5e-5, mixed_per_sequence=1e-4)
HOST_TIME = HostTime(per_request=0.004, per_request_serial=0.001, per_prompt_token=2e-6)
HURRY = 1e6  # simulated seconds in a second: no test waits


class Watcher:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    def receive(self, tokens: int, ended: bool) -> None:
        self.tokens.append(tokens)
        self.begun.set()
        if ended:
            self.ended.set()


def metrics() -> EngineMetrics:
    return EngineMetrics("demo", (0, 32), FLAGS.max_model_len, {})


async def serve(
    flags: EngineFlags, host_time: HostTime, requests: Sequence[Request]
) -> tuple[list[Ticket], list[Watcher]]:
    """Play requests that are all known ahead, each sent at its time."""
    clock = Clock(HURRY)
    engine = LiveEngine(LiveScheduler(flags), STEP_TIME, host_time, clock, metrics())
    watchers = [Watcher() for _ in requests]
    tickets = [engine.submit(request, watcher) for request, watcher in zip(requests, watchers, strict=True)]
    running = asyncio.create_task(engine.run())
    await asyncio.wait([asyncio.create_task(watcher.ended.wait()) for watcher in watchers], timeout=60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return tickets, watchers


@pytest.mark.parametrize("host_time", [HostTime(), HOST_TIME], ids=["no host", "host"])
@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("rate", [5.0, 200.0])  # one after the other; all together, with preemptions
def test_tokens_are_due_when_the_simulator_says(rate: float, async_scheduling: bool, host_time: HostTime) -> None:
    flags = replace(FLAGS, async_scheduling=async_scheduling)
    load = Workload(OpenLoop(rate), (Shape(Length(20, 200), Length(1, 60)),), 60)
    level = simulate_level(load, flags, STEP_TIME, host_time)
    prompts, outputs = load.lengths()
    requests = [
        Request(number, int(prompt), int(output), arrival_time=float(sent))
        for number, (prompt, output, sent) in enumerate(zip(prompts, outputs, load.arrival_times(), strict=True))
    ]
    tickets, watchers = asyncio.run(serve(flags, host_time, requests))
    sent = np.array([request.sent for request in requests])
    assert [ticket.first_due for ticket in tickets] - sent == pytest.approx(level.requests["ttft"].to_numpy())
    assert [ticket.last_due for ticket in tickets] - sent == pytest.approx(level.requests["e2el"].to_numpy())
    assert [request.preemptions for request in requests] == level.requests["preemptions"].to_list()
    assert (rate > 100) == (level.requests["preemptions"].sum() > 0), "both cases are tried"
    for watcher, output in zip(watchers, outputs, strict=True):
        assert watcher.tokens == list(range(1, int(output) + 1)), "every token is handed over, each on its own"


EVENTS = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 40), st.integers(0, 120)), min_size=1, max_size=25)


@settings(max_examples=60)
@given(EVENTS, st.booleans(), st.booleans(), st.sampled_from(["fcfs", "priority"]))
def test_whoever_leaves_frees_all_it_holds(
    events: list[tuple[int, int, int]], async_scheduling: bool, caching: bool, policy: str
) -> None:
    """Each request: prompt and output tokens, and the step at which its client leaves, if it lives so long."""
    flags = replace(FLAGS, async_scheduling=async_scheduling, enable_prefix_caching=caching, scheduling_policy=policy)
    scheduler = LiveScheduler(flags)
    core = EngineCore(scheduler, STEP_TIME, metrics().recorder, single_steps=True)
    requests = [
        Request(number, prompt, output, priority=number % 3, arrival_time=number * 1e-9)
        for number, (prompt, output, _) in enumerate(events)
    ]
    core.inbox.extend(requests)
    seen = dict.fromkeys(requests, 0)
    left = set()
    for step in range(5000):
        if core.is_idle:
            break
        for request, (_, _, leaves_at) in zip(requests, events, strict=True):
            if leaves_at == step > 0 and not request.finished:
                scheduler.abort(request)
                left.add(request)
        core.advance(-math.inf)
        for request in requests:
            if request not in left:
                tokens = request.output_tokens if request.finished else scheduler.delivered(request)
                assert seen[request] <= tokens <= seen[request] + 1, "one token a step, at most"
                seen[request] = tokens
    assert core.is_idle
    assert scheduler.used_blocks == 0
    assert scheduler.active_tokens == 0
    assert not scheduler.running
    assert all(seen[request] == request.output_tokens for request in requests if request not in left)


def test_nobody_waits_for_who_has_left() -> None:
    """With one slot, the second of three leaves before its turn, the first in the middle of its answer."""

    async def play() -> list[Watcher]:
        flags = replace(FLAGS, max_num_seqs=1)
        engine = LiveEngine(LiveScheduler(flags), STEP_TIME, HostTime(), Clock(100), metrics())
        running = asyncio.create_task(engine.run())
        watchers = [Watcher() for _ in range(3)]
        tickets = []
        for number, watcher in enumerate(watchers):
            request = Request(number, 50, 800 if number == 0 else 5)
            request.sent = engine.clock.now()
            tickets.append(engine.submit(request, watcher))
        await watchers[0].begun.wait()
        engine.abort(tickets[1])
        engine.abort(tickets[0])
        engine.abort(tickets[0])  # once is enough
        await asyncio.wait_for(watchers[2].ended.wait(), 30)
        engine.abort(tickets[2])  # too late to matter
        assert engine.requests == 0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return watchers

    first, second, third = asyncio.run(play())
    assert 0 < len(first.tokens) < 800
    assert second.tokens == []
    assert third.tokens == [1, 2, 3, 4, 5]

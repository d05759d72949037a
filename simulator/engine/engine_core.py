"""vLLM's engine loop in simulated time: plans steps, gives them durations, delivers their tokens.

The loop is that of `v1/engine/core.py`: synchronous, or asynchronous with two batches in flight. It runs on a clock of
its own, ahead of SimPy's, up to the next moment at which something outside could matter.
"""

from __future__ import annotations

import math
from collections import deque

from simulator.engine.cuda_graphs import DecodeGraphs
from simulator.engine.recorder import Recorder
from simulator.engine.request import Request
from simulator.engine.scheduler import Scheduler
from simulator.engine.step import Step, Work
from simulator.engine.step_time import StepTime

IDLE_SLEEP = 1e-3  # s; vLLM's loop sleeps this long after a step without tokens while requests are left


class EngineCore:
    """One engine: a scheduler, a device that takes time, and the loop between them.

    Attributes
        now: s, the engine's own clock
        inbox: requests that have arrived and are not in the scheduler yet
        pause: s that vLLM sleeps with its outputs delivered; the next `advance` begins so much later
    """

    def __init__(
        self,
        scheduler: Scheduler,
        step_time: StepTime,
        recorder: Recorder,
        single_steps: bool = False,
        idle_sleep: float = IDLE_SLEEP,
    ) -> None:
        """`single_steps` takes every step on its own instead of runs of equal ones: the same results, slower."""
        self.scheduler = scheduler
        self.step_time = step_time
        self.recorder = recorder
        self.now = 0.0
        self.inbox: list[Request] = []
        self.pause = 0.0
        self._single_steps = single_steps
        self._idle_sleep = idle_sleep
        self._graphs = DecodeGraphs(scheduler.flags)
        self._graph_cost: dict[int, float] = {}  # s, by the size of the batch
        self._depth = 2 if scheduler.flags.async_scheduling else 1
        self._in_flight: deque[tuple[Step, float]] = deque()  # each with the time at which it ends
        self._device_free = 0.0  # s, when the device has done all that it was given
        self._last_output = 0.0  # s, when the decode batch last delivered
        self._planned_steady = False

    @property
    def is_idle(self) -> bool:
        return not self.inbox and not self._in_flight and not self.scheduler.has_requests

    @property
    def earliest_end(self) -> float:
        """No request ends before this moment if none arrives until then."""
        if self.inbox or not self._planned_steady:
            return self.now
        batch = self.scheduler.batch
        kv_tokens = self._in_flight[0][0].decode_kv_tokens if self._in_flight else batch.kv_tokens
        return self.now + self.scheduler.repeatable() * self._decode_duration(batch.size, kv_tokens)

    def advance(self, horizon: float) -> list[Request]:
        """Run until requests end, or the next step would be planned at or after `horizon`, or nothing is left to do.

        Returns the requests that ended, at `now`. At least one pass of the loop is made. `horizon` is the next moment
        at which a request might arrive.
        """
        self.now += self.pause
        self.pause = 0.0
        while True:
            ended = self._pass()
            if ended or self.pause or self.is_idle:
                return ended
            if self._planned_steady and not self._single_steps and self.now < horizon:
                self._repeat(horizon)
            if self.now >= horizon:
                return []

    def _pass(self) -> list[Request]:
        """One pass of vLLM's loop: take in arrivals, plan a step, and process the oldest one when the queue is full."""
        scheduler = self.scheduler
        for request in self.inbox:
            scheduler.add(request)
        self.inbox.clear()
        planned = True
        if scheduler.has_requests:
            step = scheduler.schedule()
            planned = not step.is_empty
            self._planned_steady = step.is_steady
            self._launch(step)
            if planned and len(self._in_flight) < self._depth:
                self._planned_steady = False
                return []
        ended = self._process_oldest()
        if not planned and scheduler.has_requests:
            self.pause = self._idle_sleep
        return ended

    def _launch(self, step: Step) -> None:
        """Put a step on the device, behind what it has to do already."""
        for request in step.left:
            request.last_token = self._last_output
        for request in step.admitted:
            if math.isnan(request.scheduled):
                request.scheduled = self.now
        end = self.now
        if step.chunks:
            step.work = Work(step.chunks)
        if not step.is_empty:
            end = self._device_free = max(self._device_free, self.now) + self._duration(step)
        self._in_flight.append((step, end))
        self.recorder.record_state(self.now, self.scheduler, step)

    def _duration(self, step: Step) -> float:
        """Seconds that a step takes."""
        work = step.work
        if work is None:
            return self._decode_duration(step.decodes, step.decode_kv_tokens)
        return self.step_time.duration(
            step.decodes + len(step.chunks),
            step.decode_kv_tokens + work.kv_tokens,
            work.prefill_tokens,
            work.prefill_attention,
        )

    def _decode_duration(self, sequences: int, kv_tokens: int) -> float:
        """Seconds of a step in which `sequences` sequences decode and nothing else happens."""
        cost = self._graph_cost.get(sequences)
        if cost is None:
            cost = self._graph_cost[sequences] = self.step_time.graph_cost(self._graphs.padding(sequences))
        return self.step_time.duration(sequences, kv_tokens) + cost

    def _process_oldest(self) -> list[Request]:
        """Wait for the oldest step in flight, deliver its tokens and end whoever has them all."""
        step, end = self._in_flight.popleft()
        now = self.now = max(self.now, end)
        if step.tokens_out:
            self.recorder.record_gap(now, now - self._last_output, step.tokens_out)
        if not step.is_empty:
            self._last_output = now
        prompt_tokens = step.work.prefill_tokens if step.work else 0
        if prompt_tokens:
            self.recorder.record_prompts(now, prompt_tokens)
        for request in step.joined:
            self._deliver(request)
        for request in step.samplers:
            if not request.finished:
                self._deliver(request)
        ended = self.scheduler.update(step)
        for request in ended:
            request.ended = now
            request.late_tokens = prompt_tokens
            self.recorder.record_request(request)
        return ended

    def _deliver(self, request: Request) -> None:
        """A token outside the decode batch's rhythm: a first one, or one after a wait."""
        if math.isnan(request.first_token):
            request.first_token = self.now
        else:
            self.recorder.record_gap(self.now, self.now - request.last_token, 1)
        request.last_token = self.now

    def _repeat(self, horizon: float) -> None:
        """Take as many steps like the last one as nothing can change, at once.

        The durations of a run of equal decode steps grow by the same amount from step to step, since every sequence
        reads one more token each time.
        """
        batch = self.scheduler.batch
        steps = self.scheduler.repeatable()
        if steps < 1:
            return
        kv_tokens = self._in_flight[0][0].decode_kv_tokens if self._in_flight else batch.kv_tokens
        first = self._decode_duration(batch.size, kv_tokens)
        growth = self.step_time.decode_growth(batch.size)
        if horizon < math.inf:
            steps = min(steps, 1 + _steps_within(horizon - self.now, first, growth))
        self.recorder.record_run(self.now, first, growth, steps, batch.size)
        self.scheduler.repeat(steps)
        self.now = self._last_output = self.now + _run_time(steps, first, growth)
        self._device_free = self.now
        if self._in_flight:
            self._device_free += first + steps * growth
            self._in_flight[0] = (self._in_flight[0][0], self._device_free)


def _run_time(steps: int, first: float, growth: float) -> float:
    """Seconds for `steps` steps, the first of `first` seconds and each next one longer by `growth`."""
    return steps * first + growth * (steps * (steps - 1) // 2)


def _steps_within(seconds: float, first: float, growth: float) -> int:
    """The largest number of such steps that end before `seconds` have passed."""
    b = first - growth / 2
    steps = int(2 * seconds / (b + math.sqrt(b * b + 2 * growth * seconds)))
    while steps > 0 and _run_time(steps, first, growth) >= seconds:
        steps -= 1
    while _run_time(steps + 1, first, growth) < seconds:
        steps += 1
    return steps

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
from simulator.engine.rhythm import Rhythm
from simulator.engine.scheduler import Scheduler
from simulator.engine.step import Step, Work
from simulator.engine.step_time import StepTime

IDLE_SLEEP = 1e-3  # s; vLLM's loop sleeps this long after a step without tokens while requests are left


class EngineCore:
    """One engine: a scheduler, a device that takes time, and the loop between them.

    Attributes
        now: s, the engine's own clock
        inbox: requests that have arrived and are not in the scheduler yet
        begun_tokens: prompt tokens of all requests that were ever scheduled
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
        self.begun_tokens = 0
        self.pause = 0.0
        self._single_steps = single_steps
        self._idle_sleep = idle_sleep
        self._graphs = DecodeGraphs(scheduler.flags)
        self._graph_cost: dict[int, float] = {}  # s, by the size of the batch
        self._depth = 2 if scheduler.flags.async_scheduling else 1
        # each with when it begins, how long it takes and when it ends, s
        self._in_flight: deque[tuple[Step, float, float, float]] = deque()
        self._rhythm: Rhythm | None = None  # of the decode steps that the device was given last
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
                self.begun_tokens += request.prompt_tokens
        if step.chunks:
            step.work = Work(step.chunks)
        self._in_flight.append((step, self.now, 0.0, self.now) if step.is_empty else self._given(step))
        self.recorder.record_state(self.now, self.scheduler, step)

    def _given(self, step: Step) -> tuple[Step, float, float, float]:
        """The step behind what the device has to do already; as it is kept in flight."""
        free, now, duration, rhythm = self._device_free, self.now, self._duration(step), self._rhythm
        begin = max(now, free)
        end = begin + duration
        if step.work is not None:
            self._rhythm = None
        elif rhythm is not None and begin == free and rhythm.goes_on(step.decodes, duration):
            rhythm.steps += 1
            duration, end = rhythm.duration(rhythm.steps), rhythm.end(rhythm.steps)
        else:
            self._rhythm = Rhythm(begin, duration, self.step_time.decode_growth(step.decodes), step.decodes)
        self._device_free = end
        return step, begin, duration, end

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
        step, begin, duration, end = self._in_flight.popleft()
        now = self.now = max(self.now, end)
        if step.tokens_out:
            at_once = begin == self._last_output and end == now
            self.recorder.record_gap(now, duration if at_once else now - self._last_output, step.tokens_out)
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

        Every sequence reads one more token each time, so they are of the last one's rhythm.
        """
        rhythm, steps = self._rhythm, self.scheduler.repeatable()
        if rhythm is None or steps < 1:
            return
        done = rhythm.steps - len(self._in_flight)
        steps = rhythm.steps_until(horizon, done, steps)
        self.recorder.record_run(rhythm, done, steps)
        self.scheduler.repeat(steps)
        rhythm.steps += steps
        self.now = self._last_output = rhythm.end(done + steps)
        self._device_free = rhythm.end(rhythm.steps)
        if self._in_flight:
            last = rhythm.duration(rhythm.steps)
            self._in_flight[0] = (self._in_flight[0][0], self.now, last, self._device_free)

"""Every step of one simulated level, written down while it is played: what it did, how long, and for whom.

An `ObservedCore` is an `EngineCore` that keeps a `StepLog`; the ordinary one keeps none and pays nothing for it. Runs
of equal decode steps stay one row. Times are seconds from the start of the level. On the device one step begins where
the one before it ends, or later if the engine had nothing planned.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import simpy

from simulator.engine.clients import ApiServer, Clients
from simulator.engine.engine_core import EngineCore
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.recorder import RUN_WIDTH, Recorder
from simulator.engine.request import Request
from simulator.engine.rhythm import Rhythm
from simulator.engine.scheduler import Scheduler
from simulator.engine.simulation import Engine
from simulator.engine.step import Step
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import Load
from simulator.results.run import GAP_COLUMNS, Level

Array = npt.NDArray[np.float64]

ROW = (
    "planned",  # s, when the engine planned it
    "start",  # s, when the device began with it
    "end",  # s
    "steps",  # equal steps that this row stands for; 0 where nothing could be planned
    "running",  # requests in the running list once it is planned
    "waiting",  # requests that were there and were not admitted
    "reason",  # why they were not, a place in `REASONS`; -1 where none waits
    "sequences",  # requests that it computes something for
    "tokens",  # tokens computed in each of the equal steps, what --max-num-batched-tokens limits
    "prompts",  # requests whose prompt it computes
    "prefill_tokens",  # prompt tokens among `tokens`
    "step_constant",  # s of its time: the constant of a step
    "sequence_cost",  # s: what each sequence that decodes costs
    "kv_reading",  # s: reading the KV cache of those that decode
    "prompt_cost",  # s: what the prompts in it add
    "graph_edges",  # s: padding to the next CUDA graph, or running without one
)
PARTS = ("step_constant", "sequence_cost", "kv_reading", "prompt_cost", "graph_edges")
REASONS = ("slots", "kv_pool", "token_budget")
SLOTS, KV_POOL, TOKEN_BUDGET = range(3)
NO_REASON = -1

GAP_CAUSES = ("decode", "prompts", "graph_edges", "preemption", "budget_stall")
DECODE, PROMPTS, GRAPH_EDGES, PREEMPTION, BUDGET_STALL = range(5)
NOTICEABLE = 0.1  # share of a step's time from which on a CUDA graph's edge is the cause of a gap
SAME_MOMENT = 1e-9  # s


class Visit(NamedTuple):
    """A step with prompt tokens of a request that has no first token yet. Seconds; the three add up to the step.

    `own` is what the step would take for this chunk alone, `prompts` what others' prompts add, `decoding` the rest.
    """

    row: int
    own: float
    prompts: float
    decoding: float


class Interruption(NamedTuple):
    """A gap between two tokens in which the request was not in every step. `kv_wait` are seconds without any KV."""

    start: float
    end: float
    cause: int
    kv_wait: float


@dataclass
class RequestLog:
    """What became of one request; rows are those of the log."""

    request: Request
    entered: int  # row of the first step that was planned with it in sight
    admissions: list[int] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)
    held_by_budget: list[int] = field(default_factory=list)  # rows in which it waited for the token budget alone
    interruptions: list[Interruption] = field(default_factory=list)
    settled: int = 0  # how many of its preemptions a later token has made up for


class StepLog:
    """Rows of `ROW`, and a `RequestLog` for every request by its number."""

    def __init__(self, flags: EngineFlags, step_time: StepTime) -> None:
        self.requests: dict[int, RequestLog] = {}
        self._flags, self._step_time = flags, step_time
        self._watermark = int(flags.watermark * flags.num_gpu_blocks)
        self._rows = array("d")
        self._count = 0
        self._last_reason = float(NO_REASON)

    def __len__(self) -> int:
        return self._count

    def columns(self) -> dict[str, Array]:
        """The rows as one array for each of `ROW`."""
        return dict(zip(ROW, np.array(self._rows).reshape(-1, len(ROW)).T, strict=True))

    def start_of(self, row: int) -> float:
        """When the device began with a step."""
        return self._rows[row * len(ROW) + 1]

    def enter(self, requests: Iterable[Request]) -> None:
        """Requests that the engine takes in before its next step."""
        for request in requests:
            self.requests[request.request_id] = RequestLog(request, self._count)

    def plan(self, planned: float, start: float, end: float, step: Step, scheduler: Scheduler) -> None:
        """A step, as it is put on the device."""
        row = self._count
        for request in step.admitted:
            self.requests[request.request_id].admissions.append(row)
        for request in step.preempted:
            self.requests[request.request_id].preemptions.append(row)
        work = _Work(step)
        full = work.tokens >= self._flags.max_num_batched_tokens
        self._last_reason = float(self._reason(row, step, scheduler, full))
        parts = self._parts(work, end - start)
        self._visit(row, work, end - start)
        self._append(
            (planned, start, end, float(not step.is_empty), len(scheduler.running), len(scheduler.waiting)),
            (self._last_reason, work.sequences, work.tokens, len(work.prefills), work.prefill_tokens),
            parts,
        )

    def repeat(self, planned: float, start: float, end: float, steps: int, scheduler: Scheduler, graph: float) -> None:
        """`steps` steps like the last one, each of them pure decode with `graph` seconds for its CUDA graph."""
        size, time = scheduler.batch.size, self._step_time
        computing = time.duration(size, 0) - time.constant
        edges = graph * steps
        reading = max(end - start - (time.constant + computing) * steps - edges, 0.0)
        self._append(
            (planned, start, end, steps, len(scheduler.running), len(scheduler.waiting)),
            (self._last_reason, size, size, 0, 0),
            (time.constant * steps, computing * steps, reading, 0.0, edges),
        )

    def _append(self, *parts: tuple[float, ...]) -> None:
        for part in parts:
            self._rows.extend(part)
        self._count += 1

    def _reason(self, row: int, step: Step, scheduler: Scheduler, full: bool) -> int:
        """Why those that wait were not admitted.

        In a full step, or one without room for a whole prompt where prompts are not split, as many wait for the token
        budget as slots and pool would still take; the others would have to wait all the same.
        """
        if not scheduler.waiting:
            return NO_REASON
        if step.preempted:
            return KV_POOL  # vLLM admits nobody in a step that takes blocks away from others
        slots_left = self._flags.max_num_seqs - len(scheduler.running)
        if slots_left <= 0:
            return SLOTS
        if not full and self._flags.enable_chunked_prefill:
            return KV_POOL
        free = scheduler.kv_cache.free_blocks - (self._watermark if scheduler.running else 0)
        taken = 0
        for request in islice(scheduler.waiting, slots_left):
            free -= -(-(request.prompt_tokens + request.output) // self._flags.block_size)
            if free < 0:
                return KV_POOL
            taken += 1
            self.requests[request.request_id].held_by_budget.append(row)
        return SLOTS if taken == slots_left else TOKEN_BUDGET

    def _parts(self, work: _Work, seconds: float) -> tuple[float, ...]:
        """Seconds of a step by `PARTS`."""
        if not work.sequences:
            return (0.0,) * len(PARTS)
        time = self._step_time
        decoding = work.sequences - len(work.prefills)
        computing = time.duration(decoding, 0) - time.constant
        reading = time.per_kv_token * work.kv_tokens
        rest = max(seconds - (time.constant + computing + reading), 0.0)
        return (time.constant, computing, reading, rest, 0.0) if work.prefills else (
            time.constant, computing, reading, 0.0, rest
        )  # fmt: skip

    def _visit(self, row: int, work: _Work, seconds: float) -> None:
        """Divide a step among its prompts, for each request that it brings closer to its first token."""
        if not work.prefills:
            return
        duration = self._step_time.duration
        prompts = duration(len(work.prefills), 0, work.prefill_tokens, sum(load for _, _, load in work.prefills))
        for request, tokens, attention in work.prefills:
            if math.isnan(request.first_token):
                alone = duration(1, 0, tokens, attention)
                visit = Visit(row, alone, max(prompts - alone, 0.0), max(seconds - prompts, 0.0))
                self.requests[request.request_id].visits.append(visit)


class _Work:
    """What a step computes, counted as `EngineCore` does."""

    def __init__(self, step: Step) -> None:
        self.sequences = step.decodes + len(step.chunks)
        self.kv_tokens = step.decode_kv_tokens
        self.tokens = step.decodes
        self.prefill_tokens = 0
        self.prefills: list[tuple[Request, int, float]] = []
        for chunk in step.chunks:
            self.tokens += chunk.tokens
            if chunk.is_prefill:
                self.prefill_tokens += chunk.tokens
                attention = chunk.tokens * (chunk.context + chunk.tokens / 2)
                self.prefills.append((chunk.request, chunk.tokens, attention))
            else:
                self.kv_tokens += chunk.context


class GapRecorder(Recorder):
    """A recorder that also notes which step ended a gap, and what made it.

    Attributes
        row, cause: of the gaps that are recorded next
    """

    def __init__(self, host_time: HostTime) -> None:
        super().__init__(host_time)
        self.row, self.cause = 0, DECODE
        self._single_origins = array("q")
        self._run_origins = array("q")

    def record_gap(self, time: float, gap: float, count: int) -> None:
        super().record_gap(time, gap, count)
        self._single_origins.extend((self.row, self.cause))

    def record_run(self, rhythm: Rhythm, done: int, steps: int) -> None:
        super().record_run(rhythm, done, steps)
        self._run_origins.extend((self.row, self.cause))

    def gaps_with_origin(self) -> pd.DataFrame:
        """`gaps` with two more columns: `row` of the log, and `cause`, a place in `GAP_CAUSES`."""
        steps = np.array(self._runs).reshape(-1, RUN_WIDTH)[:, -1].astype(np.int64)
        runs = np.array(self._run_origins, np.int64).reshape(-1, 2)
        origins = np.concatenate([np.array(self._single_origins, np.int64).reshape(-1, 2), np.repeat(runs, steps, 0)])
        order = np.argsort(self.unsorted_gaps()["time"].to_numpy(), kind="stable")
        return self.gaps().assign(row=origins[order, 0], cause=origins[order, 1])


class ObservedCore(EngineCore):
    """An engine that writes a `StepLog`."""

    def __init__(self, scheduler: Scheduler, step_time: StepTime, recorder: GapRecorder) -> None:
        super().__init__(scheduler, step_time, recorder)
        self.log = StepLog(scheduler.flags, step_time)
        self._gaps = recorder
        self._rows_in_flight: list[int] = []
        self._regular_cause: dict[int, int] = {}  # of steps in flight

    def _pass(self) -> list[Request]:
        self.log.enter(self.inbox)
        return super()._pass()

    def _launch(self, step: Step) -> None:
        before = self._device_free
        super()._launch(step)
        start = max(before, self.now)
        end = start if step.is_empty else self._device_free
        row = len(self.log)
        self._rows_in_flight.append(row)
        self._regular_cause[row] = self._cause_of(step)
        self.log.plan(self.now, start, end, step, self.scheduler)

    def _cause_of(self, step: Step) -> int:
        if any(chunk.is_prefill for chunk in step.chunks):
            return PROMPTS
        return DECODE if step.chunks else self._cause_of_decode(step.decodes, step.decode_kv_tokens)

    def _cause_of_decode(self, sequences: int, kv_tokens: int) -> int:
        edges = self._graph_seconds(sequences) if sequences else 0.0
        return GRAPH_EDGES if edges > NOTICEABLE * self.step_time.duration(sequences, kv_tokens) else DECODE

    def _graph_seconds(self, sequences: int) -> float:
        return self.step_time.graph_cost(self._graphs.padding(sequences))

    def _process_oldest(self) -> list[Request]:
        self._gaps.row = self._rows_in_flight.pop(0)
        self._gaps.cause = self._regular_cause.pop(self._gaps.row)
        return super()._process_oldest()

    def _deliver(self, request: Request) -> None:
        regular = self._gaps.cause
        self._gaps.cause = self._cause_of_wait(request)
        super()._deliver(request)
        self._gaps.cause = regular

    def _cause_of_wait(self, request: Request) -> int:
        """The cause of a gap that ends now, of a request outside of the batch; noted if steps passed without it."""
        log, row, start = self.log.requests[request.request_id], self._gaps.row, request.last_token
        made_up = sum(at < row for at in log.preemptions)
        out = range(log.settled, made_up)
        log.settled = made_up
        if math.isnan(request.first_token):
            return self._gaps.cause
        if out:
            start_of, back = self.log.start_of, log.admissions
            waited = sum(start_of(back[at + 1]) - start_of(log.preemptions[at]) for at in out)
            log.interruptions.append(Interruption(start, self.now, PREEMPTION, waited))
            return PREEMPTION
        if self.log.start_of(row) > start + SAME_MOMENT:
            log.interruptions.append(Interruption(start, self.now, BUDGET_STALL, 0.0))
            return BUDGET_STALL
        return self._gaps.cause

    def _repeat(self, horizon: float) -> None:
        batch = self.scheduler.batch
        before, clock, planned = self._device_free, batch.clock, self.now
        self._gaps.row, self._gaps.cause = len(self.log), self._cause_of_decode(batch.size, batch.kv_tokens)
        super()._repeat(horizon)
        steps = batch.clock - clock
        if steps:
            graph = self._graph_seconds(batch.size)
            self.log.repeat(planned, before, self._device_free, steps, self.scheduler, graph)


@dataclass(frozen=True)
class ObservedLevel:
    """A simulated level with its log. `gaps` are those of `level`, with `row` and `cause` as in `GapRecorder`."""

    level: Level
    log: StepLog
    gaps: pd.DataFrame
    flags: EngineFlags
    step_time: StepTime
    host_time: HostTime


def observe_level(
    workload: Load, flags: EngineFlags, step_time: StepTime, host_time: HostTime | None = None
) -> ObservedLevel:
    """Play one level of load on one engine, as `simulate_level` does, and keep a log of its steps.

    Raises `simulator.engine.scheduler.CannotFit`.
    """
    env = simpy.Environment()
    host_time = host_time or HostTime()
    recorder = GapRecorder(host_time)
    core = ObservedCore(Scheduler(flags), step_time, recorder)
    block_size = flags.block_size if flags.enable_prefix_caching else None
    Clients(env, workload, Engine(env, core), ApiServer(host_time), block_size)
    env.run()
    requests, gaps = recorder.requests(), recorder.gaps_with_origin()
    level = Level(
        workload=workload,
        duration=float((requests["arrival"] + requests["e2el"]).max() - requests["arrival"].min()),
        requests=requests,
        gaps=gaps[list(GAP_COLUMNS)],
        timeline=recorder.timeline(),
        steps=recorder.steps(),
        cached_tokens=recorder.cached_tokens,
    )
    return ObservedLevel(level, core.log, gaps, flags, step_time, host_time)

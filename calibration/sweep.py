"""A sweep: levels of load one after the other, every one saved as soon as it is finished."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

from calibration.clients import Job, Progress
from calibration.dialect import Dialect
from calibration.endpoint import Endpoint, EndpointError
from calibration.load import level_of, record_apart
from calibration.stream import PATIENCE, Patience
from simulator.run import Level, Run
from simulator.run_files import append_level, check_free, start_run
from simulator.workload import ClosedLoop, Length, OpenLoop, Shape, Workload

PROBE_LENGTHS = (64, 256, 512, 1024, 2048, 4096)  # tokens of the prompts that are measured alone
PROBE_OUTPUT = 8  # tokens
PROBE_REPEATS = 5
MIXED_CLIENTS, MIXED_OUTPUT, MIXED_REQUESTS = 2, 32, 24  # prompts of all lengths beside another client's decoding
WARM_UP_OUTPUT = 16  # tokens, of warm-up requests that only fill the batch

LEAST_PER_CLIENT, MOST_PER_CLIENT = 3, 12  # requests
LEAST_PER_LEVEL = 8
LEVEL_SECONDS = 180.0  # for the closed-loop levels of a planned sweep; warm-up and probes come on top
BUSY_IDLE = 1.0  # s, to wait for an idle server once it has shown that others keep it busy
OVERHEAD = 1.0  # s a level: starting clients, waiting for the server to be idle


@dataclass(frozen=True)
class SweepPlan:
    """Levels in the order they are measured, and what is played before them and not kept.

    With `level_seconds` the levels after the first `probes` get as many requests a client as fit that time, between
    `LEAST_PER_CLIENT` and `MOST_PER_CLIENT`, once the warm-up has shown how fast the server is.
    """

    levels: tuple[Workload, ...]
    warm_up: tuple[Workload, ...] = ()
    probes: int = 0
    level_seconds: float | None = None


@dataclass(frozen=True)
class SweepProgress:
    """How far a sweep is. `level` counts from 1 and is 0 during the warm-up."""

    level: int
    levels: int
    description: str  # of what is played
    requests_done: int  # of this level
    requests: int
    elapsed: float  # s, since the sweep began
    remaining: float | None  # s, an estimate; None until a first request has shown the server's pace


@dataclass(frozen=True)
class Pace:
    """How fast a server is: good enough to say when a sweep will end."""

    prefill: float  # s per prompt token
    decode: float  # s per output token

    @classmethod
    def of(cls, level: Level) -> Pace | None:
        """The pace of a level, best one of a single client; None where nothing was answered."""
        done = level.completed
        if done.empty:
            return None
        tpot = done["tpot"].median()
        return cls(float((done["ttft"] / done["prompt_tokens"]).median()), 0.0 if math.isnan(tpot) else float(tpot))

    def seconds(self, workload: Workload) -> float:
        """What `workload` will take: in every round of a closed loop a client also waits for the others' prompts."""
        shapes, weight = workload.shapes, sum(shape.weight for shape in workload.shapes)
        prefill = sum(shape.weight * shape.input_len.mean for shape in shapes) / weight * self.prefill
        decode = sum(shape.weight * shape.output_len.mean for shape in shapes) / weight * self.decode
        if isinstance(workload.arrivals, OpenLoop):
            return workload.num_prompts / workload.arrivals.request_rate + prefill + decode
        clients = min(workload.arrivals.concurrency, workload.num_prompts)
        return workload.num_prompts / clients * (clients * prefill + decode)


def plan_sweep(
    input_len: int,
    output_len: int,
    concurrencies: Sequence[int],
    max_model_len: int | None = None,
    requests_per_level: int | None = None,
    probes: bool = True,
) -> SweepPlan:
    """Prompts of several lengths, each alone in the server, then a closed-loop level for every concurrency.

    Two clients with prompts of all lengths come between: what a chunk costs shows in the other's token gaps, without
    the host's time. Without `probes` there are neither.

    Without `requests_per_level` the server's pace decides: three to twelve requests a client and at least eight a
    level. Levels 1 to 16 at 1024/256 then take three minutes on a server with steps of 16 ms, the sweep under four.
    """
    if not concurrencies:
        raise ValueError("a sweep needs at least one concurrency")
    if max_model_len is not None and input_len + output_len > max_model_len:
        raise ValueError(
            f"{input_len} input and {output_len} output tokens exceed the server's max_model_len of {max_model_len}"
        )
    lone, mixed = _probes(input_len, output_len, max_model_len) if probes else ([], [])
    first = lone + mixed
    levels = [
        _closed(clients, input_len, output_len, requests_per_level or _least(clients)) for clients in concurrencies
    ]
    brief, crowd = min(output_len, WARM_UP_OUTPUT), max(concurrencies)
    warm_up = (
        _closed(1, input_len, brief, 1),  # whatever a server compiles at its first request
        _closed(1, input_len, output_len, 1),  # its pace
        _closed(crowd, input_len, brief, crowd),  # every batch size on the way up and down
        *(replace(probe, num_prompts=1) for probe in lone),
    )
    return SweepPlan(
        levels=tuple(replace(workload, seed=seed) for seed, workload in enumerate(first + levels)),
        warm_up=warm_up,
        probes=len(first),
        level_seconds=None if requests_per_level else LEVEL_SECONDS,
    )


def run_sweep(
    endpoint: Endpoint,
    plan: SweepPlan,
    folder: str | Path,
    on_progress: Callable[[SweepProgress], None] | None = None,
    *,
    patience: Patience = PATIENCE,
) -> Run:
    """Measure every level of `plan` and keep it in `folder` at once, which must be absent or empty.

    An interrupted sweep leaves the levels that were finished; the one in progress is dropped. Raises `EndpointError`
    where a whole warm-up or level fails.
    """
    check_free(folder)
    sweep = _Sweep(endpoint, plan, patience, on_progress)
    while sweep.warm_up:
        level = sweep.play(0, sweep.warm_up.pop(0))
        _refuse_failure(endpoint, level, "every warm-up request failed")

    server = endpoint.server()
    if sweep.dialect is not None and sweep.dialect.fingerprint:
        server["system_fingerprint"] = sweep.dialect.fingerprint
    run = Run("measured", [], server, datetime.now(UTC).isoformat(timespec="seconds"))
    start_run(folder, run.source, run.server, run.started_at)
    for number in range(1, len(sweep.levels) + 1):
        level = sweep.play(number, sweep.levels[number - 1])
        _refuse_failure(endpoint, level, f"every request of level {number} failed; levels kept: {len(run.levels)}")
        append_level(folder, level)
        run.levels.append(level)
    return run


class _Sweep:
    """Plays workloads in turn and says how long the rest will take."""

    def __init__(
        self,
        endpoint: Endpoint,
        plan: SweepPlan,
        patience: Patience,
        on_progress: Callable[[SweepProgress], None] | None,
    ) -> None:
        self.endpoint, self.plan, self.patience, self.on_progress = endpoint, plan, patience, on_progress
        self.warm_up, self.levels = list(plan.warm_up), list(plan.levels)  # still to be played; all levels
        self.dialect: Dialect | None = None
        self._pace: Pace | None = None
        self._paced_by = 0.0  # output tokens of the request that showed the pace
        self._began = monotonic()
        self._expected = self._taken = 0.0  # s, over the levels that were played

    def play(self, number: int, workload: Workload) -> Level:
        """Play one level; `number` is its place from 1 on, or 0 in the warm-up."""
        began = monotonic()
        outputs = int(workload.lengths()[1].sum())

        def tell(progress: Progress) -> None:
            if self.on_progress is not None:
                share = min(1.0, progress.tokens_done / outputs)
                rest = self._remaining(number, workload, share, monotonic() - began)
                what = workload.describe() if number else f"warm-up: {workload.describe()}"
                self.on_progress(
                    SweepProgress(
                        level=number,
                        levels=len(self.levels),
                        description=what,
                        requests_done=progress.requests_done,
                        requests=workload.num_prompts,
                        elapsed=monotonic() - self._began,
                        remaining=rest,
                    )
                )

        job = Job(self.endpoint, workload, secrets.randbits(63), self.dialect, self.patience)
        seen = record_apart(job, tell)
        level = level_of(job, seen)
        self.dialect = seen.dialect
        if not seen.was_idle:
            self.patience = replace(self.patience, idle=BUSY_IDLE)
        self._learn(number, level)
        return level

    def _fit_levels(self, pace: Pace) -> None:
        """Choose how many requests the levels get."""
        if self.plan.level_seconds is None:
            return
        fixed, flexible = self.levels[: self.plan.probes], self.levels[self.plan.probes :]
        for per_client in range(MOST_PER_CLIENT, LEAST_PER_CLIENT - 1, -1):
            fitted = [_with_requests(workload, per_client) for workload in flexible]
            if sum(pace.seconds(workload) for workload in fitted) <= self.plan.level_seconds:
                break
        self.levels = fixed + fitted

    def _learn(self, number: int, level: Level) -> None:
        output = max(shape.output_len.mean for shape in level.workload.shapes)
        if self._pace is None or (
            number == 0 and level.workload.arrivals == ClosedLoop(1) and output >= self._paced_by
        ):
            self._pace, self._paced_by = Pace.of(level), output
            if self._pace is not None and number == 0:
                self._fit_levels(self._pace)
        elif number and self._pace is not None:
            self._expected += self._pace.seconds(level.workload)
            self._taken += level.duration

    def _remaining(self, number: int, workload: Workload, share: float, spent: float) -> float | None:
        """Seconds to the end: this level by its tokens so far, the later ones by the pace and how it held until now."""
        if self._pace is None:
            return None
        scale = self._taken / self._expected if self._expected else 1.0
        whole = (1 - share) * scale * self._pace.seconds(workload) + spent  # what is seen outweighs what was expected
        later = self.warm_up + self.levels[number:]
        return (1 - share) * whole + sum(scale * self._pace.seconds(level) + OVERHEAD for level in later)


def _probes(input_len: int, output_len: int, max_model_len: int | None) -> tuple[list[Workload], list[Workload]]:
    """Prompts of several lengths alone, and prompts of all those lengths beside another client's decoding."""
    room = max_model_len or PROBE_LENGTHS[-1] + MIXED_OUTPUT
    lengths = [length for length in PROBE_LENGTHS if length + PROBE_OUTPUT <= room]
    if input_len > max(lengths, default=0):
        lengths.append(input_len)  # a long prompt belongs on the curve itself
    lone = [_closed(1, length, min(PROBE_OUTPUT, output_len), PROBE_REPEATS) for length in lengths]
    longest = min(max(lengths), room - MIXED_OUTPUT)
    if longest < min(lengths):
        return lone, []
    any_length = Shape(Length(min(lengths), longest), Length.fixed(MIXED_OUTPUT))
    return lone, [Workload(ClosedLoop(MIXED_CLIENTS), (any_length,), MIXED_REQUESTS)]


def _closed(clients: int, input_len: int, output_len: int, requests: int) -> Workload:
    shape = Shape(Length.fixed(input_len), Length.fixed(output_len))
    return Workload(ClosedLoop(clients), (shape,), requests)


def _least(clients: int) -> int:
    return max(LEAST_PER_LEVEL, LEAST_PER_CLIENT * clients)


def _with_requests(workload: Workload, per_client: int) -> Workload:
    if isinstance(workload.arrivals, OpenLoop):
        return workload
    return replace(workload, num_prompts=max(LEAST_PER_LEVEL, per_client * workload.arrivals.concurrency))


def _refuse_failure(endpoint: Endpoint, level: Level, what: str) -> None:
    if level.completed.empty:
        raise EndpointError(f"{endpoint.url}: {what} ({level.notes[0]}): see the server's log")

"""A sweep: levels of load one after the other, every one saved as soon as it is finished."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

from calibration.client_processes import LoadGeneratorError, record_apart
from calibration.clients import Job, Progress
from calibration.dialect import Dialect
from calibration.endpoint import Endpoint, EndpointError, discover
from calibration.level_notes import RESTARTED, restarted
from calibration.load import level_of
from calibration.metrics import MetricsSnapshot
from calibration.resume import changed_server, resumed_run, with_kept_counts
from calibration.stream import PATIENCE, Patience
from calibration.sweep_plan import Pace, SweepPlan, fitted_levels, plan_sweep
from simulator.loads.workload import ClosedLoop, Workload
from simulator.results.run import Level, Run
from simulator.results.run_files import append_level, check_free, start_run

__all__ = ["NextLevel", "Pace", "SweepFileError", "SweepPlan", "SweepProgress", "plan_sweep", "run_sweep"]

BUSY_IDLE = 1.0  # s, to wait for an idle server once it has shown that others keep it busy
OVERHEAD = 1.0  # s a level: starting clients, waiting for the server to be idle

# From the levels so far and the seconds that the sweep has taken, the next level; None ends the sweep.
NextLevel = Callable[[Sequence[Level], float], Workload | None]


class SweepFileError(Exception):
    """A level that could not be kept. The message is one line."""


@dataclass(frozen=True)
class SweepProgress:
    """How far a sweep is. `level` counts from 1 and is 0 during the warm-up."""

    level: int
    levels: int  # that are known so far
    description: str  # of what is played
    requests_done: int  # of this level
    requests: int
    elapsed: float  # s, since the sweep began
    remaining: float | None  # s, an estimate; None until a first request has shown the server's pace


def run_sweep(
    endpoint: Endpoint,
    plan: SweepPlan,
    folder: str | Path,
    on_progress: Callable[[SweepProgress], None] | None = None,
    *,
    facts: Mapping[str, object] | None = None,
    choose: NextLevel | None = None,
    resume: bool = False,
    patience: Patience = PATIENCE,
) -> Run:
    """Measure every level of `plan` and keep it in `folder` at once, which must be absent or empty.

    `facts` are what else is known of the server, to be kept with the run. After the plan's levels `choose` names
    further ones. An interrupted sweep leaves the levels that were finished; the one in progress is dropped. With
    `resume` they are kept and the rest is measured. Raises `EndpointError` where a whole warm-up or level fails, or
    where another server answers than at first, `SweepFileError` where the folder cannot be written, and
    `calibration.resume.ResumeError` where it is of another sweep.
    """
    server = {**(facts or {}), **endpoint.server()}
    run = resumed_run(folder, server, plan, choose is not None) if resume else None
    if not resume:
        check_free(folder)
    _check_writable(Path(folder))
    kept = [] if run is None else list(run.levels)
    sweep = _Sweep(endpoint, plan, patience, on_progress, kept)
    if sweep.is_finished and choose is None:
        assert run is not None
        return run
    while sweep.warm_up:
        level = sweep.play(0, sweep.warm_up.pop(0))
        _refuse_failure(endpoint, level, "every warm-up request failed")
    if run is None:
        if sweep.dialect is not None and sweep.dialect.fingerprint:
            server["system_fingerprint"] = sweep.dialect.fingerprint
        run = Run("measured", [], server, datetime.now(UTC).isoformat(timespec="seconds"))
        with _kept(folder, 0):
            start_run(folder, run.source, run.server, run.started_at)
    change = ""
    while (workload := sweep.next_level(run.levels, choose)) is not None:
        done, number = len(run.levels), len(run.levels) + 1
        _refuse_change(change, done)
        level = sweep.play(number, workload)
        _refuse_failure(endpoint, level, f"every request of level {number} failed; levels kept: {done}")
        change = sweep.change_of_server()
        if RESTARTED in level.notes:
            _refuse_change(change, done)  # some of the level may be another server's
        with _kept(folder, done):
            append_level(folder, level)
        run.levels.append(level)
    return run


def _refuse_change(change: str, kept: int) -> None:
    if change:
        raise EndpointError(f"{change}; levels kept: {kept}; start it as before and go on with --resume")


@contextmanager
def _kept(folder: str | Path, levels: int) -> Iterator[None]:
    """Says of a disk that is full or read-only what is safe; nothing of the earlier levels is touched."""
    try:
        yield
    except OSError as problem:
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise SweepFileError(
            f"level {levels + 1} could not be written to {folder} ({problem.strerror or problem}); "
            f"levels kept: {levels}; make {'room' if full else 'the folder writable'} and go on with --resume"
        ) from None


def _check_writable(folder: Path) -> None:
    """Raise `SweepFileError` before anything is measured that could not be kept."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        raise SweepFileError(f"{folder} cannot be made: {place} is a file; give another folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise SweepFileError(f"{folder} cannot be written: {place} is read-only; give another folder")


class _Sweep:
    """Plays workloads in turn and says how long the rest will take."""

    def __init__(
        self,
        endpoint: Endpoint,
        plan: SweepPlan,
        patience: Patience,
        on_progress: Callable[[SweepProgress], None] | None,
        kept: Sequence[Level] = (),
    ) -> None:
        self.endpoint, self.plan, self.patience, self.on_progress = endpoint, plan, patience, on_progress
        self.kept = kept
        self.warm_up = list(plan.warm_up)  # still to be played
        self.levels = with_kept_counts(plan.levels, kept)  # all that are known
        self.dialect: Dialect | None = None
        self._pace: Pace | None = None
        self._paced_by = 0.0  # output tokens of the request that showed the pace
        self._began = monotonic()
        self._expected = self._taken = 0.0  # s, over the levels that were played
        self._server = self._ask()
        self._last: MetricsSnapshot | None = None  # the server's counters after the last level

    @property
    def is_finished(self) -> bool:
        """Whether the plan had been measured already."""
        return 0 < len(self.levels) == len(self.kept)

    def next_level(self, done: Sequence[Level], choose: NextLevel | None) -> Workload | None:
        """The plan's next level or, after the last of them, what `choose` names."""
        if len(done) == len(self.levels) and choose is not None:
            spent = monotonic() - self._began + sum(level.duration for level in self.kept)
            chosen = choose(done, spent)
            self.levels += [] if chosen is None else [chosen]
        return self.levels[len(done)] if len(done) < len(self.levels) else None

    def _ask(self) -> Mapping[str, object]:
        """What the server says of itself, without what its owner says of it."""
        known = self.endpoint
        return discover(known.url, model=known.model, api_key=known.api_key, insecure=known.insecure).server()

    def change_of_server(self) -> str:
        """Why no further level can be measured here, in words: it has gone, or was started anew as another."""
        try:
            change = changed_server(self._server, self._ask())
        except EndpointError as problem:
            return str(problem)
        return change and f"{self.endpoint.url} has changed: the sweep began {change}"

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
        try:
            seen = record_apart(job, tell)
        except LoadGeneratorError as problem:
            raise LoadGeneratorError(f"{problem}; levels kept: {max(0, number - 1)}") from None
        level = level_of(job, seen)
        self.dialect = seen.dialect
        if self._last is not None and seen.before is not None and restarted(self._last, seen.before):
            level.notes.append("the server had been started anew since the level before")
        self._last = seen.after
        if not seen.was_idle:
            self.patience = replace(self.patience, idle=BUSY_IDLE)
        self._learn(number, workload, level)
        return level

    def _learn(self, number: int, workload: Workload, level: Level) -> None:
        output = max(shape.output_len.mean for shape in workload.shapes)
        if self._pace is None or (number == 0 and workload.arrivals == ClosedLoop(1) and output >= self._paced_by):
            self._pace, self._paced_by = Pace.of(level), output
            if self._pace is not None and number == 0:
                self.levels = with_kept_counts(fitted_levels(self.plan, self._pace), self.kept)
        elif number and self._pace is not None:
            self._expected += self._pace.seconds(workload)
            self._taken += level.duration

    def _remaining(self, number: int, workload: Workload, share: float, spent: float) -> float | None:
        """Seconds to the end: this level by its tokens so far, the later ones by the pace and how it held until now."""
        if self._pace is None:
            return None
        scale = self._taken / self._expected if self._expected else 1.0
        whole = (1 - share) * scale * self._pace.seconds(workload) + spent  # what is seen outweighs what was expected
        later = self.warm_up + self.levels[number or len(self.kept) :]
        return (1 - share) * whole + sum(scale * self._pace.seconds(level) + OVERHEAD for level in later)


def _refuse_failure(endpoint: Endpoint, level: Level, what: str) -> None:
    if level.completed.empty:
        raise EndpointError(f"{endpoint.url}: {what} ({level.notes[0]}): see the server's log")

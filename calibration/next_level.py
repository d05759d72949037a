"""Which level to measure next: the one that narrows the predictions most for each second that it takes.

A level is worth what its steps would tell the fit. The simulator plays it with the coefficients fitted so far, its
steps become rows of the fit's design matrix, and these add to the information of the rows that were measured (Bayesian
V-optimal design, see Atkinson, Donev and Tobias, Optimum Experimental Designs, chapter 10: least average variance of
what is to be predicted). A term that was never seen has a prior: alone it could be all of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from calibration.step_fit import FitError, StepTimeFit, fit_step_time
from calibration.step_rows import TERMS, Observations, observations
from calibration.sweep import OVERHEAD
from calibration.sweep_plan import (
    CROWD,
    LEAST_PER_CLIENT,
    LEAST_PER_LEVEL,
    REPEATED_CLIENTS,
    SweepPlan,
    longest_request,
    probe_levels,
    warm_up_of,
)
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload
from simulator.results.run import TOKEN_COLUMNS, Level

START_LONE, START_PER_CLIENT = 4, 2  # requests of the start set: of a lone client, and of each in the loaded level
START_REPEATS = 3  # of each lone prompt
SHORTEST = 16  # tokens of a candidate's prompt or output
NEGLIGIBLE = 0.0005  # of the predicted figures, by which their mean standard error must fall

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Expected:
    """What measuring a level would bring: `seconds` that it takes, and the rows that the fit would see."""

    workload: Workload
    seconds: float
    rows: Observations

    def figures(self, step_time: StepTime) -> tuple[Array, Array]:
        """By how much each coefficient moves the mean row of each kind, and the row's seconds.

        The level's percentiles are made of these: kinds x `TERMS`, and kinds.
        """
        slopes = self.rows.slopes(knee_of(step_time))
        chosen = [self.rows.kinds == kind for kind in sorted(set(self.rows.kinds.tolist()))]
        moves = np.array([slopes[rows].mean(axis=0) for rows in chosen]).reshape(-1, len(TERMS))
        return moves, np.array([self.rows.seconds[rows].mean() for rows in chosen])


def knee_of(step_time: StepTime) -> float | None:
    """Tokens that take as long to compute as the weights to read; None where the two do not overlap."""
    if not (step_time.weights and step_time.per_prefill_token):
        return None
    return step_time.weights / step_time.per_prefill_token


def expected(workload: Workload, flags: EngineFlags, step_time: StepTime, host_time: HostTime) -> Expected | None:
    """What measuring `workload` would show, if the server is as the coefficients say; None where requests preempt."""
    level = simulate_level(workload, flags, step_time, host_time)
    if level.requests["preemptions"].any():
        return None
    rows = observations([as_measured(level)], flags, host_time.per_request_serial)
    return Expected(workload, level.duration + OVERHEAD, rows)


def as_measured(level: Level) -> Level:
    """A simulated level without preemptions as a client would have written it down: with the times of tokens."""
    requests = level.requests
    first = (requests["arrival"] + requests["ttft"]).to_numpy()
    last = (requests["arrival"] + requests["e2el"]).to_numpy()
    steps = np.unique(np.concatenate([level.gaps["time"].to_numpy(), first]).round(9))
    starts = np.searchsorted(steps, first - 1e-8)
    counts = np.searchsorted(steps, last + 1e-8) - starts
    number = np.concatenate([np.arange(count) for count in counts])
    table = {
        "request_id": np.repeat(requests["request_id"].to_numpy(), counts),
        "time": steps[np.repeat(starts, counts) + number],
        "tokens": number + 1,
    }
    return replace(level, tokens=pd.DataFrame(table).astype(TOKEN_COLUMNS))


def start_plan(levels: Sequence[Workload], max_model_len: int | None) -> SweepPlan:
    """What a sweep with a time budget measures first: lone prompts, crowds, one client, and the most of `levels`."""
    lone, together = probe_levels(levels, max_model_len)
    lone = [replace(probe, num_prompts=START_REPEATS) for probe in lone]
    crowds = [probe for probe in together if probe.concurrency == CROWD]  # a few seconds each
    most = max(levels, key=lambda level: level.concurrency or 0)
    clients = most.concurrency or 1
    loaded = replace(most, num_prompts=max(LEAST_PER_LEVEL, START_PER_CLIENT * clients))
    single = replace(most, arrivals=ClosedLoop(1), num_prompts=START_LONE)
    order = [*lone, *crowds, single, *([loaded] if clients > 1 else [])]
    return SweepPlan(
        levels=tuple(replace(workload, seed=seed) for seed, workload in enumerate(order)),
        warm_up=(*warm_up_of(levels), *(replace(probe, num_prompts=1) for probe in lone)),
        probes=len(lone) + len(crowds),
    )


def candidate_levels(levels: Sequence[Workload], max_model_len: int | None, keep_out: Iterable[int]) -> list[Workload]:
    """Closed loops to choose from: the clients of `levels` with their lengths, with others, and with mixed ones.

    `keep_out` are numbers of clients that are left for the hold-out.
    """
    shapes = list(dict.fromkeys(shape for level in levels for shape in level.shapes))
    clients = sorted({level.concurrency for level in levels if level.concurrency} - set(keep_out))
    kinds = [tuple(levels[0].shapes), *_other_shapes(shapes, max_model_len)]
    return [
        Workload(ClosedLoop(count), kind, max(LEAST_PER_LEVEL, LEAST_PER_CLIENT * count))
        for kind in dict.fromkeys(kinds)
        for count in clients
    ]


def hold_out_levels(levels: Sequence[Workload], keep_out: Iterable[int]) -> list[Workload]:
    """Levels that judge the fit: the lengths asked for, with as many clients as `keep_out` says."""
    return [
        Workload(ClosedLoop(count), levels[0].shapes, max(LEAST_PER_LEVEL, LEAST_PER_CLIENT * count))
        for count in keep_out
    ]


def _other_shapes(shapes: Sequence[Shape], max_model_len: int | None) -> list[tuple[Shape, ...]]:
    """Shorter and longer prompts and answers than asked, and short prompts among long ones."""
    room = max_model_len or longest_request(shapes)
    prompt = round(sum(shape.input_len.mean for shape in shapes) / len(shapes))
    output = round(sum(shape.output_len.mean for shape in shapes) / len(shapes))
    brief = max(SHORTEST, output // 4)
    short = _shape(max(SHORTEST, prompt // 8), output)
    long = _shape(min(4 * prompt, room - brief), brief)
    found = [(short,), (long,), (_shape(prompt, brief),), (replace(short, weight=0.7), replace(long, weight=0.3))]
    return [kind for kind in found if longest_request(kind) <= room]


def _shape(prompt: int, output: int) -> Shape:
    return Shape(Length.fixed(max(1, prompt)), Length.fixed(max(1, output)))


@dataclass
class LevelChooser:
    """Names one level after the other until `budget` seconds are used or more would tell next to nothing.

    Of the `candidates` each is measured once at most. Then come the `hold_out` levels, and with `repeat` one that was
    measured already once more, which shows the noise. Time for these is kept back.
    """

    flags: EngineFlags
    budget: float  # s, of the whole sweep
    candidates: Sequence[Workload]
    hold_out: Sequence[Workload] = ()
    repeat: bool = True
    _expected: dict[Workload, Expected] = field(default_factory=dict, init=False)
    _simulated: bool = field(default=False, init=False)

    def __call__(self, levels: Sequence[Level], spent: float) -> Workload | None:
        """The level to measure after `levels`, when `spent` seconds have gone; None to end."""
        left = self.budget - spent
        try:
            fit = fit_step_time(levels, self.flags)
        except FitError:
            return None  # the start set tells too little; the fit of the whole says why
        self._expect(fit)
        measured = {_plain(level.workload) for level in levels if isinstance(level.workload, Workload)}
        closing = [workload for workload in self.hold_out if workload not in measured]
        chosen = None
        if len(closing) == len(self.hold_out):
            reserve = sum(self._seconds(workload) for workload in closing) + self._repeat_seconds(levels)
            open_ones = [item for workload, item in self._expected.items() if workload not in measured]
            candidates = [item for item in open_ones if item.seconds <= left - reserve and self._is_candidate(item)]
            chosen = most_telling(candidates, list(self._expected.values()), levels, fit, self.flags)
        if chosen is None:
            chosen = next((workload for workload in closing if self._seconds(workload) <= left), None)
        if chosen is None:
            return self._repeated(levels, left)
        return replace(chosen, seed=len(levels))

    def _expect(self, fit: StepTimeFit) -> None:
        """Simulate every level that may come, once: what its steps are made of hardly depends on the coefficients."""
        if not self._simulated:
            for workload in (*self.candidates, *self.hold_out):
                found = expected(workload, self.flags, fit.step_time, replace(fit.host_time, gap_noise=()))
                if found is not None:
                    self._expected[workload] = found
            self._simulated = True

    def _is_candidate(self, item: Expected) -> bool:
        return item.workload in self.candidates

    def _seconds(self, workload: Workload) -> float:
        return self._expected[workload].seconds if workload in self._expected else float("inf")

    def _repeat_seconds(self, levels: Sequence[Level]) -> float:
        level = _cheapest_to_repeat(levels) if self.repeat else None
        return 0.0 if level is None else level.duration + OVERHEAD

    def _repeated(self, levels: Sequence[Level], left: float) -> Workload | None:
        """The level to measure again at last; None where that was done, or there is no time for it."""
        workloads = [level.workload for level in levels]
        level = _cheapest_to_repeat(levels) if self.repeat and len(set(workloads)) == len(workloads) else None
        if level is None or level.duration > left or not isinstance(level.workload, Workload):
            return None
        return level.workload


def most_telling(
    candidates: Sequence[Expected],
    to_predict: Sequence[Expected],
    levels: Sequence[Level],
    fit: StepTimeFit,
    flags: EngineFlags,
) -> Workload | None:
    """The candidate that narrows the figures of `to_predict` most for a second; None where none is worth it."""
    if not candidates:
        return None
    rows, knee = observations(levels, flags, fit.host_time.per_request_serial), knee_of(fit.step_time)
    figures = [item.figures(fit.step_time) for item in to_predict]
    relative = np.vstack([moves / seconds[:, None] for moves, seconds in figures])
    shares = np.vstack([np.abs(relative), np.abs(rows.slopes(knee) / rows.seconds[:, None])]).max(axis=0)
    seen = np.asarray(shares > 0)
    size = shares[seen]  # a term of 1 / size would be all of some step
    relative = relative[:, seen] / size

    def information(observed: Observations) -> Array:
        scaled = observed.slopes(knee)[:, seen] / size / _noise(observed, fit)[:, None]
        return np.asarray(scaled.T @ scaled)

    measured = information(rows)
    inflation = _inflation(measured, size, seen, fit)
    known = measured / inflation + np.eye(len(size))

    def mean_error(matrix: Array) -> float:
        return float(np.sqrt(np.mean(np.sum(relative * np.linalg.solve(matrix, relative.T).T, axis=1))))

    now = mean_error(known)
    gains = [now - mean_error(known + information(item.rows) / inflation) for item in candidates]
    best = max(range(len(candidates)), key=lambda number: gains[number] / candidates[number].seconds)
    return candidates[best].workload if gains[best] >= NEGLIGIBLE else None


def _noise(observed: Observations, fit: StepTimeFit) -> Array:
    """The standard deviation of each row in seconds; of a kind that was not seen yet that of the noisiest."""
    worst = max(fit.noise.values())
    return np.array([fit.noise.get(str(kind), worst) for kind in observed.kinds])


def _inflation(measured: Array, size: Array, seen: npt.NDArray[np.bool_], fit: StepTimeFit) -> float:
    """How many times larger the fit's own variances are than those of independent rows: errors within a level agree."""
    names = [name for name, is_seen in zip(TERMS, seen, strict=True) if is_seen]
    kept = [n for n, name in enumerate(names) if not fit.coefficients[name].dropped and name not in fit.held]
    naive = np.diag(np.linalg.pinv(measured[np.ix_(kept, kept)])) / size[kept] ** 2
    stated = np.array([fit.coefficients[names[number]].stderr for number in kept]) ** 2
    ratios = stated[naive > 0] / naive[naive > 0]
    return max(1.0, float(np.median(ratios))) if len(ratios) else 1.0


def _cheapest_to_repeat(levels: Sequence[Level]) -> Level | None:
    """The quickest level in which some share their steps with others' prompts, else the one with most clients."""
    closed = [level for level in levels if (level.workload.concurrency or 0) > 1]
    crowded = [level for level in closed if (level.workload.concurrency or 0) >= REPEATED_CLIENTS]
    if crowded:
        return min(crowded, key=lambda level: level.duration)
    return max(closed, key=lambda level: level.workload.concurrency or 0, default=None)


def _plain(workload: Workload) -> Workload:
    return replace(workload, seed=0)

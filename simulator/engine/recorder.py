"""Writes down what a simulated engine does, compactly, and turns it into the tables of a run."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.engine.request import Request
from simulator.engine.rhythm import Rhythm
from simulator.engine.scheduler import Scheduler
from simulator.engine.step import Step
from simulator.engine.step_time import NOISE_PERCENTILES, HostTime
from simulator.results.run import GAP_COLUMNS, REQUEST_COLUMNS, STEP_COLUMNS, TIMELINE_COLUMNS

STATE_WIDTH = len(TIMELINE_COLUMNS) + 2  # numbers that are kept of each planned step
RUN_WIDTH = 6  # numbers that are kept of each run of steps
FINISH_REASONS = np.array(["length", "stop"], object)  # the same two texts for all requests
AT_A_TIME = 1 << 18  # gaps that are computed, each of which takes ten numbers meanwhile
SAME_TIME = 1e-7  # s, within which two times are those of one step

Reals = npt.NDArray[np.float64]


class Recorder:
    """Flat arrays of numbers while the simulation runs; one entry a step or a run of steps, not one a token.

    Tables are a client's: `host_time` says how long after the engine it sees a token. Prompt tokens of a step make all
    that it brings late, so the next gap is as much shorter.
    """

    def __init__(self, host_time: HostTime | None = None) -> None:
        self._host_time = host_time or HostTime()
        self._requests = array("d")
        self._gaps = array("d")
        self._runs = array("d")
        self._states = array("d")
        self._chunks = array("d")
        self._prompts = array("d")
        self.cached_tokens = 0  # prompt tokens that came from the prefix cache

    def record_request(self, request: Request) -> None:
        """A request that has ended."""
        self.cached_tokens += request.cached
        self._requests.extend(
            (
                request.request_id,
                request.sent,
                request.prompt_tokens,
                request.output_tokens,
                request.first_token,
                request.ended,
                request.scheduled - request.arrived,
                request.preemptions,
                request.output_tokens < request.max_tokens,
            )
        )

    def record_gap(self, time: float, gap: float, count: int) -> None:
        """`count` tokens that arrived at `time`, each `gap` seconds after its request's last one."""
        self._gaps.extend((time, gap, count))

    def record_prompts(self, time: float, tokens: int) -> None:
        """A step with `tokens` prompt tokens that ended at `time`."""
        self._prompts.extend((time, tokens))

    def record_run(self, rhythm: Rhythm, done: int, steps: int) -> None:
        """`steps` steps of a rhythm after `done` others, each of which delivers a token to every request."""
        self._runs.extend((rhythm.start, rhythm.first, rhythm.growth, rhythm.size, done, steps))

    def record_state(self, time: float, scheduler: Scheduler, step: Step) -> None:
        """Both gauges of concurrency as a step is planned, and what the step does."""
        if work := step.work:
            row, chunks = len(self._states) // STATE_WIDTH, len(step.chunks)
            done = (work.kv_tokens, work.tokens, work.prefill_tokens, work.prefill_attention)
            self._chunks.extend((row, chunks, *done))
        self._states.extend(
            (
                time,
                len(scheduler.running),
                len(scheduler.waiting),
                scheduler.used_blocks * scheduler.flags.block_size,
                scheduler.active_tokens,
                step.decodes,
                step.decode_kv_tokens,
            )
        )

    def requests(self) -> pd.DataFrame:
        """One row a request, in the order of sending."""
        rows = _rows(self._requests, 9)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        number, sent, prompt, output, first, ended, queued, preemptions, stopped = rows.T
        first = first + self._host_time.per_request + self._lateness(first)
        ended = np.maximum(ended + self._host_time.per_request + self._lateness(ended), first)
        with np.errstate(invalid="ignore", divide="ignore"):
            tpot = np.where(output > 1, (ended - first) / (output - 1), np.nan)
        columns = {
            "request_id": number,
            "arrival": sent,
            "prompt_tokens": prompt,
            "output_tokens": output,
            "ttft": first - sent,
            "tpot": tpot,
            "e2el": ended - sent,
            "queue_time": queued,
            "preemptions": preemptions,
            "finish_reason": FINISH_REASONS[(stopped > 0).astype(np.int64)],
            "error": np.full(len(rows), "", object),
        }
        return pd.DataFrame(columns).astype(REQUEST_COLUMNS)

    def gaps(self) -> pd.DataFrame:
        """Every token gap, equal ones of a step in one row, in the order of time."""
        unsorted = self.unsorted_gaps()
        order = np.argsort(unsorted["time"].to_numpy(), kind="stable")
        time, gap, count = (unsorted.pop(name).to_numpy()[order] for name in GAP_COLUMNS)
        noise = np.random.default_rng(0)
        for begin in range(0, len(time), AT_A_TIME):
            part = slice(begin, begin + AT_A_TIME)
            if self._host_time.per_prompt_token:
                ends = time[part] - self._host_time.per_request
                late = self._lateness(ends)
                gap[part] = np.maximum(gap[part] + late - self._lateness(ends - gap[part]), 0.0)
                time[part] += late
            if self._host_time.gap_noise:
                gap[part] = np.maximum(gap[part] + _noise(self._host_time, noise, len(gap[part])), 0.0)
        return _gap_table(time, gap, count)

    def unsorted_gaps(self) -> pd.DataFrame:
        """Every token gap of the engine, without noise: single ones, then those of runs, in the order of recording."""
        single, runs = _rows(self._gaps, 3), _rows(self._runs, RUN_WIDTH)
        ends = len(single) + np.cumsum(runs[:, -1].astype(np.int64))
        rows = int(ends[-1]) if len(ends) else len(single)
        time, gap, count = np.empty(rows), np.empty(rows), np.empty(rows, np.int64)
        time[: len(single)], gap[: len(single)], count[: len(single)] = single.T
        begin = len(single)
        for some in np.split(runs, np.searchsorted(ends, np.arange(begin + AT_A_TIME, rows, AT_A_TIME))):
            part = slice(begin, begin := begin + int(some[:, -1].sum()))
            time[part], gap[part], count[part] = _run_gaps(some)
        time += self._host_time.per_request
        return _gap_table(time, gap, count)

    def _lateness(self, ends: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Seconds by which what a step brings is late, for steps that ended at these times."""
        steps = _rows(self._prompts, 2)
        if not len(steps) or not self._host_time.per_prompt_token:
            return np.zeros(len(ends))
        at = np.searchsorted(steps[:, 0], ends - SAME_TIME).clip(max=len(steps) - 1)
        tokens = np.where(np.abs(steps[at, 0] - ends) <= SAME_TIME, steps[at, 1], 0.0)
        return np.asarray(self._host_time.per_prompt_token * tokens)

    def timeline(self) -> pd.DataFrame:
        """Both gauges of concurrency, one row a planned step; in between they change evenly."""
        gauges = _rows(self._states, STATE_WIDTH)[:, : len(TIMELINE_COLUMNS)]
        return pd.DataFrame(gauges, columns=list(TIMELINE_COLUMNS)).astype(TIMELINE_COLUMNS)

    def steps(self) -> dict[str, npt.NDArray[np.float64]]:
        """What the engine did: one entry a planned step, then one a run of steps that are equal to a planned one."""
        time, running, waiting, held, _active, decodes, kv_tokens = _rows(self._states, STATE_WIDTH).T
        start, first, growth, size, done, steps = _rows(self._runs, RUN_WIDTH).T
        columns = np.zeros((len(STEP_COLUMNS), len(time) + len(start)))
        planned, repeated = columns[:, : len(time)], columns[:, len(time) :]
        planned[:6] = time, running, waiting, held, np.ones(len(time)), decodes
        chunks = _rows(self._chunks, 6).T
        planned[6:, chunks[0].astype(np.int64)] = chunks[1:]
        planned[6:9] += decodes, kv_tokens, decodes
        begin = _ends(start, first, growth, done)
        repeated[:] = planned[:, np.searchsorted(time, begin, side="right") - 1]
        repeated[0], repeated[4] = begin, steps
        repeated[7] += size * (steps + 1) / 2  # every sequence reads one more token in each step
        return dict(zip(STEP_COLUMNS, columns, strict=True))


def _run_gaps(runs: Reals) -> tuple[Reals, Reals, Reals]:
    """Times, gaps and counts of the steps of some runs."""
    start, first, growth, size, done, steps = runs.T
    number = steps.astype(np.int64)
    which = np.repeat(np.arange(len(number)), number)
    before = done[which] + np.arange(len(which)) - np.repeat(np.cumsum(number) - number, number)
    ends = _ends(start[which], first[which], growth[which], before + 1)
    return ends, first[which] + growth[which] * before, size[which]


def _gap_table(time: Reals, gap: Reals, count: npt.NDArray[np.int64]) -> pd.DataFrame:
    """Without a copy: of a long load this is the largest table."""
    return pd.DataFrame({"time": time, "gap": gap, "count": count}, copy=False)


def _noise(host_time: HostTime, chance: np.random.Generator, count: int) -> Reals:
    """What the way to the client adds to each of `count` gaps, in seconds."""
    return np.interp(chance.random(count) * 100, NOISE_PERCENTILES, host_time.gap_noise)


def _ends(start: Reals, first: Reals, growth: Reals, number: Reals) -> Reals:
    """`Rhythm.end`, to the bit."""
    return start + (first * number + growth * (number * (number - 1) / 2))


def _rows(values: array[float], columns: int) -> Reals:
    """A view: nothing more can be written down while it is in use."""
    return np.frombuffer(memoryview(values), np.float64).reshape(-1, columns)

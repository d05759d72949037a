"""Writes down what a simulated engine does, compactly, and turns it into the tables of a run."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.engine.request import Request
from simulator.engine.scheduler import Scheduler
from simulator.engine.step import Step
from simulator.engine.step_time import NOISE_PERCENTILES, HostTime
from simulator.results.run import GAP_COLUMNS, REQUEST_COLUMNS, STEP_COLUMNS, TIMELINE_COLUMNS

STATE_WIDTH = len(TIMELINE_COLUMNS) + 2  # numbers that are kept of each planned step
SAME_TIME = 1e-7  # s, within which two times are those of one step


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

    def record_run(self, start: float, first: float, growth: float, steps: int, count: int) -> None:
        """`steps` steps from `start` on, of `first`, `first + growth`, ... seconds, each delivering `count` tokens."""
        self._runs.extend((start, first, growth, steps, count))

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
            "finish_reason": np.where(stopped > 0, "stop", "length"),
            "error": np.full(len(rows), ""),
        }
        return pd.DataFrame(columns).astype(REQUEST_COLUMNS)

    def gaps(self) -> pd.DataFrame:
        """Every token gap, equal ones of a step in one row, in the order of time."""
        table = self.unsorted_gaps().sort_values("time", kind="stable", ignore_index=True)
        if self._host_time.per_prompt_token:
            ends = table["time"].to_numpy() - self._host_time.per_request
            late = self._lateness(ends)
            table["gap"] = np.maximum(table["gap"] + late - self._lateness(ends - table["gap"].to_numpy()), 0.0)
            table["time"] += late
        if self._host_time.gap_noise:
            table["gap"] = np.maximum(table["gap"] + _noise(self._host_time, len(table)), 0.0)
        return table.astype(GAP_COLUMNS)

    def unsorted_gaps(self) -> pd.DataFrame:
        """Every token gap of the engine, without noise: single ones, then those of runs, in the order of recording."""
        single = _rows(self._gaps, 3)
        runs = _rows(self._runs, 5)
        start, first, growth, steps, count = runs.T
        number = steps.astype(np.int64)
        which = np.repeat(np.arange(len(runs)), number)
        step = np.arange(len(which)) - np.repeat(np.cumsum(number) - number, number)
        gap = first[which] + growth[which] * step
        time = start[which] + first[which] * (step + 1) + growth[which] * (step * (step + 1) / 2)
        return pd.DataFrame(
            {
                "time": np.concatenate([single[:, 0], time]) + self._host_time.per_request,
                "gap": np.concatenate([single[:, 1], gap]),
                "count": np.concatenate([single[:, 2], count[which]]),
            }
        )

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
        chunks = _rows(self._chunks, 6)
        work = np.zeros((len(time), 5))
        work[chunks[:, 0].astype(np.int64)] = chunks[:, 1:]
        work[:, :3] += np.column_stack([decodes, kv_tokens, decodes])
        planned = np.column_stack([time, running, waiting, held, np.ones(len(time)), decodes, work])
        start, _first, _growth, steps, count = _rows(self._runs, 5).T
        repeated = planned[np.searchsorted(time, start, side="right") - 1]
        repeated[:, 0], repeated[:, 4] = start, steps
        repeated[:, 7] += count * (steps + 1) / 2  # every sequence reads one more token in each step
        rows = np.concatenate([planned, repeated])
        return dict(zip(STEP_COLUMNS, rows.T, strict=True))


def _noise(host_time: HostTime, count: int) -> npt.NDArray[np.float64]:
    """What the way to the client adds to each of `count` gaps, in seconds; always the same numbers."""
    chance = np.random.default_rng(0).random(count) * 100
    return np.interp(chance, NOISE_PERCENTILES, host_time.gap_noise)


def _rows(values: array[float], columns: int) -> npt.NDArray[np.float64]:
    return np.array(values, dtype=np.float64).reshape(-1, columns)

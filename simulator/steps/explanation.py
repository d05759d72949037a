"""Where the latency of a simulated level comes from: the time of every request, and of every token gap, divided.

The parts of a request's TTFT add up to its TTFT, and those of its decode time to E2EL - TTFT, to the last bits of a
float. Nothing is estimated: `simulator.steps.step_log` says of every step who was in it, who waited and why.

A request's time before its first token is divided so: it waits in the API server; for the steps that were planned
before the engine saw it; for a slot, room or token budget, by what stopped the scheduler in each step; then it is in
steps. Of such a step `own_prefill` is what it would take for this chunk alone; what other prompts and decoding requests
add is sharing. A step in which an admitted request gets no token is a wait for the budget. If it is thrown out before
its first token, all since its first admission was in vain and counts as preemption.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.results.percentiles import weighted_percentiles
from simulator.steps.step_log import (
    BUDGET_STALL,
    GAP_CAUSES,
    PARTS,
    PREEMPTION,
    REASONS,
    SAME_MOMENT,
    Interruption,
    ObservedLevel,
    RequestLog,
)

Array = npt.NDArray[np.float64]

TTFT_PARTS = {
    "slots": "queue for a slot (--max-num-seqs)",
    "kv_pool": "queue for room in the KV pool",
    "token_budget": "wait for the step token budget (--max-num-batched-tokens)",
    "steps_under_way": "steps planned before it came",
    "preemption": "thrown out before the first token",
    "own_prefill": "own prefill",
    "other_prompts": "sharing steps with other prompts",
    "decoding": "sharing steps with decoding requests",
    "host": "host (API server, way to the client)",
}
DECODE_PARTS = {
    "step_constant": "constant of every step (weights, launches)",
    "sequence_cost": "decoding sequences in the batch",
    "kv_reading": "reading the KV cache",
    "prompt_cost": "prompt chunks in the same steps",
    "graph_edges": "CUDA graph edges (padding, no graph)",
    "kv_stall": "preempted: wait for room in the KV pool",
    "preemption": "preempted: computing all again",
    "budget_stall": "no token in a step: budget used up",
    "pauses": "pauses of the engine's loop",
}
CAUSES = {
    "decode": "plain decode steps",
    "prompts": "steps with prompt chunks",
    "graph_edges": "CUDA graph edges",
    "preemption": "preemptions",
    "budget_stall": "steps without budget for it",
}
PERCENTILES = (50, 90, 95, 99)
TAIL = 1.5  # times the median: a longer gap belongs to the tail


@dataclass(frozen=True)
class InterTokenLatency:
    """What makes token gaps long.

    Attributes
        percentiles: s, by percentile
        longest: s
        splits_at: percentile above which gaps are `TAIL` times the median or longer; None without such gaps
        tail: causes of the gaps above it, shares by the names of `CAUSES`, all together 1; empty without any
        at_or_above: for each percentile the causes of the gaps that are at least so long, likewise
        preemptions: of all requests
    """

    percentiles: dict[int, float]
    longest: float
    splits_at: float | None
    tail: dict[str, float]
    at_or_above: dict[int, dict[str, float]]
    preemptions: int


@dataclass(frozen=True)
class StepUse:
    """What the engine's steps are used for.

    Attributes
        busy: share of the level's time in which a step runs; the rest is idle
        steps: how many there were
        with_prompts: share of the steps that compute prompt tokens
        prompt_tokens: prompt tokens of such a step, mean
        prompt_seconds: s that they add to it, mean
        budget_with_prompts: tokens of such a step over ``--max-num-batched-tokens``, mean over time
        budget_without: the same of the others
        full: share of the busy time in steps that use the whole budget
    """

    busy: float
    steps: int
    with_prompts: float
    prompt_tokens: float
    prompt_seconds: float
    budget_with_prompts: float
    budget_without: float
    full: float


@dataclass(frozen=True)
class Gauge:
    """A gauge over the level's time. `limit` is what the flags allow, None for no limit."""

    mean: float
    peak: float
    limit: int | None


@dataclass(frozen=True)
class Explanation:
    """Where the latency of one level comes from.

    `ttft` and `decode` have a row for each request by its number and a column of seconds for each of `TTFT_PARTS` and
    `DECODE_PARTS`; a row adds up to the request's TTFT and to its E2EL - TTFT.
    """

    ttft: pd.DataFrame
    decode: pd.DataFrame
    itl: InterTokenLatency
    steps: StepUse
    gauges: dict[str, Gauge]

    def parts(self, of: str, percentile: float = 0) -> dict[str, float]:
        """Mean seconds by part, of "ttft" or "decode", over requests for which it is at least at a percentile."""
        table: pd.DataFrame = getattr(self, of)
        total = table.sum(axis=1)
        slow = table[total >= np.percentile(total, percentile, method="inverted_cdf")] if len(table) else table
        return {str(name): float(value) for name, value in slow.mean().items()}


def explain(observed: ObservedLevel) -> Explanation:
    """Divide the time of every request and every gap of a level."""
    rows = _Rows(observed)
    requests = observed.level.requests.set_index("request_id")
    logs = [observed.log.requests[number] for number in requests.index]
    ttft = pd.DataFrame(
        [_ttft(rows, log, seen) for log, seen in zip(logs, requests["ttft"].tolist(), strict=True)],
        index=requests.index,
        columns=list(TTFT_PARTS),
    )
    decode_time = (requests["e2el"] - requests["ttft"]).to_numpy(np.float64)
    decode = pd.DataFrame(_decode(rows, logs, decode_time), index=requests.index, columns=list(DECODE_PARTS))
    return Explanation(ttft, decode, _itl(observed), _step_use(observed, rows), _gauges(observed))


class _Rows:
    """The log's rows as clocks: how much of each part, and of each reason to wait, has passed at a moment."""

    def __init__(self, observed: ObservedLevel) -> None:
        self.columns = column = observed.log.columns()
        self.start, self.end = column["start"], column["end"]
        # a row lasts until the next one begins: after a step in which nothing could be planned the loop pauses
        self.lasts = np.append(self.start[1:], self.end[-1]) - self.start
        self.reason = column["reason"].astype(np.int64)
        self.waited = {
            name: _clock(np.where(self.reason == place, self.lasts, 0.0)) for place, name in enumerate(REASONS)
        }
        self.worked = _clock(self.end - self.start)
        self._moments = np.column_stack([self.start, self.end]).ravel()
        nothing = np.zeros(len(self.start))
        self._passed = {name: np.cumsum(np.column_stack([nothing, column[name]]).ravel()) for name in PARTS}
        pauses = np.append(0.0, self.start[1:] - self.end[:-1])
        self._passed["pauses"] = np.cumsum(np.column_stack([pauses, nothing]).ravel())

    def between(self, begin: Array, end: Array) -> dict[str, Array]:
        """Seconds of each part that pass between two moments; each moment is the end of a row."""
        return {
            name: np.interp(end, self._moments, passed) - np.interp(begin, self._moments, passed)
            for name, passed in self._passed.items()
        }


def _clock(seconds: Array) -> Array:
    """How much has passed before each row, and after the last."""
    return np.append(0.0, np.cumsum(seconds))


def _ttft(rows: _Rows, log: RequestLog, ttft: float) -> dict[str, float]:
    """Parts of one request's TTFT."""
    request = log.request
    seconds = dict.fromkeys(TTFT_PARTS, 0.0)
    first_row = log.visits[-1].row
    admitted = [row for row in log.admissions if row <= first_row]
    at = admitted[0]
    for name, clock in rows.waited.items():
        seconds[name] += float(clock[at] - clock[log.entered])
    for row in log.held_by_budget:
        if row < at:
            seconds[REASONS[rows.reason[row]]] -= float(rows.lasts[row])
            seconds["token_budget"] += float(rows.lasts[row])
    seconds["steps_under_way"] = max(float(rows.start[log.entered]) - request.arrived, 0.0)
    seconds["preemption"] = float(rows.start[admitted[-1]] - rows.start[at])
    seconds["host"] = (request.arrived - request.sent) + (ttft - (request.first_token - request.sent))
    _add_visits(seconds, rows, log, admitted[-1])
    # what is left are pauses of the engine's loop, between steps or before a token is handed on; else rounding
    rest = ttft - sum(seconds.values())
    seconds["steps_under_way" if rest > SAME_MOMENT else "own_prefill"] += rest
    return seconds


def _add_visits(seconds: dict[str, float], rows: _Rows, log: RequestLog, since: int) -> None:
    """The steps from the last admission before the first token on, those without a token for the request included."""
    in_steps = 0.0
    for visit in log.visits:
        if visit.row >= since:
            seconds["own_prefill"] += visit.own
            seconds["other_prompts"] += visit.prompts
            seconds["decoding"] += visit.decoding
            in_steps += visit.own + visit.prompts + visit.decoding
    passed = float(rows.worked[log.visits[-1].row + 1] - rows.worked[since])
    if passed > in_steps * (1 + 1e-9):
        seconds["token_budget"] += passed - in_steps


def _decode(rows: _Rows, logs: list[RequestLog], decode_time: Array) -> dict[str, Array]:
    """Parts of every request's E2EL - TTFT, `decode_time`.

    The client's first token comes later than the engine's, by the host's time for prompts, and so may its last one: all
    parts are then shorter, or longer, by the same share.
    """
    first = np.array([log.request.first_token for log in logs])
    last = np.array([log.request.ended for log in logs])
    parts = {name: np.zeros(len(logs)) for name in DECODE_PARTS}
    parts |= rows.between(first, last)
    breaks = [(place, pause) for place, log in enumerate(logs) for pause in log.interruptions]
    if breaks:
        _take_out_interruptions(parts, rows, breaks)
    total = np.asarray(sum(parts.values()))
    seen = np.divide(decode_time, total, out=np.zeros(len(logs)), where=total > 0)
    return {name: values * seen for name, values in parts.items()}


def _take_out_interruptions(parts: dict[str, Array], rows: _Rows, breaks: list[tuple[int, Interruption]]) -> None:
    """Move the gaps in which a request was not in every step from the parts of those steps to their causes."""
    places = np.array([place for place, _ in breaks])
    begin, end = (np.array([getattr(pause, name) for _, pause in breaks]) for name in ("start", "end"))
    for name, passed in rows.between(begin, end).items():
        np.subtract.at(parts[name], places, passed)
    for place, pause in breaks:
        whole = pause.end - pause.start
        if pause.cause == PREEMPTION:
            parts["kv_stall"][place] += pause.kv_wait
            parts["preemption"][place] += whole - pause.kv_wait
        else:
            assert pause.cause == BUDGET_STALL
            parts["budget_stall"][place] += whole


def _itl(observed: ObservedLevel) -> InterTokenLatency:
    gaps, requests = observed.gaps, observed.level.requests
    preemptions = int(requests["preemptions"].sum())
    value, count = gaps["gap"].to_numpy(np.float64), gaps["count"].to_numpy(np.int64)
    if not count.sum():
        nothing = dict.fromkeys(PERCENTILES, float("nan"))
        return InterTokenLatency(nothing, float("nan"), None, {}, {}, preemptions)
    cause = gaps["cause"].to_numpy(np.int64)
    found = dict(zip(PERCENTILES, weighted_percentiles(value, count, PERCENTILES).tolist(), strict=True))
    in_tail = value >= TAIL * found[50]
    share = float(count[in_tail].sum() / count.sum())
    return InterTokenLatency(
        percentiles=found,
        longest=float(value.max()),
        splits_at=100 * (1 - share) if share else None,
        tail=_cause_shares(cause[in_tail], count[in_tail]) if share else {},
        at_or_above={p: _cause_shares(cause[value >= least], count[value >= least]) for p, least in found.items()},
        preemptions=preemptions,
    )


def _cause_shares(cause: npt.NDArray[np.int64], count: npt.NDArray[np.int64]) -> dict[str, float]:
    """Shares of the gaps by cause, the largest first; causes that none has are left out."""
    numbers = np.bincount(cause, weights=count, minlength=len(GAP_CAUSES))
    shares = {name: float(number / numbers.sum()) for name, number in zip(GAP_CAUSES, numbers, strict=True) if number}
    return _largest_first(shares)


def _largest_first(values: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))


def _step_use(observed: ObservedLevel, rows: _Rows) -> StepUse:
    column, budget = rows.columns, observed.flags.max_num_batched_tokens
    seconds, steps = rows.end - rows.start, column["steps"]
    prompts = (column["prompts"] > 0).astype(np.float64)
    others = (steps > 0) * (1 - prompts)
    used = column["tokens"] / budget
    number, duration = steps.sum(), observed.level.duration
    return StepUse(
        busy=min(float(seconds.sum() / duration), 1.0) if duration > 0 else float("nan"),
        steps=int(number),
        with_prompts=_mean(prompts, steps),
        prompt_tokens=_mean(column["prefill_tokens"], prompts),
        prompt_seconds=_mean(column["prompt_cost"], prompts),
        budget_with_prompts=_mean(used, seconds * prompts),
        budget_without=_mean(used, seconds * others),
        full=_mean((used >= 1).astype(np.float64), seconds),
    )


def _mean(values: Array, weights: Array) -> float:
    total = weights.sum()
    return float((values * weights).sum() / total) if total else float("nan")


def _gauges(observed: ObservedLevel) -> dict[str, Gauge]:
    """Means and peaks of the time line, whose gauges change evenly from row to row."""
    timeline, flags = observed.level.timeline, observed.flags
    pool = flags.usable_blocks * flags.block_size
    limits = {"running": flags.max_num_seqs, "waiting": None, "kv_tokens": pool, "active_tokens": None}
    time = timeline["time"].to_numpy(np.float64)
    gauges = {}
    for name, limit in limits.items():
        value = timeline[name].to_numpy(np.float64)
        mean = _mean((value[1:] + value[:-1]) / 2, np.diff(time))
        gauges[name] = Gauge(mean if len(value) > 1 else float(value.mean()), float(value.max()), limit)
    return gauges

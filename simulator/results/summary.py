"""A level of load in a few numbers, the same for a measured and a simulated one. All times are seconds.

Names follow ``vllm bench serve``: ``p99_ttft``, ``mean_tpot``, ``output_throughput``. Latencies and throughputs count
completed requests only; both gauges of concurrency count every request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.results.backlog import State, held_rate, state_of
from simulator.results.percentiles import PERCENTILES, unbounded_percentiles, weighted_percentiles
from simulator.results.run import Level, Run
from simulator.results.steady_window import steady_window, tokens_within

STATISTICS = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))
LATENCIES = ("ttft", "tpot", "itl", "e2el")
SAME_MOMENT = 1e-9  # s; an answer and the request that it lets go are no farther apart, but for rounding

LEAST_SPAN = 1e-9  # s over which a gauge has a mean over time

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of one latency, in seconds, NaN where nothing was seen; and of how many values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    count: int


@dataclass(frozen=True)
class Summary:
    """What came of one level.

    Attributes
        requests, completed, errors: how many were sent, ended well, and failed
        duration: s, from the first send to the last end
        request_throughput: completed requests a second
        output_throughput, total_throughput: output tokens, and prompt and output tokens, of completed requests a second
        steady_output_throughput: the same within `simulator.results.steady_window`, without ramp and drain; NaN without
            one
        steady_duration: s, of that window; 0 without one
        mean_concurrency, peak_concurrency: requests in the system, from send to last token
        mean_active_tokens, peak_active_tokens: prompt and generated tokens of all running requests
        peak_kv_tokens: tokens whose KV is held
        preemptions: of all requests; None where it cannot be seen
        ttft, tpot, itl, e2el: latencies as `simulator.results.run` defines them
        state: whether the level has a steady state, `simulator.results.backlog`; without one, percentiles of TTFT and
            E2EL tell how long the level was
        held_rate: requests a second of an open loop that its server can hold, as far as is known; else NaN

    All but `steady_output_throughput` and `steady_duration` count the whole level, ramp and drain included.
    """

    requests: int
    completed: int
    errors: int
    duration: float
    request_throughput: float
    output_throughput: float
    total_throughput: float
    steady_output_throughput: float
    steady_duration: float
    mean_concurrency: float
    peak_concurrency: int
    mean_active_tokens: float
    peak_active_tokens: float
    peak_kv_tokens: float
    preemptions: int | None
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread
    state: State
    held_rate: float

    @property
    def too_few(self) -> tuple[str, ...]:
        """Names of the percentiles that their samples do not bound, such as ``p99_ttft`` of 100 requests."""
        return tuple(
            f"p{percentile}_{name}"
            for name in LATENCIES
            for percentile in unbounded_percentiles(getattr(self, name).count)
            if getattr(self, name).count
        )

    def flat(self) -> dict[str, float | int | None]:
        """Every number by its name; those of a latency as ``mean_ttft``, ``p50_ttft`` and so on."""
        numbers: dict[str, float | int | None] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Spread):
                numbers |= {f"{part}_{field.name}": getattr(value, part) for part in STATISTICS}
            elif field.name not in ("state", "held_rate"):
                numbers[field.name] = value
        return numbers


def summarize(level: Level) -> Summary:
    """The numbers of one level."""
    done, duration = level.completed, level.duration
    prompt, output = int(done["prompt_tokens"].sum()), int(done["output_tokens"].sum())
    mean_concurrency, peak_concurrency = _concurrency(level)
    steady_throughput, steady_duration = _steady(level)
    mean_tokens, peak_tokens = _gauge(level.timeline, "active_tokens")
    preemptions = level.requests["preemptions"]
    per_second = 1 / duration if duration > 0 else float("nan")
    return Summary(
        requests=len(level.requests),
        completed=len(done),
        errors=len(level.requests) - len(done),
        duration=duration,
        request_throughput=len(done) * per_second,
        output_throughput=output * per_second,
        total_throughput=(prompt + output) * per_second,
        steady_output_throughput=steady_throughput,
        steady_duration=steady_duration,
        mean_concurrency=mean_concurrency,
        peak_concurrency=peak_concurrency,
        mean_active_tokens=mean_tokens,
        peak_active_tokens=peak_tokens,
        peak_kv_tokens=_gauge(level.timeline, "kv_tokens")[1],
        preemptions=None if (preemptions < 0).any() else int(preemptions.sum()),
        ttft=_spread(done["ttft"]),
        tpot=_spread(done["tpot"]),
        itl=_spread(level.gaps["gap"], level.gaps["count"]),
        e2el=_spread(done["e2el"]),
        state=state_of(level),
        held_rate=held_rate(level),
    )


def stated(summary: Summary, source: str) -> Summary:
    """The numbers that a run of this `source` may state. A prediction without steady state has neither TTFT nor E2EL:
    they only say how long the level was. What was measured has been so."""
    if source == "measured" or summary.state != "no steady state":
        return summary
    nothing = float("nan")
    refused = Spread(nothing, nothing, nothing, nothing, nothing, 0)
    return replace(summary, ttft=refused, e2el=refused)


def summary_table(run: Run) -> pd.DataFrame:
    """One row a level: its load, everything in `Summary.flat` as far as it is `stated`, its state, the rate that its
    server can hold, and which percentiles are of too few samples."""
    rows = []
    for level in run.levels:
        summary = stated(summarize(level), run.source)
        known = {"state": summary.state, "held_rate": summary.held_rate, "too_few": " ".join(summary.too_few)}
        rows.append(load_columns(level) | summary.flat() | known)
    table = pd.DataFrame(rows)
    if "preemptions" in table:
        table["preemptions"] = table["preemptions"].astype("Int64")
    return table


def load_columns(level: Level) -> dict[str, object]:
    """What was asked of a level, by column; the rate of a closed loop and the clients of an open one are NaN."""
    load, nothing = level.workload, float("nan")
    return {
        "level": load.label,
        "lengths": lengths_label(level),
        "concurrency": load.concurrency or nothing,
        "request_rate": load.request_rate or nothing,
    }


def lengths_label(level: Level) -> str:
    """Prompt and output tokens of a level, such as ``1024/256``."""
    return level.workload.lengths_label


def _spread(values: pd.Series[float], counts: Iterable[int] | None = None) -> Spread:
    sample = values.to_numpy(np.float64)
    weights = np.ones(len(sample), np.int64) if counts is None else np.asarray(counts, np.int64)
    if not (seen := ~np.isnan(sample)).all():
        sample, weights = sample[seen], weights[seen]
    count = int(weights.sum())
    mean = float(np.average(sample, weights=weights)) if count else float("nan")
    p50, p90, p95, p99 = weighted_percentiles(sample, weights, PERCENTILES).tolist()
    return Spread(mean, p50, p90, p95, p99, count)


def _concurrency(level: Level) -> tuple[float, int]:
    """Mean over the level and peak of the requests between send and end, by a line that sweeps over both."""
    table = level.requests.dropna(subset=["arrival", "e2el"])
    start = table["arrival"].to_numpy()
    end = start + table["e2el"].to_numpy()
    if not len(start) or level.duration <= 0:
        return float("nan"), 0
    first = float(start.min())  # an open loop's first request is not at 0
    last = first + level.duration
    mean = float((np.clip(end, first, last) - np.clip(start, first, last)).sum() / level.duration)
    times = np.concatenate([end - SAME_MOMENT, start])  # who sends on an answer was never two
    change = np.concatenate([np.full(len(end), -1), np.full(len(start), 1)])
    return mean, int(np.cumsum(change[np.argsort(times, kind="stable")]).max())


def _steady(level: Level) -> tuple[float, float]:
    """Output tokens a second of completed requests within the steady window, and the window's length in seconds."""
    seen = level.requests.dropna(subset=["arrival", "e2el"])
    start = seen["arrival"].to_numpy(np.float64)
    window = steady_window(start, start + seen["e2el"].to_numpy(np.float64))
    if window is None:
        return float("nan"), 0.0
    done = level.completed
    sent, first, last, tokens = (
        done[name].to_numpy(np.float64) for name in ("arrival", "ttft", "e2el", "output_tokens")
    )
    duration = window[1] - window[0]
    return tokens_within(window, sent + first, sent + last, tokens) / duration, duration


def _gauge(timeline: pd.DataFrame, name: str) -> tuple[float, float]:
    """Mean over time and peak of a gauge that changes evenly between its rows; NaN where it was not seen."""
    rows = timeline[["time", name]].dropna()
    time, value = rows["time"].to_numpy(np.float64), rows[name].to_numpy(np.float64)
    if not len(value):
        return float("nan"), float("nan")
    span = time[-1] - time[0]
    mean = _area(time, value) / span if span > LEAST_SPAN else value.mean()
    return float(mean), float(value.max())


def _area(time: Array, value: Array) -> float:
    return float(((value[1:] + value[:-1]) / 2 * np.diff(time)).sum())

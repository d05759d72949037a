"""How sure the latencies of a measured level are, from the requests it has: a bootstrap.

Requests are drawn anew, with all their tokens, since a request's gaps resemble each other. Requests of a level share
batches, so that the true spread between repeats of a level can be wider: only a repeat shows it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.results.percentiles import PERCENTILES, requests_for, weighted_percentiles
from simulator.results.run import Level

RESAMPLES = 200
CONFIDENCE = 90  # % within an interval
LEAST_REQUESTS = 5
RANKS = np.concatenate([np.arange(0.25, 98, 0.25), np.arange(98, 100.01, 0.05)]).clip(max=100)  # %, of the pooled gaps

Array = npt.NDArray[np.float64]
Interval = tuple[float, float]


def resampled_intervals(level: Level, seed: int = 0) -> dict[str, Interval]:
    """90 % intervals by the names of `simulator.results.summary.Summary.flat`, as far as the number of requests allows.

    Mean and percentiles of TTFT, TPOT and E2EL; of ITL where the level keeps its tokens; throughputs of a closed loop
    without think time, by Little's law. A percentile that the sample does not bound has none
    (`simulator.results.percentiles.requests_for`).
    """
    done = level.completed
    if len(done) < LEAST_REQUESTS:
        return {}
    rng = np.random.default_rng(seed)
    chosen = rng.integers(len(done), size=(RESAMPLES, len(done)))
    found: dict[str, Interval] = {}
    for latency in ("ttft", "tpot", "e2el"):
        values = done[latency].to_numpy(np.float64)
        if not np.isnan(values).any():
            found |= _of_requests(latency, values[chosen])
    weights = _times_chosen(chosen)
    if level.workload.concurrency is not None and level.workload.think_times() is None:
        found |= _throughputs(level, done, weights)
    if level.tokens is not None:
        found |= _of_gaps(*_gaps_by_request(done, level.tokens), weights)
    return found


def _of_requests(latency: str, drawn: Array) -> dict[str, Interval]:
    found = {f"mean_{latency}": _interval(drawn.mean(axis=1))}
    bounded = [percentile for percentile in PERCENTILES if drawn.shape[1] >= requests_for(percentile)]
    for percentile, values in zip(bounded, np.percentile(drawn, bounded, axis=1), strict=True):
        found[f"p{percentile}_{latency}"] = _interval(values)
    return found


def _throughputs(level: Level, done: pd.DataFrame, weights: Array) -> dict[str, Interval]:
    """Requests in flight are given, so a throughput goes as its tokens over the time that requests took."""
    took = weights @ done["e2el"].to_numpy(np.float64)
    output = done["output_tokens"].to_numpy(np.float64)
    amounts = {
        "request_throughput": np.ones(len(done)),
        "output_throughput": output,
        "total_throughput": output + done["prompt_tokens"].to_numpy(np.float64),
    }
    seconds = float(done["e2el"].sum())
    if seconds <= 0 or level.duration <= 0:
        return {}
    # relative to the level's own ratio, times its own throughput
    return {name: _interval(weights @ amount / took * (seconds / level.duration)) for name, amount in amounts.items()}


def _gaps_by_request(
    done: pd.DataFrame, tokens: pd.DataFrame
) -> tuple[npt.NDArray[np.int64], Array, npt.NDArray[np.int64]]:
    """Every gap's request (its row in `done`), size in seconds, and how many tokens it stands for."""
    rows = pd.Series(np.arange(len(done)), index=done["request_id"])
    known = tokens["request_id"].isin(done["request_id"]).to_numpy()
    request = rows.reindex(tokens["request_id"].to_numpy()[known]).to_numpy(np.int64)
    order = np.argsort(request, kind="stable")
    request = request[order]
    time, count = (tokens[name].to_numpy()[known][order] for name in ("time", "tokens"))
    later = np.flatnonzero(request[1:] == request[:-1]) + 1
    shares = np.maximum(1, count[later] - count[later - 1])
    return request[later], (time[later] - time[later - 1]) / shares, shares


def _of_gaps(
    request: npt.NDArray[np.int64], gaps: Array, counts: npt.NDArray[np.int64], weights: Array
) -> dict[str, Interval]:
    """Intervals of the pooled gaps; their percentiles to a quarter of a percent in rank, a twentieth in the tail."""
    if not len(gaps):
        return {}
    requests, size = weights.shape[1], int(counts.sum())
    sums = np.bincount(request, gaps * counts, requests)
    tokens = weights @ np.bincount(request, counts, requests)
    drawn = tokens > 0  # else a draw of requests without gaps, which tells nothing
    found = {"mean_itl": _interval((weights @ sums)[drawn] / tokens[drawn])}
    grid = weighted_percentiles(gaps, counts, RANKS.tolist())
    place = request * len(grid) + np.searchsorted(grid, gaps).clip(max=len(grid) - 1)
    per_request = np.bincount(place, counts, requests * len(grid)).reshape(requests, len(grid))
    reached = np.cumsum(weights @ per_request, axis=1)
    for percentile in PERCENTILES:
        if size >= requests_for(percentile):
            below = reached < percentile / 100 * reached[:, -1:]
            found[f"p{percentile}_itl"] = _interval(grid[below.sum(axis=1)])
    return found


def _times_chosen(chosen: npt.NDArray[np.int64]) -> Array:
    """How often each request (column) is in each resample (row)."""
    resamples, requests = chosen.shape
    place = chosen + np.arange(resamples)[:, None] * requests
    counts = np.bincount(place.ravel(), minlength=resamples * requests)
    return np.asarray(counts.reshape(resamples, requests), np.float64)


def _interval(values: Array) -> Interval:
    low, high = np.percentile(values, [50 - CONFIDENCE / 2, 50 + CONFIDENCE / 2])
    return float(low), float(high)

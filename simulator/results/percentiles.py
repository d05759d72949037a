"""Percentiles of weighted samples, equal to NumPy's on the samples written out one by one, and how many they need."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PERCENTILES = (50, 90, 95, 99)
SURE = 0.95  # chance that the largest value of a large enough sample lies above the true percentile


def requests_for(percentile: float) -> int:
    """The least sample whose largest value exceeds the true percentile in 95 of 100 cases; fewer do not bound it.

    These are Wilks' tolerance limits ("Determination of sample sizes for setting tolerance limits", Annals of
    Mathematical Statistics 12, 1941): 59 values for the 95th percentile, 299 for the 99th.
    """
    return math.ceil(math.log(1 - SURE) / math.log(percentile / 100))


def unbounded_percentiles(requests: int) -> list[int]:
    """Percentiles of a request's latencies on which nothing should be built that is made of so few."""
    return [percentile for percentile in PERCENTILES if requests < requests_for(percentile)]


def weighted_percentiles(
    values: npt.ArrayLike, counts: npt.ArrayLike, percentiles: Sequence[float]
) -> npt.NDArray[np.float64]:
    """Percentiles (0 to 100) of ``np.repeat(values, counts)`` by linear interpolation, without writing it out.

    Linear interpolation is `numpy.percentile`'s default and what ``vllm bench serve`` prints.
    An empty sample gives NaN for every percentile.
    """
    sample = np.asarray(values, dtype=np.float64)
    weights = np.asarray(counts, dtype=np.int64)
    if not (counted := weights > 0).all():
        weights, sample = weights[counted], sample[counted]
    if sample.size == 0:
        return np.full(len(percentiles), np.nan)
    order = np.argsort(sample, kind="stable")
    sample = sample[order]
    ends = np.cumsum(weights[order])
    position = np.asarray(percentiles, dtype=np.float64) / 100.0 * (ends[-1] - 1)
    below = np.floor(position).astype(np.int64)
    low = sample[np.searchsorted(ends, below, side="right")]
    high = sample[np.searchsorted(ends, np.minimum(below + 1, ends[-1] - 1), side="right")]
    return np.asarray(low + (high - low) * (position - below))

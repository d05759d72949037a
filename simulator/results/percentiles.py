"""Percentiles of weighted samples, equal to NumPy's on the samples written out one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def weighted_percentiles(
    values: npt.ArrayLike, counts: npt.ArrayLike, percentiles: Sequence[float]
) -> npt.NDArray[np.float64]:
    """Percentiles (0 to 100) of ``np.repeat(values, counts)`` by linear interpolation, without writing it out.

    Linear interpolation is `numpy.percentile`'s default and what ``vllm bench serve`` prints.
    An empty sample gives NaN for every percentile.
    """
    sample = np.asarray(values, dtype=np.float64)
    weights = np.asarray(counts, dtype=np.int64)
    weights, sample = weights[weights > 0], sample[weights > 0]
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

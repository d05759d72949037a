"""Workloads that describe the lengths which requests really had, or which a report states."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from calibration.imports.source import MOST, ImplausibleError
from simulator.loads.workload import Length, Shape

FEW = 4  # so many distinct pairs of lengths become a fixed shape each
GROUPS = 4  # of equally many requests, by output length, where one uniform shape does not describe them
MEAN_OFF, STD_OFF = 0.03, 0.25  # by which a uniform length's mean (of it) and spread (of the range's) may be off


def shapes_of(lengths: Sequence[tuple[int, int]]) -> tuple[tuple[Shape, ...], list[str]]:
    """Shapes for the (prompt, output) tokens of requests, and a sentence where they only come near.

    Equal lengths are one fixed shape; up to `FEW` distinct pairs a fixed shape each, with their shares; lengths that
    look uniform one shape from the least to the most; all others `GROUPS` such shapes by output length.
    """
    if not lengths:
        return (Shape(Length.fixed(1), Length.fixed(1)),), ["no request was completed, so no length is known"]
    pairs = Counter((max(1, prompt), max(1, output)) for prompt, output in lengths)
    if len(pairs) <= FEW:
        one = len(pairs) == 1
        return tuple(
            Shape(Length.fixed(prompt), Length.fixed(output), 1.0 if one else float(count))
            for (prompt, output), count in sorted(pairs.items())
        ), []
    table = np.array(sorted(pairs.elements(), key=lambda pair: (pair[1], pair[0])))
    if _uniform(table[:, 0]) and _uniform(table[:, 1]):
        return (_bounds(table),), ["lengths are drawn anew, uniform between the least and the most that were recorded"]
    groups = [group for group in np.array_split(table, min(GROUPS, len(table))) if len(group)]
    note = f"lengths are drawn anew, uniform within {len(groups)} groups of the recorded requests by output length"
    return tuple(_bounds(group, float(len(group))) for group in groups), [note]


def length_of(mean: float, std: float | None = None) -> Length:
    """A uniform length of this mean and standard deviation in tokens; fixed where it does not vary.

    Raises `calibration.imports.source.ImplausibleError`.
    """
    if not 0 < mean <= MOST or not (std or 0.0) <= MOST:
        raise ImplausibleError(
            f"requests of {mean:g} +- {std or 0.0:g} tokens on average cannot be; up to {MOST:,} can"
        )
    half = math.sqrt(3) * (std or 0.0)
    low, high = max(1, round(mean - half)), max(1, round(mean + half))
    return Length(min(low, high), high)


def _bounds(table: np.ndarray[tuple[int, int], np.dtype[np.int64]], weight: float = 1.0) -> Shape:
    (low_in, low_out), (high_in, high_out) = table.min(axis=0).tolist(), table.max(axis=0).tolist()
    return Shape(Length(low_in, high_in), Length(low_out, high_out), weight)


def _uniform(values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bool:
    low, high = int(values.min()), int(values.max())
    middle, spread = (low + high) / 2, (high - low) / math.sqrt(12)
    mean, std = float(values.mean()), float(values.std())
    return abs(mean - middle) <= MEAN_OFF * mean and abs(std - spread) <= STD_OFF * spread

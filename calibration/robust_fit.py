"""Robust least squares with non-negative coefficients, and errors that rows may share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

HUBER = 1.5  # residuals beyond this many standard deviations count less
LEAST_SCALE = 1e-6  # s, below any clock
MOST_LEVERAGE = 0.9  # of a cluster on its own fit, for the correction of its residuals
ROUNDS = 20
SINGULAR = 1e-12  # squared length, as a share of the longest, of a direction in which the rows say nothing

Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Belief:
    """What is known of coefficients beforehand: values and standard deviations; infinite ones say nothing."""

    values: Array
    deviations: Array

    def precision(self) -> Array:
        return 1.0 / self.deviations**2


@dataclass(frozen=True)
class Solution:
    """Coefficients; `scales` are the standard deviations of the residuals by group, `weights` those of the rows."""

    values: Array
    residuals: Array
    scales: Array
    weights: Array


def solve(matrix: Array, seconds: Array, groups: Numbers, belief: Belief) -> Solution:
    """Least squares where odd rows count less, each of the `groups` of rows weighed by its own noise."""
    weights = 1.0 / np.maximum(seconds, LEAST_SCALE)
    values = np.zeros(matrix.shape[1])
    scales, residuals = np.ones(groups.max() + 1), seconds
    for _ in range(ROUNDS):
        before = values
        values = weighted(matrix, seconds, weights, belief)[0]
        residuals = seconds - np.einsum("ij,j->i", matrix, values)
        for group in np.unique(groups):
            scales[group] = max(1.4826 * float(np.median(np.abs(residuals[groups == group]))), LEAST_SCALE)
        deviations = np.abs(residuals) / scales[groups]
        weights = np.sqrt(np.minimum(1.0, HUBER / np.maximum(deviations, 1e-9))) / scales[groups]
        if np.allclose(values, before, rtol=1e-6, atol=0):
            break
    return Solution(values, residuals, scales, weights)


def weighted(matrix: Array, seconds: Array, weights: Array, belief: Belief) -> tuple[Array, float]:
    """Non-negative values for given weights of the rows, and the sum of squares that is left."""
    rows, target = matrix * weights[:, None], seconds * weights
    products = _products(rows, rows) + np.diag(belief.precision())
    size = np.sqrt(np.maximum(np.diag(products), 1e-300))
    toward = (_products(rows, target[:, None])[:, 0] + belief.values * belief.precision()) / size
    # nnls wants rows, not their products; as few as there are columns do
    lengths, directions = np.linalg.eigh(products / np.outer(size, size))
    roots = np.sqrt(np.maximum(lengths, SINGULAR))
    reached = directions.T @ toward / roots
    scaled, left = nnls(roots[:, None] * directions.T, reached)
    total = float((target**2).sum() + belief.values**2 @ belief.precision())
    return scaled / size, total - float(reached @ reached) + float(left) ** 2


def covariance(
    slopes: Array,
    solution: Solution,
    groups: Numbers,
    clusters: Numbers,
    belief: Belief,
) -> Array:
    """Of the values, where the errors within a cluster of rows may be shared in any way.

    The sandwich of Huber's estimator, clusters as in Liang and Zeger (1986), whose residuals are corrected for their
    pull on the fit as in Bell and McCaffrey's (2002) jackknife, up to `MOST_LEVERAGE`.
    """
    scale = solution.scales[groups]
    size = np.maximum(np.abs(slopes).max(axis=0), 1e-300)
    rows = slopes / scale[:, None] / size
    deviations = solution.residuals / scale
    inside = rows * (np.abs(deviations) <= HUBER)[:, None]
    scores = rows * np.clip(deviations, -HUBER, HUBER)[:, None]
    known = np.diag(belief.precision() / size**2)
    bread = np.linalg.pinv(_products(inside, inside) + known, hermitian=True)
    meat = known
    for members in _members(clusters):
        pull = _products(inside[members], inside[members]) @ bread
        strongest = float(np.abs(np.linalg.eigvals(pull)).max())
        pull *= min(1.0, MOST_LEVERAGE / max(strongest, 1e-300))
        score = np.linalg.solve(np.eye(len(pull)) - pull, scores[members].sum(axis=0))
        meat = meat + np.outer(score, score)
    return bread @ meat @ bread / np.outer(size, size)


def _products(one: Array, other: Array) -> Array:
    """one.T @ other, whose sums over many rows would depend on the number of BLAS's threads."""
    return np.asarray(np.einsum("ij,ik->jk", one, other))


def _members(clusters: Numbers) -> list[Numbers]:
    order = np.argsort(clusters, kind="stable")
    ends = np.flatnonzero(np.diff(clusters[order])) + 1
    return list(np.split(order, ends))

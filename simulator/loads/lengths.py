"""Numbers of tokens: fixed, uniform, or distributed otherwise between two bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.loads.bounds import MOST_TOKENS, MOST_WEIGHT

Reals = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

HIGHEST = 0.9999  # quantile of an endless distribution at which it is cut where no bound is given
LEAST_MEAN = 1e-3  # tokens


@dataclass(frozen=True)
class Distribution:
    """A distribution of tokens before it is cut to a `Length`'s bounds.

    Attributes
        kind: "normal", "lognormal" or "exponential"
        mean: tokens
        std: standard deviation in tokens; that of an exponential one is its mean
    """

    kind: str
    mean: float
    std: float

    def __post_init__(self) -> None:
        if self.kind not in _QUANTILES:
            raise ValueError(f"{self.kind!r} is no distribution; known are {', '.join(_QUANTILES)}")
        if not (LEAST_MEAN <= self.mean <= MOST_TOKENS and LEAST_MEAN <= self.std <= MOST_TOKENS):
            raise ValueError(
                f"a distribution's mean and deviation must be positive, {LEAST_MEAN:g} to {MOST_TOKENS:,}; got {self}"
            )

    def below(self, tokens: Reals) -> Reals:
        """Share of the values up to `tokens`."""
        return _SHARES[self.kind](self, tokens)

    def quantile(self, shares: Reals) -> Reals:
        """Tokens up to which these shares of the values lie."""
        return _QUANTILES[self.kind](self, shares)

    def __str__(self) -> str:
        return f"{self.kind}({self.mean:g}" + (")" if self.kind == "exponential" else f",{self.std:g})")


def _logarithmic(distribution: Distribution) -> tuple[float, float]:
    """Mean and deviation of a lognormal distribution's logarithm."""
    variance = math.log1p((distribution.std / distribution.mean) ** 2)
    return math.log(distribution.mean) - variance / 2, math.sqrt(variance)


def _normal_share(distribution: Distribution, tokens: Reals) -> Reals:
    from scipy.special import ndtr

    return np.asarray(ndtr((tokens - distribution.mean) / distribution.std))


def _normal_quantile(distribution: Distribution, shares: Reals) -> Reals:
    from scipy.special import ndtri

    return np.asarray(distribution.mean + distribution.std * ndtri(shares))


def _lognormal_share(distribution: Distribution, tokens: Reals) -> Reals:
    from scipy.special import ndtr

    middle, spread = _logarithmic(distribution)
    return np.asarray(ndtr((np.log(np.maximum(tokens, 1e-300)) - middle) / spread))


def _lognormal_quantile(distribution: Distribution, shares: Reals) -> Reals:
    from scipy.special import ndtri

    middle, spread = _logarithmic(distribution)
    return np.asarray(np.exp(middle + spread * ndtri(shares)))


_SHARES: dict[str, Callable[[Distribution, Reals], Reals]] = {
    "normal": _normal_share,
    "lognormal": _lognormal_share,
    "exponential": lambda distribution, tokens: -np.expm1(-np.maximum(tokens, 0.0) / distribution.mean),
}
_QUANTILES: dict[str, Callable[[Distribution, Reals], Reals]] = {
    "normal": _normal_quantile,
    "lognormal": _lognormal_quantile,
    "exponential": lambda distribution, shares: -distribution.mean * np.log1p(-shares),
}


@dataclass(frozen=True)
class Histogram:
    """Ranges of tokens, both ends included, each with a positive weight; uniform within a range.

    A range of one value makes the distribution an empirical one.
    """

    ranges: tuple[tuple[int, int, float], ...]

    def __post_init__(self) -> None:
        if not self.ranges:
            raise ValueError("a histogram needs at least one range of tokens")
        for low, high, weight in self.ranges:
            if not 1 <= low <= high:
                raise ValueError(f"a histogram's range must have 1 <= low <= high, got {low} to {high}")
            if not 0 < weight <= MOST_WEIGHT:
                raise ValueError(f"a histogram's weights must be positive, up to {MOST_WEIGHT:g}; got {weight}")

    @property
    def shares(self) -> Reals:
        weights = np.array([weight for _, _, weight in self.ranges])
        return np.asarray(weights / weights.sum())

    def draw(self, rng: np.random.Generator, count: int) -> Integers:
        chosen = rng.choice(len(self.ranges), size=count, p=self.shares)
        bounds = np.array([(low, high) for low, high, _ in self.ranges], dtype=np.int64)[chosen]
        return rng.integers(bounds[:, 0], bounds[:, 1], endpoint=True)

    def __str__(self) -> str:
        return "histogram(" + ",".join(f"{_span(low, high)}:{weight:g}" for low, high, weight in self.ranges) + ")"


@dataclass(frozen=True)
class Length:
    """A number of tokens from `low` to `high`, both included; `low == high` is fixed.

    Without a `shape` all are equally likely. A `Distribution` is cut to the bounds, what lies outside is drawn anew; a
    `Histogram` lies within them by itself.
    """

    low: int
    high: int
    shape: Distribution | Histogram | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"a length must have 1 <= low <= high, got {self.low} to {self.high}")
        if self.high > MOST_TOKENS:
            raise ValueError(f"a length may have up to {MOST_TOKENS:,} tokens, got {self.high}")
        if isinstance(self.shape, Distribution) and not self._inside()[1] > 0:
            raise ValueError(f"{self.shape} has next to nothing between {self.low} and {self.high}")
        if isinstance(self.shape, Histogram):
            lows, highs, _ = zip(*self.shape.ranges, strict=True)
            if (min(lows), max(highs)) != (self.low, self.high):
                raise ValueError(f"{self.shape} does not reach from {self.low} to {self.high}")

    @classmethod
    def fixed(cls, tokens: int) -> Length:
        return cls(tokens, tokens)

    @classmethod
    def jittered(cls, tokens: int, range_ratio: float) -> Length:
        """Uniform on [tokens x (1 - ratio), tokens x (1 + ratio)], as vLLM bench's ``--random-range-ratio``."""
        if not 0 <= range_ratio < 1:
            raise ValueError(f"range ratio must be in [0, 1), got {range_ratio}")
        if tokens > MOST_TOKENS:
            raise ValueError(f"a length may have up to {MOST_TOKENS:,} tokens, got {tokens}")
        return cls(max(1, math.floor(tokens * (1 - range_ratio))), math.ceil(tokens * (1 + range_ratio)))

    @classmethod
    def distributed(cls, shape: Distribution, low: int | None = None, high: int | None = None) -> Length:
        """Cut to the bounds; without `high` at the quantile `HIGHEST`."""
        if high is None:
            high = max(low or 1, math.ceil(float(shape.quantile(np.array([HIGHEST]))[0])))
        return cls(low or 1, high, shape)

    @classmethod
    def from_histogram(cls, *ranges: tuple[int, int, float]) -> Length:
        shape = Histogram(ranges)
        return cls(min(low for low, _, _ in ranges), max(high for _, high, _ in ranges), shape)

    @property
    def mean(self) -> float:
        if isinstance(self.shape, Histogram):
            middles = np.array([(low + high) / 2 for low, high, _ in self.shape.ranges])
            return float(self.shape.shares @ middles)
        if isinstance(self.shape, Distribution):
            edges = self.shape.below(np.arange(self.low - 0.5, self.high + 1))
            shares = np.diff(edges)
            return float((np.arange(self.low, self.high + 1) * shares).sum() / shares.sum())
        return (self.low + self.high) / 2

    def draw(self, rng: np.random.Generator, count: int) -> Integers:
        """`count` lengths."""
        if isinstance(self.shape, Histogram):
            return self.shape.draw(rng, count)
        if isinstance(self.shape, Distribution):
            start, width = self._inside()
            tokens = np.rint(self.shape.quantile(start + width * rng.random(count)))
            return np.clip(tokens, self.low, self.high).astype(np.int64)
        return rng.integers(self.low, self.high, size=count, endpoint=True)

    def _inside(self) -> tuple[float, float]:
        """Share of the distribution below the bounds, and between them."""
        assert isinstance(self.shape, Distribution)
        below, up_to = self.shape.below(np.array([self.low - 0.5, self.high + 0.5])).tolist()
        return below, up_to - below

    def __str__(self) -> str:
        if isinstance(self.shape, Distribution):
            return f"{str(self.shape)[:-1]},{_span(self.low, self.high)})"
        return str(self.shape) if self.shape else _span(self.low, self.high)


_RANGE = re.compile(r"([0-9]{1,30})(?:-([0-9]{1,30}))?")
FORMS = "512, 512-1024, 512~0.1, lognormal(500,300), normal(500,100,64-2048), exponential(200), histogram(1-99:3,100:1)"


def parse_length(text: str) -> Length:
    """A length as people write it, in one of the `FORMS`; it reads what `Length.__str__` writes.

    ``512~0.1`` is 512 tokens, 10 % up and down. Distributions are written with mean and standard deviation in tokens,
    and where they are to be cut. Raises `ValueError`.
    """
    text = text.replace(" ", "")
    if _RANGE.fullmatch(text):
        return Length(*_bounds(text))
    tokens, jitter, ratio = text.partition("~")
    if jitter and re.fullmatch(r"[0-9]{1,30}", tokens):
        return Length.jittered(int(tokens), parse_number(ratio))
    name, bracket, rest = text.partition("(")
    if not (bracket and rest.endswith(")")):
        raise ValueError(f"{text!r} is no length; write one as {FORMS}")
    values = rest[:-1].split(",")
    if name == "histogram":
        return Length.from_histogram(*(_weighted_range(value) for value in values))
    return _parse_distribution(name, values)


def _parse_distribution(name: str, values: list[str]) -> Length:
    needed = 1 if name == "exponential" else 2
    if name not in _QUANTILES:
        raise ValueError(f"{name!r} is no distribution; known are {', '.join(_QUANTILES)} and histogram")
    if len(values) not in (needed, needed + 1):
        raise ValueError(f"{name} is written {'exponential(MEAN)' if needed == 1 else f'{name}(MEAN,STD)'}")
    mean, std = parse_number(values[0]), parse_number(values[needed - 1])
    low, high = _bounds(values[needed]) if len(values) > needed else (None, None)
    return Length.distributed(Distribution(name, mean, std), low, high)


def _weighted_range(text: str) -> tuple[int, int, float]:
    tokens, _, weight = text.partition(":")
    return (*_bounds(tokens), parse_number(weight) if weight else 1.0)


def _bounds(text: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is no number of tokens such as 512, or 512-1024, up to {MOST_TOKENS:,}")
    return int(found[1]), int(found[2] or found[1])


def parse_number(text: str) -> float:
    """A number as people write it. Raises `ValueError`."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"

"""When requests are sent: by clients who wait for their answers, or on their own at a rate that may vary."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from simulator.loads.bounds import (
    LEAST_BURSTINESS,
    LEAST_FACTOR,
    LEAST_RATE,
    MOST_FACTOR,
    MOST_RATE,
    MOST_REQUESTS,
    MOST_SECONDS,
)
from simulator.loads.lengths import parse_number

Reals = npt.NDArray[np.float64]

DAY = 86_400.0  # s
LEAST_WIDTH = 1e-6  # s between two moments of a rate curve


@dataclass(frozen=True)
class ThinkTime:
    """Seconds that a client waits between an answer and its next request: always `mean`, or exponential around it."""

    mean: float
    kind: Literal["fixed", "exponential"] = "fixed"

    def __post_init__(self) -> None:
        if not 0 <= self.mean <= MOST_SECONDS:
            raise ValueError(f"a think time must be a number of seconds from 0 to {MOST_SECONDS:g}, got {self.mean}")

    def draw(self, rng: np.random.Generator, count: int) -> Reals:
        return np.full(count, self.mean) if self.kind == "fixed" else rng.exponential(self.mean, count)

    def __str__(self) -> str:
        return f"{self.mean:g}s" if self.kind == "fixed" else f"exponential({self.mean:g}s)"


@dataclass(frozen=True)
class RateCurve:
    """How an arrival rate goes over time: a factor at each of some moments, a straight line from one to the next.

    Attributes
        seconds: the moments, from 0 on, not decreasing; two equal ones are a jump
        factors: of the `request_rate`, at each moment
        period: s after which the curve begins anew, at least the last moment; None where the last factor holds for ever
        text: as it was written
    """

    seconds: tuple[float, ...]
    factors: tuple[float, ...]
    period: float | None = None
    text: str = "curve"

    def __post_init__(self) -> None:
        if len(self.seconds) != len(self.factors) or not self.seconds:
            raise ValueError("a rate curve needs a factor for each of its moments, and at least one")
        if self.seconds[0] != 0 or not all(0 <= moment <= MOST_SECONDS for moment in self.seconds):
            raise ValueError(f"a rate curve's moments must start at 0 and be numbers up to {MOST_SECONDS:g}")
        if np.any((widths := np.diff(self.seconds)) < 0):
            raise ValueError("a rate curve's moments must be in order")
        if np.any((widths > 0) & (widths < LEAST_WIDTH)):
            raise ValueError(f"a rate curve's moments must be equal or {LEAST_WIDTH:g} s apart")
        if not all(factor == 0 or LEAST_FACTOR <= factor <= MOST_FACTOR for factor in self.factors):
            raise ValueError(f"a rate curve's factors must be 0, or {LEAST_FACTOR:g} to {MOST_FACTOR:g}")
        if self.period is not None and not self.seconds[-1] <= self.period <= MOST_SECONDS:
            raise ValueError("a rate curve's period must hold all its moments")
        least = 0.0 if self.period is None else LEAST_FACTOR * self.period
        if (self.period is None and not self.factors[-1]) or (self.period and self.area(self.period) < least):
            raise ValueError("a rate curve must go on for ever, but this one's rate ends at 0")
        if self.period == 0:
            raise ValueError("a rate curve's period must take some time")

    def area(self, until: float) -> float:
        """Integral of the factor from 0 to `until` seconds: how long a constant rate needs for as many requests."""
        seconds, areas = self._line()
        whole, rest = (0.0, until) if self.period is None else divmod(until, self.period)
        place = int(np.searchsorted(seconds, rest, side="right")) - 1
        start, factor = seconds[place], self._factor_after(place)
        grown = areas[place] + factor * (rest - start) + self._slope(place) * (rest - start) ** 2 / 2
        return float(whole * areas[-1] + grown)

    def moments(self, areas: Reals) -> Reals:
        """The inverse of `area`: seconds at which it reaches `areas`, which do not decrease."""
        seconds, known = self._line()
        whole, rest = np.zeros(len(areas)), areas
        if self.period is not None:
            whole = np.maximum(np.ceil(areas / known[-1]) - 1, 0.0)  # a period's last arrival is still in it
            rest = areas - whole * known[-1]
        place = np.clip(np.searchsorted(known, rest, side="left") - 1, 0, len(seconds) - 1)
        factor = np.array([self._factor_after(number) for number in range(len(seconds))])[place]
        slope = np.array([self._slope(number) for number in range(len(seconds))])[place]
        wanted = rest - known[place]
        root = np.sqrt(np.maximum(factor**2 + 2 * slope * wanted, 0.0))
        with np.errstate(divide="ignore", invalid="ignore"):  # wanted / factor, in the form that holds for any slope
            step = np.where(wanted > 0, 2 * wanted / (factor + root), 0.0)
        moments = whole * (self.period or 0.0) + seconds[place] + step
        return np.maximum.accumulate(moments)  # a steep slope loses digits

    def _line(self) -> tuple[Reals, Reals]:
        """The moments, the period's end included, and the area up to each."""
        seconds, factors = list(self.seconds), list(self.factors)
        if self.period is not None:
            seconds, factors = [*seconds, self.period], [*factors, factors[-1]]
        widths, heights = np.diff(seconds), np.array(factors)
        areas = np.concatenate([[0.0], np.cumsum(widths * (heights[1:] + heights[:-1]) / 2)])
        return np.array(seconds), areas

    def _factor_after(self, place: int) -> float:
        return self.factors[min(place, len(self.factors) - 1)]

    def _slope(self, place: int) -> float:
        """Growth of the factor a second, after the moment number `place`."""
        if place + 1 >= len(self.factors):
            return 0.0
        width = self.seconds[place + 1] - self.seconds[place]
        return (self.factors[place + 1] - self.factors[place]) / width if width else 0.0

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` clients; each sends its next request when its last one has ended and it has thought."""

    concurrency: int
    kind: Literal["closed"] = "closed"
    think_time: ThinkTime | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.concurrency > MOST_REQUESTS:
            raise ValueError(f"concurrency may be up to {MOST_REQUESTS:,} clients, got {self.concurrency}")

    @property
    def is_random(self) -> bool:
        return self.think_time is not None and self.think_time.kind == "exponential"

    @property
    def label(self) -> str:
        """A few letters for a table."""
        return f"C={self.concurrency}"

    def __str__(self) -> str:
        return self.label + (f" think {self.think_time}" if self.think_time else "")


@dataclass(frozen=True)
class OpenLoop:
    """Requests arrive at `request_rate` per second, whether or not earlier ones have ended.

    Gaps between arrivals are gamma distributed with shape `burstiness`, as in vLLM bench: 1 is Poisson, below 1 is
    burstier, infinity is evenly spaced. An infinite rate sends everything at once. A `curve` multiplies the rate over
    time; gaps are then those of a constant rate, stretched where the rate is low. `max_concurrency` is the most
    requests in flight, as vLLM bench's ``--max-concurrency``: who comes beyond it waits at the client, and that wait is
    in no latency.
    """

    request_rate: float
    burstiness: float = 1.0
    kind: Literal["open"] = "open"
    curve: RateCurve | None = None
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ValueError(f"request rate must be positive, got {self.request_rate}")
        if not (LEAST_RATE <= self.request_rate <= MOST_RATE or math.isinf(self.request_rate)):
            raise ValueError(f"request rate must be {LEAST_RATE:g} to {MOST_RATE:g}, or inf; got {self.request_rate}")
        if not self.burstiness >= LEAST_BURSTINESS:
            raise ValueError(f"burstiness must be positive, {LEAST_BURSTINESS:g} or more; got {self.burstiness}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {self.max_concurrency}")
        if self.curve is not None and math.isinf(self.request_rate):
            raise ValueError("an infinite request rate sends everything at once and has no rate curve")

    @property
    def is_random(self) -> bool:
        return math.isfinite(self.request_rate) and math.isfinite(self.burstiness)

    def times(self, count: int, seed: int) -> Reals:
        """Seconds from the start of `count` arrivals; the same for the same seed.

        As in vLLM bench, arrivals at a constant rate are rescaled so that the last one lands at ``count / rate``.
        """
        if math.isinf(self.request_rate):
            return np.zeros(count)
        if math.isinf(self.burstiness):
            even = np.arange(1, count + 1) / self.request_rate
            return even if self.curve is None else self.curve.moments(even)
        rng = np.random.default_rng([seed, 1])
        times = np.cumsum(rng.gamma(self.burstiness, 1.0 / self.burstiness, size=count))
        if self.curve is not None:
            return self.curve.moments(times / self.request_rate)
        return np.asarray(times * (count / self.request_rate / times[-1]))

    def expected(self, seconds: float) -> float:
        """Mean number of arrivals in the first `seconds`."""
        return self.request_rate * (seconds if self.curve is None else self.curve.area(seconds))

    @property
    def label(self) -> str:
        """A few letters for a table."""
        return f"{self.request_rate:g}/s" + (f" {self.curve.text.partition('(')[0]}" if self.curve else "")

    def __str__(self) -> str:
        curve = f" x {self.curve}" if self.curve else ""
        return f"{self.request_rate:g}/s{curve}" + (f" max {self.max_concurrency}" if self.max_concurrency else "")


Arrivals = ClosedLoop | OpenLoop


_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": DAY}
CURVES = "ramp(0.1-1,10min), bursts(5s,20s), bursts(5s,20s,0.2), daily(0h:0.2,9h:1,18h:0.4)"


def parse_seconds(text: str) -> float:
    """Seconds from ``2``, ``2s``, ``500ms``, ``10min`` or ``1.5h``. Raises `ValueError`."""
    found = re.fullmatch(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([a-z]*)\s*", text)
    if not found or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is no time such as 2s, 500ms, 10min or 1.5h")
    seconds = parse_number(found[1]) * _UNITS[found[2]]
    if seconds > MOST_SECONDS:
        raise ValueError(f"{text!r} is longer than {MOST_SECONDS:g} s")
    return seconds


def parse_think_time(text: str) -> ThinkTime:
    """A think time written ``2s``, or ``exponential(2s)``. Raises `ValueError`."""
    found = re.fullmatch(r"\s*exponential\((.*)\)\s*", text)
    return ThinkTime(parse_seconds(found[1]), "exponential") if found else ThinkTime(parse_seconds(text))


def parse_curve(text: str) -> RateCurve:
    """A rate curve in one of the forms of `CURVES`. Raises `ValueError`.

    ``ramp(0.1-1,10min)`` climbs from a tenth of the rate to the full one and stays there. ``bursts(5s,20s)`` is 5 s at
    the full rate and 20 s of silence, in turn; a third number is the factor in between. ``daily(...)`` gives factors
    at hours of the day, and goes straight from one to the next.
    """
    found = re.fullmatch(r"(ramp|bursts|daily)\((.*)\)", text.replace(" ", ""))
    if not found:
        raise ValueError(f"{text!r} is no rate curve; write one as {CURVES}")
    values = found[2].split(",")
    try:
        return {"ramp": _ramp, "bursts": _bursts, "daily": _daily}[found[1]](found[0], values)
    except IndexError:
        raise ValueError(f"{text!r} lacks a value; write a rate curve as {CURVES}") from None


def _ramp(text: str, values: list[str]) -> RateCurve:
    start, _, end = values[0].partition("-")
    return RateCurve((0.0, parse_seconds(values[1])), (parse_number(start), parse_number(end)), None, text)


def _bursts(text: str, values: list[str]) -> RateCurve:
    on, off = parse_seconds(values[0]), parse_seconds(values[1])
    low = parse_number(values[2]) if len(values) > 2 else 0.0
    return RateCurve((0.0, on, on, on + off), (1.0, 1.0, low, low), on + off, text)


def _daily(text: str, values: list[str]) -> RateCurve:
    points = sorted(
        (parse_seconds(hour), parse_number(factor)) for hour, _, factor in (v.partition(":") for v in values)
    )
    if points[-1][0] >= DAY:
        raise ValueError(f"{text!r}: a day's hours are 0h to 24h")
    (first, at_first), (last, at_last) = points[0], points[-1]
    around = DAY - last + first
    at_midnight = at_last + (at_first - at_last) * (DAY - last) / around
    points = ([] if first == 0 else [(0.0, at_midnight)]) + points + [(DAY, at_midnight if first else at_first)]
    seconds, factors = zip(*points, strict=True)
    return RateCurve(seconds, factors, DAY, text)

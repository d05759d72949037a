"""Levels of load from the few words in which people state them: ``1,2,4,8`` clients, ``512/128:0.7`` tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from simulator.loads.arrivals import RateCurve
from simulator.loads.lengths import FORMS, parse_length, parse_number
from simulator.loads.sessions import Sessions, Talk, split_outside_brackets
from simulator.loads.trace import Trace
from simulator.loads.workload import Arrivals, ClosedLoop, Length, Load, OpenLoop, Shape, ThinkTime, Workload

NUM_PROMPTS = 1000  # vLLM bench's default


class LoadError(ValueError):
    """A load that makes no sense. The message is one line."""


@dataclass(frozen=True)
class Levels:
    """How many levels a load has: one for each of `concurrency` (clients) or of `request_rate` (requests a second).

    Attributes
        burstiness: of an open loop, 1 unless given
        think_time: of clients, between an answer and the next request
        max_concurrency: most requests in flight in an open loop
        rate_curve: what multiplies `request_rate` over time
        num_prompts: requests a level; or `requests_per_client` in a closed loop; or those that are expected in
            `duration` seconds of an open one
        speed: how much faster than recorded a trace is played
        seed: the same one draws the same load
    """

    concurrency: Sequence[int] | None = None
    request_rate: Sequence[float] | None = None
    burstiness: float | None = None
    think_time: ThinkTime | None = None
    max_concurrency: int | None = None
    rate_curve: RateCurve | None = None
    num_prompts: int | None = None
    requests_per_client: int | None = None
    duration: float | None = None
    speed: float | None = None
    seed: int = 0

    @property
    def arrivals(self) -> list[Arrivals]:
        """Those of each level."""
        burstiness = 1.0 if self.burstiness is None else self.burstiness
        found: list[Arrivals] = [ClosedLoop(clients, think_time=self.think_time) for clients in self.concurrency or ()]
        found += [
            OpenLoop(rate, burstiness, curve=self.rate_curve, max_concurrency=self.max_concurrency)
            for rate in self.request_rate or ()
        ]
        if not found:
            raise LoadError("the list of levels is empty")
        return found

    def requests(self, arrivals: Arrivals) -> int:
        """Requests of a level, `NUM_PROMPTS` unless told; with a duration what is expected to arrive in it."""
        if isinstance(arrivals, OpenLoop) and self.duration is not None:
            if math.isinf(arrivals.request_rate):
                raise LoadError("an infinite request_rate sends everything at once: give num_prompts, not duration")
            return max(1, round(arrivals.expected(self.duration)))
        if isinstance(arrivals, ClosedLoop) and self.requests_per_client is not None:
            return self.requests_per_client * arrivals.concurrency
        return NUM_PROMPTS if self.num_prompts is None else self.num_prompts

    def check(self, requests: Sequence[Shape] | Talk | Trace) -> None:
        """Raise `LoadError` where words contradict each other."""
        closed, opened, traced = (
            self.concurrency is not None,
            self.request_rate is not None,
            isinstance(requests, Trace),
        )
        timed = opened or (traced and not closed)
        faults = {  # and whether it is one
            "a load needs either concurrency or request_rate, and not both": closed == opened
            and (closed or not traced),
            "requests_per_client goes with concurrency, and not with num_prompts": self.requests_per_client is not None
            and (self.num_prompts is not None or not closed),
            "think_time goes with concurrency, or with sessions": self.think_time is not None
            and not (closed or isinstance(requests, Talk)),
            "rate_curve goes with request_rate, which it multiplies": self.rate_curve is not None and not opened,
            "max_concurrency goes with request_rate or a trace": self.max_concurrency is not None and not timed,
            "duration goes with request_rate or a trace, and not with num_prompts": self.duration is not None
            and (not timed or self.num_prompts is not None),
            "duration must be a positive number of seconds": not 0 < (self.duration or 1.0) < math.inf,
            "speed goes with a trace, and not with concurrency or request_rate": self.speed is not None
            and (not traced or closed or opened),
        }
        if told := [fault for fault, found in faults.items() if found]:
            raise LoadError(told[0])


def plan_load(requests: Sequence[Shape] | Talk | Trace, levels: Levels) -> list[Load]:
    """The levels of a load whose requests are of some shapes, the turns of sessions, or recorded.

    With sessions the number of requests is about that of `levels`, clients are users, and rates are those of sessions.
    A trace needs neither `concurrency` nor `request_rate`: then it is played as recorded. A rate stretches its recorded
    gaps; with `burstiness` or `rate_curve`, or where no times were recorded, arrivals are drawn. `num_prompts` and
    `duration` are the most that is played of it. Raises `LoadError`.
    """
    levels.check(requests)
    try:
        if isinstance(requests, Talk):
            return [_sessions(requests, arrivals, levels) for arrivals in levels.arrivals]
        if isinstance(requests, Trace):
            return [*_traces(requests, levels)]
        return [
            Workload(arrivals, tuple(requests), levels.requests(arrivals), levels.seed) for arrivals in levels.arrivals
        ]
    except ValueError as problem:
        raise LoadError(str(problem)) from None


def plan_levels(
    shapes: Sequence[Shape],
    *,
    concurrency: Sequence[int] | None = None,
    request_rate: Sequence[float] | None = None,
    burstiness: float | None = None,
    num_prompts: int | None = None,
    requests_per_client: int | None = None,
    seed: int = 0,
) -> list[Workload]:
    """`plan_load` of shapes alone, which a live server can be given too."""
    levels = Levels(
        concurrency,
        request_rate,
        burstiness,
        num_prompts=num_prompts,
        requests_per_client=requests_per_client,
        seed=seed,
    )
    return [load for load in plan_load(shapes, levels) if isinstance(load, Workload)]


def _sessions(talk: Talk, arrivals: Arrivals, levels: Levels) -> Sessions:
    number = levels.requests(arrivals)
    if levels.duration is None:
        number = max(1, round(number / talk.turns.mean))
    return Sessions(arrivals, talk, number, levels.think_time, levels.seed)


def _traces(trace: Trace, levels: Levels) -> Iterator[Trace]:
    if levels.concurrency is not None:
        for arrivals in levels.arrivals:
            most = levels.num_prompts if levels.requests_per_client is None else levels.requests(arrivals)
            yield trace.first(most).sent_by(arrivals, levels.seed)
    elif levels.request_rate is None:
        played = trace if levels.speed is None else trace.faster(levels.speed)
        yield replace(played.first(levels.num_prompts, levels.duration), max_concurrency=levels.max_concurrency)
    elif trace.times is None or levels.burstiness is not None or levels.rate_curve is not None:
        for arrivals in levels.arrivals:
            most = levels.num_prompts if levels.duration is None else levels.requests(arrivals)
            yield trace.first(most).sent_by(arrivals, levels.seed)
    else:
        for rate in levels.request_rate:
            played = trace.first(levels.num_prompts).at_rate(rate).first(seconds=levels.duration)
            yield replace(played, max_concurrency=levels.max_concurrency)


def uniform_shape(input_len: Length, output_len: Length, range_ratio: float = 0.0) -> Shape:
    """One kind of request. `range_ratio` spreads fixed lengths as vLLM bench's ``--random-range-ratio`` does."""
    if not range_ratio:
        return Shape(input_len, output_len)
    if input_len.low != input_len.high or output_len.low != output_len.high:
        raise LoadError("range_ratio spreads a fixed length; give either it or low and high")
    try:
        return Shape(Length.jittered(input_len.low, range_ratio), Length.jittered(output_len.low, range_ratio))
    except ValueError as problem:
        raise LoadError(str(problem)) from None


_LENGTH = r"([^/:()]+(?:\([^()]*\))?)"
_SHAPE = re.compile(rf"{_LENGTH}/{_LENGTH}(?::([^/:()]+))?")


def parse_shape(text: str) -> Shape:
    """A shape written INPUT/OUTPUT or INPUT/OUTPUT:WEIGHT, lengths as `parse_length` reads them. Raises `LoadError`."""
    found = _SHAPE.fullmatch(text.replace(" ", ""))
    try:
        if not found:
            raise ValueError(f"lengths are written {FORMS}" if "(" in text else "")
        return Shape(parse_length(found[1]), parse_length(found[2]), parse_number(found[3]) if found[3] else 1.0)
    except ValueError as problem:
        reason = f": {problem}" if str(problem) else ""
        raise LoadError(f"{text!r} is not a shape such as 512/128 or 512-1024/128:0.7{reason}") from None


def parse_shapes(text: str) -> list[Shape]:
    """Shapes from ``512/128:0.7,lognormal(4000,2000)/256:0.3``. Raises `LoadError`."""
    return [parse_shape(part) for part in split_outside_brackets(text)]

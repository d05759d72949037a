"""What is asked of a server: request lengths and when requests are sent.

A `Workload` describes one level of load. The load generator sends it to a live server and the simulator plays it in
simulated time; both draw the same lengths and arrival times from the same seed. Other loads, for the simulator alone,
are `simulator.loads.sessions.Sessions` and `simulator.loads.trace.Trace`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from simulator.loads.arrivals import Arrivals, ClosedLoop, OpenLoop, ThinkTime
from simulator.loads.bounds import MOST_REQUESTS, MOST_WEIGHT
from simulator.loads.lengths import Length

__all__ = ["Arrivals", "ClosedLoop", "Length", "Load", "OpenLoop", "Shape", "ThinkTime", "Workload"]

Integers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


class Load(Protocol):
    """What the simulator and the tables ask of any load. Every request has a number, from 0 on.

    A load that only states its requests needs the first four; the others follow from them.
    """

    @property
    def num_prompts(self) -> int:
        """Number of requests."""

    @property
    def concurrency(self) -> int | None:
        """Clients of a closed loop; None where requests arrive on their own."""

    def lengths(self) -> tuple[Integers, Integers]:
        """Prompt and output tokens of every request, in the order of their numbers."""

    def arrival_times(self) -> Reals | None:
        """Seconds from the start at which each request is sent, not decreasing; None in a closed loop."""

    @property
    def max_concurrency(self) -> int | None:
        """Most requests in flight of an open loop; others wait at the client. None for no limit."""
        return None

    @property
    def request_rate(self) -> float | None:
        """Mean requests a second of an open loop, None in a closed one."""
        times = self.arrival_times()
        return None if times is None else self.num_prompts / float(times[-1]) if times[-1] else math.inf

    def think_times(self) -> Reals | None:
        """Seconds for which its client waits after each request's answer; None for no wait."""
        return None

    def conversations(self) -> Sequence[int] | None:
        """How many successive requests make up each session, in which one follows the other's answer; None for 1 each.

        In an open loop `arrival_times` are then those of the sessions.
        """
        return None

    def prefix(self, number: int, block_size: int) -> Sequence[int]:
        """`simulator.engine.request.Request.prefix` of a request, for KV blocks of `block_size` tokens."""
        return ()

    @property
    def label(self) -> str:
        """A few letters for a table, such as ``C=8``."""
        return f"{self.request_rate:g}/s" if self.concurrency is None else f"C={self.concurrency}"

    @property
    def lengths_label(self) -> str:
        """Prompt and output tokens for a table, such as ``1024/256``; means where they differ."""
        return "/".join(
            f"{'' if tokens.min() == tokens.max() else '~'}{tokens.mean():.0f}" for tokens in self.lengths()
        )

    def longest(self) -> tuple[int, int]:
        """Most prompt tokens, and most prompt and output tokens together, of a request."""
        prompts, outputs = self.lengths()
        return int(prompts.max()), int((prompts + outputs).max())

    def describe(self) -> str:
        """One line."""
        return f"{self.label}, {self.lengths_label} tokens, {self.num_prompts} requests"

    @property
    def is_random(self) -> bool:
        """Whether another seed makes another load."""
        return False

    def redrawn(self, number: int) -> Load:
        """The same load with other random numbers, the `number`-th; itself for 0 or where nothing is random."""
        return self


@dataclass(frozen=True)
class Shape:
    """A kind of request: prompt and output length in tokens, and its share of the requests (any positive weight)."""

    input_len: Length
    output_len: Length
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.weight <= MOST_WEIGHT:
            raise ValueError(f"a shape's weight must be positive, up to {MOST_WEIGHT:g}; got {self.weight}")

    def __str__(self) -> str:
        return f"{self.input_len}/{self.output_len}"


@dataclass(frozen=True)
class Workload:
    """One level of load: how many requests, of which shapes, arriving how."""

    arrivals: Arrivals
    shapes: tuple[Shape, ...]
    num_prompts: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts must be at least 1, got {self.num_prompts}")
        if self.num_prompts > MOST_REQUESTS:
            raise ValueError(f"num_prompts may be up to {MOST_REQUESTS:,} a level, got {self.num_prompts}")
        if not self.shapes:
            raise ValueError("a workload needs at least one shape")

    @property
    def concurrency(self) -> int | None:
        return self.arrivals.concurrency if isinstance(self.arrivals, ClosedLoop) else None

    @property
    def max_concurrency(self) -> int | None:
        return self.arrivals.max_concurrency if isinstance(self.arrivals, OpenLoop) else None

    @property
    def request_rate(self) -> float | None:
        return self.arrivals.request_rate if isinstance(self.arrivals, OpenLoop) else None

    def lengths(self) -> tuple[Integers, Integers]:
        """Prompt and output tokens of every request, in the order of sending; the same for the same seed."""
        rng = np.random.default_rng([self.seed, 0])
        weights = np.array([shape.weight for shape in self.shapes])
        kinds = rng.choice(len(self.shapes), size=self.num_prompts, p=weights / weights.sum())
        inputs = np.empty(self.num_prompts, dtype=np.int64)
        outputs = np.empty(self.num_prompts, dtype=np.int64)
        for kind, shape in enumerate(self.shapes):
            chosen = kinds == kind
            count = int(chosen.sum())
            inputs[chosen] = shape.input_len.draw(rng, count)
            outputs[chosen] = shape.output_len.draw(rng, count)
        return inputs, outputs

    def arrival_times(self) -> Reals | None:
        """Seconds from the start at which each request is sent; None in a closed loop, where answers decide it."""
        return self.arrivals.times(self.num_prompts, self.seed) if isinstance(self.arrivals, OpenLoop) else None

    def think_times(self) -> Reals | None:
        return drawn_think_times(self.arrivals, self.num_prompts, self.seed)

    def conversations(self) -> None:
        return None

    def prefix(self, number: int, block_size: int) -> tuple[int, ...]:
        return ()

    @property
    def label(self) -> str:
        return self.arrivals.label

    @property
    def lengths_label(self) -> str:
        """``1024/256``, or of a mix ``256/128:0.7 12000/300:0.3`` with the shares where they differ."""
        if len({shape.weight for shape in self.shapes}) == 1:
            return " ".join(str(shape) for shape in self.shapes)
        total = sum(shape.weight for shape in self.shapes)
        return " ".join(f"{shape}:{shape.weight / total:.2g}" for shape in self.shapes)

    def longest(self) -> tuple[int, int]:
        return (
            max(shape.input_len.high for shape in self.shapes),
            max(shape.input_len.high + shape.output_len.high for shape in self.shapes),
        )

    def describe(self) -> str:
        shapes = ", ".join(
            str(shape) if len(self.shapes) == 1 else f"{shape}:{shape.weight:g}" for shape in self.shapes
        )
        return f"{self.arrivals}, {shapes} tokens, {self.num_prompts} requests"

    @property
    def is_random(self) -> bool:
        lengths = (length for shape in self.shapes for length in (shape.input_len, shape.output_len))
        return self.arrivals.is_random or len(self.shapes) > 1 or any(length.low != length.high for length in lengths)

    def redrawn(self, number: int) -> Workload:
        return replace(self, seed=self.seed + number)


def drawn_think_times(arrivals: Arrivals, count: int, seed: int) -> Reals | None:
    """Think times after each of `count` requests or sessions of a closed loop."""
    if not isinstance(arrivals, ClosedLoop) or arrivals.think_time is None:
        return None
    return arrivals.think_time.draw(np.random.default_rng([seed, 2]), count)

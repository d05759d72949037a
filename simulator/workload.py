"""What is asked of a server: request lengths and when requests are sent.

A `Workload` describes one level of load. The load generator sends it to a live server and the simulator plays it in
simulated time; both draw the same lengths and arrival times from the same seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt


class Load(Protocol):
    """What the simulator asks of any load."""

    @property
    def num_prompts(self) -> int:
        """Number of requests."""

    @property
    def concurrency(self) -> int | None:
        """Clients of a closed loop; None where requests arrive on their own."""

    def lengths(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Prompt and output tokens of every request, in the order of sending."""

    def arrival_times(self) -> npt.NDArray[np.float64] | None:
        """Seconds from the start at which each request is sent, not decreasing; None in a closed loop."""


@dataclass(frozen=True)
class Length:
    """A number of tokens, uniform on the integers from `low` to `high`, both included; `low == high` is fixed."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"a length must have 1 <= low <= high, got {self.low} to {self.high}")

    @classmethod
    def fixed(cls, tokens: int) -> Length:
        return cls(tokens, tokens)

    @classmethod
    def jittered(cls, tokens: int, range_ratio: float) -> Length:
        """Uniform on [tokens x (1 - ratio), tokens x (1 + ratio)], as vLLM bench's ``--random-range-ratio``."""
        if not 0 <= range_ratio < 1:
            raise ValueError(f"range ratio must be in [0, 1), got {range_ratio}")
        return cls(max(1, math.floor(tokens * (1 - range_ratio))), math.ceil(tokens * (1 + range_ratio)))

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Shape:
    """A kind of request: prompt and output length in tokens, and its share of the requests (any positive weight)."""

    input_len: Length
    output_len: Length
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise ValueError(f"a shape's weight must be positive, got {self.weight}")

    def __str__(self) -> str:
        return f"{self.input_len}/{self.output_len}"


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` clients; each sends its next request as soon as its last one has ended."""

    concurrency: int
    kind: Literal["closed"] = "closed"

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")

    def __str__(self) -> str:
        return f"C={self.concurrency}"


@dataclass(frozen=True)
class OpenLoop:
    """Requests arrive at `request_rate` per second, whether or not earlier ones have ended.

    Gaps between arrivals are gamma distributed with shape `burstiness`, as in vLLM bench: 1 is Poisson, below 1 is
    burstier, infinity is evenly spaced. An infinite rate sends everything at once.
    """

    request_rate: float
    burstiness: float = 1.0
    kind: Literal["open"] = "open"

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ValueError(f"request rate must be positive, got {self.request_rate}")
        if not self.burstiness > 0:
            raise ValueError(f"burstiness must be positive, got {self.burstiness}")

    def __str__(self) -> str:
        return f"{self.request_rate:g}/s"


@dataclass(frozen=True)
class Workload:
    """One level of load: how many requests, of which shapes, arriving how."""

    arrivals: ClosedLoop | OpenLoop
    shapes: tuple[Shape, ...]
    num_prompts: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts must be at least 1, got {self.num_prompts}")
        if not self.shapes:
            raise ValueError("a workload needs at least one shape")

    @property
    def concurrency(self) -> int | None:
        return self.arrivals.concurrency if isinstance(self.arrivals, ClosedLoop) else None

    def lengths(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Prompt and output tokens of every request, in the order of sending; the same for the same seed."""
        rng = np.random.default_rng([self.seed, 0])
        weights = np.array([shape.weight for shape in self.shapes])
        kinds = rng.choice(len(self.shapes), size=self.num_prompts, p=weights / weights.sum())
        inputs = np.empty(self.num_prompts, dtype=np.int64)
        outputs = np.empty(self.num_prompts, dtype=np.int64)
        for kind, shape in enumerate(self.shapes):
            chosen = kinds == kind
            count = int(chosen.sum())
            inputs[chosen] = rng.integers(shape.input_len.low, shape.input_len.high, size=count, endpoint=True)
            outputs[chosen] = rng.integers(shape.output_len.low, shape.output_len.high, size=count, endpoint=True)
        return inputs, outputs

    def arrival_times(self) -> npt.NDArray[np.float64] | None:
        """Seconds from the start at which each request is sent; None in a closed loop, where answers decide it.

        As in vLLM bench, an open loop is rescaled so that the last arrival lands at ``num_prompts / request_rate``.
        """
        if isinstance(self.arrivals, ClosedLoop):
            return None
        rate, burstiness = self.arrivals.request_rate, self.arrivals.burstiness
        if math.isinf(rate):
            return np.zeros(self.num_prompts)
        if math.isinf(burstiness):
            return np.arange(1, self.num_prompts + 1) / rate
        rng = np.random.default_rng([self.seed, 1])
        times = np.cumsum(rng.gamma(burstiness, 1.0 / burstiness, size=self.num_prompts))
        return np.asarray(times * (self.num_prompts / rate / times[-1]))

    def describe(self) -> str:
        shapes = ", ".join(
            str(shape) if len(self.shapes) == 1 else f"{shape}:{shape.weight:g}" for shape in self.shapes
        )
        return f"{self.arrivals}, {shapes} tokens, {self.num_prompts} requests"

"""Recorded traffic: when requests arrived and how long they were, to be played again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from simulator.loads.arrivals import Arrivals, ClosedLoop, OpenLoop
from simulator.loads.bounds import MOST_SECONDS, MOST_TOKENS
from simulator.loads.workload import Integers, Load, Reals, drawn_think_times

MOST_SPEED = 1e9
PLACE_BITS = 24  # a KV block's content is the hash id at its end and, in so many bits, its place


class TraceError(ValueError):
    """A file that is not a trace of a known format, or a trace that cannot be played so. The message is one line."""


@dataclass(frozen=True, eq=False)
class HashIds:
    """Which blocks of their prompts requests share: equal ids mean equal tokens up to the block's end.

    Attributes
        ids: of all requests, one after the other
        ends: how many of them belong to the requests up to each one
        block_size: tokens of a block; Mooncake's have 512
    """

    ids: Integers
    ends: Integers
    block_size: int

    def of(self, number: int) -> Integers:
        return self.ids[self.ends[number - 1] if number else 0 : self.ends[number]]

    def prefix(self, number: int, prompt_tokens: int, block_size: int) -> tuple[int, ...]:
        """Contents of a prompt's full KV blocks of `block_size` tokens: that of the hashed block which holds its end.

        What lies beyond the prompt's last id is like no other request's.
        """
        known = self.of(number)
        blocks = min(prompt_tokens, len(known) * self.block_size) // block_size
        places = np.arange(blocks)
        holders = known[((places + 1) * block_size - 1) // self.block_size]
        return tuple((holders << PLACE_BITS | places).tolist())

    def chosen(self, order: Integers) -> HashIds:
        """Those of the requests `order`, in this order."""
        starts = np.concatenate([[0], self.ends[:-1]])[order]
        counts = self.ends[order] - starts
        ends = np.cumsum(counts)
        places = np.repeat(starts - (ends - counts), counts)
        places += np.arange(len(places))
        return HashIds(self.ids[places], ends, self.block_size)


@dataclass(frozen=True, eq=False)
class Trace(Load):
    """Requests in the order of arrival, as recorded, or sent otherwise.

    Attributes
        name: what a report calls it
        times: seconds from the first arrival, not decreasing; None where they were not recorded
        prompt_tokens, generated_tokens: lengths, at least 1
        hash_ids: what prompts share; None where that was not recorded
        arrivals: how the requests are sent instead of at `times`
        seed: of such arrivals
        max_concurrency: most requests in flight, others wait at the client; None for no limit
    """

    name: str
    times: Reals | None
    prompt_tokens: Integers
    generated_tokens: Integers
    hash_ids: HashIds | None = field(default=None, repr=False)
    arrivals: Arrivals | None = None
    seed: int = 0
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        count = len(self.prompt_tokens)
        if not count or count != len(self.generated_tokens):
            raise TraceError("a trace needs at least one request, and two lengths for each")
        if self.times is not None and len(self.times) != count:
            raise TraceError("a trace needs a time for each request")
        if self.times is not None and not ((self.times >= 0) & (self.times <= MOST_SECONDS)).all():
            raise TraceError(f"a trace's arrivals must be numbers of seconds from 0 to {MOST_SECONDS:g}")
        if self.times is not None and np.any(np.diff(self.times) < 0):
            raise TraceError("a trace's arrivals must be in order of time")
        if self.prompt_tokens.min() < 1 or self.generated_tokens.min() < 1:
            raise TraceError("a trace's requests must have at least one prompt and one generated token")
        if max(self.prompt_tokens.max(), self.generated_tokens.max()) > MOST_TOKENS:
            raise TraceError(f"a trace's requests may have up to {MOST_TOKENS:,} prompt and as many generated tokens")

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_tokens)

    @property
    def concurrency(self) -> int | None:
        return self.arrivals.concurrency if isinstance(self.arrivals, ClosedLoop) else None

    def lengths(self) -> tuple[Integers, Integers]:
        return self.prompt_tokens, self.generated_tokens

    def arrival_times(self) -> Reals | None:
        if self.arrivals is None:
            return self._recorded()
        return self.arrivals.times(self.num_prompts, self.seed) if isinstance(self.arrivals, OpenLoop) else None

    def think_times(self) -> Reals | None:
        return None if self.arrivals is None else drawn_think_times(self.arrivals, self.num_prompts, self.seed)

    def prefix(self, number: int, block_size: int) -> tuple[int, ...]:
        if self.hash_ids is None:
            return ()
        return self.hash_ids.prefix(number, int(self.prompt_tokens[number]), block_size)

    @property
    def label(self) -> str:
        return self.arrivals.label if self.arrivals else f"{self.request_rate:.3g}/s"

    def describe(self) -> str:
        most = f" max {self.max_concurrency}" if self.max_concurrency and not self.arrivals else ""
        sent = f"{self.arrivals or self.label}{most}"
        return f"{sent}, {self.name}, {self.lengths_label} tokens, {self.num_prompts} requests"

    @property
    def is_random(self) -> bool:
        return self.arrivals is not None and self.arrivals.is_random

    def redrawn(self, number: int) -> Trace:
        return replace(self, seed=self.seed + number)

    def faster(self, factor: float) -> Trace:
        """The same requests at `factor` times the rate."""
        if not 1 / MOST_SPEED <= factor <= MOST_SPEED:
            raise TraceError(f"a trace's speed must be positive, {1 / MOST_SPEED:g} to {MOST_SPEED:g}; got {factor}")
        return replace(self, times=self._recorded() / factor)

    def at_rate(self, request_rate: float) -> Trace:
        """The same requests, the gaps between them stretched to a mean of `request_rate` a second."""
        span = float(self._recorded()[-1])
        if not 0 < request_rate < np.inf or not span:
            raise TraceError(f"{self.name} cannot be stretched to {request_rate:g} requests a second")
        return self.faster(request_rate / (self.num_prompts / span))

    def sent_by(self, arrivals: Arrivals, seed: int = 0) -> Trace:
        """The same requests in the same order, sent by `arrivals` instead of at their times."""
        most = arrivals.max_concurrency if isinstance(arrivals, OpenLoop) else None
        return replace(self, arrivals=arrivals, seed=seed, max_concurrency=most)

    def first(self, count: int | None = None, seconds: float | None = None) -> Trace:
        """Its first `count` requests, or those of the first `seconds`."""
        kept = self.num_prompts if count is None else min(count, self.num_prompts)
        if seconds is not None:
            kept = min(kept, int(np.searchsorted(self._recorded(), seconds)))
        if kept == self.num_prompts:
            return self
        if kept < 1:
            raise TraceError(f"nothing of {self.name} is left to be played")
        return replace(
            self,
            times=None if self.times is None else self.times[:kept],
            prompt_tokens=self.prompt_tokens[:kept],
            generated_tokens=self.generated_tokens[:kept],
            hash_ids=None if self.hash_ids is None else self.hash_ids.chosen(np.arange(kept)),
        )

    def _recorded(self) -> Reals:
        if self.times is None:
            raise TraceError(f"{self.name} does not say when requests arrived: give concurrency or request_rate")
        return self.times

    def _content(self) -> tuple[object, ...]:
        hashed = self.hash_ids
        arrays = [self.times, self.prompt_tokens, self.generated_tokens]
        arrays += [hashed.ids, hashed.ends] if hashed else []
        return (
            self.name,
            self.arrivals,
            self.seed,
            self.max_concurrency,
            hashed and hashed.block_size,
            *(None if values is None else values.tobytes() for values in arrays),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash((self.name, self.num_prompts, self.arrivals, self.seed))

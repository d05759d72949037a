"""Who gets a request: the routers that stand before a fleet, and the balancer inside vLLM's data parallelism.

Routers see each replica as it is at this moment; real ones scrape metrics that are some seconds old.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from simulator.engine.request import Request
from simulator.yaml_file import suggestion

ROUTERS = ("round-robin", "random", "least-requests", "least-kv", "prefix-aware", "session-sticky")
PUBLISH_INTERVAL = 0.1  # s between two counts that vLLM's coordinator tells its API server
PRESSURE_FROM, PRESSURE_FACTOR = 0.5, 6.0  # KV use above which waiting requests count more, and by how much
LOAD_WEIGHT = 1.0  # of a replica's load against the share of the prompt that it has cached

DISAGGREGATED = ("disaggregat", "prefill-decode", "kv-transfer", "p/d", "1p1d")


class RouterError(ValueError):
    """A router that does not exist or is not modelled. The message is one line."""


class Replica(Protocol):
    """What a router knows of a replica.

    Attributes
        in_flight: requests that were sent to it and have not ended
        kv_tokens: tokens of its KV pool that are held, and of prompts that it has yet to begin
    """

    @property
    def in_flight(self) -> int: ...

    @property
    def kv_tokens(self) -> int: ...

    def cached_tokens(self, request: Request) -> int:
        """Tokens of the request's longest prefix that its cache holds."""


class Router(Protocol):
    """Chooses a replica, by its number, for every request in turn."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int: ...


def make_router(name: str, sessions: Sequence[int] | None = None, seed: int = 0) -> Router:
    """The router of that name. `sessions` tells the session of every request by its number; without it each stands
    alone. Raises `RouterError`."""
    name = name.strip().lower().replace("_", "-")
    if name == "pd" or any(word in name for word in DISAGGREGATED):
        raise RouterError("prefill/decode disaggregation is not modelled: every replica computes prompts and decodes")
    makers: dict[str, Callable[[], Router]] = {
        "round-robin": RoundRobin,
        "random": lambda: Random(seed),
        "least-requests": LeastRequests,
        "least-kv": LeastKV,
        "prefix-aware": PrefixAware,
        "session-sticky": lambda: SessionSticky(sessions),
    }
    if name not in makers:
        raise RouterError(f"no router is called {name!r}; {suggestion(name, ROUTERS)}")
    return makers[name]()


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        chosen, self._next = self._next, (self._next + 1) % len(replicas)
        return chosen


class Random:
    """Any, each as likely as the others."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        return int(self._random.integers(len(replicas)))


class LeastRequests:
    """The one with the fewest requests in flight; the first of several."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        return min(range(len(replicas)), key=lambda number: replicas[number].in_flight)


class LeastKV:
    """The one that holds the fewest tokens of KV cache; of several the one with the fewest requests."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        return min(range(len(replicas)), key=lambda number: (replicas[number].kv_tokens, replicas[number].in_flight))


class PrefixAware:
    """The best of cached prefix and load, as vLLM production-stack's load-aware routing scores a replica::

    cached tokens / prompt tokens - LOAD_WEIGHT * (requests in flight - mean) / max(1, mean)
    """

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        mean = sum(replica.in_flight for replica in replicas) / len(replicas)

        def score(number: int) -> float:
            replica = replicas[number]
            cached = replica.cached_tokens(request) / request.prompt_tokens
            return cached - LOAD_WEIGHT * (replica.in_flight - mean) / max(1.0, mean)

        return max(range(len(replicas)), key=score)


class SessionSticky:
    """All turns of a session to one replica; a new session to the one with the fewest requests."""

    def __init__(self, sessions: Sequence[int] | None = None) -> None:
        self._sessions = sessions
        self._homes: dict[int, int] = {}
        self._new = LeastRequests()

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        if self._sessions is None:
            return self._new.choose(request, replicas)
        session = self._sessions[request.request_id]
        if session not in self._homes:
            self._homes[session] = self._new.choose(request, replicas)
        return self._homes[session]


class DataParallelBalancer:
    """vLLM's own balancer under ``--data-parallel-size`` (`v1/engine/core_client.py`, DPLBAsyncMPClient, 0.32).

    An engine's score is the larger of its requests in flight and of those that it told the coordinator to run and to
    have waiting, and more where requests wait for KV cache. What engines tell is up to `PUBLISH_INTERVAL` old.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._told_at = -PUBLISH_INTERVAL
        self._waiting: list[int] = []
        self._running: list[int] = []
        self._usage: list[float] = []
        self._start = 0

    def choose(self, engines: Sequence[ParallelEngine]) -> int:
        if self._now() >= self._told_at + PUBLISH_INTERVAL:
            self._told_at = self._now()
            self._waiting = [engine.waiting for engine in engines]
            self._running = [engine.running for engine in engines]
            self._usage = [engine.kv_usage for engine in engines]
        order = [(self._start + step) % len(engines) for step in range(len(engines))]
        chosen = min(order, key=lambda number: self._score(number, engines[number].in_flight))
        self._waiting[chosen] += 1
        self._start = (self._start + 1) % len(engines)
        return chosen

    def _score(self, number: int, in_flight: int) -> float:
        waiting = self._waiting[number]
        pressure = PRESSURE_FACTOR * max(0.0, self._usage[number] - PRESSURE_FROM)
        return max(in_flight, waiting + self._running[number]) + waiting * pressure


class ParallelEngine(Protocol):
    """What vLLM's balancer knows of one of its engines; `kv_usage` is a share of the pool."""

    @property
    def in_flight(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def kv_usage(self) -> float: ...

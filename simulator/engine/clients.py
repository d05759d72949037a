"""Clients as SimPy processes: they send a load's requests, and wait, and think, as the load says."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import simpy

from simulator.engine.request import Request
from simulator.engine.step_time import HostTime
from simulator.loads.workload import Load

Process = Generator[simpy.Event, Any, None]

AT_A_TIME = 10_000  # requests of a long load that exist as Python numbers


class Server(Protocol):
    """Who takes requests: an engine, or whatever stands before several of them."""

    def submit(self, request: Request) -> simpy.Event:
        """Hand over a request; the event happens at its last token."""


class ApiServer:
    """What stands between clients and engine: takes requests in one after the other, passes answers on."""

    def __init__(self, host_time: HostTime) -> None:
        self._response = host_time.per_request
        self._per_prompt_token = host_time.per_prompt_token
        self._intake = host_time.per_request_serial
        self._free = 0.0  # s, when it has taken in all that was sent

    def take_in(self, sent: float) -> float:
        """When the engine gets a request that is sent at `sent`, no earlier than the one before."""
        self._free = max(self._free, sent) + self._intake
        return self._free

    def response(self, request: Request) -> float:
        """Seconds from the engine's last token of a request to its client."""
        return self._response + self._per_prompt_token * request.late_tokens


class Clients:
    """The clients of one load. They reach `server` by way of `api_server`.

    `block_size` is that of the KV blocks whose content is to be known, None where nobody asks for it.
    """

    def __init__(
        self, env: simpy.Environment, load: Load, server: Server, api_server: ApiServer, block_size: int | None = None
    ) -> None:
        self._env, self._server, self._api_server = env, server, api_server
        thinks = load.think_times()
        self._thinks = None if thinks is None else thinks.tolist()
        requests = _requests(load, block_size)
        turns, times = load.conversations(), load.arrival_times()
        if turns is not None:
            self._start_sessions(load, (list(islice(requests, number)) for number in turns), len(turns))
        elif times is None:
            for _ in range(min(load.concurrency or 1, load.num_prompts)):
                env.process(self._client(requests))
        elif load.max_concurrency is None:
            env.process(self._source(requests, times.tolist()))
        else:
            env.process(self._capped_source(requests, times.tolist(), load.max_concurrency))

    def _start_sessions(self, load: Load, sessions: Iterator[list[Request]], count: int) -> None:
        times = load.arrival_times()
        if times is not None:
            self._env.process(self._session_source(sessions, times.tolist()))
            return
        for _ in range(min(load.concurrency or 1, count)):
            self._env.process(self._user(sessions))

    def _client(self, requests: Iterator[Request]) -> Process:
        """A client of a closed loop: sends its next request when it has its last answer and has thought."""
        env, take_in, submit, thinks = self._env, self._api_server.take_in, self._server.submit, self._thinks
        response = self._api_server.response
        for request in requests:
            request.sent = env.now
            wait = take_in(env.now) - env.now
            if wait > 0:
                yield env.timeout(wait)
            yield submit(request)
            wait = response(request)
            if wait > 0:
                yield env.timeout(wait)
            if thinks is not None and thinks[request.request_id]:
                yield env.timeout(thinks[request.request_id])

    def _user(self, sessions: Iterator[list[Request]]) -> Process:
        """A user of a closed loop: has one session after the other."""
        for session in sessions:
            yield from self._client(iter(session))

    def _source(self, requests: Iterator[Request], times: Sequence[float]) -> Process:
        """Sends requests at their times, whether or not earlier ones have ended."""
        env, take_in, submit = self._env, self._api_server.take_in, self._server.submit
        for request, sent in zip(requests, times, strict=True):
            request.sent = sent
            wait = take_in(sent) - env.now
            if wait > 0:
                yield env.timeout(wait)
            submit(request)

    def _capped_source(self, requests: Iterator[Request], times: Sequence[float], most: int) -> Process:
        """Sends requests at their times, or later, when fewer than `most` are in flight."""
        slots = simpy.Resource(self._env, most)
        for request, due in zip(requests, times, strict=True):
            if due > self._env.now:
                yield self._env.timeout(due - self._env.now)
            slot = slots.request()
            yield slot
            self._env.process(self._holding(slots, slot, request))

    def _holding(self, slots: simpy.Resource, slot: simpy.resources.resource.Request, request: Request) -> Process:
        """Send a request and free its slot when the answer has come."""
        yield from self._client(iter((request,)))
        slots.release(slot)

    def _session_source(self, sessions: Iterator[list[Request]], times: Sequence[float]) -> Process:
        """Begins sessions at their times."""
        for session, start in zip(sessions, times, strict=True):
            if start > self._env.now:
                yield self._env.timeout(start - self._env.now)
            self._env.process(self._client(iter(session)))


def _requests(load: Load, block_size: int | None) -> Iterator[Request]:
    """Made as they are sent, so that a long load takes little memory."""
    prompts, outputs = load.lengths()
    for start in range(0, len(prompts), AT_A_TIME):
        part = slice(start, start + AT_A_TIME)
        pairs = zip(prompts[part].tolist(), outputs[part].tolist(), strict=True)
        for number, (prompt, output) in enumerate(pairs, start):
            prefix = load.prefix(number, block_size) if block_size else ()
            yield Request(number, prompt, output, prefix=prefix)

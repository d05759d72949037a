"""The simulator's engine on a clock: requests come in when they come, tokens go out when they are due.

The engine's own time is exact and never drifts: a step begins when the one before has ended, however late this machine
hears of it. So a delay of the machine shifts single tokens and leaves those after them in their places.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from capsim.emulator.clock import Clock
from capsim.emulator.engine_metrics import EngineMetrics
from capsim.emulator.live_scheduler import LiveScheduler
from simulator.engine.clients import ApiServer
from simulator.engine.engine_core import EngineCore
from simulator.engine.request import Request
from simulator.engine.step_time import HostTime, StepTime

COARSE = 1e-3  # s; the event loop's timers may be as late as this, so the rest is waited for turn by turn


class Receiver(Protocol):
    """Who gets an answer."""

    def receive(self, tokens: int, ended: bool) -> None:
        """The answer has so many tokens now, and has ended or not."""


@dataclass(eq=False)
class Ticket:
    """A request in the engine and who waits for it. Times are simulated seconds.

    Attributes
        promised: tokens whose time of delivery is known
        delivered: tokens that were handed over
        first_due, last_due: when the first token was due, and the latest that was handed over
        left: whether the client has gone
    """

    request: Request
    receiver: Receiver
    promised: int = 0
    delivered: int = 0
    first_due: float = math.nan
    last_due: float = math.nan
    left: bool = False


@dataclass(frozen=True)
class _Delivery:
    """Tickets whose answers grow at `due`, a simulated moment, each with its number of tokens by then."""

    due: float
    growth: Sequence[tuple[Ticket, int]]


class LiveEngine:
    """One engine. `submit` hands it a request; tokens come to the receiver when a client should see them.

    They come `HostTime.per_request` after the engine has them, and those of a step with prompt tokens later by
    `HostTime.per_prompt_token`. `HostTime.gap_noise` is not added: the way to a real client has noise of its own.
    """

    def __init__(
        self,
        scheduler: LiveScheduler,
        step_time: StepTime,
        host_time: HostTime,
        clock: Clock,
        metrics: EngineMetrics,
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self._metrics = metrics
        self._host_time = host_time
        self._api_server = ApiServer(host_time)
        self._core = EngineCore(scheduler, step_time, metrics.recorder, single_steps=True)
        self._arrivals: deque[Ticket] = deque()  # not in the scheduler yet, in the order of their arrival
        self._gone: list[Ticket] = []  # to be aborted before the next step
        self._tickets: dict[Request, Ticket] = {}  # in the scheduler
        self._arrived = asyncio.Event()
        self._deliveries: deque[_Delivery] = deque()  # in the order of their times
        self._last_due = -math.inf
        self._promised = asyncio.Event()
        self._last_arrival = -math.inf
        metrics.watch(scheduler, lambda: len(self._arrivals))

    def submit(self, request: Request, receiver: Receiver) -> Ticket:
        """Hand over a request that reached this machine at `request.sent`. Raises `CannotFit`."""
        self.scheduler.check(request)
        taken_in = self._api_server.take_in(request.sent)
        # no two arrive at once: vLLM's priority policy would let equal ones preempt each other for ever
        request.arrived = self._last_arrival = max(taken_in, math.nextafter(self._last_arrival, math.inf))
        request.arrival_time = request.arrived
        ticket = Ticket(request, receiver)
        self._arrivals.append(ticket)
        self._arrived.set()
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """The client has left: free what the request holds. Nothing happens where its answer is complete."""
        if ticket.left or ticket.delivered >= ticket.request.output_tokens:
            return
        ticket.left = True
        self._metrics.record_abort(ticket.request)
        if ticket in self._arrivals:
            self._arrivals.remove(ticket)
        else:
            self._gone.append(ticket)
            self._arrived.set()

    @property
    def requests(self) -> int:
        """Requests that have come and whose clients wait."""
        return len(self._arrivals) + len(self._tickets)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._serve())
            tasks.create_task(self._deliver())

    # --- the engine's loop

    async def _serve(self) -> None:
        core = self._core
        while True:
            self._abort_gone()
            if core.is_idle:
                await self._wait_for_arrival()
                if not self._arrivals:
                    continue  # its client left before it arrived
                core.now = max(core.now, self._arrivals[0].request.arrived)
            self._take_in()
            core.advance(-math.inf)  # one pass of the loop
            self._promise()
            await self._sleep_until(core.now + core.pause)

    def _abort_gone(self) -> None:
        for ticket in self._gone:
            self.scheduler.abort(ticket.request)
            self._tickets.pop(ticket.request, None)
        self._gone.clear()

    async def _wait_for_arrival(self) -> None:
        while not self._arrivals:
            self._arrived.clear()
            await self._arrived.wait()
            self._abort_gone()
        await self._sleep_until(self._arrivals[0].request.arrived)

    def _take_in(self) -> None:
        """Hand the engine all that has arrived by now."""
        now = self._core.now + self._core.pause
        while self._arrivals and self._arrivals[0].request.arrived <= now:
            ticket = self._arrivals.popleft()
            self._tickets[ticket.request] = ticket
            self._core.inbox.append(ticket.request)

    def _promise(self) -> None:
        """Note when the tokens of the step that has just been processed reach their clients."""
        recorder, host_time = self._metrics.recorder, self._host_time
        due = self._core.now + host_time.per_request + host_time.per_prompt_token * recorder.take_prompt_tokens()
        growth = []
        for request in recorder.begun():
            ticket = self._tickets.get(request)
            if ticket is None:
                continue
            tokens = request.output_tokens if request.finished else self.scheduler.delivered(request)
            if request.finished:
                del self._tickets[request]
            if tokens > ticket.promised:
                ticket.promised = tokens
                growth.append((ticket, tokens))
        if growth:
            self._last_due = max(due, self._last_due)  # no token overtakes one before it
            self._deliveries.append(_Delivery(self._last_due, growth))
            self._promised.set()

    async def _sleep_until(self, moment: float) -> None:
        await asyncio.sleep(max(self.clock.left(moment), 0.0))

    # --- tokens on their way out

    async def _deliver(self) -> None:
        while True:
            await self._wait_for_delivery()
            delivery = self._deliveries.popleft()
            for ticket, tokens in delivery.growth:
                if not ticket.left:
                    ticket.receiver.receive(tokens, tokens >= ticket.request.output_tokens)
            late = -self.clock.left(delivery.due)
            for ticket, tokens in delivery.growth:
                if not ticket.left:
                    self._record(ticket, tokens, delivery.due)
            self._metrics.record_delivery(late)

    async def _wait_for_delivery(self) -> None:
        """Return when the earliest delivery is due, to some microseconds."""
        loop = asyncio.get_running_loop()
        while True:
            self._promised.clear()
            left = self.clock.left(self._deliveries[0].due) if self._deliveries else math.inf
            if left <= 0:
                return
            if left <= COARSE:
                await asyncio.sleep(0)
                continue
            timer = loop.call_later(left - COARSE, self._promised.set) if left < math.inf else None
            await self._promised.wait()
            if timer is not None:
                timer.cancel()

    def _record(self, ticket: Ticket, tokens: int, due: float) -> None:
        """Tell the metrics of tokens that were handed over."""
        request, speed = ticket.request, self.clock.speed
        if not ticket.delivered:
            ticket.first_due = due
            self._metrics.record_first(request, (due - request.sent) / speed)
        else:
            self._metrics.record_gap((due - ticket.last_due) / speed)
        self._metrics.record_tokens(tokens - ticket.delivered)
        ticket.delivered, ticket.last_due = tokens, due
        if tokens >= request.output_tokens:
            self._metrics.record_end(request, ticket.first_due, due, speed)

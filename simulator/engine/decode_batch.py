"""The requests that decode steadily: one token each in every step until they end.

Between two scheduling events such requests all do the same, so they are counted together instead of one by one: a clock
counts the steps, and what a request has computed follows from the clock when it is asked for. A step costs the same
whether four requests decode or four hundred.
"""

from __future__ import annotations

from heapq import heappop, heappush

from simulator.engine.request import Request


class DecodeBatch:
    """Steadily decoding requests.

    Attributes
        clock: steps so far
        size: requests in the batch
        kv_tokens: sum of the tokens that the requests have computed; what their next step reads
    """

    __slots__ = ("_block_size", "_due", "_due_clocks", "_phase", "clock", "kv_tokens", "size")

    def __init__(self, block_size: int) -> None:
        self.clock = 0
        self.size = 0
        self.kv_tokens = 0
        self._block_size = block_size
        # requests by (computed - clock) modulo the block size: those of one phase need a new block in the same step
        self._phase: list[dict[Request, None]] = [{} for _ in range(block_size)]
        self._due: dict[int, list[Request]] = {}
        self._due_clocks: list[int] = []

    def join(self, request: Request, last_step: int) -> None:
        """Add a request whose `computed` is current; `last_step` is the clock at which its last token is sampled."""
        request.decoding = True
        request.joined = self.clock
        request.last_step = last_step
        self.size += 1
        self.kv_tokens += request.computed
        self._phase[(request.computed - self.clock) % self._block_size][request] = None
        if last_step in self._due:
            self._due[last_step].append(request)
        else:
            self._due[last_step] = [request]
            heappush(self._due_clocks, last_step)

    def leave(self, request: Request) -> None:
        """Take a request out, its `computed` and `blocks` brought up to date."""
        request.computed += self.clock - request.joined
        request.blocks = -(-request.computed // self._block_size)
        request.decoding = False
        self.size -= 1
        self.kv_tokens -= request.computed
        del self._phase[(request.computed - self.clock) % self._block_size][request]
        if (due := self._due.get(request.last_step)) is not None:
            due.remove(request)

    def needs_block(self, request: Request) -> bool:
        """Whether the request's next token opens a new block."""
        return (request.computed + self.clock - request.joined) % self._block_size == 0

    def blocks_needed(self, steps: int = 1) -> int:
        """Blocks that the whole batch takes in its next `steps` steps."""
        if steps == 1:
            return len(self._phase[-self.clock % self._block_size])
        rounds, rest = divmod(steps, self._block_size)
        needed = rounds * self.size
        for step in range(rest):
            needed += len(self._phase[(-self.clock - step) % self._block_size])
        return needed

    def opening_block(self, step: int) -> list[Request]:
        """The requests that take a new block in the `step`-th step from now, 0 for the next, in running order."""
        opening = self._phase[(-self.clock - step) % self._block_size]
        return sorted(opening, key=lambda request: request.position)

    def advance(self, steps: int = 1) -> None:
        """Give every request `steps` tokens."""
        self.clock += steps
        self.kv_tokens += steps * self.size

    def pop_due(self) -> list[Request]:
        """The requests whose last token is sampled at this clock; they stay in the batch."""
        if self.steps_until_due() > 0:
            return []
        return self._due.pop(heappop(self._due_clocks))

    def steps_until_due(self) -> int:
        """Steps until some request samples its last token; a large number when the batch is empty."""
        while self._due_clocks and not self._due[self._due_clocks[0]]:
            del self._due[heappop(self._due_clocks)]
        return self._due_clocks[0] - self.clock if self._due_clocks else 1 << 60

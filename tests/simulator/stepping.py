"""A scheduler that is taken step by step by hand: small limits, blocks of 4 tokens, requests called A, B, C, ..."""

from __future__ import annotations

from conformance import Event, WatchedScheduler

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.request import Request
from simulator.engine.step import Step

FLAGS = EngineFlags(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=100,
    num_gpu_blocks=101,
    block_size=4,
    async_scheduling=False,
)
OLD, NEWER, NEWEST = "0.11.0", "0.27.1", "0.32.0"


class Engine(WatchedScheduler):
    """Our scheduler with `usable_blocks` KV blocks for requests and these flags changed."""

    def __init__(self, usable_blocks: int = 100, **flags: object) -> None:
        super().__init__(FLAGS.changed(num_gpu_blocks=usable_blocks + 1, **flags), list("ABCDEFGH"))
        self.planned: list[Step] = []  # steps in flight
        self._added = 0

    def ask(self, prompt: int, output: int = 5, **more: object) -> Request:
        """Add the next request."""
        request = Request(self._added, prompt, output, **more)
        self._added += 1
        self.add(request)
        return request

    def plan(self) -> Event:
        """Plan a step, without its outcome."""
        self.planned.append(self.schedule())
        return self.events[-1]

    def process(self) -> list[str]:
        """Take in the outcome of the oldest step; whose last token it brought."""
        return self._ids(self.update(self.planned.pop(0)))

    def step(self) -> Event:
        """One step of synchronous scheduling; what was planned."""
        event = self.plan()
        self.process()
        return event

    def tokens(self) -> dict[str, int]:
        """One step of synchronous scheduling; the tokens that it gave."""
        return self.step()["n"]

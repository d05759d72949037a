"""The KV cache: a pool of blocks, and what is remembered in them (`v1/core/block_pool.py`, `kv_cache_manager.py`).

Without prefix caching one block is as good as another, so `BlockCounter` only counts. `PrefixCache` knows every block:
which are free and in which order they will be taken, and which full blocks can be found again by their content.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol

from simulator.engine.decode_batch import DecodeBatch
from simulator.engine.request import Request


class KVCache(Protocol):
    """What the scheduler asks of a KV cache. Sizes are blocks unless they are called tokens."""

    ordered: bool  # whether it matters which request takes its blocks first

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken."""

    def find_prefix(self, request: Request, known_tokens: int) -> list[int]:
        """The blocks that hold the longest cached prefix of a request that has computed nothing."""

    def unreferenced(self, blocks: list[int]) -> int:
        """How many of these cached blocks nobody holds; they leave the free list when a request adopts them."""

    def adopt(self, request: Request, blocks: list[int]) -> None:
        """Let a request share cached blocks as its first ones."""

    def take(self, request: Request, blocks: int) -> None:
        """Give a request free blocks. The caller has made sure that there are enough."""

    def take_for_batch(self, batch: DecodeBatch, steps: int) -> None:
        """Give the decode batch the blocks of its next `steps` steps."""

    def store(self, request: Request, tokens: int) -> None:
        """Make the full blocks of a request's first `tokens` tokens findable."""

    def release(self, request: Request) -> None:
        """Take all blocks from a request."""


class BlockCounter:
    """A pool whose blocks are all alike."""

    ordered = False

    def __init__(self, blocks: int) -> None:
        self.free_blocks = blocks

    def find_prefix(self, request: Request, known_tokens: int) -> list[int]:
        return []

    def unreferenced(self, blocks: list[int]) -> int:
        return 0

    def adopt(self, request: Request, blocks: list[int]) -> None:
        request.blocks = 0

    def take(self, request: Request, blocks: int) -> None:
        request.blocks += blocks
        self.free_blocks -= blocks

    def take_for_batch(self, batch: DecodeBatch, steps: int) -> None:
        self.free_blocks -= batch.blocks_needed(steps)

    def store(self, request: Request, tokens: int) -> None:
        pass

    def release(self, request: Request) -> None:
        self.free_blocks += request.blocks
        request.blocks = 0


class PrefixCache:
    """A pool whose full blocks are found again by content.

    Free blocks are taken from the head of a list. Released ones whose content can be found go to its tail, the last
    block of a request first, so that long prefixes lose their ends first; the others go to the head. A block loses its
    content when it is taken.
    """

    ordered = True

    def __init__(self, blocks: int, block_size: int, plain_first: bool = True) -> None:
        """`plain_first` is whether released blocks without findable content are taken first; 0.11 does not."""
        self._block_size = block_size
        self._plain_first = plain_first
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks + 1))
        self._holders = [0] * (blocks + 1)
        self._content: list[Hashable] = [None] * (blocks + 1)
        self._found: dict[Hashable, dict[int, None]] = {}  # by content; the block stored first is returned
        self._blocks: dict[Request, list[int]] = {}
        self._stored: dict[Request, int] = {}  # full blocks of a request that are findable

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def find_prefix(self, request: Request, known_tokens: int) -> list[int]:
        """At least the last known token is always computed again."""
        blocks: list[int] = []
        for index in range((known_tokens - 1) // self._block_size):
            same = self._found.get(request.block_content(index))
            if same is None:
                break
            blocks.append(next(iter(same)))
        return blocks

    def unreferenced(self, blocks: list[int]) -> int:
        return sum(1 for block in blocks if not self._holders[block])

    def adopt(self, request: Request, blocks: list[int]) -> None:
        for block in blocks:
            if not self._holders[block]:
                del self._free[block]
            self._holders[block] += 1
        self._blocks[request] = list(blocks)
        self._stored[request] = len(blocks)
        request.blocks = len(blocks)

    def take(self, request: Request, blocks: int) -> None:
        held = self._blocks[request]
        for _ in range(blocks):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            self._holders[block] = 1
            held.append(block)
        request.blocks += blocks

    def _forget(self, block: int) -> None:
        content = self._content[block]
        if content is not None:
            same = self._found[content]
            del same[block]
            if not same:
                del self._found[content]
            self._content[block] = None

    def take_for_batch(self, batch: DecodeBatch, steps: int) -> None:
        for step in range(steps):
            for request in batch.opening_block(step):
                self.take(request, 1)

    def store(self, request: Request, tokens: int) -> None:
        held = self._blocks[request]
        full = tokens // self._block_size
        for index in range(self._stored[request], full):
            content = request.block_content(index)
            self._content[held[index]] = content
            self._found.setdefault(content, {})[held[index]] = None
        self._stored[request] = max(full, self._stored[request])

    def release(self, request: Request) -> None:
        for block in reversed(self._blocks.pop(request, [])):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._plain_first and self._content[block] is None:
                    self._free.move_to_end(block, last=False)
        self._stored.pop(request, None)
        request.blocks = 0

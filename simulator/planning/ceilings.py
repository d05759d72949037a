"""Static ceilings: how many requests an engine can hold at once, by slots and by KV pool; nothing is simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from simulator.engine.engine_flags import EngineFlags
from simulator.loads.sessions import Sessions
from simulator.loads.workload import Load, Workload

SAMPLE = 10_000  # requests that stand for a load whose lengths are random

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ceilings:
    """Requests that can run at once. A prefix that requests share is counted for each of them.

    Attributes
        slots: by ``--max-num-seqs``
        kv_full_length: whose KV cache fits the pool when all are at their full length; up to here nothing is preempted
        kv_average: whose KV cache fits the pool on average, at a steady mix of ages; above it the pool is full
        kv_tokens: size of the pool that requests can use, in tokens
        full_tokens: tokens that a request holds at its end, mean of those that run at once
        held_tokens: tokens that a request holds, mean over requests and their life
    """

    slots: int
    kv_full_length: int
    kv_average: int
    kv_tokens: int
    full_tokens: float
    held_tokens: float

    @property
    def running(self) -> int:
        """Requests that run at once on average when enough are there; more have to wait."""
        return min(self.slots, self.kv_average)

    @property
    def binding(self) -> str:
        """Which ceiling is met first: "slots" or "kv_pool"."""
        return "slots" if self.slots <= self.kv_full_length else "kv_pool"

    def sentence(self) -> str:
        """Which ceiling is met first, and what the other one would allow."""
        if self.binding == "slots":
            return f"--max-num-seqs {self.slots} is the ceiling; the KV pool holds {self.kv_full_length} at full length"
        return (
            f"the KV pool is the ceiling: {self.kv_full_length} requests at full length, {self.kv_average} on average; "
            f"--max-num-seqs {self.slots} promises more"
        )


def ceilings(load: Load, flags: EngineFlags) -> Ceilings:
    """The ceilings for requests of a load's lengths.

    Those that run at once are weighted by how long they stay, which their output tokens decide: a request of 1,000
    output tokens is ten times as likely to be there as one of 100. A request holds its prompt and the tokens generated
    before the current one, in whole blocks, and its last token never gets a place (vLLM's `kv_cache_manager.py`).
    """
    prompts, outputs = _sample(load).lengths()
    outputs = np.minimum(outputs, np.maximum(flags.max_model_len - prompts, 1))
    stays = int(outputs.sum())
    full_blocks = int((_blocks(prompts + outputs - 1, flags.block_size) * outputs).sum())
    held_blocks = int(_blocks_over_life(prompts, outputs, flags.block_size).sum())
    return Ceilings(
        slots=flags.max_num_seqs,
        kv_full_length=flags.usable_blocks * stays // full_blocks,
        kv_average=flags.usable_blocks * stays // held_blocks,
        kv_tokens=flags.usable_blocks * flags.block_size,
        full_tokens=float(((prompts + outputs - 1) * outputs).sum() / stays),
        held_tokens=float(((2 * prompts + outputs - 1) * outputs).sum() / (2 * stays)),
    )


def _sample(load: Load) -> Load:
    """As many requests of the same kind as it takes to know their mean."""
    if isinstance(load, Sessions):
        return replace(load, num_sessions=max(SAMPLE // 10, load.num_sessions))
    return replace(load, num_prompts=max(SAMPLE, load.num_prompts)) if isinstance(load, Workload) else load


def _blocks(tokens: Integers, block_size: int) -> Integers:
    return np.asarray(-(-tokens // block_size))


def _blocks_over_life(prompts: Integers, outputs: Integers, block_size: int) -> Integers:
    """Sum of each request's blocks over its steps, in which it holds `prompt`, ... `prompt + output - 1` tokens."""
    return _summed_blocks(prompts + outputs - 1, block_size) - _summed_blocks(prompts - 1, block_size)


def _summed_blocks(tokens: Integers, block_size: int) -> Integers:
    """Sum of the blocks for 1, 2, ... `tokens` tokens."""
    full, rest = np.divmod(tokens, block_size)
    return np.asarray(block_size * full * (full + 1) // 2 + rest * (full + 1))

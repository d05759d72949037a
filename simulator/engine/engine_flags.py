"""vLLM's engine flags: their names, their defaults by version and device, and what must hold between them.

Source: vLLM 0.32.0, 0.27.1 and 0.11.0, `config/scheduler.py`, `config/cache.py` and `engine/arg_utils.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

MOST = 2**31 - 1  # of a number: vLLM counts in 32 bits
MOST_CACHED_BLOCKS = 1 << 22  # each of which is simulated on its own; 67 million tokens in blocks of 16


class FlagError(ValueError):
    """A flag that does not exist, has a wrong value, or contradicts another one."""


@dataclass(frozen=True)
class EngineFlags:
    """What decides how the engine schedules, under vLLM's own names.

    `num_gpu_blocks` counts the whole pool of `block_size` tokens each, its null block included, as vLLM reports it.
    `watermark` is a share of the pool. Token counts are tokens.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 32768
    num_gpu_blocks: int = 8192
    block_size: int = 16
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = False
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = True
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    enforce_eager: bool = False
    engine_version: str = "0.32.0"

    def __post_init__(self) -> None:
        self._check_counts()
        if not 0 <= self.long_prefill_token_threshold <= self.max_model_len:
            raise FlagError(
                f"--long-prefill-token-threshold must be between 0 and --max-model-len ({self.max_model_len}), "
                f"got {self.long_prefill_token_threshold}"
            )
        if not 0 <= self.watermark < 1:
            raise FlagError(f"watermark must be in [0, 1), got {self.watermark}")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise FlagError(f"--scheduling-policy must be fcfs or priority, got {self.scheduling_policy}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise FlagError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must not be smaller than "
                f"--max-num-seqs ({self.max_num_seqs}); vLLM refuses it too"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise FlagError(
                f"without chunked prefill --max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least "
                f"--max-model-len ({self.max_model_len})"
            )

    def _check_counts(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
            value = getattr(self, name)
            if value < 1:
                raise FlagError(f"{_flag(name)} must be at least 1, got {value}")
            if value > MOST:
                raise FlagError(f"{_flag(name)} may be up to {MOST:,}, got {value}")
        blocks, most = self.num_gpu_blocks, MOST_CACHED_BLOCKS if self.enable_prefix_caching else MOST
        if blocks < 2:
            raise FlagError(f"the KV pool needs 2 blocks or more, one is vLLM's null block; got {blocks}")
        if blocks > most:
            caching = " with prefix caching" if self.enable_prefix_caching else ""
            raise FlagError(f"a KV pool{caching} may have up to {most:,} blocks, got {blocks}")

    @property
    def kv_tokens(self) -> int:
        """Size of the KV pool as vLLM's log states it: every block, the null block included."""
        return self.num_gpu_blocks * self.block_size

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: vLLM keeps block 0 as its null block."""
        return self.num_gpu_blocks - 1

    def changed(self, **changes: Any) -> EngineFlags:
        """These flags with some values changed. Raises `FlagError` for a name that is no flag."""
        known = {field.name for field in fields(self)}
        if unknown := sorted(set(changes) - known):
            raise FlagError(f"unknown engine flag {unknown[0]!r}; known are {', '.join(sorted(known))}")
        return replace(self, **changes)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

"""Which batches vLLM replays as a captured CUDA graph, and to which size it pads them.

Sources: vLLM 0.32.0 `config/vllm.py` (sizes) and `v1/cudagraph_dispatcher.py` (padding); 0.11.0
`config/__init__.py`. A batch of pure decode up to the largest captured size runs as one full graph, padded to the next
size; a larger one runs without a graph. Steps with prompt tokens are not padded here: their graphs are piecewise and
cover small batches only.
"""

from __future__ import annotations

from bisect import bisect_left

from simulator.engine.engine_flags import EngineFlags

LARGEST = 512  # sequences; 1024 on Blackwell data-centre GPUs since 0.32


def capture_sizes(flags: EngineFlags) -> list[int]:
    """Batch sizes captured at start-up, in order; none with ``--enforce-eager``."""
    if flags.enforce_eager:
        return []
    if flags.engine_version.startswith("0.11"):
        return [1, 2, 4, *range(8, min(2 * flags.max_num_seqs, LARGEST) + 1, 8)]
    largest = min(2 * flags.max_num_seqs, LARGEST, flags.max_num_batched_tokens)
    sizes = {size for size in (1, 2, 4) if size <= largest}
    sizes |= {*range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)}
    if flags.max_num_seqs <= largest:
        sizes.add(flags.max_num_seqs)
    return sorted(sizes)


class DecodeGraphs:
    """The captured graphs of one engine, as far as batches of pure decode use them."""

    def __init__(self, flags: EngineFlags) -> None:
        sizes = capture_sizes(flags)
        usable = [size for size in sizes if size <= max(flags.max_num_seqs, 1)]
        self._sizes = usable or sizes[:1]

    def padding(self, sequences: int) -> int | None:
        """Empty places in the graph that a batch of `sequences` runs as; None where no graph is large enough."""
        at = bisect_left(self._sizes, sequences)
        return self._sizes[at] - sequences if at < len(self._sizes) else None

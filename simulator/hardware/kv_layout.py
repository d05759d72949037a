"""How vLLM lays a model's KV cache out in blocks: from bytes to blocks, tokens and requests.

Source: vLLM 0.32.0, `v1/core/kv_cache_utils.py` and `v1/kv_cache_interface.py`. Layers of one kind, full attention or a
sliding window, are split into groups of equally many layers; each group has its own blocks, and all draw from one pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.hardware.model_config import KvLayers, ModelArchitecture, ModelError

_FP8_LATENT_BYTES = (
    656  # a token and layer of MLA as fp8_ds_mla: 512 values, their scales, and 64 rotary ones in 16 bit
)
_DTYPE_BYTES = {"float16": 2, "half": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class KvLayout:
    """The blocks of one GPU's KV cache.

    Attributes
        block_size: tokens a block
        block_bytes: bytes of a block, for all layers of a group
        full_groups: groups of layers with full attention
        window_groups: groups of layers with a sliding window of `window` tokens
    """

    block_size: int
    block_bytes: int
    full_groups: int = 1
    window_groups: int = 0
    window: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Of a request that is shorter than the window, all groups together."""
        return self.block_bytes * (self.full_groups + self.window_groups) // self.block_size

    def blocks(self, memory: int) -> int:
        """Blocks that `memory` bytes hold, vLLM's null block included."""
        return max(memory, 0) // self.block_bytes

    def blocks_per_request(self, tokens: int, tokens_in_flight: int) -> int:
        """Most blocks that a request of `tokens` holds at a time.

        `tokens_in_flight` are those scheduled and not yet settled, which a window cannot drop: max_num_batched_tokens,
        twice that with asynchronous scheduling.
        """
        needed = self.full_groups * _ceil(tokens, self.block_size)
        if self.window_groups:
            held = min(self.window - 1 + tokens_in_flight, tokens)
            needed += self.window_groups * (_ceil(held, self.block_size) + 1)
        return needed

    def pool(self, memory: int, max_model_len: int, tokens_in_flight: int) -> KvPool:
        """The pool that `memory` bytes make."""
        return KvPool(self, self.blocks(memory), max_model_len, tokens_in_flight)


@dataclass(frozen=True)
class KvPool:
    """A KV pool of `num_gpu_blocks`, vLLM's null block included. Lengths are tokens."""

    layout: KvLayout
    num_gpu_blocks: int
    max_model_len: int
    tokens_in_flight: int

    @property
    def max_concurrency(self) -> float:
        """Requests of max_model_len that fit at once, as vLLM's log states it."""
        return self.num_gpu_blocks / self.layout.blocks_per_request(self.max_model_len, self.tokens_in_flight)

    @property
    def tokens(self) -> int:
        """ "GPU KV cache size" of vLLM's log: what the pool holds if all requests have max_model_len."""
        return int(self.max_concurrency * self.max_model_len)

    def requests(self, tokens: int) -> int:
        """Requests of `tokens` each that can run at once; vLLM keeps one block, its null block."""
        return (self.num_gpu_blocks - 1) // self.layout.blocks_per_request(tokens, self.tokens_in_flight)

    @property
    def simulated_blocks(self) -> int:
        """The pool as one group of layers with full attention, which is what the simulator's scheduler knows."""
        one_group = self.layout.full_groups == 1 and not self.layout.window_groups
        return self.num_gpu_blocks if one_group else self.tokens // self.layout.block_size

    @property
    def longest_request(self) -> int:
        """Most tokens of a single request that the pool holds, at most max_model_len; the null block is kept."""
        fits, too_long = 0, self.max_model_len + 1
        while too_long - fits > 1:
            tokens = (fits + too_long) // 2
            if self.layout.blocks_per_request(tokens, self.tokens_in_flight) <= self.num_gpu_blocks - 1:
                fits = tokens
            else:
                too_long = tokens
        return fits


def kv_layout(
    model: ModelArchitecture, block_size: int = 16, kv_cache_dtype: str = "auto", tensor_parallel: int = 1
) -> KvLayout:
    """The layout of a model on each of `tensor_parallel` GPUs. Raises `ModelError`."""
    model.check_tensor_parallel(tensor_parallel)
    page = _layer_bytes_per_token(model, kv_cache_dtype, tensor_parallel) * block_size
    full = sum(kind.layers for kind in model.kv if kind.window is None)
    windowed = sum(kind.layers for kind in model.kv if kind.window is not None)
    window = next((kind.window for kind in model.kv if kind.window is not None), 0)
    size = _layers_per_group([layers for layers in (full, windowed) if layers])
    return KvLayout(block_size, page * size, _ceil(full, size), _ceil(windowed, size), window)


def plain_layout(kv_bytes_per_token: int, block_size: int) -> KvLayout:
    """The layout of a model of which no more than its bytes per token is known: all layers of full attention."""
    return KvLayout(block_size, kv_bytes_per_token * block_size)


def dtype_bytes(kv_cache_dtype: str, model_dtype_bytes: int = 2) -> int:
    """Bytes of a cached value. Raises `ModelError` for a type that is not modelled."""
    if kv_cache_dtype == "auto":
        return model_dtype_bytes
    if kv_cache_dtype not in _DTYPE_BYTES:
        raise ModelError(
            f"--kv-cache-dtype {kv_cache_dtype} is not modelled; known are auto, {', '.join(_DTYPE_BYTES)}"
            " and for MLA fp8_ds_mla"
        )
    return _DTYPE_BYTES[kv_cache_dtype]


def _layer_bytes_per_token(model: ModelArchitecture, kv_cache_dtype: str, tensor_parallel: int) -> int:
    kind: KvLayers = model.kv[0]  # the layers of a model differ in their window alone
    if kv_cache_dtype == "fp8_ds_mla" and kind.latent:
        return _FP8_LATENT_BYTES
    values = kind.heads_per_rank(tensor_parallel) * (kind.key_size + kind.value_size)
    return values * dtype_bytes(kv_cache_dtype, model.dtype_bytes)


def _layers_per_group(kinds: list[int]) -> int:
    """The smaller number of layers; the larger where the two are close, which wastes less."""
    smallest, largest = min(kinds), max(kinds)
    return largest if largest < 1.5 * smallest else smallest


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)

"""Where the memory of a GPU goes when vLLM serves a model, and the KV pool that other flags would leave.

The account has the lines of vLLM's own log. Source: vLLM 0.32.0, `v1/worker/gpu_worker.py` and `v1/worker/utils.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from simulator.engine.engine_flags import EngineFlags
from simulator.flags.vllm_flags import SYNONYMS, parse_real, parse_size
from simulator.hardware.gpus import GIB, Gpu
from simulator.hardware.kv_layout import KvLayout, KvPool, dtype_bytes, kv_layout, plain_layout
from simulator.hardware.model_config import ModelArchitecture

BUFFER = 150 << 20  # bytes that vLLM's advice on --kv-cache-memory leaves free
COUNTS_GRAPHS = (0, 21)  # the version from which on CUDA graphs are estimated before the KV pool is sized

# What cannot be computed from the architecture. Sources: published logs of vLLM 0.10 to 0.31 on one to four GPUs.
SAMPLER_BYTES = 36  # of each of max_num_seqs x vocabulary logits: nine copies in 32 bits at the peak of sampling
HIDDEN_COPIES = 4  # of each token's hidden state, beside the three of its widest layer
NON_TORCH = int(0.25 * GIB)
COMMUNICATION = int(0.9 * GIB)  # more with tensor parallelism: NCCL's and the all-reduce's buffers
GRAPHS = int(0.35 * GIB)


class MemoryAccountError(ValueError):
    """Flags under which vLLM would not start, or facts that are missing. The message is one line."""


@dataclass(frozen=True)
class MemoryFlags:
    """The flags that decide about memory, under vLLM's names. `kv_cache_memory_bytes` overrides the utilization."""

    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int = 32768
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    async_scheduling: bool = True
    enforce_eager: bool = False
    engine_version: str = "0.32.0"

    def __post_init__(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            raise MemoryAccountError(f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise MemoryAccountError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def of(cls, flags: EngineFlags, **more: Any) -> MemoryFlags:
        """Those of a server with `flags`; the utilization is its version's default unless among `more`."""
        shared = {field.name for field in fields(cls)} & {field.name for field in fields(flags)}
        known: dict[str, Any] = {name: getattr(flags, name) for name in shared}
        return cls(**({"gpu_memory_utilization": default_utilization(flags.engine_version)} | known | more))

    def changed(self, given: Mapping[str, object]) -> MemoryFlags:
        """These flags with those of `given` that matter here; names as people write them, sizes with units.

        A new utilization undoes --kv-cache-memory-bytes, and either of them --num-gpu-blocks-override.
        """
        known: dict[str, Any] = {}
        for key, value in given.items():
            name = key.removeprefix("--").replace("-", "_")
            name = SYNONYMS.get(name, name)
            name = "num_gpu_blocks_override" if name == "num_gpu_blocks" else name
            if name in {field.name for field in fields(self)}:
                known[name] = _value(key, name, value)
        if "gpu_memory_utilization" in known:
            known.setdefault("kv_cache_memory_bytes", None)
        if {"gpu_memory_utilization", "kv_cache_memory_bytes"} & known.keys():
            known.setdefault("num_gpu_blocks_override", None)
        return replace(self, **known)

    @property
    def tokens_in_flight(self) -> int:
        """Tokens that are scheduled and whose step may not be done."""
        return (2 if self.async_scheduling else 1) * self.max_num_batched_tokens

    @property
    def counts_graphs(self) -> bool:
        """Whether vLLM makes room for CUDA graphs when it sizes the pool."""
        return not self.enforce_eager and _version(self.engine_version) >= COUNTS_GRAPHS


def default_utilization(engine_version: str) -> float:
    """vLLM's default of --gpu-memory-utilization, which rose as the room for CUDA graphs came out of it."""
    return 0.92 if _version(engine_version) >= COUNTS_GRAPHS else 0.9


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = f"{text}.0".split(".")
    return int(major), int(minor)


def _value(key: str, name: str, value: object) -> object:
    """A flag's value in its type."""
    try:
        if name == "gpu_memory_utilization":
            return parse_real(str(value))
        if name in ("kv_cache_dtype", "async_scheduling", "enforce_eager", "engine_version") or value is None:
            return value
        return parse_size(str(value))
    except ValueError as problem:
        raise MemoryAccountError(f"{key}: {problem}") from None


@dataclass(frozen=True)
class MemoryAccount:
    """Bytes of one GPU.

    Attributes
        total: of the device, as the driver reports it
        free: at the start; the rest is held by others
        utilization: share of `total` that vLLM was told to use; None if the KV cache's size was given instead
        consumed: weights and what lies outside of PyTorch's allocator
        activation: at the peak of a step; from vLLM 0.21 on with the graphs as estimated beforehand
        graphs: CUDA graphs as captured
        kv_cache: the pool
        weights: of `consumed`; None if not known apart
        estimated: names of those that are not measured
    """

    total: int
    free: int
    utilization: float | None
    consumed: int
    activation: int
    graphs: int
    kv_cache: int
    weights: int | None = None
    estimated: frozenset[str] = frozenset()

    @property
    def requested(self) -> int | None:
        """What vLLM was told to use."""
        return None if self.utilization is None else math.ceil(self.total * self.utilization)

    @property
    def unused(self) -> int:
        """What nobody holds, as vLLM counts; negative where the GPU would run out of memory."""
        return self.free - self._without_kv - self.kv_cache

    @property
    def kv_bytes_to_fill(self) -> int:
        """vLLM's advice: the --kv-cache-memory that would use all of the GPU, but for a small buffer."""
        return self.free - self._without_kv - BUFFER

    @property
    def kv_bytes_as_requested(self) -> int | None:
        """vLLM's advice: the --kv-cache-memory that fits into the requested memory."""
        return None if self.requested is None else self.requested - self._without_kv - BUFFER

    @property
    def _without_kv(self) -> int:
        return self.consumed + self.activation + self.graphs  # counts the graphs twice from 0.21 on, as vLLM does


def estimated_account(model: ModelArchitecture, gpu: Gpu, flags: MemoryFlags) -> MemoryAccount:
    """The account of a server that nobody has started.

    Against published logs the pool came out within 3 % on cards of 40 GiB and more; what is not weights is uncertain by
    about 0.7 GiB, which weighs more on small cards. Raises `MemoryAccountError` where nothing is left for the KV cache.
    """
    weights = model.weight_bytes(flags.tensor_parallel_size)
    account = MemoryAccount(
        total=gpu.memory_bytes,
        free=gpu.memory_bytes,
        utilization=flags.gpu_memory_utilization,
        consumed=weights + _outside_torch(flags),
        activation=activation_bytes(model, flags) + (GRAPHS if flags.counts_graphs else 0),
        graphs=0 if flags.enforce_eager else GRAPHS,
        kv_cache=0,
        weights=weights,
        estimated=frozenset({"free", "consumed", "activation", "graphs", "kv_cache", "weights"}),
    )
    return _with_kv_cache(account, flags, kv_layout_of(model, flags))


def activation_bytes(model: ModelArchitecture, flags: MemoryFlags) -> int:
    """About what a step needs at its peak: in the layers, for max_num_batched_tokens, or when sampling, for
    max_num_seqs, whichever is more."""
    ranks = flags.tensor_parallel_size
    per_token = 3 * model.intermediate_size / ranks + HIDDEN_COPIES * model.hidden_size
    layers = flags.max_num_batched_tokens * per_token * model.dtype_bytes
    sampled = min(flags.max_num_seqs, flags.max_num_batched_tokens) * model.vocab_size * SAMPLER_BYTES
    return round(max(layers, sampled))


def account_under(
    account: MemoryAccount, before: MemoryFlags, after: MemoryFlags, model: ModelArchitecture | None, layout: KvLayout
) -> MemoryAccount:
    """The account of the same server with other flags; `layout` is that of the KV cache after the change.

    What the change does not touch stays as measured. Raises `MemoryAccountError` where the model is needed and None, or
    where vLLM would not start.
    """
    if _touches_model(before, after):
        if model is None:
            raise MemoryAccountError(
                "other --max-num-batched-tokens, --max-num-seqs or --tensor-parallel-size need the model's "
                "architecture; name a known model or its config.json"
            )
        account = _with_activation(_with_consumed(account, before, after, model), before, after, model)
    if before.enforce_eager != after.enforce_eager:
        account = _with_graphs(account, before, after)
    return _with_kv_cache(account, after, layout)


def _touches_model(before: MemoryFlags, after: MemoryFlags) -> bool:
    names = ("max_num_batched_tokens", "max_num_seqs", "tensor_parallel_size")
    return any(getattr(before, name) != getattr(after, name) for name in names)


def _with_consumed(
    account: MemoryAccount, before: MemoryFlags, after: MemoryFlags, model: ModelArchitecture
) -> MemoryAccount:
    if before.tensor_parallel_size == after.tensor_parallel_size:
        return account
    weights = model.weight_bytes(after.tensor_parallel_size)
    more = weights - model.weight_bytes(before.tensor_parallel_size) + _outside_torch(after) - _outside_torch(before)
    estimated = account.estimated | {"consumed", "weights", "kv_cache"}
    return replace(account, consumed=account.consumed + more, weights=weights, estimated=estimated)


def _with_activation(
    account: MemoryAccount, before: MemoryFlags, after: MemoryFlags, model: ModelArchitecture
) -> MemoryAccount:
    more = activation_bytes(model, after) - activation_bytes(model, before)
    if not more:
        return account
    estimated = account.estimated | {"activation", "kv_cache"}
    return replace(account, activation=max(account.activation + more, 0), estimated=estimated)


def _with_graphs(account: MemoryAccount, before: MemoryFlags, after: MemoryFlags) -> MemoryAccount:
    """Eager execution captures no graphs; which are as large as captured, or as usual."""
    graphs = 0 if after.enforce_eager else GRAPHS
    counted = (graphs if after.counts_graphs else 0) - (account.graphs if before.counts_graphs else 0)
    estimated = account.estimated | {"activation", "graphs", "kv_cache"}
    return replace(account, graphs=graphs, activation=max(account.activation + counted, 0), estimated=estimated)


def _outside_torch(flags: MemoryFlags) -> int:
    return NON_TORCH + (COMMUNICATION if flags.tensor_parallel_size > 1 else 0)


def _with_kv_cache(account: MemoryAccount, flags: MemoryFlags, layout: KvLayout) -> MemoryAccount:
    """The pool that vLLM would make, or its refusal to start."""
    if flags.num_gpu_blocks_override is not None:
        size = flags.num_gpu_blocks_override * layout.block_bytes
        return replace(account, kv_cache=size, estimated=account.estimated - {"kv_cache"})
    if flags.kv_cache_memory_bytes is not None:
        size, estimated = flags.kv_cache_memory_bytes, account.estimated - {"kv_cache"}
        account = replace(account, utilization=None, kv_cache=size, estimated=estimated)
        if account.unused < 0:
            raise MemoryAccountError(
                f"--kv-cache-memory-bytes {size} leaves the GPU {-account.unused / GIB:.2f} GiB short; at most "
                f"{account.kv_bytes_to_fill} fit"
            )
        return account
    account = replace(account, utilization=flags.gpu_memory_utilization)
    requested = account.requested
    assert requested is not None
    if requested > account.free:
        raise MemoryAccountError(
            f"--gpu-memory-utilization {flags.gpu_memory_utilization:g} asks for {requested / GIB:.2f} GiB and "
            f"{account.free / GIB:.2f} GiB are free at the start; vLLM refuses it, give at most "
            f"{math.floor(1000 * account.free / account.total) / 1000:g}"
        )
    size = requested - account.consumed - account.activation
    if size <= 0:
        raise MemoryAccountError(
            f"no memory is left for the KV cache: of {requested / GIB:.2f} GiB weights and the like take "
            f"{account.consumed / GIB:.2f} and a step's activations {account.activation / GIB:.2f}; take a larger GPU, "
            "a higher --gpu-memory-utilization or --tensor-parallel-size, or a quantised model"
        )
    return replace(account, kv_cache=size)


def kv_layout_of(model: ModelArchitecture, flags: MemoryFlags) -> KvLayout:
    """The layout of the model's KV cache under `flags`."""
    return kv_layout(model, flags.block_size, flags.kv_cache_dtype, flags.tensor_parallel_size)


def pool_of(account: MemoryAccount, flags: MemoryFlags, layout: KvLayout) -> KvPool:
    """The account's KV pool. Raises `MemoryAccountError` where no request of max_model_len fits, as vLLM does."""
    pool = layout.pool(account.kv_cache, flags.max_model_len, flags.tokens_in_flight)
    if pool.longest_request < flags.max_model_len:
        raise MemoryAccountError(
            f"a request of --max-model-len {flags.max_model_len} does not fit into the KV pool of "
            f"{pool.num_gpu_blocks} blocks; vLLM refuses it, give at most {pool.longest_request}"
        )
    return pool


def kv_pool(
    flags: EngineFlags,
    changes: Mapping[str, object],
    kv_bytes_per_token: int | None,
    model: ModelArchitecture | None = None,
    gpu: Gpu | None = None,
    account: MemoryAccount | None = None,
    **more: Any,
) -> KvPool:
    """The KV pool of the server with `flags` after `changes` to them, by vLLM's names.

    `account` is the server's, from its log. Without one it is drawn up from the pool in `flags`, the `gpu`'s memory and
    the utilization, for which `more` may state other `MemoryFlags` than the defaults. `kv_bytes_per_token` is of
    one GPU and the measured type. Raises `MemoryAccountError`, which says what is missing.
    """
    before = MemoryFlags.of(flags, **more)
    after = before.changed(changes)
    layout = layout_after(before, after, kv_bytes_per_token, model)
    if not _resizes(before, after):  # the same memory, perhaps in other blocks
        memory = flags.num_gpu_blocks * layout_after(before, before, kv_bytes_per_token, model).block_bytes
        return pool_of(_bare_account(memory), after, layout)
    if after.num_gpu_blocks_override is not None or (after.kv_cache_memory_bytes is not None and account is None):
        override = after.num_gpu_blocks_override
        memory = override * layout.block_bytes if override is not None else after.kv_cache_memory_bytes or 0
        return pool_of(_bare_account(memory), after, layout)
    if account is None:
        known = layout_after(before, before, kv_bytes_per_token, model)
        account = account_around(flags.num_gpu_blocks * known.block_bytes, before, model, gpu)
    return pool_of(account_under(account, before, after, model, layout), after, layout)


def _resizes(before: MemoryFlags, after: MemoryFlags) -> bool:
    names = ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "enforce_eager")
    return _touches_model(before, after) or any(getattr(before, name) != getattr(after, name) for name in names)


def layout_after(
    before: MemoryFlags, after: MemoryFlags, kv_bytes_per_token: int | None, model: ModelArchitecture | None
) -> KvLayout:
    """The layout after a change of flags, by the model or by the bytes of a token before it."""
    if model is not None:
        return kv_layout_of(model, after)
    if kv_bytes_per_token is None:
        raise MemoryAccountError(
            "the KV pool needs the model's KV bytes per token; name a known model or its config.json, or add "
            "kv_bytes_per_token to the profile"
        )
    if before.tensor_parallel_size != after.tensor_parallel_size:
        raise MemoryAccountError(
            "another --tensor-parallel-size needs the model's architecture; name a known model or its config.json"
        )
    factor = dtype_bytes(after.kv_cache_dtype) / dtype_bytes(before.kv_cache_dtype)
    return plain_layout(round(kv_bytes_per_token * factor), after.block_size)


def _bare_account(kv_cache: int) -> MemoryAccount:
    """Nothing but a pool."""
    return MemoryAccount(kv_cache, kv_cache, None, 0, 0, 0, kv_cache)


def account_around(
    kv_cache: int, flags: MemoryFlags, model: ModelArchitecture | None, gpu: Gpu | None
) -> MemoryAccount:
    """The account of a server of which the pool is known, and what its GPU has in all."""
    if gpu is None:
        raise MemoryAccountError(
            "the KV pool under other flags needs the GPU's memory; name the GPU, or give the server's log"
        )
    if flags.kv_cache_memory_bytes is not None:
        raise MemoryAccountError("the pool was set by --kv-cache-memory-bytes; give the server's log to size another")
    rest = math.ceil(gpu.memory_bytes * flags.gpu_memory_utilization) - kv_cache
    graphs = GRAPHS if not flags.enforce_eager else 0
    activation = activation_bytes(model, flags) if model else 0
    weights = model.weight_bytes(flags.tensor_parallel_size) if model else 0
    if rest <= weights:
        raise MemoryAccountError(
            f"a pool of {kv_cache / GIB:.2f} GiB and --gpu-memory-utilization {flags.gpu_memory_utilization:g} leave "
            f"no room for the weights on a {gpu.name}; state the utilization the server runs with, or give its log"
        )
    activation = min(activation + (graphs if flags.counts_graphs else 0), rest - weights)
    estimated = frozenset({"free", "consumed", "activation", "graphs", "kv_cache", "weights"})
    total = gpu.memory_bytes
    return MemoryAccount(
        total, total, flags.gpu_memory_utilization, rest - activation, activation, graphs, kv_cache, weights or None,
        estimated,
    )  # fmt: skip

"""The memory of a server as its log tells it, ready to be recomputed under other flags."""

from __future__ import annotations

from dataclasses import dataclass, replace

from calibration.server_flags import blocks_of, resolve_flags, told
from calibration.server_log import ServerLog
from simulator.engine.engine_flags import EngineFlags
from simulator.hardware.gpus import GIB, Gpu
from simulator.hardware.kv_layout import KvLayout, plain_layout
from simulator.hardware.memory import BUFFER, MemoryAccount, MemoryFlags, kv_layout_of
from simulator.hardware.model_config import ModelArchitecture, ModelError, find_model

ROUNDING = 0.03  # GiB; the log's numbers have two decimals each


class ServerMemoryError(ValueError):
    """A log that does not tell what is needed. The message is one line."""


@dataclass(frozen=True)
class ServerMemory:
    """A server's memory, its flags, and the layout of its KV cache; `notes` are sentences a reader must know."""

    account: MemoryAccount
    flags: MemoryFlags
    layout: KvLayout
    model: ModelArchitecture | None
    notes: tuple[str, ...] = ()


def server_memory(log: ServerLog, model: ModelArchitecture | None = None) -> ServerMemory:
    """The account of the server that wrote `log`. The model is looked up by the name in the log unless given.

    Raises `ServerMemoryError` where the log lacks the lines on memory.
    """
    use = log.memory
    if use is None or use.total is None or use.utilization is None or use.consumed is None or log.kv_tokens is None:
        raise ServerMemoryError(
            "the log lacks vLLM's account of memory, the line 'Free memory on device ... Actual usage is ...'; vLLM "
            "writes it at level INFO, and only if it sizes the KV cache itself, not with --kv-cache-memory-bytes"
        )
    flags, notes = _flags(log)
    model = model or _named(log)
    layout = _layout(log, flags, model)
    kv_cache = _blocks(log, flags, layout) * layout.block_bytes
    if model is None:
        notes.append(f"the architecture of {log.model} is not known: name a similar model for more than the pool")
    account = MemoryAccount(
        total=round(use.total * GIB),
        free=round((use.free or use.total) * GIB),
        utilization=use.utilization,
        consumed=round(use.consumed * GIB),
        activation=round((use.activation or 0.0) * GIB),
        graphs=round(max(use.graphs or 0.0, 0.0) * GIB),
        kv_cache=kv_cache,
        weights=None if log.model_memory is None else round(log.model_memory * GIB),
    )
    return ServerMemory(_without_rounding(account, use.kv_bytes_full), flags, layout, model, tuple(notes))


def default_flags(gpu: Gpu, **given: object) -> tuple[MemoryFlags, list[str]]:
    """The flags of a server on `gpu` that is started with what is `given` and vLLM's defaults, and what is assumed."""
    known = {name: value for name, value in given.items() if value is not None}
    facts = {"gpu": gpu.name, "gpu_memory": gpu.memory_gib, **known}
    resolved = resolve_flags(told("stated", facts))
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    assumed = [
        f"{name} = {getattr(resolved.flags, name)}: {resolved.found[name].why.partition(';')[0]}"
        for name in names
        if resolved.found[name].source == "assumed"
    ]
    return MemoryFlags.of(resolved.flags), assumed


def _flags(log: ServerLog) -> tuple[MemoryFlags, list[str]]:
    """The flags that the server ran with, and a sentence on each that the log does not tell."""
    assert log.memory is not None
    names = (
        "engine_version", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "async_scheduling",
        "enforce_eager", "kv_tokens", "device", "tensor_parallel_size",
    )  # fmt: skip
    facts = {name: getattr(log, name) for name in names} | {"gpu_memory": log.memory.total}
    resolved = resolve_flags(told("log", facts))
    flags: EngineFlags = resolved.flags
    memory = MemoryFlags.of(
        flags,
        gpu_memory_utilization=log.memory.utilization or 0.0,
        kv_cache_dtype=log.kv_cache_dtype or "auto",
        tensor_parallel_size=log.tensor_parallel_size or 1,
    )
    shown = ("max_num_seqs", "max_num_batched_tokens")
    notes = [f"assumed is {sentence}" for sentence in resolved.assumed if sentence.startswith(shown)]
    return memory, notes


def _named(log: ServerLog) -> ModelArchitecture | None:
    try:
        return find_model(log.model) if log.model else None
    except ModelError:
        return None


def _layout(log: ServerLog, flags: MemoryFlags, model: ModelArchitecture | None) -> KvLayout:
    """By the model; without one, by what the log says of bytes and tokens, as exact as its two decimals."""
    if model is not None:
        return kv_layout_of(model, flags)
    memory = log.kv_memory or (log.memory.kv_cache if log.memory else None)
    if not memory or not log.kv_tokens:
        raise ServerMemoryError("the log does not tell the KV cache's size in bytes and tokens; name the model")
    return plain_layout(round(memory * GIB / log.kv_tokens), flags.block_size)


def _blocks(log: ServerLog, flags: MemoryFlags, layout: KvLayout) -> int:
    """Blocks of the pool, which the log tells in tokens."""
    assert log.kv_tokens is not None
    if layout.full_groups == 1 and not layout.window_groups:
        return blocks_of(log.kv_tokens, flags.block_size, flags.max_model_len)
    in_one_request = layout.blocks_per_request(flags.max_model_len, flags.tokens_in_flight)
    return round(log.kv_tokens * in_one_request / flags.max_model_len)


def _without_rounding(account: MemoryAccount, kv_bytes_full: int | None) -> MemoryAccount:
    """Let the lines add up: the pool and vLLM's advice are told to the byte, the others to 0.01 GiB."""
    requested = account.requested
    assert requested is not None
    consumed = requested - account.activation - account.kv_cache
    if abs(consumed - account.consumed) <= ROUNDING * GIB:
        account = replace(account, consumed=consumed)
    if kv_bytes_full is not None:
        free = kv_bytes_full + account.consumed + account.activation + account.graphs + BUFFER
        if abs(free - account.free) <= ROUNDING * GIB or account.free == account.total:
            account = replace(account, free=free)
    return account

"""The flags of a live server: what its owner states, what it tells, what a load shows, vLLM's defaults for the rest.

Every flag says where it comes from, and what is assumed is marked as assumed. Defaults: vLLM 0.32.0, 0.27.1 and 0.11.0,
`engine/arg_utils.py`, for the API server.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from calibration.endpoint import Endpoint
from simulator.engine.engine_flags import MOST_CACHED_BLOCKS, EngineFlags, FlagError
from simulator.flags.vllm_flags import parse_flags

NEWEST = "0.32.0"
MAX_MODEL_LEN = 32768
BLOCK_SIZE, BLOCK_SIZE_CPU = 16, 128
ENDLESS_POOL = 1 << 30  # tokens
ASYNC_SINCE = (0, 14)  # from this version on asynchronous scheduling is the default on a GPU
FULL_ISL_SINCE = (0, 12)  # 0.11 admits a prompt that its pool cannot hold whole

# Owners, servers and logs also tell what is no flag of the engine: sizes, GPU, precision.
Source = Literal["stated", "server", "log", "inferred", "assumed"]
_WORDS = {
    "stated": "stated is",
    "server": "the server says",
    "log": "the log says",
    "inferred": "the measured run shows",
    "assumed": "assumed is",
}


@dataclass(frozen=True)
class Found:
    """One value and where it comes from; `why` explains what is inferred or assumed."""

    value: Any
    source: Source
    why: str = ""


@dataclass(frozen=True)
class ServerFlags:
    """What is known of a server. `found` has every flag by its name, and more, such as "gpu" or "dtype".

    `assumed` speaks of those assumed flags that matter; `contradictions` are sentences on values of which two sources
    say different things.
    """

    flags: EngineFlags
    found: Mapping[str, Found]
    contradictions: list[str] = field(default_factory=list)

    @property
    def assumed(self) -> list[str]:
        """A sentence on each value that is assumed."""
        return self._sentences("assumed")

    @property
    def inferred(self) -> list[str]:
        """A sentence on each value that the measured run shows."""
        return self._sentences("inferred")

    @property
    def sources(self) -> dict[str, Source]:
        return {name: found.source for name, found in self.found.items()}

    def _sentences(self, source: Source) -> list[str]:
        chosen = {name: found for name, found in self.found.items() if found.source == source and found.why}
        return [f"{name} = {_shown(found.value)}: {found.why}" for name, found in chosen.items()]


def stated_flags(given: Mapping[str, object]) -> dict[str, Found]:
    """What the user states, under vLLM's names. Raises `simulator.engine.engine_flags.FlagError`."""
    stated = parse_flags(given)
    if "kv_cache_memory_bytes" in stated:
        raise FlagError("the KV pool is taken from the server; where it does not tell, give --num-gpu-blocks-override")
    return told("stated", stated)


def told(source: Source, facts: Mapping[str, Any], why: str = "") -> dict[str, Found]:
    """Facts with their source; None is no fact."""
    return {name: Found(value, source, why) for name, value in facts.items() if value is not None}


def endpoint_facts(endpoint: Endpoint) -> dict[str, Any]:
    """What the server says itself, of one of its engines."""
    same = ("engine_version", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_tokens", "block_size")
    blocks = endpoint.num_gpu_blocks
    return {name: getattr(endpoint, name) for name in same} | {
        "num_gpu_blocks": None if blocks is None else blocks // endpoint.engines,
        "enable_prefix_caching": endpoint.enable_prefix_caching,
        "gpu_memory_utilization": endpoint.gpu_memory_utilization,
        "kv_cache_dtype": endpoint.cache_dtype,
        "data_parallel_size": endpoint.engines if endpoint.has_metrics else None,
    }


def resolve_flags(*sources: Mapping[str, Found]) -> ServerFlags:
    """One value for every flag: the first of `sources` that tells it wins, vLLM's defaults fill in the rest.

    Raises `simulator.engine.engine_flags.FlagError` where values cannot hold together.
    """
    found: dict[str, Found] = {}
    contradictions = []
    for source in sources:
        for name, fact in source.items():
            winner = found.setdefault(name, fact)
            if not _agree(winner.value, fact.value):
                contradictions.append(
                    f"{name}: {_WORDS[winner.source]} {_shown(winner.value)}, but {_WORDS[fact.source]} "
                    f"{_shown(fact.value)}; {_shown(winner.value)} is used"
                )
    _assume_server(found)
    _assume_batch(found)
    _assume_pool(found)
    for flag in fields(EngineFlags):
        _assume(found, flag.name, flag.default, "")
    flags = EngineFlags(**{flag.name: found[flag.name].value for flag in fields(EngineFlags)})
    return ServerFlags(flags, found, contradictions)


def _agree(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        return math.isclose(one, other, rel_tol=0.02)  # a device's memory has several definitions
    return bool(one == other)


def _assume_server(found: dict[str, Found]) -> None:
    version = str(_value(found, "engine_version", ""))
    if not re.match(r"\d+\.\d+", version):  # a build from source may call itself "dev"
        why = f"the server calls its version {version!r}" if version else "the server does not tell its version"
        version, found["engine_version"] = NEWEST, Found(NEWEST, "assumed", why)
    _assume(found, "max_model_len", MAX_MODEL_LEN, "the server does not tell; give --max-model-len")
    asynchronous = _release(version) >= ASYNC_SINCE and not _on_cpu(found)
    why = f"the default of version {version}; give --async-scheduling or --no-..."
    _assume(found, "async_scheduling", asynchronous, why)
    _assume(found, "enable_prefix_caching", True, "vLLM's default for models that generate text")
    if _release(version) < FULL_ISL_SINCE:
        _assume(found, "scheduler_reserve_full_isl", False, f"version {version} does not know it")


def _assume_batch(found: dict[str, Found]) -> None:
    """Sizes of a batch as vLLM's post-processing of its defaults makes them."""
    tokens, sequences, device = batch_defaults(found)
    if _value(found, "performance_mode") == "throughput":
        tokens, sequences = tokens * 2, sequences * 2
    length = found["max_model_len"].value
    sequences_known = _value(found, "max_num_seqs", sequences)
    if not _value(found, "enable_chunked_prefill", True):
        tokens = max(tokens, length)
    # vLLM refuses fewer tokens than sequences, so a server that runs has as many
    tokens = max(min(tokens, sequences_known * length), _value(found, "max_num_seqs", 1))
    tokens = _value(found, "max_num_batched_tokens", tokens)
    remedy = "as the server was started with"
    _assume(found, "max_num_seqs", min(sequences, tokens), f"the default {device}; give --max-num-seqs {remedy}")
    _assume(found, "max_num_batched_tokens", tokens, f"the default {device}; give --max-num-batched-tokens {remedy}")


def batch_defaults(found: Mapping[str, Found]) -> tuple[int, int, str]:
    """vLLM's own max_num_batched_tokens and max_num_seqs, and in words for which devices."""
    if _on_cpu(found):
        workers = _value(found, "tensor_parallel_size", 1) * _value(found, "pipeline_parallel_size", 1)
        return 2048 * workers, 128 * workers, "on a CPU"
    memory, name = _value(found, "gpu_memory"), _value(found, "gpu")
    if memory is None:
        return 2048, 256, "on most GPUs"
    if memory >= 160:
        newest = _release(str(found["engine_version"].value)) >= (0, 32)
        return 16384 if newest else 8192, 1024, f"on a GPU of {memory:.0f} GiB"
    if memory < 70:
        return 2048, 256, f"on a GPU of {memory:.0f} GiB"
    if name is not None and "a100" in name.lower():
        return 2048, 256, "on an A100"
    # an A100 has 80 GB; no name is needed to know that a larger GPU is none
    unless = " unless it is an A100 (2048 and 256)" if name is None and memory < 82 else ""
    return 8192, 1024, f"on a GPU of {memory:.0f} GiB{unless}"


def _assume_pool(found: dict[str, Found]) -> None:
    old = _release(str(found["engine_version"].value)) <= (0, 11)
    size = BLOCK_SIZE_CPU if _on_cpu(found) and not old else BLOCK_SIZE
    _assume(found, "block_size", size, "the server does not tell; give --block-size")
    size = found["block_size"].value
    if "num_gpu_blocks" not in found and "kv_tokens" in found:
        pool = found["kv_tokens"]
        found["num_gpu_blocks"] = Found(blocks_of(pool.value, size, found["max_model_len"].value), pool.source)
    why = "a KV pool without end, since the server does not tell"
    _assume(found, "num_gpu_blocks", min(ENDLESS_POOL // size, MOST_CACHED_BLOCKS), why)


def blocks_of(kv_tokens: int, block_size: int, max_model_len: int) -> int:
    """Blocks of a pool whose size vLLM tells in tokens: of whole requests of max_model_len, where blocks do not fit."""
    if kv_tokens % block_size == 0:
        return kv_tokens // block_size
    return round(kv_tokens * math.ceil(max_model_len / block_size) / max_model_len)


def _assume(found: dict[str, Found], name: str, value: Any, why: str) -> None:
    found.setdefault(name, Found(value, "assumed", why))


def _value(found: Mapping[str, Found], name: str, default: Any = None) -> Any:
    return found[name].value if name in found else default


def _on_cpu(found: Mapping[str, Found]) -> bool:
    return _value(found, "device") == "cpu" or "cpu" in str(_value(found, "engine_version", ""))


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _shown(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)

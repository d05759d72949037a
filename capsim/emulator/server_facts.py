"""What the twin says of its server: its model, cache and configuration, in the form of the profile's version."""

from __future__ import annotations

from typing import Any
from zlib import crc32

from simulator.engine.engine_flags import EngineFlags
from simulator.profile import Profile

CACHE_BYTES_SINCE, CACHE_TOKENS_SINCE = (0, 11), (0, 24)  # versions of vLLM with these labels


def release(version: str) -> tuple[int, int]:
    """0.32.0 as (0, 32)."""
    major, minor = version.split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)


def fingerprint(profile: Profile) -> str:
    """vLLM's system fingerprint: version, parallel sizes, and eight signs of the configuration."""
    return f"vllm-{profile.engine_version}-tp1-{crc32(profile.to_yaml().encode()):08x}"


def model_card(model: str, profile: Profile, flags: EngineFlags, created: int) -> dict[str, Any]:
    """The entry of /v1/models."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": profile.model,
        "parent": None,
        "max_model_len": flags.max_model_len,
        "permission": [],
    }


def cache_config(profile: Profile, flags: EngineFlags) -> dict[str, str]:
    """The labels of vLLM's ``cache_config_info``, all of them texts. A twin's pool has bytes but no share of a GPU."""
    config: dict[str, object] = {
        "block_size": flags.block_size,
        "cache_dtype": "auto",
        "enable_prefix_caching": flags.enable_prefix_caching,
        "gpu_memory_utilization": None,
        "is_attention_free": False,
        "num_cpu_blocks": None,
        "num_gpu_blocks": flags.num_gpu_blocks,
        "num_gpu_blocks_override": None,
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": None,
    }
    version = release(profile.engine_version)
    if version >= CACHE_BYTES_SINCE:
        per_token = profile.kv_bytes_per_token
        config["kv_cache_memory_bytes"] = per_token and per_token * flags.kv_tokens
    if version >= CACHE_TOKENS_SINCE:
        config["kv_cache_size_tokens"] = flags.kv_tokens
        config["kv_cache_max_concurrency"] = round(flags.kv_tokens / flags.max_model_len, 2)
    return {name: str(value) for name, value in sorted(config.items())}


def server_info(profile: Profile, flags: EngineFlags) -> dict[str, Any]:
    """What vLLM shows on /server_info in development mode, as far as a profile knows it."""
    scheduler = {
        "max_num_seqs": flags.max_num_seqs,
        "max_num_batched_tokens": flags.max_num_batched_tokens,
        "max_model_len": flags.max_model_len,
        "enable_chunked_prefill": flags.enable_chunked_prefill,
        "policy": flags.scheduling_policy,
        "long_prefill_token_threshold": flags.long_prefill_token_threshold,
        "long_prefill_token_threshold_adaptive": flags.long_prefill_token_threshold_adaptive,
        "scheduler_reserve_full_isl": flags.scheduler_reserve_full_isl,
        "watermark": flags.watermark,
        "async_scheduling": flags.async_scheduling,
    }
    cache = {
        "block_size": flags.block_size,
        "num_gpu_blocks": flags.num_gpu_blocks,
        "kv_cache_size_tokens": flags.kv_tokens,
        "enable_prefix_caching": flags.enable_prefix_caching,
        "cache_dtype": "auto",
    }
    model = {"model": profile.model, "max_model_len": flags.max_model_len, "enforce_eager": flags.enforce_eager}
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    sections = {"scheduler": scheduler, "cache": cache, "model": model, "parallel": parallel}
    env = {"nvidia_gpu_models": f"GPU 0: {profile.gpu}"} if profile.gpu else {}
    return {
        "vllm_config": {f"{name}_config": content for name, content in sections.items()},
        "vllm_env": {"VLLM_SERVER_DEV_MODE": True},
        "system_env": env,
    }

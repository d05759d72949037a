"""All that can be known of a live server, from every source that is open, put together.

    endpoint, log = discover("http://localhost:8000"), read_server_log("vllm.log")
    known = discover_flags(endpoint, {"max_num_seqs": 64}, log=log, info=server_info(endpoint))
    print(known.flags, known.sources, known.contradictions, known.assumed)

What the owner states wins over what the server says, that over its log, that over what a measured run shows, and that
over vLLM's defaults.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from calibration.endpoint import Endpoint, headers
from calibration.foreign_text import one_line
from calibration.gpu import GpuReading, fetch
from calibration.secrecy import keepable
from calibration.server_flags import Found, ServerFlags, endpoint_facts, resolve_flags, stated_flags, told
from calibration.server_log import ServerLog
from simulator.results.run import Level, Run

GIB = 1 << 30
POOL_MARGIN = 0.02  # share of the KV pool that may not be free although it seems so: gauges lag behind by a step
PLATEAU_SAMPLES = 10  # of the gauges, at the least, with requests waiting
PLATEAU_SHARE = 0.5  # of the samples with requests waiting, that show the plateau
STATUS_LINES, STATUS_KV_USAGE = 3, 0.8  # lines of a log at the least, and the most of the pool in use, for the same

# In vLLM's own configuration, as /server_info shows it in development mode: section, name, our name, type.
_INFO = (
    ("scheduler_config", "max_num_seqs", "max_num_seqs", int),
    ("scheduler_config", "max_num_batched_tokens", "max_num_batched_tokens", int),
    ("scheduler_config", "enable_chunked_prefill", "enable_chunked_prefill", bool),
    ("scheduler_config", "policy", "scheduling_policy", str),
    ("scheduler_config", "long_prefill_token_threshold", "long_prefill_token_threshold", int),
    ("scheduler_config", "long_prefill_token_threshold_adaptive", "long_prefill_token_threshold_adaptive", bool),
    ("scheduler_config", "scheduler_reserve_full_isl", "scheduler_reserve_full_isl", bool),
    ("scheduler_config", "watermark", "watermark", float),
    ("scheduler_config", "async_scheduling", "async_scheduling", bool),
    ("cache_config", "block_size", "block_size", int),
    ("cache_config", "kv_cache_size_tokens", "kv_tokens", int),
    ("cache_config", "enable_prefix_caching", "enable_prefix_caching", bool),
    ("cache_config", "gpu_memory_utilization", "gpu_memory_utilization", float),
    ("cache_config", "cache_dtype", "kv_cache_dtype", str),
    ("model_config", "dtype", "dtype", str),
    ("model_config", "max_model_len", "max_model_len", int),
    ("model_config", "quantization", "quantization", str),
    ("model_config", "enforce_eager", "enforce_eager", bool),
    ("parallel_config", "tensor_parallel_size", "tensor_parallel_size", int),
    ("parallel_config", "pipeline_parallel_size", "pipeline_parallel_size", int),
    ("parallel_config", "data_parallel_size", "data_parallel_size", int),
    ("parallel_config", "enable_expert_parallel", "enable_expert_parallel", bool),
    ("device_config", "device", "device", str),
)
_LOG = (  # what a log tells under the same name
    "engine_version",
    "dtype",
    "device",
    "max_model_len",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "quantization",
    "kv_cache_dtype",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "max_num_batched_tokens",
    "max_num_seqs",
    "block_size",
    "async_scheduling",
    "kv_tokens",
)
_ARGUMENTS: Mapping[str, type] = {  # what a log tells only where it is no default
    "scheduling_policy": str,
    "long_prefill_token_threshold": int,
    "performance_mode": str,
    "gpu_memory_utilization": float,
    "enable_expert_parallel": bool,
    "watermark": float,
}
_FINGERPRINT = re.compile(r"vllm-(?P<version>[^-]+)(?:-tp(\d+))?(?:-pp(\d+))?(?:-dp(\d+))?(-ep)?-(?:\w{8}|nohash)")


def discover_flags(
    endpoint: Endpoint,
    stated: Mapping[str, object] | None = None,
    *,
    log: ServerLog | None = None,
    info: Mapping[str, Any] | None = None,
    fingerprint: str = "",
    gpus: GpuReading | None = None,
    run: Run | None = None,
) -> ServerFlags:
    """What is known of the server at `endpoint`, and from where.

    `stated` are the flags that its owner names, `info` is what `server_info` gave, `fingerprint` the system fingerprint
    of an answer, and `run` a measurement of this server. Raises `simulator.engine.engine_flags.FlagError`.
    """
    says = _known(endpoint_facts(endpoint)) | _known(fingerprint_facts(fingerprint)) | _known(info_facts(info or {}))
    kind = gpus.kind if gpus else None
    if kind is not None:
        says |= _known({"gpu": kind.name, "gpu_memory": kind.memory_total and kind.memory_total / GIB})
    sources = [stated_flags(stated or {}), told("server", says), told("log", log_facts(log) if log else {})]
    engines = int(says.get("data_parallel_size", 1))
    if run is not None:
        sources.append(infer_max_num_seqs(run, endpoint.kv_pool_tokens, engines))
    if log is not None:
        sources.append(max_num_seqs_in_status(log, engines))
    known = resolve_flags(*sources)
    doubts = [
        *_wrong_log(endpoint, log),
        *_not_simulated(log, info),
        *known.contradictions,
        *_too_few_sequences(known, run, engines),
    ]
    return replace(known, contradictions=doubts)


def server_info(endpoint: Endpoint, timeout: float = 30.0) -> dict[str, Any] | None:
    """vLLM's whole configuration, which it shows in development mode only; None otherwise. `timeout` in seconds."""
    text, _ = fetch(
        f"{endpoint.url}/server_info?config_format=json",
        headers=headers(endpoint.api_key),
        timeout=timeout,
        insecure=endpoint.insecure,
    )
    try:
        info: dict[str, Any] | None = keepable(info_in(text or ""), endpoint.api_key)
    except RecursionError:  # deeper than any configuration
        return None
    return info


def info_in(text: str) -> dict[str, Any] | None:
    """The configuration in an answer to /server_info, None where it holds none."""
    try:
        info = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return info if isinstance(info, dict) and isinstance(info.get("vllm_config"), dict) else None


def info_facts(info: Mapping[str, Any]) -> dict[str, Any]:
    """What `server_info` tells."""
    config = _section(info, "vllm_config")
    facts: dict[str, Any] = {"performance_mode": _typed(config.get("performance_mode"), str)}
    for section, theirs, ours, kind in _INFO:
        facts[ours] = _typed(_section(config, section).get(theirs), kind)
        if kind is int and facts[ours] == 0 and ours != "long_prefill_token_threshold":
            facts[ours] = None  # no size can be
    if facts["dtype"]:
        facts["dtype"] = facts["dtype"].removeprefix("torch.")
    models = _section(info, "system_env").get("nvidia_gpu_models")
    cards = re.findall(r"GPU \d+: (.+?)(?: \(UUID.*)?$", models, re.MULTILINE) if isinstance(models, str) else []
    facts["gpu"] = one_line(cards[0], 80) if len(set(cards)) == 1 else None
    return facts


def log_facts(log: ServerLog) -> dict[str, Any]:
    """What a log tells."""
    facts = {name: getattr(log, name) for name in _LOG}
    facts |= {name: _typed(log.arguments.get(name), kind) for name, kind in _ARGUMENTS.items()}
    facts["num_gpu_blocks"] = _typed(log.arguments.get("num_gpu_blocks_override"), int)
    facts["gpu_memory"] = log.memory.total if log.memory else None
    return facts


def fingerprint_facts(fingerprint: str) -> dict[str, Any]:
    """Version and parallel sizes from vLLM's system fingerprint; one that its owner chose tells nothing."""
    match = _FINGERPRINT.fullmatch(fingerprint)
    if match is None:
        return {}
    version, *sizes, expert = match.groups()
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    # a server told to show its hash alone leaves the sizes out, so that a missing one tells nothing
    facts: dict[str, Any] = {name: int(size) for name, size in zip(names, sizes, strict=True) if size}
    return facts | {"engine_version": version, "enable_expert_parallel": True if expert else None}


def infer_max_num_seqs(run: Run, pool_tokens: int | None, engines: int = 1) -> dict[str, Found]:
    """max_num_seqs, where a measured run shows it: as many requests ran while others waited though KV cache was free.

    `pool_tokens` is the KV pool of one of `engines`. Empty where the run does not show it.
    """
    peak = most_running(run)
    if pool_tokens is None or peak < 1 or peak % engines:
        return {}
    waited = [samples for level in run.levels if (samples := _waited(level, pool_tokens * engines)) is not None]
    samples = pd.concat(waited) if waited else pd.DataFrame({"running": []})
    at_peak = int((samples["running"] == peak).sum())
    if at_peak < PLATEAU_SAMPLES or at_peak < PLATEAU_SHARE * len(samples):
        return {}
    each = f" on each of {engines} engines" if engines > 1 else ""
    why = f"never more ran{each}, though others waited and KV cache was free, in {at_peak} samples of the measured run"
    return {"max_num_seqs": Found(peak // engines, "inferred", why)}


def max_num_seqs_in_status(log: ServerLog, engines: int = 1) -> dict[str, Found]:
    """The same from the lines that vLLM writes every ten seconds, of one engine each or of all `engines` together."""
    status = log.status[log.status["preemptions"] == 0]
    running = status["running"].to_numpy(np.float64) / np.where(status["engine"] < 0, engines, 1)
    crowded = running[((status["waiting"] > 0) & (status["kv_usage"] < STATUS_KV_USAGE)).to_numpy()]
    peak = float(running.max(initial=0.0))
    at_peak = int((crowded == peak).sum())
    if peak < 1 or peak != int(peak) or at_peak < STATUS_LINES or at_peak < PLATEAU_SHARE * len(crowded):
        return {}
    why = f"never more ran, though others waited and KV cache was free, in {at_peak} lines of the log"
    return {"max_num_seqs": Found(int(peak), "inferred", why)}


def most_running(run: Run) -> int:
    """The most requests that ran at once, on all engines together; 0 where the server does not tell."""
    seen = [level.timeline for level in run.levels if _tells_waiting(level)]
    return max((int(timeline["running"].max()) for timeline in seen), default=0)


def _waited(level: Level, pool_tokens: int) -> pd.DataFrame | None:
    """The samples in which requests waited though the longest of them had room; None for a level with preemptions."""
    if not _tells_waiting(level) or _preempted(level):
        return None
    longest = int(level.requests["prompt_tokens"].max())
    free = pool_tokens * (1 - POOL_MARGIN) - level.timeline["kv_tokens"]
    return level.timeline[(level.timeline["waiting"] > 0) & (free > longest)]


def _tells_waiting(level: Level) -> bool:
    return not level.timeline.empty and int(level.timeline["waiting"].min()) >= 0


def _preempted(level: Level) -> bool:
    """Whether a level saw preemptions: of its requests, or, where only the server knows, in a note."""
    return bool((level.requests["preemptions"] > 0).any()) or any("preemption" in note for note in level.notes)


def _wrong_log(endpoint: Endpoint, log: ServerLog | None) -> list[str]:
    """A sentence where a log is of a server of another model."""
    if log is None or not log.served_names or endpoint.model in log.served_names:
        return []
    return [
        f"the log is of a server of {one_line(log.served_names[0], 80)}, not of {endpoint.model}: is it the right one?"
    ]


def _not_simulated(log: ServerLog | None, info: Mapping[str, Any] | None) -> list[str]:
    """A sentence where the server does what the simulator does not know."""
    speculative = _section(info or {}, "vllm_config").get("speculative_config")
    speculative = speculative or (log.arguments.get("speculative_config") if log else None)
    if not speculative:
        return []
    return ["the server decodes speculatively, which is not simulated: measure without it, or expect wrong predictions"]


def _too_few_sequences(known: ServerFlags, run: Run | None, engines: int) -> list[str]:
    """A sentence where more ran at once than the flag allows."""
    limit, seen = known.found["max_num_seqs"], most_running(run) if run else 0
    if seen <= limit.value * engines:
        return []
    return [f"max_num_seqs: {limit.source} is {limit.value}, but {seen} requests ran at once; give --max-num-seqs"]


def _known(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}


def _typed(value: object, kind: type) -> Any:
    """A value of the type it should have, None otherwise; true is no number, but a whole number is a real one."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str:
        return one_line(value, 80) if isinstance(value, str) else None
    if kind is not bool and isinstance(value, (int, float)) and not 0 <= value < 1e15:
        return None
    return value if type(value) is kind else None

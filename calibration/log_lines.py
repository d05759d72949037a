"""The lines of a vLLM log that tell what runs and how, in the wordings of versions 0.9 to 0.32.

Source: vLLM 0.32.0, `v1/core/kv_cache_utils.py`, `v1/worker/gpu_worker.py`, `v1/metrics/loggers.py`, `config/`,
`entrypoints/serve/utils/api_utils.py`; older wordings from logs that people published.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

MAX_ARGUMENTS = 1 << 16  # characters of the arguments that are parsed

# A line without one of these tells nothing; to look for them before decoding makes a long log quick to read.
WORTH_A_LOOK = re.compile(
    rb"Iteration\(|Avg prompt throughput|non-default args|LLM engine \(v|version \d|max[ _]model[ _]len"
    rb"|max_num_batched_tokens|max_num_seqs|KV [cC]ache|Maximum concurrency|Model loading took"
    rb"|Graph capturing finished|Free memory on device|attention block size|[Aa]sync(?:hronous)? scheduling"
)


@dataclass(frozen=True)
class MemoryUse:
    """vLLM's advice on --kv-cache-memory, with what it knows of the device. Memory in GiB unless said otherwise."""

    free: float | None = None  # at the start
    total: float | None = None  # of the device; tells which GPU it is
    utilization: float | None = None  # gpu_memory_utilization
    requested: float | None = None
    weights: float | None = None  # only told until 0.25
    non_torch: float | None = None  # likewise
    consumed: float | None = None  # weights and non-torch memory together, told from 0.26 on
    activation: float | None = None  # at the peak
    graphs: float | None = None  # CUDA graphs
    kv_cache: float | None = None  # in use
    kv_bytes_requested: int | None = None  # bytes of KV cache that would fit into the requested memory
    kv_bytes_full: int | None = None  # bytes of KV cache that would fill the device


# Numbers of a bounded length: a search for an endless one takes the square of a line's length.
_NUMBERS = {
    "<int>": r"\d{1,15}(?!\d)",
    "<real>": r"\d{1,15}(?!\d)(?:\.\d{0,15}(?![\d.]))?",
    "<commas>": r"\d[\d,]{0,18}(?![\d,])",
}


def _compiled(pattern: str) -> re.Pattern[str]:
    for name, number in _NUMBERS.items():
        pattern = pattern.replace(name, number)
    return re.compile(pattern, re.ASCII)


_FACTS = tuple(
    _compiled(pattern)
    for pattern in (
        r"vLLM (?:API )?server version (?P<engine_version>\d\S{0,60})",
        r"[█▄▀]\s{1,9}version (?P<engine_version>\d\S{0,60})",
        r"LLM engine \(v(?P<engine_version>[^)\s]{1,60})\)",
        r"Using max model len (?P<max_model_len><int>)",
        r"Auto-fit max_model_len: reduced from <int> to (?P<max_model_len><int>)",
        r"Chunked prefill is enabled with max_num_batched_tokens=(?P<max_num_batched_tokens><int>)",
        r"(?:Setting|Defaulting) max_num_batched_tokens to (?P<max_num_batched_tokens><int>) for",
        r"(?:Setting|Defaulting) max_num_seqs to (?P<max_num_seqs><int>) for",
        r"Setting attention block size to (?P<block_size><int>) tokens",
        r"[Aa]sync(?:hronous)? scheduling .{0,200}?\b(?P<async_scheduling>enabled|disabled)\b",
        r"(?P<pool>[A-Z]{1,12})(?: \+ host)? KV cache size: (?P<kv_tokens><commas>) tokens",
        r"Maximum concurrency for (?P<max_model_len><commas>) tokens per request: "
        r"(?P<max_concurrency><commas>(?:\.\d{0,15})?)x",
        r"Available KV cache memory: (?P<kv_memory>-?<real>) GiB",
        r"reserved (?P<kv_memory><real>) GiB memory for KV Cache as specified",
        r"(?:Explicitly|Auto) set \((?P<kv_memory><real>)/<real>\) GiB for KV cache",
        r"Model loading took (?P<model_memory><real>) Gi?B",
        r"Graph capturing finished in <int> secs?, took (?P<graph_memory>-?<real>) GiB",
    )
)
_CONFIG = {  # names in the line that shows the engine's configuration
    "model": "model",
    "dtype": "dtype",
    "max_seq_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "device_config": "device",
    "enforce_eager": "enforce_eager",
    "enable_prefix_caching": "enable_prefix_caching",
    "chunked_prefill_enabled": "enable_chunked_prefill",  # until 0.11
    "enable_chunked_prefill": "enable_chunked_prefill",
}
_MEMORY = {
    name: _compiled(pattern)
    for name, pattern in (
        ("free", r"on device[^(]{0,80}\((<real>)/"),
        ("total", r"on device[^(]{0,80}\(<real>/(<real>) GiB\)"),
        ("utilization", r"utilization is \((<real>),"),
        ("requested", r"utilization is \(<real>, (<real>) GiB\)"),
        ("weights", r"(<real>) GiB for weights?\b"),
        ("non_torch", r"(-?<real>) GiB for non-torch"),
        ("consumed", r"(<real>) GiB for consumed memory"),
        ("activation", r"(<real>) GiB for peak activation"),
        ("graphs", r"(-?<real>) GiB for CUDAGraph memory"),
        ("kv_bytes_requested", r"--kv-cache-memory=(-?<int>)`(?: \(-?<real> GiB\))? to fit"),
        ("kv_bytes_full", r"--kv-cache-memory=(-?<int>)`(?: \(-?<real> GiB\))? to fully"),
    )
}
_STATUS = {
    name: _compiled(pattern)
    for name, pattern in (
        ("prompt_throughput", r"Avg prompt throughput: (<real>)"),
        ("generation_throughput", r"Avg generation throughput: (<real>)"),
        ("running", r"Running: (<int>)"),
        ("waiting", r"Waiting: (<int>)"),
        ("preemptions", r"Preemptions: (<int>)"),
        ("kv_usage", r"KV cache usage: (<real>)%"),
        ("prefix_hit_rate", r", Prefix cache hit rate: (?:GPU: )?(<real>)%"),
    )
}
_ITERATION = _compiled(
    r"Iteration\((?P<iteration><int>)\): (?P<context_requests><int>) context requests, "
    r"(?P<context_tokens><int>) context tokens, (?P<generation_requests><int>) generation requests, "
    r"(?P<generation_tokens><int>) generation tokens, "
    r"iteration elapsed time: (?P<elapsed><real>) ms(?P<dummy> \(dummy\))?"
    r"(?:.{0,200}?KV cache usage: (?P<kv_usage><real>)%)?"
)
_IN_USE = _compiled(r"Current kv cache memory in use is (-?<real>) (GiB|bytes)")
_ENGINE = _compiled(r"Engine (<int>):|EngineCore_(?:DP)?(<int>)")
_COUNTS = (
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "block_size",
    "kv_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
)
_SWITCHES = ("enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling")
_REALS = ("max_concurrency", "kv_memory", "model_memory", "graph_memory")


def facts_in(line: str) -> dict[str, Any]:
    """What a line says of the server, by the names of `calibration.server_log.ServerLog`; empty for most lines."""
    found: dict[str, Any] = {}
    for pattern in _FACTS:
        if match := pattern.search(line):
            told = {name: _value(name, text) for name, text in match.groupdict().items()}
            found |= {name: value for name, value in told.items() if _can_be(name, value)}
    if (pool := found.pop("pool", "GPU")) != "GPU":  # before 0.30 it says GPU whatever it is
        found["device"] = pool.lower()
    if "LLM engine (v" in line and "with config:" in line:
        found |= _config(line.partition("with config:")[2])
    if "non-default args:" in line:
        found["arguments"] = _arguments(line)
    if "Free memory on device" in line and "Actual usage" in line:
        found["memory"] = _memory(line)
    return found


def status_in(line: str) -> dict[str, float] | None:
    """A line that vLLM writes every ten seconds, by the names of `server_log.STATUS_COLUMNS`; None for another."""
    if "Avg prompt throughput" not in line:
        return None
    found: dict[str, float] = {"engine": _engine(line), "preemptions": 0, "prefix_hit_rate": math.nan}
    for name, pattern in _STATUS.items():
        if match := pattern.search(line):
            found[name] = float(match[1]) / 100 if name in ("kv_usage", "prefix_hit_rate") else float(match[1])
    return found if found.keys() >= _STATUS.keys() and found["kv_usage"] <= 1 else None


def iteration_in(line: str) -> dict[str, float] | None:
    """A line about one step, by the names of `server_log.ITERATION_COLUMNS`; None for another."""
    match = _ITERATION.search(line)
    if match is None:
        return None
    found = match.groupdict()
    dummy, elapsed, usage = found.pop("dummy"), found.pop("elapsed"), found.pop("kv_usage")
    if usage is not None and float(usage) > 100:
        return None
    return {name: int(text) for name, text in found.items()} | {
        "engine": _engine(line),
        "elapsed": float(elapsed) / 1e3,
        "kv_usage": math.nan if usage is None else float(usage) / 100,
        "dummy": dummy is not None,
    }


def _engine(line: str) -> int:
    """The data-parallel rank that a line is about; -1 for all together."""
    if "Engines Aggregated" in line:
        return -1
    match = _ENGINE.search(line)
    return int(match[1] or match[2]) if match else 0


def _config(text: str) -> dict[str, Any]:
    """The engine's configuration, of which no other line tells as much; the first of equal names is the engine's."""
    found = {}
    for name, ours in _CONFIG.items():
        if match := re.search(rf"(?:^|[\s,]){name}=('[^']{{0,1000}}'|\"[^\"]{{0,1000}}\"|[^,\s]{{1,1000}})", text):
            value = _value(ours, match[1])
            if _can_be(ours, value):
                found[ours] = value
    return found


def _memory(line: str) -> MemoryUse:
    found: dict[str, Any] = {}
    for name, pattern in _MEMORY.items():
        if match := pattern.search(line):
            found[name] = int(match[1]) if name.startswith("kv_bytes") else float(match[1])
    if match := _IN_USE.search(line):
        found["kv_cache"] = float(match[1]) / (2**30 if match[2] == "bytes" else 1)
    if not 0 < found.get("utilization", 1) <= 1:
        del found["utilization"]
    if "weights" in found and "non_torch" in found:
        found["consumed"] = round(found["weights"] + found["non_torch"], 3)
    return MemoryUse(**found)


def _arguments(line: str) -> dict[str, Any]:
    """The arguments of the server: those that are plain values, and no secrets, which older versions write out."""
    text = line.partition("non-default args: ")[2][:MAX_ARGUMENTS]
    pairs = _pairs(text[: text.rfind("}") + 1])
    found = {}
    for key, value in zip(pairs.keys, pairs.values, strict=True) if pairs else ():
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            name = ast.literal_eval(key) if key else None
            if isinstance(name, str) and not re.search("key|password|secret|token$", name):
                found[name] = ast.literal_eval(value)
    return found


def _pairs(text: str) -> ast.Dict | None:
    """A dictionary as it is printed, objects such as ``<Policy.A: 1>`` in it turned into None where it must be."""
    for attempt in (text, re.sub(r"<[^<>]*>", "None", text)):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in text that is not ours
            body = ast.parse(attempt, mode="eval").body
            return body if isinstance(body, ast.Dict) else None
    return None


def argument(arguments: Mapping[str, Any], name: str) -> Any:
    """An argument of the server, None where it is not given or cannot be."""
    value = arguments.get(name)
    return value if _can_be(name, value) else None


def _can_be(name: str, value: Any) -> bool:
    """Whether a value has the type of the field `name`."""
    if name in _COUNTS:
        return type(value) is int and 1 <= value < 10**15
    if name in _SWITCHES:
        return isinstance(value, bool)
    return name in _REALS or value is None or isinstance(value, str)


def _value(name: str, text: str) -> Any:
    """A value in the type of the field `name`."""
    if name in ("engine_version", "pool"):
        return text
    if name == "async_scheduling":
        return text == "enabled"
    if text[:1] in ("'", '"'):
        return text[1:-1]
    if name in _REALS:
        return float(text.replace(",", ""))
    if re.fullmatch(r"[0-9][0-9,]{0,18}", text):
        return int(text.replace(",", ""))
    return {"None": None, "True": True, "False": False}.get(text, text.removeprefix("torch."))

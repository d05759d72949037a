"""What AIPerf saw of the server: its ``server_metrics_export.json``, Prometheus metrics scraped during the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from calibration.imports.source import MOST, Fields
from calibration.metrics import CACHE_CONFIG, KV_USAGE, RUNNING, WAITING

NS = 1e-9
MEANS = {
    "queue_time": "vllm:request_queue_time_seconds",
    "prefill_time": "vllm:request_prefill_time_seconds",
    "decode_time": "vllm:request_decode_time_seconds",
    "ttft": "vllm:time_to_first_token_seconds",
}
_COUNTS = ("block_size", "num_gpu_blocks", "kv_cache_size_tokens")
PREFIX_HITS, PREEMPTIONS = "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"


@dataclass(frozen=True)
class ServerMetrics:
    """The server by the names of `calibration.endpoint.Endpoint`, its means in seconds, and its gauges.

    `gauges` has a row for each slice of time: when it began and ended, seconds from the level's start, and the means of
    running and waiting requests (-1 where not told) and of the KV tokens held (NaN).
    """

    server: dict[str, object]
    means: dict[str, float]
    gauges: pd.DataFrame
    notes: list[str]


def read_server_metrics(export: Fields, start: float, end: float) -> ServerMetrics:
    """`start` and `end` bound the level on the clock of the clients, seconds."""
    metrics = export.section_or_empty("metrics")
    server, notes = _server(metrics)
    means = {name: mean for name, metric in MEANS.items() if (mean := _mean(metrics, metric)) is not None}
    for name, what in ((PREFIX_HITS, "prompt tokens came from the prefix cache"), (PREEMPTIONS, "preemptions")):
        total = sum(
            series.section_or_empty("stats").real_or("total", 0.0)
            for series in metrics.section_or_empty(name).sections("series")
        )
        if total:
            notes.append(f"{total:.0f} {what}")
    gauges = _gauges(metrics, start, end)
    pool = server.get("kv_tokens")
    gauges["kv_tokens"] = gauges["usage"] * (pool if isinstance(pool, int) else np.nan)
    return ServerMetrics(server, means, gauges, notes)


def _server(metrics: Fields) -> tuple[dict[str, object], list[str]]:
    """From the labels of the cache config, which are texts; blocks are of all engines together, tokens of one."""
    series = metrics.section_or_empty(CACHE_CONFIG).sections("series")
    if not series:
        return {}, []
    places = {one.text("endpoint_url") for one in series}
    here = [
        one.section_or_empty("labels") for one in series if one.text("endpoint_url") == series[0].text("endpoint_url")
    ]
    labels, engines = here[0], len({one.text("engine") for one in here})
    server: dict[str, object] = {"engine": "vllm", "engines": engines}
    known = {name: size for name in _COUNTS if (size := labels.size(name)) is not None}
    server |= {name: count for name, count in known.items() if name != "kv_cache_size_tokens"}
    if "kv_cache_size_tokens" in known:
        server["kv_tokens"] = known["kv_cache_size_tokens"]
    elif "num_gpu_blocks" in known and "block_size" in known:
        server["kv_tokens"] = known["num_gpu_blocks"] // engines * known["block_size"]
    if labels.text("enable_prefix_caching") in ("True", "False"):
        server["enable_prefix_caching"] = labels.text("enable_prefix_caching") == "True"
    if labels.text("cache_dtype"):
        server["cache_dtype"] = labels.text("cache_dtype")
    several = f"metrics come from {len(places)} servers; the KV pool is the first one's"
    return server, [several] if len(places) > 1 else []


def _mean(metrics: Fields, name: str) -> float | None:
    """A histogram's mean over the run, all its series together."""
    stats = [series.section_or_empty("stats") for series in metrics.section_or_empty(name).sections("series")]
    total, count = (sum(one.real_or(part, 0.0) for one in stats) for part in ("sum", "count"))
    return total / count if count >= 1 else None


def _gauges(metrics: Fields, start: float, end: float) -> pd.DataFrame:
    """Slices of time that lie within the level, gauges added up over series."""
    wanted = {"running": RUNNING, "waiting": WAITING, "usage": KV_USAGE}
    found = {column: _slices(metrics, names, column == "usage") for column, names in wanted.items()}
    rows = [
        {"begin": begin, "end": finish}
        | {
            column: slices.get((begin, finish), np.nan if column == "usage" else -1.0)
            for column, slices in found.items()
        }
        for begin, finish in found["running"]
        if begin < end and finish > start
    ]
    table = pd.DataFrame(rows, columns=["begin", "end", "running", "waiting", "usage"])
    return table.assign(begin=table["begin"] - start, end=table["end"] - start)


def _slices(metrics: Fields, names: Sequence[str], average: bool) -> dict[tuple[float, float], float]:
    """Means of a gauge by (begin, end) in seconds, from the first of `names` that is there."""
    for name in names:
        series = metrics.section_or_empty(name).sections("series")
        if not series:
            continue
        found: dict[tuple[float, float], float] = {}
        for one in series:
            for part in one.sections("timeslices"):
                key = (part.real("start_ns") * NS, part.real("end_ns") * NS)
                value, most = part.real("avg"), 1 if average else MOST
                if value > most:
                    raise part.problem("avg", f"of {name} must be at most {most:,}, got {value:g}")
                found[key] = found.get(key, 0.0) + value / (len(series) if average else 1)
        return found
    return {}

"""Levels as the JSON that ``vllm bench serve --save-result --save-detailed`` writes, for the tools that read it.

Keys and units are vLLM 0.32's: seconds in lists, milliseconds in statistics. A measured level gives its gaps as vLLM
bench would, one for each chunk after the first; a simulated one keeps no gaps of single requests, so its ``itls`` are
empty, and ITL is in the statistics only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from simulator import __version__
from simulator.loads.workload import Load, OpenLoop, Workload
from simulator.results.percentiles import PERCENTILES
from simulator.results.run import Level, Run
from simulator.results.summary import LATENCIES, Summary, summarize

NOT_METADATA = ("model", "source", "source_version", "metadata", "url")


def save_vllm_bench(run: Run, path: str | Path) -> None:
    """Write every level of `run` to one file, objects one after the other as ``--append-result`` does."""
    texts = [json.dumps(vllm_bench_result(level, run), allow_nan=False) for level in run.levels]
    Path(path).write_text("\n".join(texts) + "\n", encoding="utf-8")


class ExportError(ValueError):
    """A place where nothing can be written. The message is one line."""


def check_exportable(path: str | Path) -> None:
    """Raise `ExportError` where `export_vllm_bench` could not write, or would replace what is there."""
    path = Path(path)
    if path.suffix == ".json":
        if path.exists():
            raise ExportError(f"{path} is there already; choose another file or remove it first")
        if not path.parent.is_dir():
            raise ExportError(f"{path} cannot be written: there is no folder {path.parent}")
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ExportError(f"{path} is not an empty folder; choose another one, or a file that ends in .json")


def export_vllm_bench(run: Run, path: str | Path) -> None:
    """Write `run` to one file whose name ends in .json, or to a folder with a file for each level."""
    path = Path(path)
    check_exportable(path)
    if path.suffix == ".json":
        save_vllm_bench(run, path)
        return
    path.mkdir(parents=True, exist_ok=True)
    for number, level in enumerate(run.levels):
        save_vllm_bench(replace(run, levels=[level]), path / f"{number:03d}-{_file_name(level)}.json")


def _file_name(level: Level) -> str:
    """The load in a name that every file system takes: ``concurrency16`` or ``2.5qps``, as vLLM bench writes them."""
    load = level.workload
    return f"{load.request_rate:g}qps" if load.request_rate is not None else f"concurrency{load.concurrency}"


def vllm_bench_result(level: Level, run: Run) -> dict[str, Any]:
    """One level as vLLM bench's result. `run` tells the server, whose flags become metadata."""
    summary = summarize(level)
    done, requests = level.completed, level.requests
    good = requests["error"] == ""
    result: dict[str, Any] = {
        "date": _date(run.started_at),
        "endpoint_type": "openai",
        "backend": "openai",
        "label": None,
        "model_id": str(run.server.get("model", "unknown")),
        "tokenizer_id": None,
        "num_prompts": len(requests),
        **_metadata(run),
        **_load(level.workload),
        "duration": level.duration,
        "completed": summary.completed,
        "failed": summary.errors,
        "total_input_tokens": int(done["prompt_tokens"].sum()),
        "total_output_tokens": int(done["output_tokens"].sum()),
        "request_throughput": summary.request_throughput,
        "request_goodput": None,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_throughput,
        "input_lens": requests["prompt_tokens"].tolist(),
        "output_lens": requests["output_tokens"].where(good, 0).tolist(),
        "ttfts": _zero_for_nan(requests["ttft"]),
        "itls": _gaps(level),
        "latencies": _zero_for_nan(requests["e2el"]),
        "generated_texts": [""] * len(requests),
        "errors": requests["error"].tolist(),
    }
    if not requests["arrival"].isna().any():
        result["start_times"] = requests["arrival"].tolist()
    if len(requests) and not requests.loc[good, "queue_time"].isna().any():
        result["server_queue_times"] = _zero_for_nan(requests["queue_time"])
    return result | _statistics(level, summary)


def _load(load: Load) -> dict[str, object]:
    """The load by the names of vLLM bench's options; a closed loop sends as fast as its clients come free."""
    if load.request_rate is None:
        return {"request_rate": "inf", "burstiness": 1.0, "max_concurrency": load.concurrency}
    arrivals = load.arrivals if isinstance(load, Workload) else None
    burstiness = arrivals.burstiness if isinstance(arrivals, OpenLoop) else 1.0
    return {
        "request_rate": _finite_or_inf(load.request_rate),
        "burstiness": _finite_or_inf(burstiness),
        "max_concurrency": load.max_concurrency,
    }


def _gaps(level: Level) -> list[list[float]]:
    """Seconds between the chunks of each request; empty lists where they are not known."""
    if level.tokens is None:
        return [[] for _ in range(len(level.requests))]
    gaps: dict[Any, list[float]] = {
        number: np.round(np.diff(times), 9).tolist() for number, times in level.tokens.groupby("request_id")["time"]
    }
    errors = zip(level.requests["request_id"], level.requests["error"], strict=True)
    return [[] if error else gaps.get(number, []) for number, error in errors]


def _statistics(level: Level, summary: Summary) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles in milliseconds; those that were not seen are left out."""
    found: dict[str, float] = {}
    for latency in LATENCIES:
        spread = getattr(summary, latency)
        values = {"mean": spread.mean, "median": spread.p50, "std": _std(level, latency)}
        values |= {f"p{percentile}": getattr(spread, f"p{percentile}") for percentile in PERCENTILES}
        found |= {f"{name}_{latency}_ms": value * 1000 for name, value in values.items() if not math.isnan(value)}
    return found


def _std(level: Level, latency: str) -> float:
    if latency != "itl":
        return float(level.completed[latency].std(ddof=0))
    gaps = level.gaps.dropna(subset=["gap"])
    if not gaps["count"].sum():
        return math.nan
    mean = float(np.average(gaps["gap"], weights=gaps["count"]))
    return math.sqrt(float(np.average((gaps["gap"] - mean) ** 2, weights=gaps["count"])))


def _metadata(run: Run) -> dict[str, str]:
    """What the run knows of its server, as ``--metadata`` puts it: texts at the top level."""
    known: Mapping[str, object] = run.server
    texts = {name: str(value) for name, value in known.items() if name not in NOT_METADATA and value is not None}
    return texts | {"written_by": f"capsim {__version__}, {run.source}"}


def _date(started_at: str) -> str:
    return datetime.fromisoformat(started_at).strftime("%Y%m%d-%H%M%S") if started_at else ""


def _zero_for_nan(values: pd.Series[float]) -> list[float]:
    """vLLM bench writes 0 for what a failed request has not."""
    return [float(value) for value in values.fillna(0.0)]


def _finite_or_inf(value: float) -> float | str:
    return "inf" if math.isinf(value) else value

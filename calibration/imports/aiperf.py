"""AIPerf's ``profile_export.jsonl``, with what lies beside it, and its summary ``profile_export_aiperf.json``.

Sources: AIPerf 0.3 to 0.13. What it calls inter-token latency is our TPOT; its inter-chunk latencies are the gaps.
Beside the requests lie the summary, which states the load, and ``server_metrics_export.json``, which has the KV pool,
the server's gauges and its own means of queue, prefill and decode time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from calibration.foreign_text import one_line
from calibration.imports.aiperf_server import read_server_metrics
from calibration.imports.format import Format
from calibration.imports.records import NAN, Record, level_from_records
from calibration.imports.source import Fields, ImportFileError, Source, iso_time, shown
from calibration.imports.stated import StatedLevel, Statistics, figures_of, stated_shape, statistics_in
from calibration.secrecy import shown_url
from simulator.loads.workload import ClosedLoop, OpenLoop, Workload
from simulator.results.run import Run

MS, NS = 1e-3, 1e-9
SUMMARY, SERVER_METRICS = "profile_export_aiperf.json", "server_metrics_export.json"
UNIT_SECONDS = {"ms": 1e-3, "sec": 1.0, "s": 1.0, "us": 1e-6, "ns": 1e-9}


@dataclass
class _Counting:
    """Whose counts of tokens were taken."""

    server: int = 0
    client: int = 0

    def notes(self) -> list[str]:
        if not self.client:
            return []
        return [f"{self.client} requests have no usage from the server: their tokens are the client tokenizer's count"]


def recognises_requests(source: Source) -> bool:
    lines = source.objects()
    return bool(lines) and all({"metadata", "metrics"} <= line.data.keys() or _failed(line) for line in lines)


def recognises_summary(source: Source) -> bool:
    return isinstance(source.first, dict) and {"request_latency", "input_config"} <= source.first.keys()


def read_requests(source: Source) -> Run:
    """The profiling phase as one level."""
    lines = [line for line in source.objects() if _phase(line) in ("profiling", "")]
    left_out = len(source.objects()) - len(lines)
    if not lines:
        raise ImportFileError(f"{source.path}: warm-up lines only")
    counting = _Counting()
    records = [_record(line, counting) for line in lines]
    notes = ["imported from AIPerf; its inter-token latency is our TPOT, its inter-chunk latencies are the gaps"]
    if left_out:
        notes.append(f"{left_out} warm-up lines were left out")
    summary, metrics = source.beside(SUMMARY), source.beside(SERVER_METRICS)
    start = min(record.sent for record in records)
    seen = read_server_metrics(metrics, start, _end(records)) if metrics else None
    arrivals = _arrivals(summary) if summary else None
    level = level_from_records(
        records,
        arrivals,
        notes + counting.notes() + (seen.notes if seen else []),
        gauges=seen.gauges if seen else None,
        server_means=seen.means if seen else {},
    )
    if arrivals is None:
        level.notes.append(f"the load was told from the sending times: {level.workload.label}")
    server = _server(summary) | (seen.server if seen else {})
    return Run("measured", [level], server, iso_time(start))


def read_stated(source: Source) -> list[StatedLevel]:
    """What the summary states."""
    summary = source.objects()[0]
    latency = summary.section("request_latency")
    requests = (
        latency.one_or_more("count") if "count" in latency else summary.section("request_count").one_or_more("avg")
    )
    arrivals = _arrivals(summary)
    if arrivals is None:
        raise ImportFileError(f"{source.path}: the profiling phase states neither concurrency nor rate")
    by_server = "usage_prompt_tokens" in summary and "usage_completion_tokens" in summary
    names = ("usage_prompt_tokens", "usage_completion_tokens")
    lengths = [
        summary.section(name) for name in (names if by_server else ("input_sequence_length", "output_sequence_length"))
    ]
    shape = stated_shape(lengths[0], lengths[1], "avg", "std")
    workload = Workload(arrivals, (shape,), requests)
    duration = summary.section("benchmark_duration").positive("avg")
    latencies = {
        ours: _statistics(summary, theirs)
        for ours, theirs in (
            ("ttft", "time_to_first_token"),
            ("tpot", "inter_token_latency"),
            ("e2el", "request_latency"),
            ("itl", "inter_chunk_latency"),
        )
        if theirs in summary
    }
    output = lengths[1].real("avg") * requests / duration
    flying = latency.real("avg") * UNIT_SECONDS.get(latency.text("unit"), MS) * requests / duration
    figures = figures_of(workload, latencies, {"output_throughput": output, "mean_concurrency": flying}, requests)
    notes = ["stated by AIPerf; its inter-token latency is our TPOT, its inter-chunk latencies are our ITL"]
    if not by_server:
        notes.append("tokens are the client tokenizer's count")
    return [StatedLevel(workload, figures, notes, _server(summary))]


def _record(line: Fields, counting: _Counting) -> Record:
    metadata, metrics = line.section("metadata"), line.section_or_empty("metrics")
    sent, ended = metadata.real("request_start_ns") * NS, metadata.real_or("request_end_ns", NAN) * NS
    error = _kind(line)
    prompt = _count(metrics, "usage_prompt_tokens", "input_sequence_length")
    output = _count(metrics, "usage_completion_tokens", "output_sequence_length")
    if error or output is None:
        return Record(prompt or 0, output or 0, sent, error=error or "no tokens", ended=ended)
    if prompt is None:
        raise metrics.problem("input_sequence_length", "is missing")
    if "usage_completion_tokens" in metrics and "usage_prompt_tokens" in metrics:
        counting.server += 1
    else:
        counting.client += 1
    e2el = _seconds(metrics, "request_latency")
    ttft = _seconds(metrics, "time_to_first_token") if "time_to_first_token" in metrics else NAN
    chunks = None
    if "inter_chunk_latency" in metrics:
        gaps = metrics.section("inter_chunk_latency")
        unit = UNIT_SECONDS.get(gaps.text("unit"), MS)
        chunks = np.cumsum([ttft, *(gap * unit for gap in gaps.reals("value"))])
    elif output == 1 and ttft == ttft:
        chunks = np.array([ttft])
    return Record(prompt, output, sent, ttft, e2el, chunks, ended=ended)


def _end(records: Sequence[Record]) -> float:
    """When the last request ended, on the clients' clock; the last that was sent where ends are not told."""
    return max(record.sent if math.isnan(record.ended) else record.ended for record in records)


def _count(metrics: Fields, *names: str) -> int | None:
    """The first of these counts that is there."""
    for name in names:
        if name in metrics:
            return metrics.section(name).count("value")
    return None


def _seconds(metrics: Fields, name: str) -> float:
    metric = metrics.section(name)
    return metric.real("value") * UNIT_SECONDS.get(metric.text("unit"), MS)


def _statistics(summary: Fields, name: str) -> Statistics:
    metric = summary.section(name)
    unit = UNIT_SECONDS.get(metric.text("unit"), MS)
    return statistics_in(metric, lambda part: "avg" if part == "mean" else part, unit)


def _failed(line: Fields) -> bool:
    return "metadata" in line and "error" in line


def _phase(line: Fields) -> str:
    """ "warmup" or "profiling"; older versions do not tell and wrote profiling only."""
    return line.section("metadata").text("benchmark_phase")


def _kind(line: Fields) -> str:
    if line.section("metadata").data.get("was_cancelled"):
        return "cancelled"
    if "error" not in line:
        return ""
    error = line.section_or_empty("error")
    code = error.data.get("code")
    return f"http {code}" if isinstance(code, int) and 400 <= code < 600 else error.text("type")[:60] or "error"


def _arrivals(summary: Fields) -> ClosedLoop | OpenLoop | None:
    """The load of the profiling phase, as the summary states it; None where it does not."""
    for phase in _phases(summary):
        if "concurrency" in phase and "rate" not in phase and "request_rate" not in phase:
            return ClosedLoop(phase.one_or_more("concurrency"))
        for name in ("rate", "request_rate"):
            if name in phase:
                steady = "constant" in f"{phase.text('type')} {phase.text('arrival_pattern')}"
                return OpenLoop(phase.rate(name), float("inf") if steady else 1.0)
    return None


def _phases(summary: Fields) -> Iterator[Fields]:
    """The profiling phases; before schema 1.4 the load lay in one object, ``loadgen``."""
    config = summary.section_or_empty("input_config")
    phases = config.sections("phases") if isinstance(config.data.get("phases"), list) else []
    yield from (phase for phase in phases if phase.text("kind") in ("profiling", ""))
    yield config.section_or_empty("loadgen")


def _server(summary: Fields | None) -> dict[str, object]:
    server: dict[str, object] = {"source": "AIPerf"}
    if summary is None:
        return server
    if version := summary.text("aiperf_version"):
        server["source_version"] = version
    config = summary.section_or_empty("input_config")
    models = config.section_or_empty("models").data.get("items") or config.section_or_empty("endpoint").data.get(
        "model_names"
    )
    if isinstance(models, list) and models:
        first = models[0]
        named = first.get("name") if isinstance(first, dict) else first
        server["model"] = one_line(named) if isinstance(named, str) else shown(named)
    urls = config.section_or_empty("endpoint").data.get("urls")
    if isinstance(urls, list) and urls and isinstance(urls[0], str):
        server["url"] = shown_url(one_line(urls[0]))
    return server


REQUESTS = Format("aiperf", "AIPerf profile_export.jsonl", recognises_requests, read_requests, None)
STATED = Format("aiperf", "AIPerf profile_export_aiperf.json", recognises_summary, None, read_stated)

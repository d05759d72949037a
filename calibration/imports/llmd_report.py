"""Benchmark Reports of llm-d-benchmark (YAML or JSON, schema 0.1, 0.2 and 0.2.1): aggregates of many tools.

Source: llm-d-benchmark, `schema_v0_1.py` and `schema_v0_2_1.py`. Latencies keep the definitions of the tool that
measured them, so those that differ from ours are left out. inference-perf writes such reports too, without a scenario;
its ``config.yaml`` beside tells the load then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from calibration.foreign_text import one_line
from calibration.imports.format import Format
from calibration.imports.inference_perf import stage_arrivals
from calibration.imports.source import Fields, ImportFileError, Source, shown, size_in
from calibration.imports.stated import StatedLevel, Statistics, figures_of, stated_shape, statistics_in
from simulator.loads.workload import ClosedLoop, OpenLoop, Workload

UNIT_SECONDS = {"ms": 1e-3, "s": 1.0, "us": 1e-6, "ms/token": 1e-3, "s/token": 1.0}
THEIRS = {
    "ttft": "time_to_first_token",
    "tpot": "time_per_output_token",
    "itl": "inter_token_latency",
    "e2el": "request_latency",
}
FLAGS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size")


def recognises(source: Source) -> bool:
    report = source.first
    if not isinstance(report, dict) or not _version(report).startswith("0."):
        return False
    results = report.get("results")
    return (isinstance(results, dict) and "request_performance" in results) or {"scenario", "metrics"} <= report.keys()


def read_stated(source: Source) -> list[StatedLevel]:
    """One level for each report in the file."""
    return [_stated(source, report) for report in source.objects()]


def _stated(source: Source, report: Fields) -> StatedLevel:
    is_old = "metrics" in report
    measured = report.section("metrics") if is_old else report.section("results").section("request_performance")
    measured = measured if is_old else measured.section("aggregate")
    requests = measured.section("requests")
    failed = int(requests.real_or("failures", 0)) + int(requests.real_or("incomplete", 0))
    completed = requests.count("total") - failed
    if completed <= 0:
        raise requests.problem("total", "tells of no completed request")
    tool = _tool(report)
    prompt, output = requests.section("input_length"), requests.section("output_length")
    shape = stated_shape(prompt, output, "mean", "stddev")
    arrivals = _arrivals(source, report)
    if arrivals is None:
        raise ImportFileError(f"{source.path}: does not tell the load (concurrency or rate); give the tool's own file")
    workload = Workload(arrivals, (shape,), requests.count("total"))
    latencies, notes = _latencies(measured.section("latency"), tool)
    rates = _rates(measured.section("throughput"), tool)
    if (mean := latencies.get("e2el", Statistics()).mean) and (rate := rates.get("request_throughput")):
        rates["mean_concurrency"] = mean * rate
    told = [
        f"stated by a Benchmark Report of {tool or 'an unnamed tool'}",
        f"lengths are drawn from the stated means and spreads: {shape} tokens",
        *notes,
    ]
    if failed:
        told.append(f"{failed} of {requests.count('total')} requests failed")
    return StatedLevel(workload, figures_of(workload, latencies, rates, completed), told, _server(report))


def _latencies(latency: Fields, tool: str) -> tuple[dict[str, Statistics], list[str]]:
    """Latencies that the tool defines as we do, and a sentence on what was left out or renamed."""
    theirs, notes = dict(THEIRS), []
    if tool == "guidellm":
        theirs = {"ttft": THEIRS["ttft"], "tpot": THEIRS["itl"], "e2el": THEIRS["e2el"]}
        notes.append("TPOT is GuideLLM's inter-token latency; its time per output token holds the prefill")
    elif tool == "inference-perf":
        del theirs["tpot"]
        notes.append("TPOT left out: inference-perf divides by its own tokenizer's count")
        notes.append("of ITL only the mean: inference-perf counts tokens of one chunk as 0 apart")
    found = {ours: _statistics(latency.section(name)) for ours, name in theirs.items() if name in latency}
    if tool == "inference-perf" and "itl" in found:
        found["itl"] = Statistics(found["itl"].mean)
    return found, notes


def _statistics(fields: Fields) -> Statistics:
    unit = UNIT_SECONDS.get(fields.text("units"))
    if unit is None:
        raise fields.problem("units", f"is {shown(fields.text('units'))}, not one of {', '.join(UNIT_SECONDS)}")
    return statistics_in(fields, lambda part: "stddev" if part == "std" else part, unit)


def _rates(throughput: Fields, tool: str) -> dict[str, float | None]:
    """Requests and output tokens a second; flat numbers in schema 0.1, statistics since."""
    rates: dict[str, float | None] = {}
    for ours, old, new in (
        ("request_throughput", "requests_per_sec", "request_rate"),
        ("output_throughput", "output_tokens_per_sec", "output_token_rate"),
    ):
        if ours == "output_throughput" and tool == "inference-perf":
            continue  # by its own count of tokens
        if old in throughput:
            rates[ours] = throughput.real(old)
        elif new in throughput:
            rates[ours] = throughput.section(new).real("mean")
    return rates


def _arrivals(source: Source, report: Fields) -> ClosedLoop | OpenLoop | None:
    load = report.section_or_empty("scenario", "load")
    standard, args = load.section_or_empty("standardized"), load.section_or_empty("args")
    for clients, rate in (("concurrency", "rate_qps"), ("max_concurrency", "request_rate")):
        for place in (standard, args):
            if _finite(place.data.get(clients)) and not _finite(place.data.get(rate)):
                return ClosedLoop(place.count(clients))
            if _finite(place.data.get(rate)):
                return OpenLoop(place.rate(rate), _burstiness(load))
    stage = re.search(r"stage-(\d+)", report.section_or_empty("run").text("uid"))
    return stage_arrivals(source, int(stage[1])) if stage else None


def _burstiness(load: Fields) -> float:
    """Even spacing where the native configuration says constant, else Poisson."""
    return math.inf if load.section_or_empty("native", "config", "load").text("type") == "constant" else 1.0


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _tool(report: Fields) -> str:
    load = report.section_or_empty("scenario", "load")
    named = load.section_or_empty("standardized").text("tool") or load.text("name")
    if not named and report.section_or_empty("run").text("uid").startswith("inference-perf"):
        return "inference-perf"
    return named.lower()


def _version(report: Mapping[str, Any]) -> str:
    """The schema's, which YAML may take for a number."""
    version = report.get("version")
    return one_line(str(version), 20) if isinstance(version, (str, float)) else ""


def _server(report: Fields) -> dict[str, object]:
    """Model, GPU and engine flags of the first inference engine."""
    server: dict[str, object] = {"source": "Benchmark Report", "source_version": _version(report.data)}
    scenario = report.section_or_empty("scenario")
    if model := scenario.section_or_empty("model").text("name"):
        server["model"] = model
    for part in scenario.sections("stack"):
        standard = part.section_or_empty("standardized")
        if standard.text("kind") != "inference_engine":
            continue
        if model := standard.section_or_empty("model").text("name"):
            server["model"] = model
        if gpu := standard.section_or_empty("accelerator").text("model"):
            server["gpu"] = gpu
        args = part.section_or_empty("native", "args").data
        flags = {str(key).lstrip("-").replace("-", "_"): size_in(value) for key, value in args.items()}
        server |= {name: flags[name] for name in FLAGS if flags.get(name) is not None}
        break
    return server


FORMAT = Format("llm-d", "Benchmark Report of llm-d-benchmark", recognises, None, read_stated)

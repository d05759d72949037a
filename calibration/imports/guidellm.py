"""GuideLLM's reports: version 2 (since 0.7), version 1 (0.5, 0.6) and those without a version (0.2 to 0.4).

Sources: GuideLLM 0.2 to 0.8.1. Its inter-token latency is our TPOT, weighted by tokens where it is aggregated. Its
``time_per_output_token_ms`` holds the prefill or divides by one token too many, and is not read. Times of single tokens
are not stored. Its latency ends with the stream; ours with the last token, where the request is there to tell.
"""

from __future__ import annotations

import math
from collections import Counter

from calibration.imports.format import Format
from calibration.imports.records import NAN, Record, level_from_records
from calibration.imports.source import Fields, ImportFileError, NoRequestsError, Source, iso_time, shown
from calibration.imports.stated import StatedLevel, Statistics, figures_of, stated_shape
from calibration.secrecy import shown_url
from simulator.loads.workload import ClosedLoop, OpenLoop, Workload
from simulator.results.percentiles import PERCENTILES
from simulator.results.run import Level, Run

MS = 1e-3
OUTCOMES = {"successful": "", "incomplete": "cut off at the end", "errored": "error"}


def recognises(source: Source) -> bool:
    report = source.first
    if not isinstance(report, dict) or not isinstance(report.get("benchmarks"), list):
        return False
    return all(isinstance(one, dict) and {"metrics", "requests"} <= one.keys() for one in report["benchmarks"])


def read_requests(source: Source) -> Run:
    """One level for each benchmark. Raises `NoRequestsError` where the report keeps only a sample of its requests."""
    report = source.objects()[0]
    benchmarks = _benchmarks(report)
    for benchmark in benchmarks:
        kept = len(benchmark.section("requests").sections("successful"))
        made = _made(benchmark)
        if kept < made or not kept:
            raise NoRequestsError(
                f"{source.path}: {benchmark.place} keeps {kept} of {made} requests: its aggregates can validate, "
                "cannot calibrate; run guidellm without a sample size for more"
            )
    levels = [_level(report, benchmark) for benchmark in benchmarks]
    began = min(benchmark.real_or("start_time", NAN) for benchmark in benchmarks)
    return Run("measured", levels, _server(report), iso_time(began))


def read_stated(source: Source) -> list[StatedLevel]:
    report = source.objects()[0]
    return [_stated(report, benchmark) for benchmark in _benchmarks(report)]


def _benchmarks(report: Fields) -> list[Fields]:
    found = report.sections("benchmarks")
    if not found:
        raise ImportFileError(f"{report.path}: a GuideLLM report without benchmarks")
    return found


def _level(report: Fields, benchmark: Fields) -> Level:
    requests = benchmark.section("requests")
    records = [
        _record(request, outcome)
        for outcome in OUTCOMES
        for request in requests.sections(outcome)
        if _was_sent(request)
    ]
    notes = [f"imported from GuideLLM {_version(report)}; its inter-token latency is our TPOT"]
    if not any(record.prompt_tokens or record.output_tokens for record in records):
        raise ImportFileError(f"{report.path}: {benchmark.place} has no counts of tokens")
    return level_from_records(records, _arrivals(benchmark), notes + _sharing(report))


def _record(request: Fields, outcome: str) -> Record:
    prompt, output = (
        _count(request, "prompt_tokens", "input_metrics"),
        _count(request, "output_tokens", "output_metrics"),
    )
    start, first, last, end = _times(request)
    if outcome != "successful":
        kind = OUTCOMES[outcome] if outcome == "incomplete" else _kind(request)
        return Record(prompt or 0, output or 0, start, error=kind, ended=end)
    if prompt is None or output is None:
        raise request.problem("prompt_tokens" if prompt is None else "output_tokens", "is missing")
    if math.isnan(last):  # the answer did not stream
        return Record(prompt, output, start, NAN, end - start, ended=end)
    return Record(prompt, output, start, first - start, last - start, ended=end)


def _times(request: Fields) -> tuple[float, float, float, float]:
    """Start, first token, last token and end on one clock, seconds; NaN where there is none."""
    if "start_time" in request and "info" not in request:  # up to 0.3
        names, place = ("start_time", "first_token_time", "last_token_time", "end_time"), request
    else:
        place = request.section("info").section("timings")
        names = ("request_start", "first_token_iteration", "last_token_iteration", "request_end")
    start, first, last, end = (place.real_or(name, NAN) for name in names)
    if math.isnan(start):
        start = place.real(names[0])
    return start, first, last, end if not math.isnan(end) else place.real_or("resolve_end", NAN)


def _was_sent(request: Fields) -> bool:
    """A request that was cut off before it was sent is none."""
    return "start_time" in request or "request_start" in request.section_or_empty("info", "timings")


def _count(request: Fields, name: str, section: str) -> int | None:
    if name in request:
        return request.count(name)
    metrics = request.section_or_empty(section)
    return next((metrics.count(key) for key in ("total_tokens", "text_tokens") if key in metrics), None)


def _kind(request: Fields) -> str:
    message = request.words("error") or request.section_or_empty("info").words("error")
    return message.strip().splitlines()[0][:60] if message.strip() else "error"


def _stated(report: Fields, benchmark: Fields) -> StatedLevel:
    metrics = benchmark.section("metrics")
    prompt, output, latency = (
        metrics.section(name).section("successful")
        for name in ("prompt_token_count", "output_token_count", "request_latency")
    )
    requests = latency.count("count")
    if not requests:
        raise ImportFileError(f"{report.path}: {benchmark.place} completed no request")
    shape = stated_shape(prompt, output, "mean", "std_dev")
    workload = Workload(_arrivals(benchmark), (shape,), requests)
    duration = benchmark.real_or("duration", 0.0) or benchmark.real("end_time") - benchmark.real("start_time")
    if duration <= 0:
        raise benchmark.problem("duration", "is 0")
    latencies = {
        "ttft": _statistics(metrics, "time_to_first_token_ms", MS),
        "tpot": _statistics(metrics, "inter_token_latency_ms", MS),
        "e2el": _statistics(metrics, "request_latency", 1.0),
    }
    rates: dict[str, float | None] = {
        "output_throughput": output.real("mean") * requests / duration,
        "mean_concurrency": latency.real("mean") * requests / duration,
    }
    notes = [
        f"stated by GuideLLM {_version(report)}; TPOT is its inter-token latency, weighted by tokens; its time per "
        "output token, which holds the prefill, was not read; its percentiles are not interpolated",
        f"lengths are drawn from the stated means and spreads: {shape} tokens",
        *_sharing(report),
    ]
    return StatedLevel(workload, figures_of(workload, latencies, rates, requests), notes, _server(report))


def _statistics(metrics: Fields, name: str, unit: float) -> Statistics:
    part = metrics.section(name).section("successful")
    percentiles = part.section_or_empty("percentiles")
    found = {number: percentiles.real(f"p{number}") * unit for number in PERCENTILES if f"p{number}" in percentiles}
    return Statistics(part.real("mean") * unit, part.real_or("std_dev", 0.0) * unit or None, found)


def _arrivals(benchmark: Fields) -> ClosedLoop | OpenLoop:
    """The load of the strategy, which lies elsewhere in every version."""
    for path in (("config", "strategy"), ("args", "strategy"), ("scheduler", "strategy")):
        strategy = benchmark.section_or_empty(*path)
        kind = strategy.text("type_")
        if kind == "synchronous":
            return ClosedLoop(1)
        if kind == "concurrent":
            return ClosedLoop(strategy.one_or_more("streams"))
        if kind == "throughput":
            bound = strategy.count("max_concurrency") if "max_concurrency" in strategy else 0
            return ClosedLoop(bound) if bound and bound < _made(benchmark) else OpenLoop(math.inf)
        if kind in ("constant", "poisson", "async_constant", "async_poisson"):
            return OpenLoop(strategy.rate("rate"), 1.0 if "poisson" in kind else math.inf)
        if kind:
            raise ImportFileError(
                f"{benchmark.path}: {benchmark.place} has arrivals of kind {shown(kind)}, which is not known"
            )
    raise ImportFileError(f"{benchmark.path}: {benchmark.place} does not tell its strategy")


def _made(benchmark: Fields) -> int:
    """Requests that were completed, by the scheduler's count or the metrics'."""
    for path in (("scheduler_metrics", "requests_made"), ("run_stats", "requests_made"), ("total_count",)):
        made = benchmark.section_or_empty(*path)
        if "successful" in made:
            return made.count("successful")
    return int(benchmark.section_or_empty("metrics", "request_latency", "successful").real_or("count", 0))


def _sharing(report: Fields) -> list[str]:
    """Whether prompts began alike, so that the server may have known a part of them."""
    data = report.section_or_empty("config", "spec").sections("data")
    marks = Counter(
        name for part in data for name in ("prefix_buckets", "turns") if part.data.get(name) not in (None, 1, [])
    )
    if not marks:
        return []
    return [f"prompts share beginnings ({', '.join(marks)}): the server's prefix cache may have held a part of them"]


def _server(report: Fields) -> dict[str, object]:
    server: dict[str, object] = {"source": "GuideLLM", "source_version": _version(report)}
    places = [report.section_or_empty("config", "spec", "backend"), report.section_or_empty("args")]
    places += [one.section_or_empty("config", "backend") for one in report.sections("benchmarks")[:1]]
    places += [one.section_or_empty("worker") for one in report.sections("benchmarks")[:1]]
    for names, key in ((("model", "backend_model"), "model"), (("target", "backend_target"), "url")):
        found = [place.text(name) for place in places for name in names if place.text(name)]
        if found:
            server[key] = found[0]
    if "url" in server:
        server["url"] = shown_url(str(server["url"]))
    return server


def _version(report: Fields) -> str:
    metadata = report.section_or_empty("metadata")
    if version := metadata.text("guidellm_version"):
        return version
    return "0.5 or 0.6" if metadata.data.get("version") == 1 else "0.2 to 0.4"


FORMAT = Format("guidellm", "GuideLLM report (JSON)", recognises, read_requests, read_stated)

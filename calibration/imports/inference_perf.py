"""inference-perf's ``per_request_lifecycle_metrics.json`` and its ``stage_N`` and ``summary_lifecycle_metrics.json``.

Source: inference-perf 0.7.0. It counts output tokens with its own tokenizer, often one less than the server, and gives
tokens of one chunk the same time, so that zeros mix into its ITL. From requests, the server's usage and the times of
chunks are read. ``config.yaml`` and the stages beside them tell the load.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calibration.imports.format import Format
from calibration.imports.lengths import length_of
from calibration.imports.records import NAN, Record, level_from_records
from calibration.imports.source import Fields, ImportFileError, Source, shown
from calibration.imports.stated import StatedLevel, Statistics, figures_of, statistics_in
from calibration.secrecy import shown_url
from simulator.loads.workload import ClosedLoop, OpenLoop, Shape, Workload
from simulator.results.run import Run

CONFIG = "config.yaml"
COUNTS_AGREE = 0.005  # relative
MOST_STAGES = 1000


@dataclass(frozen=True)
class Stage:
    """One stage of load: how many requests, arriving how."""

    requests: int
    arrivals: ClosedLoop | OpenLoop | None


def recognises_requests(source: Source) -> bool:
    lines = source.objects()
    return bool(lines) and all({"start_time", "end_time", "info", "error"} <= line.data.keys() for line in lines)


def recognises_summary(source: Source) -> bool:
    return isinstance(source.first, dict) and {"load_summary", "successes", "failures"} <= source.first.keys()


def read_requests(source: Source) -> Run:
    """A level for each stage, told apart by the stage files beside; one for all where there are none."""
    records = sorted((_record(line) for line in source.objects()), key=lambda record: record.sent)
    notes = ["imported from inference-perf; times are of chunks, tokens by the server's usage"]
    by_client = sum(1 for line in source.objects() if "error" not in line and "completion_tokens" not in _usage(line))
    if by_client:
        notes.append(
            f"{by_client} requests have no usage from the server: their tokens are the client tokenizer's count"
        )
    stages = _stages(source)
    if sum(stage.requests for stage in stages) != len(records):
        if stages:
            notes.append("the stage files beside are of other requests, so all are taken as one level")
        stages = [Stage(len(records), stages[0].arrivals if len(stages) == 1 else None)]
    levels, first = [], 0
    for stage in stages:
        chosen = records[first : first + stage.requests]
        first += stage.requests
        if chosen:
            levels.append(level_from_records(chosen, stage.arrivals, notes))
            if stage.arrivals is None:
                levels[-1].notes.append(f"the load was told from the sending times: {levels[-1].workload.label}")
    return Run("measured", levels, _server(source))


def read_stated(source: Source) -> list[StatedLevel]:
    """What a stage's file, or the summary of a single stage, states."""
    return [_stated(source, source.objects()[0])]


def stage_arrivals(source: Source, number: int) -> ClosedLoop | OpenLoop | None:
    """The load of a stage by the ``config.yaml`` beside a file; None without."""
    config = source.beside(CONFIG)
    stages = config.section_or_empty("load").sections("stages") if config else []
    if config is None or number >= len(stages):
        return None
    stage = stages[number]
    kind = config.section_or_empty("load").text("type")
    if "concurrency_level" in stage and kind in ("concurrent", ""):
        return ClosedLoop(stage.one_or_more("concurrency_level"))
    return OpenLoop(stage.rate("rate"), 1.0 if kind == "poisson" else math.inf) if "rate" in stage else None


def _record(line: Fields) -> Record:
    sent, ended = line.real("start_time"), line.real("end_time")
    info = line.section_or_empty("info")
    answer = info.section_or_empty("response_metrics")
    usage = _usage(line)
    prompt = _first_count((usage, "prompt_tokens"), (info, "input_tokens"), (_text(info), "input_tokens"))
    output = _first_count((usage, "completion_tokens"), (answer, "output_tokens"))
    if "error" in line or not output:
        return Record(prompt, output, sent, error=_kind(line) if "error" in line else "no tokens", ended=ended)
    times = sorted(
        [
            *(answer.reals("chunk_times") if "chunk_times" in answer else []),
            *(answer.reals("reasoning_chunk_times") if "reasoning_chunk_times" in answer else []),
        ]
    )
    if not times:
        return Record(prompt, output, sent, NAN, ended - sent, ended=ended)
    chunks = np.array(times) - sent
    if chunks[0] < 0:
        raise line.problem("start_time", "lies after the first chunk")
    return Record(prompt, output, sent, float(chunks[0]), float(chunks[-1]), chunks, ended=ended)


def _usage(line: Fields) -> Fields:
    return line.section_or_empty("info", "response_metrics", "server_usage")


def _text(info: Fields) -> Fields:
    return info.section_or_empty("request_metrics", "text")


def _first_count(*places: tuple[Fields, str]) -> int:
    return next((fields.count(name) for fields, name in places if name in fields), 0)


def _kind(line: Fields) -> str:
    error = line.data["error"]
    if isinstance(error, dict):
        kind = error.get("error_type") or error.get("type")
        return kind if isinstance(kind, str) else "error"
    return (error.strip().splitlines() or ["error"])[0] if isinstance(error, str) else shown(error)


def _stages(source: Source) -> list[Stage]:
    """The stages whose files lie beside, in order."""
    stages = []
    for number in range(MOST_STAGES):
        report = source.beside(f"stage_{number}_lifecycle_metrics.json")
        if report is None:
            break
        load = report.section("load_summary")
        stages.append(Stage(load.count("count"), _arrivals(source, load, number)))
    return stages


def _arrivals(source: Source, load: Fields, number: int) -> ClosedLoop | OpenLoop | None:
    """A stage's load: as its file states it, with the kind of arrivals from the config."""
    if (configured := stage_arrivals(source, number)) is not None:
        return configured
    if "concurrency" in load:
        return ClosedLoop(load.one_or_more("concurrency"))
    return OpenLoop(load.rate("requested_rate"), math.inf) if "requested_rate" in load else None


def _stated(source: Source, report: Fields) -> StatedLevel:
    load, good = report.section("load_summary"), report.section("successes")
    requests = good.count("count")
    if not requests:
        raise good.problem("count", "is 0: nothing was measured")
    arrivals = _arrivals(source, load, _number(source))
    if arrivals is None:
        raise ImportFileError(f"{source.path}: does not tell the load; give the stage_N_lifecycle_metrics.json files")
    duration = report.real_or("benchmark_time_seconds", 0.0) or load.positive("send_duration")
    prompt, client = good.section("prompt_tokens"), good.section("output_len")
    server = good.section_or_empty("output_tokens")
    counted = server if "mean" in server else client
    shape = Shape(length_of(prompt.real("mean"), _std(prompt)), length_of(counted.real("mean"), _std(counted)))
    workload = Workload(arrivals, (shape,), requests)
    agree = abs(client.real("mean") / counted.positive("mean") - 1) <= COUNTS_AGREE
    times = good.section("latency")
    latencies = {
        ours: statistics_in(times.section(theirs), lambda part: "median" if part == "p50" else part, 1.0)
        for ours, theirs in (("ttft", "time_to_first_token"), ("tpot", "time_per_output_token"))
        if theirs in times and (agree or ours != "tpot")
    }
    if "inter_token_latency" in times:
        latencies["itl"] = Statistics(times.section("inter_token_latency").real("mean"))
    if "request_latency" in times:
        latencies["e2el"] = statistics_in(
            times.section("request_latency"), lambda part: "median" if part == "p50" else part, 1.0
        )
    rates: dict[str, float | None] = {"request_throughput": requests / duration}
    if "mean" in server or agree:
        rates["output_throughput"] = counted.real("mean") * requests / duration
    if mean := latencies.get("e2el", Statistics()).mean:
        rates["mean_concurrency"] = mean * requests / duration
    notes = [
        "stated by inference-perf; of its ITL only the mean, since tokens of one chunk count as 0 apart",
        f"lengths are drawn from the stated means and percentiles: {shape} tokens",
    ]
    if not agree:
        notes.append("TPOT left out: it was divided by the client tokenizer's count, which is not the server's")
    return StatedLevel(workload, figures_of(workload, latencies, rates, requests), notes, _server(source))


def _std(statistics: Fields) -> float:
    """Standard deviation, as if normal, from the 10th and 90th percentile."""
    if "p10" not in statistics or "p90" not in statistics:
        return 0.0
    return (statistics.real("p90") - statistics.real("p10")) / 2.563


def _number(source: Source) -> int:
    """The stage that a file is of: its number is in its name only."""
    parts: Sequence[str] = source.path.stem.split("_")
    return next((int(part) for part in parts if re.fullmatch("[0-9]{1,6}", part)), 0)


def _server(source: Source) -> dict[str, object]:
    server: dict[str, object] = {"source": "inference-perf"}
    config = source.beside(CONFIG)
    if config is not None:
        named = config.section_or_empty("server")
        for name, key in (("model_name", "model"), ("base_url", "url"), ("type", "engine")):
            if named.text(name):
                server[key] = shown_url(named.text(name)) if key == "url" else named.text(name)
    return server


REQUESTS = Format(
    "inference-perf", "inference-perf per_request_lifecycle_metrics.json", recognises_requests, read_requests, None
)
STATED = Format("inference-perf", "inference-perf lifecycle metrics", recognises_summary, None, read_stated)

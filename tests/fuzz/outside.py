"""Readers of what others wrote: servers, load generators, recorded traffic."""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from calibration.clients import Job, Recording
from calibration.dialect import Dialect
from calibration.discovery import discover_flags, info_in
from calibration.endpoint import Endpoint, EndpointError, endpoint_of, models_in
from calibration.gpu import GpuReading, gpus_in
from calibration.imports import (
    NAMES,
    ImportFileError,
    NoRequestsError,
    StatedLevel,
    import_files,
    import_stated,
    load_stated,
    save_stated,
)
from calibration.load import level_of
from calibration.metrics import MetricsError, MetricsSnapshot, SumCount, only_gauges, parse_metrics
from calibration.secrecy import keepable
from calibration.server_log import ServerLogError, read_server_log
from calibration.server_memory import ServerMemoryError, server_memory
from calibration.stream import Answer, StreamReader
from simulator.engine.engine_flags import FlagError
from simulator.loads.arrivals import ClosedLoop
from simulator.loads.trace import Trace, TraceError
from simulator.loads.trace_files import FORMATS, read_trace
from simulator.loads.workload import Length, Load, Shape, Workload
from simulator.results.run import Level, Run
from simulator.results.run_files import load_run, save_run, workload_to_json
from simulator.results.summary import LATENCIES, Summary, summarize
from tests.fuzz import outside_seeds as seeds
from tests.fuzz.reader import Reader, of_file, scratch

MOST_TOKENS = 100_000_000  # of a request; a figure beyond is nonsense that went through
ENDPOINT = Endpoint("http://host", "demo", kv_tokens=16_000, num_gpu_blocks=1000, block_size=16, has_metrics=True)


# --- results of load generators


def _import(path: Path, insist: str | None = None) -> None:
    """Import a file as ``capsim import`` does, and use what came."""
    try:
        run = import_files([path], insist)
    except NoRequestsError:
        _use_figures(import_stated([path], insist))
    else:
        _use_run(run)


def _use_run(run: Run) -> None:
    json.dumps(run.server, allow_nan=False)
    _require(run.levels, "a run has levels")
    for level in run.levels:
        _use_level(level)
    requests = sum(len(level.requests) for level in run.levels)
    if requests < 50 and not round(run.levels[0].duration * 1e9) % 8:  # which takes a while
        save_run(run, scratch() / "imported-run", overwrite=(scratch() / "imported-run").exists())
        _require(len(load_run(scratch() / "imported-run").levels) == len(run.levels), "a saved run is whole")


def _use_level(level: Level) -> None:
    json.dumps(workload_to_json(level.workload), allow_nan=False)
    json.dumps(level.server_means, allow_nan=False)
    for note in level.notes:
        _require(note.isprintable() and len(note) < 1000, f"a note is a line: {note[:200]!r}")
    _use_load(level.workload)
    summary = summarize(level)
    numbers = {name: value for name, value in summary.flat().items() if value is not None}
    for name, value in numbers.items():
        _require(math.isnan(value) or 0 <= value < math.inf, f"{name} is {value}")
    if summary.completed:
        # streams are not always told, so a TTFT may be missing
        _require(math.isfinite(summary.e2el.mean), "completed requests have a latency")
        _require(math.isfinite(summary.output_throughput), "completed requests have a throughput")
        if math.isfinite(summary.ttft.mean):
            _require(summary.ttft.mean <= summary.e2el.mean * (1 + 1e-6), "TTFT is not beyond E2EL")
    else:
        told = any("failed" in note or "no request" in note for note in level.notes)
        _require(told, "that nothing was completed is said")


def _use_load(load: Load) -> None:
    if isinstance(load, Workload):
        load = replace(load, num_prompts=min(load.num_prompts, 10))
        times = load.arrival_times()
        _require(times is None or bool(np.isfinite(times).all()), "arrivals are finite")
    prompts, outputs = load.lengths()
    for tokens in (prompts[:10], outputs[:10]):
        _require(bool(((tokens >= 1) & (tokens <= MOST_TOKENS)).all()), f"lengths are {tokens}")


def _use_figures(levels: list[StatedLevel]) -> None:
    """Keep the figures as ``capsim import`` does, and look at every one."""
    _require(levels, "levels are stated")
    save_stated(levels, scratch() / "figures-kept.json")
    again = load_stated(scratch() / "figures-kept.json")
    _require([one.figures for one in again] == [one.figures for one in levels], "figures are kept as they are")
    for level in levels:
        _use_load(level.workload)
        for figure in level.figures:
            _require(_known_figure(figure.metric), f"{figure.metric!r} is a figure")
            _require(0 < figure.value < math.inf, f"{figure.metric} is {figure.value}")
            _require(0 < figure.uncertainty < math.inf, f"{figure.metric} is known to {figure.uncertainty}")


def _known_figure(metric: str) -> bool:
    part, _, latency = metric.partition("_")
    return (
        part in ("mean", "p50", "p90", "p95", "p99")
        if latency in LATENCIES
        else metric in Summary.__annotations__ or metric == "p50_decode_time"
    )


def _stated(path: Path) -> None:
    _use_figures(load_stated(path))


def _any_result(path: Path) -> None:
    """Whatever it is, also where a format is insisted on."""
    with suppress(ImportFileError):
        _import(path, NAMES[zlib.crc32(path.read_bytes()) % len(NAMES)])
    _import(path)


def _beside(name: str, requests: Callable[[], list[bytes]], named: str) -> Callable[[bytes], object]:
    """Reads bytes as the file `name` beside requests in order, which lie in the file `named`."""

    def read(content: bytes) -> None:
        folder = scratch() / f"beside-{name}"
        folder.mkdir(exist_ok=True)
        (folder / named).write_bytes(requests()[0])
        (folder / name).write_bytes(content)
        _import(folder / named)

    return read


# --- traces


def _trace(path: Path) -> None:
    with suppress(TraceError):
        _use_trace(read_trace(path, FORMATS[zlib.crc32(path.read_bytes()) % len(FORMATS)]))
    _use_trace(read_trace(path))


def _use_trace(trace: Trace) -> None:
    if trace.times is None:
        trace = trace.sent_by(ClosedLoop(2))
    else:
        _require(bool(np.isfinite(trace.times).all()) and trace.times[0] == 0, f"times are {trace.times[:5]}")
    _require(trace.describe().isprintable(), f"a trace is told in a line: {trace.describe()[:200]!r}")
    first = trace.first(10)
    _use_load(first)
    for number in range(first.num_prompts):
        blocks = len(first.prefix(number, 16))
        _require(blocks * 16 <= first.prompt_tokens[number], "a prefix is no longer than its prompt")


def _packed_trace(content: bytes) -> None:
    """By what it begins with a file of gzip, bzip2 or xz."""
    ending = {b"B": "bz2", b"\xfd": "xz"}.get(content[:1], "gz")
    of_file(f"t.csv.{ending}", _trace)(content)


# --- servers


def _log(path: Path) -> None:
    """Use a log as ``capsim calibrate`` and ``capsim memory`` do."""
    log = read_server_log(path)
    for table in (log.status, log.iterations):
        numbers = table.drop(columns="dummy", errors="ignore").to_numpy(np.float64)
        _require(bool((np.isnan(numbers) | (np.abs(numbers) < 1e18)).all()), "numbers of a log are numbers")
    _use_flags(lambda: discover_flags(ENDPOINT, log=log))
    try:
        memory = server_memory(log)
    except ServerMemoryError as problem:
        _require(str(problem).isprintable(), f"a problem is a line: {problem}")
        return
    numbers = [value for value in vars(memory.account).values() if isinstance(value, (int, float))]
    _require(all(math.isfinite(number) for number in numbers), f"memory is {memory.account}")


def _use_flags(discover: Callable[[], Any]) -> None:
    known = discover()
    for sentence in (*known.assumed, *known.inferred, *known.contradictions):
        _require(sentence.isprintable() and len(sentence) < 1000, f"a sentence is a line: {sentence[:200]!r}")


def _metrics(content: bytes) -> None:
    _use_snapshot(parse_metrics(content.decode(errors="replace")))
    _use_snapshot(parse_metrics(only_gauges(content).decode(errors="replace")))


def _use_snapshot(snapshot: MetricsSnapshot) -> None:
    for field in fields(snapshot):
        value = getattr(snapshot, field.name)
        numbers = (value.sum, value.count) if isinstance(value, SumCount) else (value,)
        for number in numbers:
            if isinstance(number, (int, float)):
                _require(0 <= number < 2**63, f"{field.name} is {number}")


def _answers(content: bytes) -> None:
    """A server's four answers, one a line but for the last, put together as ``capsim doctor`` does."""
    parts = [part.decode(errors="replace") for part in content.split(b"\n", 3)]
    models, version, info, metrics = (parts + [""] * 4)[:4]
    cards = keepable(models_in("http://host", models), "sk-a-secret-key")
    found = endpoint_of("http://host", cards[0], version, info, metrics)
    json.dumps(found.server(), allow_nan=False)
    numbers = [value for value in found.server().values() if isinstance(value, (int, float))]
    _require(all(0 <= number < 2**63 for number in numbers), f"a server tells {found.server()}")
    _require(found.kv_pool_tokens is None or found.kv_pool_tokens >= 0, "a pool is no debt")
    _use_flags(lambda: discover_flags(found, info=info_in(info), fingerprint=version[:100]))


def _gpus(content: bytes) -> None:
    reading = gpus_in(content.decode(errors="replace"), "http://host:9400/metrics")
    _require((reading.gpus is not None) != bool(reading.reason), "there are GPUs or there is a reason")
    for gpu in reading.gpus or ():
        _require(gpu.utilization is None or 0 <= gpu.utilization <= 1, f"a GPU is busy: {gpu.utilization}")
        for memory in (gpu.memory_total, gpu.memory_used):
            _require(memory is None or 0 <= memory < 2**63, f"a GPU has {memory} bytes")
    _use_flags(lambda: discover_flags(ENDPOINT, gpus=GpuReading(reading.gpus, reading.reason)))


def _stream(content: bytes) -> None:
    """A stream that comes in random pieces, and the level of that one request."""
    rng = random.Random(zlib.crc32(content))
    answer, time, position = Answer(0, 64, 4, 0.0, sent=0.1, headers=0.2), 1.0, 0
    reader = StreamReader(answer)
    size = rng.choice((1, 7, 60, 1000, 100_000)) if len(content) < 5000 else 10_000
    while position < len(content):
        step = rng.randint(1, size)
        reader.feed(time, content[position : position + step])
        time, position = time + 0.01, position + step
    reader.end()
    answer.ended = time
    _require(answer.error.isprintable() and len(answer.error) < 100, f"an error is a kind: {answer.error[:200]!r}")
    counts = [tokens for _, tokens in answer.arrivals]
    _require(counts == sorted(counts) and all(0 < count <= MOST_TOKENS for count in counts), f"counts are {counts[:9]}")
    if answer.error and zlib.crc32(content) % 8:  # tables take a while, and a failed request fills few
        return
    job = Job(ENDPOINT, Workload(ClosedLoop(1), (Shape(Length.fixed(64), Length.fixed(4)),), 1), 0, Dialect())
    _use_level(level_of(job, Recording(Dialect(), 0.0, [answer])))


def _require(holds: object, what: str) -> None:
    """`what` must hold of anything that a reader accepts."""
    if not holds:
        raise AssertionError(what)


IMPORTING = (ImportFileError,)
READERS: tuple[Reader, ...] = (
    Reader("vllm bench results", seeds.vllm_bench_results, of_file("r.json", _import), IMPORTING, slow=True),
    Reader("sglang results", seeds.sglang_results, of_file("r.jsonl", _import), IMPORTING, slow=True),
    Reader("aiperf requests", seeds.aiperf_requests, of_file("profile_export.jsonl", _import), IMPORTING, slow=True),
    Reader("aiperf summary", seeds.aiperf_summary, of_file("summary.json", _import), IMPORTING),
    Reader(
        "aiperf server metrics",
        seeds.aiperf_server_metrics,
        _beside("server_metrics_export.json", seeds.aiperf_requests, "profile_export.jsonl"),
        IMPORTING,
        slow=True,
    ),
    Reader("guidellm reports", seeds.guidellm_reports, of_file("g.json", _import), IMPORTING, slow=True),
    Reader("inference-perf results", seeds.inference_perf_results, of_file("i.json", _import), IMPORTING, slow=True),
    Reader(
        "inference-perf configs",
        seeds.inference_perf_configs,
        _beside("config.yaml", seeds.inference_perf_results, "per_request_lifecycle_metrics.json"),
        IMPORTING,
        slow=True,
    ),
    Reader("benchmark reports", seeds.benchmark_reports, of_file("report.yaml", _import), IMPORTING, slow=True),
    Reader("stated figures", seeds.stated_figures, of_file("figures.json", _stated), IMPORTING),
    Reader("any result file", seeds.any_result, of_file("any", _any_result), IMPORTING, slow=True),
    Reader("csv traces", seeds.csv_traces, of_file("t.csv", _trace), (TraceError,), slow=True),
    Reader("json traces", seeds.json_traces, of_file("t.jsonl", _trace), (TraceError,)),
    Reader("compressed traces", seeds.compressed_traces, _packed_trace, (TraceError,)),
    Reader("server logs", seeds.server_logs, of_file("vllm.log", _log), (ServerLogError, FlagError), slow=True),
    Reader("metrics", seeds.metrics_texts, _metrics, (MetricsError,)),
    Reader("server answers", seeds.server_answers, _answers, (EndpointError, FlagError)),
    Reader("dcgm metrics", seeds.dcgm_texts, _gpus, ()),
    Reader("event streams", seeds.event_streams, _stream, (), slow=True),
)

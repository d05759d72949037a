"""``python -m sglang.bench_serving --output-file``, one JSON line a run, with ``--output-details`` or without.

Source: SGLang 0.5.23, `benchmark/`. TTFT, TPOT and E2EL are ours; ITL is per chunk. There are neither sending times nor
latencies: E2EL is TTFT plus all gaps. `Infinity`, which strict JSON lacks, is a request rate.
"""

from __future__ import annotations

import math

import numpy as np

from calibration.imports.format import Format
from calibration.imports.lengths import length_of
from calibration.imports.records import NAN, Record, level_from_records, sent_in_closed_loop
from calibration.imports.source import GREATEST, Fields, NoRequestsError, Source
from calibration.imports.stated import StatedLevel, figures_of, statistics_in
from simulator.loads.workload import ClosedLoop, OpenLoop, Shape, Workload
from simulator.results.run import Level, Run

MARKS = {"backend", "duration", "completed", "total_output_tokens_retokenized", "request_throughput"}
NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e_latency"}
CHUNKS_NOTE = "SGLang's ITL is per chunk"


def recognises(source: Source) -> bool:
    results = source.objects()
    return bool(results) and all(result.data.keys() >= MARKS for result in results)


def read_requests(source: Source) -> Run:
    """One level for each line. Raises `NoRequestsError` for lines without details."""
    results = source.objects()
    for result in results:
        if "ttfts" not in result:
            raise NoRequestsError(
                f"{source.path}: {result.place + ' holds' if result.place else 'holds'} aggregates only, no requests: "
                "it can validate, cannot calibrate; run bench_serving with --output-details for more"
            )
    return Run("measured", [_level(result) for result in results], _server(results[0]))


def read_stated(source: Source) -> list[StatedLevel]:
    return [_stated(result) for result in source.objects()]


def _level(result: Fields) -> Level:
    prompts = result.counts("input_lens")
    outputs = result.counts("output_lens")
    ttfts, itls, errors = result.reals("ttfts"), result.lists("itls"), result.texts("errors")
    for name, values in (("output_lens", outputs), ("ttfts", ttfts), ("itls", itls), ("errors", errors)):
        if len(values) != len(prompts):
            raise result.problem(name, f"has {len(values)} entries and 'input_lens' {len(prompts)}")
    chunks = [np.cumsum([ttft, *gaps]) for ttft, gaps in zip(ttfts, itls, strict=True)]
    kinds = [_kind(error, output) for error, output in zip(errors, outputs, strict=True)]
    arrivals, duration = _arrivals(result), result.real("duration")
    sent = None
    if isinstance(arrivals, ClosedLoop) and not any(kinds):
        sent = sent_in_closed_loop([float(times[-1]) for times in chunks], arrivals.concurrency, duration)
    records = [
        Record(prompt, output, start, error=kind)
        if kind
        else Record(prompt, output, start, float(times[0]), float(times[-1]), times)
        for prompt, output, start, times, kind in zip(
            prompts, outputs, sent or [NAN] * len(prompts), chunks, kinds, strict=True
        )
    ]
    notes = [f"imported from SGLang bench_serving; {CHUNKS_NOTE}"]
    return level_from_records(records, arrivals, notes, duration=duration, rebuilt=True)


def _stated(result: Fields) -> StatedLevel:
    completed = result.count("completed")
    if not completed:
        raise result.problem("completed", "is 0: nothing was measured")
    prompt = result.real("total_input_tokens") / completed
    output = result.real("total_output_tokens") / completed
    shape = Shape(length_of(prompt), length_of(output))
    workload = Workload(_arrivals(result), (shape,), completed)
    latencies = {
        ours: statistics_in(result, lambda part, theirs=theirs: _key(part, theirs), 0.001)  # type: ignore[misc]
        for ours, theirs in NAMES.items()
    }
    rates: dict[str, float | None] = {
        "output_throughput": result.real("output_throughput"),
        "mean_concurrency": result.real("concurrency") if "concurrency" in result else None,
    }
    notes = [f"stated by SGLang bench_serving; {CHUNKS_NOTE}", f"lengths are means: {shape} tokens"]
    return StatedLevel(workload, figures_of(workload, latencies, rates, completed), notes, _server(result))


def _key(part: str, latency: str) -> str:
    return f"{'median' if part == 'p50' else part}_{latency}_ms"


def _arrivals(result: Fields) -> ClosedLoop | OpenLoop:
    rate = result.data.get("request_rate")
    if rate == "trace":
        raise result.problem("request_rate", "is 'trace': recorded arrivals are not in the file")
    endless = rate in (math.inf, "inf", None)
    if "max_concurrency" in result and endless:
        return ClosedLoop(result.one_or_more("max_concurrency"))
    return OpenLoop(math.inf if endless else result.rate("request_rate"))


def _server(result: Fields) -> dict[str, object]:
    """SGLang's own names of its flags, under ``server_info``."""
    info = result.section_or_empty("server_info")
    server: dict[str, object] = {"source": "SGLang bench_serving", "engine": result.text("backend")}
    if model := result.text("model_id") or info.text("served_model_name") or info.text("model_path"):
        server["model"] = model
    if tokens := info.size("max_total_num_tokens"):
        server["kv_tokens"] = tokens
    names = ("max_running_requests", "chunked_prefill_size", "mem_fraction_static", "tp_size", "version")
    kept = {name: info.text(name) or info.data[name] for name in names if _is_plain(info.data.get(name))}
    return server | ({"server_info": kept} if kept else {})


def _is_plain(value: object) -> bool:
    """A text, or a number that JSON can keep."""
    return isinstance(value, str) or (isinstance(value, (int, float)) and abs(value) <= GREATEST)


def _kind(error: str, output: int) -> str:
    if error.strip():
        last = error.strip().splitlines()[-1]
        return "timeout" if "timeout" in last.lower() else last.partition(":")[0].rpartition(".")[2][:60]
    return "" if output else "no tokens"


FORMAT = Format("sglang", "SGLang bench_serving --output-file", recognises, read_requests, read_stated)

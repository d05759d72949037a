"""``vllm bench serve --save-result``, with ``--save-detailed`` or without, one object or several appended.

Sources: vLLM 0.8.5 to 0.33.0, `benchmarks/serve.py`. TTFT, TPOT and E2EL are ours. Its ITL is the gap between chunks,
whatever they carry. `max_concurrent_requests` and `max_output_tokens_per_s` are wrong by its own clock and not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime

import numpy as np

from calibration.foreign_text import one_line
from calibration.imports.format import Format
from calibration.imports.lengths import length_of
from calibration.imports.records import NAN, Record, level_from_records
from calibration.imports.source import Fields, NoRequestsError, Source, size_in
from calibration.imports.stated import StatedLevel, Statistics, figures_of, statistics_in
from simulator.loads.workload import ClosedLoop, OpenLoop, Shape, Workload
from simulator.results.run import Level, Run

MARKS = {"model_id", "num_prompts", "duration", "completed", "total_input_tokens", "total_token_throughput"}
# The first sampled release that writes a key, newest first.
SINCE = (("server_ttfts", "0.33"), ("latencies", "0.30"), ("start_times", "0.15"), ("backend", "0.12"))
COLON_KEY = "request_goodput:"  # 0.8.5 wrote it so
ROLE_GAP = 0.0005  # s; the chat role chunk leaves together with the first token
COUNTS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "num_gpu_blocks",
    "kv_tokens",
    "engines",
)
KNOWN_TEXTS = {"date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "request_rate", "burstiness"}


def recognises(source: Source) -> bool:
    results = source.objects()
    return bool(results) and all(result.data.keys() >= MARKS for result in results)


def read_requests(source: Source) -> Run:
    """One level for each result in the file. Raises `NoRequestsError` for results without details."""
    results = source.objects()
    for result in results:
        if "ttfts" not in result:
            raise NoRequestsError(
                f"{source.path}: {result.place + ' holds' if result.place else 'holds'} aggregates only, no requests: "
                "it can validate, cannot calibrate; run vllm bench serve with --save-detailed for more"
            )
    levels = [_level(result) for result in results]
    return Run("measured", levels, _server(results[0]), _date(results[0]))


def read_stated(source: Source) -> list[StatedLevel]:
    """What every result states, with or without details."""
    return [_stated(result) for result in source.objects()]


def _level(result: Fields) -> Level:
    prompts, outputs = result.counts("input_lens"), result.counts("output_lens")
    ttfts, itls, errors = result.reals("ttfts"), result.lists("itls"), result.texts("errors")
    number = len(prompts)
    sent = result.reals("start_times") if "start_times" in result else [NAN] * number
    latencies = result.reals("latencies") if "latencies" in result else [NAN] * number
    queues = result.reals("server_queue_times") if "server_queue_times" in result else [NAN] * number
    for name, values in (("output_lens", outputs), ("ttfts", ttfts), ("itls", itls), ("errors", errors)):
        _same_length(result, name, values, number)
    for name, times in (("start_times", sent), ("latencies", latencies), ("server_queue_times", queues)):
        _same_length(result, name, times, number)
    has_role_chunk = _is_chat(result) and _role_chunk(itls, outputs, errors)
    records = []
    for row in range(number):
        error = _kind(errors[row]) if errors[row] else "" if outputs[row] else "no tokens"
        if error:
            records.append(Record(prompts[row], outputs[row], sent[row] or NAN, error=error))
            continue
        chunks = np.cumsum([ttfts[row], *itls[row]])
        if has_role_chunk and len(chunks) > 1:
            chunks = chunks[1:]
        end = float(chunks[-1]) if math.isnan(latencies[row]) else latencies[row]
        only_ends = len(chunks) == 1 and outputs[row] > 1  # an export without gaps
        records.append(
            Record(
                prompts[row],
                outputs[row],
                sent[row],
                ttft=float(chunks[0]),
                e2el=end,
                chunks=None if only_ends else chunks,
                queue_time=queues[row],
            )
        )
    arrivals = _arrivals(result)
    notes = [f"imported from vllm bench serve {_version(result)}", *_traps(result, has_role_chunk)]
    return level_from_records(records, arrivals, notes, duration=result.real("duration"))


def _stated(result: Fields) -> StatedLevel:
    completed = result.count("completed")
    if not completed:
        raise result.problem("completed", "is 0: nothing was measured")
    duration = result.positive("duration")
    prompt = result.real("total_input_tokens") / completed
    output = result.real("total_output_tokens") / completed
    shape = Shape(length_of(prompt), length_of(output))
    workload = Workload(_arrivals(result), (shape,), result.one_or_more("num_prompts"))
    unsafe = {"itl"} if _is_chat(result) and not _skips_role_chunk(result) else set()
    latencies = {
        name: statistics_in(result, lambda part, name=name: _key(result, part, name), 0.001)  # type: ignore[misc]
        for name in ("ttft", "tpot", "itl", "e2el")
        if name not in unsafe
    }
    rates: dict[str, float | None] = {"output_throughput": result.real("output_throughput")}
    notes = [f"stated by vllm bench serve {_version(result)}", f"lengths are means: {shape} tokens"]
    times = np.array([time for time in result.reals("latencies") if time] if "latencies" in result else [])
    if len(times):  # a failed request has 0
        rates["mean_concurrency"] = float(times.sum()) / duration
        known = {part: float(np.percentile(times, part)) for part in (50, 90, 95, 99)}
        latencies["e2el"] = Statistics(float(times.mean()), float(times.std()), known)
    if unsafe:
        notes.append("ITL left out: up to 0.32 the chat role chunk counts as the first token")
    return StatedLevel(workload, figures_of(workload, latencies, rates, completed), notes, _server(result))


def _key(result: Fields, part: str, latency: str) -> str:
    key = f"{part}_{latency}_ms"
    return f"median_{latency}_ms" if part == "p50" and key not in result else key


def _arrivals(result: Fields) -> ClosedLoop | OpenLoop:
    """A closed loop where concurrency is bounded and requests are sent as fast as that allows, else an open one."""
    clients = result.one_or_more("max_concurrency") if "max_concurrency" in result else None
    endless = result.data.get("request_rate", "inf") in ("inf", math.inf, None)
    if clients and (endless or _bound_binds(result, clients)):
        return ClosedLoop(clients)
    burstiness = result.data.get("burstiness")
    steady = burstiness in ("inf", math.inf)
    return OpenLoop(
        math.inf if endless else result.rate("request_rate"),
        math.inf if steady else result.burstiness("burstiness") if "burstiness" in result else 1.0,
    )


def _bound_binds(result: Fields, clients: int) -> bool:
    """Whether requests had to wait for the bound on concurrency: by Little's law it was nearly reached on average."""
    if "latencies" not in result:
        return False
    return sum(result.reals("latencies")) / result.positive("duration") > 0.9 * clients


def _role_chunk(itls: Sequence[Sequence[float]], outputs: Sequence[int], errors: Sequence[str]) -> bool:
    """Whether the first chunk of each answer carried the role and no token."""
    marks = [
        len(gaps) == output or gaps[0] < ROLE_GAP
        for gaps, output, error in zip(itls, outputs, errors, strict=True)
        if gaps and not error
    ]
    return bool(marks) and sum(marks) > 0.9 * len(marks)


def _traps(result: Fields, has_role_chunk: bool) -> list[str]:
    notes = []
    if has_role_chunk:
        notes.append("the chat role chunk counted as the first token (vLLM bench up to 0.32): it was left out")
    if "latencies" not in result:
        notes.append("prompt lengths may be the client's own count (vLLM bench before 0.20)")
    if result.data.get("ramp_up_strategy"):
        notes.append("the request rate was ramped up; the workload states its last value")
    return notes


def _version(result: Fields) -> str:
    """Which releases write such a file; it does not say itself."""
    if COLON_KEY in result.data:
        return "0.8.5"
    return next((f">= {version}" for key, version in SINCE if key in result.data), "< 0.12")


def _skips_role_chunk(result: Fields) -> bool:
    """Whether the role chunk was no token, as since 0.33, as far as the file shows."""
    if "itls" not in result:
        return "server_ttfts" in result
    return not _role_chunk(result.lists("itls"), result.counts("output_lens"), result.texts("errors"))


def _is_chat(result: Fields) -> bool:
    return "chat" in f"{result.text('backend')} {result.text('endpoint_type')}"


def _server(result: Fields) -> dict[str, object]:
    """The model, the tool, and the user's own ``--metadata``, where flags of the engine are taken as such."""
    server: dict[str, object] = {"model": result.text("model_id"), "source": "vllm bench serve"}
    server["source_version"] = _version(result)
    metadata = {
        one_line(key): one_line(value)
        for key, value in result.data.items()
        if isinstance(value, str) and key not in KNOWN_TEXTS
    }
    server |= {key: size for key in COUNTS if (size := size_in(metadata.get(key))) is not None}
    server |= {key: metadata[key] for key in ("gpu", "engine", "engine_version") if key in metadata}
    if metadata.get("async_scheduling") in ("True", "False"):
        server["async_scheduling"] = metadata["async_scheduling"] == "True"
    rest = {key: value for key, value in metadata.items() if key not in server}
    return server | ({"metadata": rest} if rest else {})


def _date(result: Fields) -> str:
    try:
        return datetime.strptime(result.text("date"), "%Y%m%d-%H%M%S").isoformat()  # noqa: DTZ007
    except ValueError:
        return ""


def _kind(error: str) -> str:
    """A short kind of an error that may be a traceback: its last line's exception, or the server's reason."""
    last = (error.strip().splitlines() or [""])[-1].strip()
    if status := re.search(r"\b([45]\d\d)\b", last):
        return f"http {status[1]}"
    if "timeout" in last.lower():
        return "timeout"
    return last.partition(":")[0].rpartition(".")[2][:60] or "error"


def _same_length(result: Fields, name: str, values: Sequence[object], number: int) -> None:
    if len(values) != number:
        raise result.problem(name, f"has {len(values)} entries and 'input_lens' {number}")


FORMAT = Format("vllm-bench", "vllm bench serve --save-result", recognises, read_requests, read_stated)

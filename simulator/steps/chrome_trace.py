"""A simulated level as a trace that ui.perfetto.dev and chrome://tracing show: steps, requests, gauges.

The format is the JSON object form of the Trace Event Format
(docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), times in microseconds:

    process "engine"    one thread with a complete event (``X``) for each step, or run of equal steps, and counters
                        (``C``) of requests and tokens
    process "requests"  for each request nested async events (``b``, ``e``) with the request's number as their id: the
                        whole of it, and within it the API server, the queue, the prefill, decoding, and preemptions
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simulator.steps.explanation import Explanation
from simulator.steps.step_log import PREEMPTION, Array, ObservedLevel, RequestLog

ENGINE, REQUESTS = 1, 2  # process ids
STEPS = 1  # thread id
MICROSECONDS = 1e6

Event = dict[str, Any]


def write_trace(path: Path, observed: ObservedLevel, explanation: Explanation, title: str) -> int:
    """Write the trace of a level, one event a line; returns the number of events."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        about = {"title": title, "load": observed.level.workload.describe(), "source": "capsim, simulated"}
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
        for event in trace_events(observed, explanation):
            file.write((",\n" if count else "") + json.dumps(event, allow_nan=False))
            count += 1
        file.write("\n]}\n")
    return count


def trace_events(observed: ObservedLevel, explanation: Explanation) -> Iterator[Event]:
    """All events of a level."""
    yield from _names()
    yield from _steps(observed)
    yield from _counters(observed)
    yield from _requests(observed, explanation)


def _names() -> Iterator[Event]:
    for pid, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
        yield _event("M", "process_name", 0.0, pid, 0, args={"name": name})
        yield _event("M", "process_sort_index", 0.0, pid, 0, args={"sort_index": pid})
    yield _event("M", "thread_name", 0.0, ENGINE, STEPS, args={"name": "steps"})


def _steps(observed: ObservedLevel) -> Iterator[Event]:
    column = {name: values.tolist() for name, values in observed.log.columns().items()}
    whole = ("running", "waiting", "sequences", "tokens", "prefill_tokens")
    for row, steps in enumerate(column["steps"]):
        if not steps:
            continue
        start, end, prompts = column["start"][row], column["end"][row], int(column["prompts"][row])
        decoding = int(column["sequences"][row]) - prompts
        name = " + ".join([f"prefill {prompts}"] * (prompts > 0) + [f"decode {decoding}"] * (decoding > 0))
        args: dict[str, Any] = {key: int(column[key][row]) for key in whole}
        args |= {"steps": int(steps), "planned_ms": column["planned"][row] * 1000}
        name += f", {int(steps)} steps" if steps > 1 else ""
        yield _event("X", name, start, ENGINE, STEPS, cat="step", dur=(end - start) * MICROSECONDS, args=args)


def _counters(observed: ObservedLevel) -> Iterator[Event]:
    timeline = observed.level.timeline
    columns = (timeline[name].tolist() for name in ("time", "running", "waiting", "kv_tokens", "active_tokens"))
    for time, running, waiting, held, active in zip(*columns, strict=True):
        yield _event("C", "requests", time, ENGINE, STEPS, args={"running": running, "waiting": waiting})
        yield _event("C", "tokens", time, ENGINE, STEPS, args={"KV cache": held, "active": active})


def _requests(observed: ObservedLevel, explanation: Explanation) -> Iterator[Event]:
    """Requests in the order of sending; within one the outer event begins first and ends last, as nesting asks for."""
    starts = observed.log.columns()["start"]
    table = observed.level.requests
    ttft = dict(zip(table["request_id"].tolist(), explanation.ttft.to_dict("records"), strict=True))
    for number, arrival, e2el, stop in zip(
        *(table[name].tolist() for name in ("request_id", "arrival", "e2el", "finish_reason")), strict=True
    ):
        log = observed.log.requests[number]
        request = log.request
        about = {"prompt_tokens": request.prompt_tokens, "output_tokens": request.output_tokens}
        about |= {"preemptions": request.preemptions, "finish_reason": stop}
        parts = {f"{name}_ms": seconds * 1000 for name, seconds in ttft[number].items()}
        yield _async("b", f"request {number}", arrival, number, about | {"ttft": parts})
        for name, start, end in _phases(log, starts, arrival + e2el):
            if end > start:
                yield _async("b", name, start, number)
                yield _async("e", name, end, number)
        yield _async("e", f"request {number}", arrival + e2el, number)


def _phases(log: RequestLog, starts: Array, seen: float) -> Iterator[tuple[str, float, float]]:
    """What a request goes through, one after the other, to the moment at which the client has `seen` it all."""
    request = log.request
    first, ended = request.first_token, request.ended
    marks = [(request.arrived, "queue")]
    marks += [(float(starts[row]), "prefill" if starts[row] < first else "recompute") for row in log.admissions]
    marks += [(first, "decode")]
    marks += [(pause.end, "decode") for pause in log.interruptions if pause.cause == PREEMPTION]
    marks += [(float(starts[row]), "preempted") for row in log.preemptions]
    inside = sorted((mark for mark in marks if mark[0] < ended), key=lambda mark: mark[0])
    marks = [(request.sent, "API server"), *inside, (ended, "way to the client")]
    ends = [time for time, _ in marks[1:]] + [seen]
    for (time, name), end in zip(marks, ends, strict=True):
        yield name, time, end


def _async(phase: str, name: str, time: float, number: int, args: dict[str, Any] | None = None) -> Event:
    event = _event(phase, name, time, REQUESTS, 0, cat="request", id=number)
    return event | {"args": args} if args else event


def _event(phase: str, name: str, time: float, pid: int, tid: int, **more: object) -> Event:
    return {"name": name, "ph": phase, "ts": time * MICROSECONDS, "pid": pid, "tid": tid, **more}

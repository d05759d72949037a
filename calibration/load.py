"""A level of load on a live server, and the tables that come of it."""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from calibration.client_processes import record_apart
from calibration.clients import Job, Progress, Recording
from calibration.dialect import Dialect
from calibration.endpoint import Endpoint
from calibration.level_notes import notes_of
from calibration.metrics import SumCount, parse_metrics
from calibration.stream import PATIENCE, Answer, Patience
from simulator.loads.workload import Load
from simulator.results.resampling import resampled_intervals
from simulator.results.run import GAP_COLUMNS, RECORD_COLUMNS, REQUEST_COLUMNS, TIMELINE_COLUMNS, TOKEN_COLUMNS, Level

__all__ = ["level_of", "play", "record_apart"]

DECIMALS = 9  # times are kept to the nanosecond


def play(
    endpoint: Endpoint,
    workload: Load,
    *,
    dialect: Dialect | None = None,
    seed: int | None = None,
    patience: Patience = PATIENCE,
    sample_every: float = 0.5,
    on_progress: Callable[[Progress], None] | None = None,
) -> Level:
    """Play `workload` against `endpoint` from a process of its own and measure what comes.

    Prompts are random token ids, new for every call unless `seed` is given. `sample_every` (seconds) is the pace of
    the timeline. Requests that fail are rows with an error; only a server that cannot be measured at all raises
    `EndpointError`.
    """
    seed = secrets.randbits(63) if seed is None else seed
    job = Job(endpoint, workload, seed, dialect, patience, sample_every)
    return level_of(job, record_apart(job, on_progress))


def level_of(job: Job, seen: Recording) -> Level:
    """The tables of a level from what its clients saw."""
    for answer in seen.answers:
        _check_counts(answer, seen.dialect)
        if job.endpoint.api_key:
            answer.detail = answer.detail.replace(job.endpoint.api_key, "***")
    start = seen.started
    good = [answer for answer in seen.answers if not answer.error]
    gaps = _gaps(good, start)
    level = Level(
        workload=job.workload,
        duration=_duration(seen.answers),
        requests=_requests(seen.answers, start),
        gaps=gaps,
        timeline=_timeline(job, seen),
        tokens=_tokens(seen.answers, start),
        records=_records(seen.answers, start),
        server_means=_server_means(seen),
    )
    level.notes = notes_of(job, seen, gaps)
    level.intervals = resampled_intervals(level)
    return level


def _server_means(seen: Recording) -> dict[str, float]:
    """The server's own means over the level, seconds, by the names of `MetricsSnapshot`; empty where it tells none."""
    if seen.before is None or seen.after is None:
        return {}
    means: dict[str, float] = {}
    for name in ("queue_time", "prefill_time", "decode_time", "ttft"):
        before, after = getattr(seen.before, name), getattr(seen.after, name)
        if isinstance(before, SumCount) and isinstance(after, SumCount):
            mean = (after - before).mean
            if mean is not None:
                means[name] = mean
    return means


def _check_counts(answer: Answer, dialect: Dialect) -> None:
    """An answer of other lengths than were asked for is an error; a chat's prompts are text, their length is free."""
    if answer.error:
        return
    prompt, output = answer.counted_prompt, answer.counted_output
    if output is None and answer.finish_reason == "stop" and answer.tokens < answer.output_tokens:
        output = answer.tokens
    if not answer.arrivals:
        answer.error = "no tokens"
    elif prompt not in (None, answer.prompt_tokens) and not dialect.chat:
        answer.error, answer.detail = "prompt miscounted", f"{prompt} tokens instead of {answer.prompt_tokens}"
    elif output not in (None, answer.output_tokens):
        answer.error = "ended early" if (output or 0) < answer.output_tokens else "ran on"
        answer.detail = f"{output} tokens instead of {answer.output_tokens}"


def _requests(answers: Sequence[Answer], start: float) -> pd.DataFrame:
    rows = []
    for answer in answers:
        ttft = e2el = tpot = np.nan
        if not answer.error:
            (first, _), (last, tokens) = answer.arrivals[0], answer.arrivals[-1]
            ttft, e2el = first - answer.sent, last - answer.sent
            tpot = (e2el - ttft) / (tokens - 1) if tokens > 1 else np.nan
        reason = "" if answer.error else answer.finish_reason
        times = (answer.sent - start, answer.prompt_length, answer.tokens, ttft, tpot, e2el)
        rows.append((answer.index, *times, np.nan, -1, reason, answer.error))
    return _table(rows, REQUEST_COLUMNS)


def _gaps(answers: Sequence[Answer], start: float) -> pd.DataFrame:
    """A row for every read but an answer's first: k tokens that came together share the gap before them."""
    rows = []
    for answer in answers:
        for (before, had), (now, has) in zip(answer.arrivals, answer.arrivals[1:], strict=False):
            count = max(1, has - had)
            rows.append((now - start, (now - before) / count, count))
    return _table(sorted(rows), GAP_COLUMNS)


def _tokens(answers: Sequence[Answer], start: float) -> pd.DataFrame:
    rows = [(answer.index, time - start, tokens) for answer in answers for time, tokens in answer.arrivals]
    return _table(rows, TOKEN_COLUMNS)


def _records(answers: Sequence[Answer], start: float) -> pd.DataFrame:
    rows = [
        (
            answer.index,
            answer.scheduled - start,
            answer.sent - start,
            answer.headers - start if answer.headers else np.nan,
            answer.ended - start,
            answer.prompt_tokens,
            answer.output_tokens,
            -1 if answer.counted_prompt is None else answer.counted_prompt,
            -1 if answer.counted_output is None else answer.counted_output,
            answer.detail,
        )
        for answer in answers
    ]
    return _table(rows, RECORD_COLUMNS)


def _timeline(job: Job, seen: Recording) -> pd.DataFrame:
    """The server's gauges as sampled; without /metrics what the clients know, -1 and NaN for the rest."""
    pool = job.endpoint.kv_pool_tokens
    rows = []
    for time, text in seen.samples:
        gauges = parse_metrics(text.decode(errors="replace"))
        kv_tokens = np.nan if pool is None or gauges.kv_usage is None else gauges.kv_usage * pool * gauges.engines
        running = -1 if gauges.running is None else gauges.running
        waiting = -1 if gauges.waiting is None else gauges.waiting
        active = _active_tokens(seen.answers, time, max(0, waiting))
        rows.append((time - seen.started, running, waiting, kv_tokens, active))
    if not job.endpoint.has_metrics:
        for time in np.arange(0.0, _duration(seen.answers), job.sample_every):
            in_flight = sum(_in_flight(answer, seen.started + time) for answer in seen.answers)
            active = _active_tokens(seen.answers, seen.started + time, 0)
            rows.append((time, in_flight, -1, np.nan, active))
    return _table(rows, TIMELINE_COLUMNS)


def _active_tokens(answers: Sequence[Answer], time: float, waiting: int) -> float:
    """Prompt and received tokens of the requests in flight at `time`, the last `waiting` without a token left out."""
    silent, tokens = [], 0
    for answer in answers:  # in the order of sending
        if not _in_flight(answer, time):
            continue
        received = _received(answer, time)
        if received:
            tokens += answer.prompt_length + received
        else:
            silent.append(answer.prompt_length)
    return float(tokens + sum(silent[: max(0, len(silent) - waiting)]))


def _in_flight(answer: Answer, time: float) -> bool:
    return answer.sent <= time < answer.ended


def _received(answer: Answer, time: float) -> int:
    position = bisect_right(answer.arrivals, time, key=lambda arrival: arrival[0])
    return answer.arrivals[position - 1][1] if position else 0


def _duration(answers: Sequence[Answer]) -> float:
    """First send to last end, seconds."""
    ends = (answer.ended if answer.error else answer.arrivals[-1][0] for answer in answers)
    return round(max(ends) - min(answer.sent for answer in answers), DECIMALS) if answers else 0.0


def _table(rows: Sequence[tuple[object, ...]], columns: dict[str, str]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=list(columns)).astype(columns)
    times = [name for name, kind in columns.items() if kind == "float64"]
    rounded: npt.NDArray[np.float64] = np.round(table[times].to_numpy(np.float64), DECIMALS)
    table[times] = rounded
    return table

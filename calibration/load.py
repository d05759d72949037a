"""A level of load on a live server, and the tables that come of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from calibration.client_processes import record_apart
from calibration.clients import Job, Progress, Recording
from calibration.dialect import Dialect
from calibration.endpoint import Endpoint, metrics_in
from calibration.level_notes import notes_of, restarted_within
from calibration.metrics import MetricsSnapshot, SumCount
from calibration.secrecy import keepable
from calibration.stream import MAX_COUNT, PATIENCE, Answer, Patience
from simulator.loads.workload import Integers, Load
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
        answer.detail = keepable(answer.detail, job.endpoint.api_key)
        answer.finish_reason = keepable(answer.finish_reason, job.endpoint.api_key)
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
    if seen.before is None or seen.after is None or restarted_within(seen):
        return {}
    means: dict[str, float] = {}
    for name in ("queue_time", "prefill_time", "decode_time", "ttft"):
        before, after = getattr(seen.before, name), getattr(seen.after, name)
        if isinstance(before, SumCount) and isinstance(after, SumCount):
            mean = (after - before).mean
            if mean is not None and 0 <= mean < np.inf:
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
    number, time, tokens = _reads(answers)
    later = np.flatnonzero(number[1:] == number[:-1]) + 1
    count = np.maximum(1, tokens[later] - tokens[later - 1])
    when, gap = time[later] - start, (time[later] - time[later - 1]) / count
    order = np.lexsort((count, gap, when))
    return _table({"time": when[order], "gap": gap[order], "count": count[order]}, GAP_COLUMNS)


def _tokens(answers: Sequence[Answer], start: float) -> pd.DataFrame:
    number, time, tokens = _reads(answers)
    indices = np.array([answer.index for answer in answers], np.int64)
    return _table({"request_id": indices[number], "time": time - start, "tokens": tokens}, TOKEN_COLUMNS)


def _reads(answers: Sequence[Answer]) -> tuple[Integers, npt.NDArray[np.float64], Integers]:
    """Every read that brought tokens, answer by answer: the answer's place, the time, and its tokens by then."""
    number = np.repeat(np.arange(len(answers)), [len(answer.arrivals) for answer in answers])
    times, tokens = np.empty(len(number)), np.empty(len(number), np.int64)
    start = 0
    for answer in answers:
        part = slice(start, start := start + len(answer.arrivals))
        times[part], tokens[part] = answer.arrivals.arrays()
    return number, times, tokens


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
    sent, ended = (np.array([getattr(answer, name) for answer in seen.answers]) for name in ("sent", "ended"))

    def in_flight(time: float) -> list[Answer]:
        return [seen.answers[place] for place in np.flatnonzero((sent <= time) & (time < ended)).tolist()]

    rows = []
    for time, text in seen.samples:
        gauges = metrics_in(text.decode(errors="replace")) or MetricsSnapshot()
        usage = -1.0 if gauges.kv_usage is None else gauges.kv_usage
        kv_tokens = usage * pool * gauges.engines if pool is not None and 0 <= usage <= 1 else np.nan
        running, waiting = _gauge(gauges.running), _gauge(gauges.waiting)
        active = _active_tokens(in_flight(time), time, max(0, waiting))
        rows.append((time - seen.started, running, waiting, kv_tokens, active))
    if not job.endpoint.has_metrics:
        for time in np.arange(0.0, _duration(seen.answers), job.sample_every):
            flying = in_flight(seen.started + time)
            active = _active_tokens(flying, seen.started + time, 0)
            rows.append((time, len(flying), -1, np.nan, active))
    return _table(rows, TIMELINE_COLUMNS)


def _gauge(value: int | None) -> int:
    """-1 for what the server does not tell, or cannot mean."""
    return -1 if value is None or not 0 <= value <= MAX_COUNT else value


def _active_tokens(in_flight: Sequence[Answer], time: float, waiting: int) -> float:
    """Prompt and received tokens of the requests in flight at `time`, the last `waiting` without a token left out."""
    silent, tokens = [], 0
    for answer in in_flight:  # in the order of sending
        if received := answer.arrivals.received_by(time):
            tokens += answer.prompt_length + received
        else:
            silent.append(answer.prompt_length)
    return float(tokens + sum(silent[: max(0, len(silent) - waiting)]))


def _duration(answers: Sequence[Answer]) -> float:
    """First send to last end, seconds."""
    ends = (answer.ended if answer.error else answer.arrivals[-1][0] for answer in answers)
    return round(max(ends) - min(answer.sent for answer in answers), DECIMALS) if answers else 0.0


def _table(
    rows: Sequence[tuple[object, ...]] | Mapping[str, npt.NDArray[np.generic]], columns: dict[str, str]
) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=list(columns)).astype(columns)
    times = [name for name, kind in columns.items() if kind == "float64"]
    rounded: npt.NDArray[np.float64] = np.round(table[times].to_numpy(np.float64), DECIMALS)
    table[times] = rounded
    return table

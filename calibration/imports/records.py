"""Requests as other tools recorded them, and the level of load that they make."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace

import numpy as np
import numpy.typing as npt
import pandas as pd

from calibration.foreign_text import one_line
from calibration.imports.lengths import shapes_of
from calibration.imports.source import ImplausibleError
from simulator.loads.bounds import LEAST_BURSTINESS, MOST_RATE
from simulator.loads.workload import ClosedLoop, OpenLoop, Workload
from simulator.results.run import GAP_COLUMNS, REQUEST_COLUMNS, TIMELINE_COLUMNS, TOKEN_COLUMNS, Level

DECIMALS = 9  # times are kept to the nanosecond
TIMELINE_ROWS = 500
TIMELINE_TOKENS = 2_000_000  # moments of tokens, of all requests, where a file has no single times
ROUNDING = 1e-6  # s and relative, by which a tool's own times may contradict each other
CHUNKS_AGREE = 0.01  # likewise, for the sum of many gaps
LONGEST = 1e6  # s, of a level: eleven days
CALIBRATES = 0.5  # share of requests with one token a chunk, from which on steps can be seen
ONLY_VALIDATES = "this level can validate, cannot calibrate"

NAN = math.nan
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Record:
    """One request by the definitions of `simulator.results.run`. Seconds; NaN is what a file does not tell.

    `sent` counts from any zero. `chunks` are the seconds from sending to each chunk that carried tokens, the first and
    the last included; None where a file has no single times. `ended` is on the clock of `sent` and needed for failed
    requests only.
    """

    prompt_tokens: int
    output_tokens: int
    sent: float = NAN
    ttft: float = NAN
    e2el: float = NAN
    chunks: Array | None = None
    queue_time: float = NAN
    finish_reason: str = ""
    error: str = ""
    ended: float = NAN

    @property
    def tpot(self) -> float:
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else NAN

    @property
    def end(self) -> float:
        return self.ended if self.error else self.sent + self.e2el

    @property
    def one_a_chunk(self) -> bool:
        return self.chunks is not None and len(self.chunks) == self.output_tokens

    def received(self) -> npt.NDArray[np.int64]:
        """Tokens so far at each chunk; where chunks carried several, spread evenly."""
        assert self.chunks is not None
        number = len(self.chunks)
        return np.arange(1, number + 1) * self.output_tokens // number


def level_from_records(
    records: Sequence[Record],
    arrivals: ClosedLoop | OpenLoop | None,
    notes: Sequence[str] = (),
    *,
    duration: float | None = None,
    gauges: pd.DataFrame | None = None,
    server_means: dict[str, float] | None = None,
    rebuilt: bool = False,
) -> Level:
    """The level that these requests make.

    Without `arrivals` they are told from the sending times. `duration` (s) is what the tool states, for files without
    those times. `gauges` are the server's by slices of time (begin, end, running, waiting, kv_tokens); without them
    requests in flight stand for running ones. `rebuilt` sending times are not exact enough to see steps.
    Raises `calibration.imports.source.ImplausibleError`.
    """
    for number, record in enumerate(records):
        _check(number, record)
    whole, counting = _settled(records)
    whole = sorted(whole, key=lambda record: math.inf if math.isnan(record.sent) else record.sent)
    start = min((record.sent for record in whole if not math.isnan(record.sent)), default=NAN)
    whole = [replace(record, sent=record.sent - start, ended=record.ended - start) for record in whole]
    shapes, lengths = shapes_of([(record.prompt_tokens, record.output_tokens) for record in whole if not record.error])
    seconds = _duration(whole, duration)
    times = (time for record in whole for time in (record.sent, record.ended, record.e2el) if not math.isnan(time))
    spans = [seconds, *times]
    if not round(seconds, DECIMALS) and any(not record.error for record in whole):
        raise ImplausibleError("a level of 0 s cannot be")
    if max(spans) > LONGEST:
        raise ImplausibleError(f"a level of {max(spans):.3g} s cannot be: in what unit are its times?")
    arrivals = arrivals or arrivals_of(whole)
    tokens, seeing = _tokens(whole, rebuilt)
    told = [*notes, *counting, *seeing, *_failures(whole), *lengths, _realised(whole, seconds)]
    timeline = _timeline(whole, seconds)
    if gauges is None or gauges.empty:
        told.append("running counts requests in flight, waiting is not known (-1)")
    else:
        timeline = _with_gauges(timeline, gauges)
    return Level(
        workload=Workload(arrivals, shapes, len(whole)),
        duration=round(seconds, DECIMALS),
        requests=_requests(whole),
        gaps=_gaps(whole),
        timeline=timeline,
        tokens=tokens,
        notes=told,
        server_means=server_means or {},
    )


def _check(number: int, record: Record) -> None:
    """Times run forwards. What a file does not tell, NaN, is compared to nothing."""
    first, last, took = record.ttft, record.e2el, record.ended - record.sent
    late = record.chunks is not None and record.chunks[-1] > last * (1 + CHUNKS_AGREE) + CHUNKS_AGREE
    if first < 0 or last < 0 or first > last * (1 + ROUNDING) + ROUNDING or late or (record.error and took < 0):
        raise ImplausibleError(
            f"the times of request {number + 1} contradict each other (first token after {first:.6g} s, last after "
            f"{last:.6g} s, end after {took:.6g} s)"
        )


def arrivals_of(records: Sequence[Record]) -> ClosedLoop | OpenLoop:
    """How requests arrived: a closed loop where each is sent as another ends, else their rate and burstiness."""
    times = np.sort([record.sent for record in records if not math.isnan(record.sent)])
    ends = np.sort([record.end for record in records if not math.isnan(record.end)])
    if len(times) < 2 or not len(ends):
        return ClosedLoop(1)
    flying = np.arange(1, len(times) + 1) - np.searchsorted(ends, times, side="right")  # just after each send
    most = int(flying.max())
    if np.mean(flying[most - 1 :] >= most - 0.5) > 0.9 and len(times) > most:
        return ClosedLoop(most)
    if times[-1] == times[0]:
        return OpenLoop(math.inf)
    spread = float(np.std(np.diff(times)) / np.mean(np.diff(times)))
    rate = min(MOST_RATE, (len(times) - 1) / float(times[-1] - times[0]))
    return OpenLoop(rate, math.inf if spread < 0.1 else max(LEAST_BURSTINESS, round(1 / spread**2, 3)))


def sent_in_closed_loop(latencies: Sequence[float], clients: int, duration: float) -> list[float] | None:
    """Sending times where a file does not tell them: each client sends as its last request ends.

    `latencies` in the order of sending and `duration` are seconds. None where this does not give that duration.
    """
    free = [0.0] * min(clients, len(latencies))  # a heap; more clients than requests stay idle
    sent = [heapreplace(free, free[0] + latency) for latency in latencies]
    return sent if abs(max(free, default=0.0) - duration) <= 0.02 * duration else None


def _settled(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Records whose chunks fit their tokens: a last chunk without a token is cut, and more chunks than that dropped."""
    settled, cut, dropped, several = [], 0, 0, 0
    for record in records:
        surplus = 0 if record.chunks is None or record.error else len(record.chunks) - record.output_tokens
        several += surplus < 0
        if record.chunks is not None and surplus == 1 and len(record.chunks) > 1:
            cut += 1
            record = replace(record, chunks=record.chunks[:-1], e2el=float(record.chunks[-2]))  # noqa: PLW2901
        elif surplus > 0:
            dropped += 1
            record = replace(record, chunks=None)  # noqa: PLW2901
        settled.append(replace(record, error=one_line(record.error, 60)) if record.error else record)
    of = f"of {len(records)} requests"
    notes = [f"in {several} {of} chunks carried several tokens: their gaps were divided evenly"] if several else []
    if cut:
        notes.append(f"in {cut} {of} the last chunk carried no token and was left out")
    if dropped:
        notes.append(f"in {dropped} {of} there were more chunks than tokens: their gaps were left out")
    return settled, notes


def _duration(records: Sequence[Record], stated: float | None) -> float:
    """First send to last end, seconds; what the tool states where that is not known or longer for failures."""
    ends = [record.end for record in records if not math.isnan(record.end)]
    seen = max(ends, default=0.0)
    failed = any(record.error and math.isnan(record.ended) for record in records)
    return max(seen, stated) if stated is not None and (failed or not ends) else seen


def _requests(records: Sequence[Record]) -> pd.DataFrame:
    rows = []
    for number, record in enumerate(records):
        good = not record.error
        times = (record.ttft, record.tpot, record.e2el) if good else (NAN, NAN, NAN)
        reason = record.finish_reason if good else ""
        lengths = (record.prompt_tokens, record.output_tokens)
        rows.append((number, record.sent, *lengths, *times, record.queue_time, -1, reason, record.error))
    return _table(pd.DataFrame(rows, columns=list(REQUEST_COLUMNS)), REQUEST_COLUMNS)


def _gaps(records: Sequence[Record]) -> pd.DataFrame:
    """A row for each chunk but a request's first: k tokens that came together share the gap before them."""
    times, gaps, counts = [np.empty(0)], [np.empty(0)], [np.empty(0, np.int64)]
    for record in records:
        if record.chunks is not None and not record.error:
            count = np.diff(record.received())
            times.append(record.sent + record.chunks[1:])
            gaps.append(np.diff(record.chunks) / count)
            counts.append(count)
    columns = {"time": np.concatenate(times), "gap": np.concatenate(gaps), "count": np.concatenate(counts)}
    return _table(pd.DataFrame(columns).sort_values("time", kind="stable", ignore_index=True), GAP_COLUMNS)


def _tokens(records: Sequence[Record], rebuilt: bool) -> tuple[pd.DataFrame | None, list[str]]:
    """The raw record of tokens, None where it cannot be rebuilt, and a sentence on why not."""
    good = [record for record in records if not record.error]
    reason = ""
    if not good or any(math.isnan(record.sent) for record in good):
        reason = "the file does not tell when requests were sent"
    elif rebuilt:
        reason = "sending times were rebuilt (each client sends as its last request ends), which shows no steps"
    elif all(record.chunks is None for record in good):
        reason = "the file has no times of single tokens"
    elif np.mean([record.one_a_chunk for record in good]) < CALIBRATES:
        reason = "most chunks carried several tokens, whose own times are not known"
    if reason:
        return None, [f"{reason}: {ONLY_VALIDATES}"]
    numbers, times, counts = [], [], []
    for number, record in enumerate(records):
        if record.chunks is not None and not record.error:
            numbers.append(np.full(len(record.chunks), number))
            times.append(record.sent + record.chunks)
            counts.append(record.received())
    columns = {
        "request_id": np.concatenate(numbers),
        "time": np.concatenate(times),
        "tokens": np.concatenate(counts),
    }
    return _table(pd.DataFrame(columns), TOKEN_COLUMNS), []


def _timeline(records: Sequence[Record], duration: float) -> pd.DataFrame:
    """Requests in flight and their tokens, from the clients' side."""
    good = [record for record in records if not record.error and not math.isnan(record.sent + record.e2el)]
    if not good or duration <= 0:
        return _table(pd.DataFrame(columns=list(TIMELINE_COLUMNS)), TIMELINE_COLUMNS)
    starts, ends = np.sort([record.sent for record in good]), np.sort([record.end for record in good])
    most = max(2, TIMELINE_TOKENS // len(good))
    moments = [np.array([[record.sent, record.prompt_tokens], [record.end, -record.prompt_tokens]]) for record in good]
    for record in good:
        times = _token_times(record, most)
        moments.append(np.column_stack([record.sent + times, np.full(len(times), record.output_tokens / len(times))]))
        moments.append(np.array([[record.end, -record.output_tokens]]))
    changes = np.concatenate(moments)
    changes = changes[np.argsort(changes[:, 0], kind="stable")]
    held = np.concatenate([[0.0], np.cumsum(changes[:, 1])])
    time = np.linspace(0.0, duration, TIMELINE_ROWS)
    columns = {
        "time": time,
        "running": np.searchsorted(starts, time, side="right") - np.searchsorted(ends, time, side="right"),
        "waiting": np.full(len(time), -1),
        "kv_tokens": np.full(len(time), np.nan),
        "active_tokens": np.round(held[np.searchsorted(changes[:, 0], time, side="right")], 3),
    }
    return _table(pd.DataFrame(columns), TIMELINE_COLUMNS)


def _with_gauges(timeline: pd.DataFrame, gauges: pd.DataFrame) -> pd.DataFrame:
    """The server's gauges in place of the clients' count: at each moment the mean of its slice."""
    row = np.searchsorted(gauges["end"].to_numpy(np.float64), timeline["time"].to_numpy(np.float64))
    near = gauges[["running", "waiting", "kv_tokens"]].iloc[np.minimum(row, len(gauges) - 1)].reset_index(drop=True)
    return timeline.assign(
        running=near["running"].round().astype("int64"),
        waiting=near["waiting"].round().astype("int64"),
        kv_tokens=near["kv_tokens"].astype("float64"),
    )


def _token_times(record: Record, most: int) -> Array:
    """When tokens came, for the gauge of active tokens: evenly from first to last, in up to `most` lots, where it is
    not known.
    """
    if record.chunks is not None:
        return record.chunks
    first = record.e2el if math.isnan(record.ttft) else record.ttft
    return np.linspace(first, record.e2el, min(max(1, record.output_tokens), most))


def _failures(records: Sequence[Record]) -> list[str]:
    kinds = Counter(record.error for record in records if record.error)
    shown = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(4))
    return [f"{kinds.total()} of {len(records)} requests failed: {shown}"] if kinds else []


def _realised(records: Sequence[Record], duration: float) -> str:
    good = [record for record in records if not record.error]
    if not good or duration <= 0:
        return "no request was completed"
    prompts, outputs = ([getattr(r, name) for r in good] for name in ("prompt_tokens", "output_tokens"))
    flying = float(np.nansum([record.e2el for record in good])) / duration
    return (
        f"realised: {_spread(prompts)} prompt and {_spread(outputs)} output tokens, "
        f"{flying:.2f} requests in flight, {len(good) / duration:.4g} requests/s"
    )


def _spread(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}-{high} (mean {np.mean(counts):.4g})"


def _table(table: pd.DataFrame, columns: dict[str, str]) -> pd.DataFrame:
    table = table.astype(columns)
    times = [name for name, kind in columns.items() if kind == "float64"]
    rounded: npt.NDArray[np.float64] = np.round(table[times].to_numpy(np.float64), DECIMALS)
    table[times] = rounded
    return table

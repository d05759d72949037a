"""A level of load on a live server, and the tables that come of it."""

from __future__ import annotations

import os
import pickle
import secrets
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from calibration.clients import Job, Progress, Recording
from calibration.dialect import Dialect
from calibration.endpoint import Endpoint, EndpointError
from calibration.metrics import MetricsSnapshot, SumCount, parse_metrics
from calibration.stream import PATIENCE, Answer, Patience
from simulator.percentiles import weighted_percentiles
from simulator.run import GAP_COLUMNS, REQUEST_COLUMNS, TIMELINE_COLUMNS, TOKEN_COLUMNS, Level
from simulator.workload import OpenLoop, Workload

LAG_SHARE = 0.2  # of the median token gap; a client later than that blurs what it measures
CPU_SHARE = 0.8  # of a core
TIMER_GRAIN = 0.001  # s, by which an idle event loop may be late already
DECIMALS = 9  # times are kept to the nanosecond


def play(
    endpoint: Endpoint,
    workload: Workload,
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


def record_apart(job: Job, on_progress: Callable[[Progress], None] | None = None) -> Recording:
    """Run `calibration.clients` in a process of its own, so that nothing here delays it."""
    command = [sys.executable, "-c", "from calibration.clients import main; main()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=environment,
            start_new_session=True,  # Ctrl-C is for us; we end it
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(job, process.stdin)  # by pipe: the key shows neither in the arguments nor in the environment
            process.stdin.flush()
            while True:
                message = pickle.load(process.stdout)
                if isinstance(message, Recording):
                    return message
                if isinstance(message, EndpointError):
                    raise message
                if on_progress is not None:
                    on_progress(message)
        except (EOFError, BrokenPipeError):
            process.wait()
            complaints.seek(0)
            lines = complaints.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise RuntimeError(f"the load generator's process died ({process.returncode}): {lines[-1]}") from None
        finally:
            process.kill()
            process.stdout.close()
            process.stdin.close()
            process.wait()


def level_of(job: Job, seen: Recording) -> Level:
    """The tables of a level from what its clients saw."""
    for answer in seen.answers:
        answer.error = answer.error or _miscount(answer)
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
        server_means=_server_means(seen),
    )
    level.notes = [*_failures(seen.answers), *_counting(seen, good), *_client(job, seen, gaps), *_server(seen)]
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


def _miscount(answer: Answer) -> str:
    """How the server's count of an answer differs from what was asked; empty if it does not."""
    if answer.counted_prompt not in (None, answer.prompt_tokens):
        return f"prompt tokens {answer.counted_prompt} instead of {answer.prompt_tokens}"
    if answer.counted_output not in (None, answer.output_tokens):
        return f"output tokens {answer.counted_output} instead of {answer.output_tokens}"
    return "" if answer.arrivals else "no tokens"


def _requests(answers: Sequence[Answer], start: float) -> pd.DataFrame:
    rows = []
    for answer in answers:
        ttft = e2el = tpot = np.nan
        if not answer.error:
            (first, _), (last, tokens) = answer.arrivals[0], answer.arrivals[-1]
            ttft, e2el = first - answer.sent, last - answer.sent
            tpot = (e2el - ttft) / (tokens - 1) if tokens > 1 else np.nan
        reason = "" if answer.error else answer.finish_reason
        times = (answer.sent - start, answer.prompt_tokens, answer.tokens, ttft, tpot, e2el)
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
            tokens += answer.prompt_tokens + received
        else:
            silent.append(answer.prompt_tokens)
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


def _failures(answers: Sequence[Answer]) -> list[str]:
    kinds = Counter(answer.error for answer in answers if answer.error)
    if not kinds:
        return []
    shown = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(4))
    more = f" and {len(kinds) - 4} other kinds" if len(kinds) > 4 else ""
    detail = next((answer.detail for answer in answers if answer.error and answer.detail), "")
    said = f"; the first said: {detail}" if detail else ""
    return [f"{kinds.total()} of {len(answers)} requests failed: {shown}{more}{said}"]


def _counting(seen: Recording, good: Sequence[Answer]) -> list[str]:
    if seen.dialect.usage == "continuous":
        return []
    if any(answer.counted_output is None for answer in good):
        return ["the server sends no usage: every event was counted as one token, and no length could be checked"]
    if any(answer.events < answer.tokens for answer in good):
        return ["events carried several tokens and the server does not say how many: they were spread evenly"]
    return []


def _client(job: Job, seen: Recording, gaps: pd.DataFrame) -> list[str]:
    """Whether we were fast enough for what we measured."""
    notes = []
    median = float(weighted_percentiles(gaps["gap"], gaps["count"], [50])[0])
    lag = max(0.0, float(np.percentile(seen.loop_lags, 99)) - TIMER_GRAIN) if seen.loop_lags else 0.0
    if lag > LAG_SHARE * median:
        notes.append(
            f"client-bound: the load generator's event loop ran {lag * 1e3:.1f} ms late (p99) where a token took "
            f"{median * 1e3:.1f} ms; use a faster or less busy machine for the client"
        )
    elif seen.cpu_share > CPU_SHARE:
        notes.append(f"client-bound: the load generator used {seen.cpu_share:.0%} of a core")
    if isinstance(job.workload.arrivals, OpenLoop):
        late = float(np.percentile([answer.sent - answer.scheduled for answer in seen.answers], 99))
        if late > max(0.005, 0.1 / job.workload.arrivals.request_rate):
            notes.append(f"requests left up to {late * 1e3:.0f} ms after their time (p99)")
    return notes


def _server(seen: Recording) -> list[str]:
    """What the server's counters say of the level, where it matters."""
    notes = []
    if not seen.was_idle:
        notes.append("other traffic: the server was busy when the level began")
    if seen.before is None or seen.after is None:
        return [*notes, "the server shows no /metrics: running counts requests in flight, waiting is not known (-1)"]
    grown = {name: _growth(seen.before, seen.after, name) for name in vars(seen.before)}
    ours = sum(1 for answer in seen.answers if answer.arrivals)
    finished = grown["requests_finished"]
    if finished < 0:
        notes.append("the server restarted during the level: its counters began anew")
    elif finished > len(seen.answers):
        notes.append(f"other traffic: the server finished {finished - ours} requests that were not ours")
    if grown["prefix_cache_hits"] > 0:
        notes.append(f"{grown['prefix_cache_hits']} prompt tokens came from the prefix cache")
    if grown["preemptions"] > 0:
        notes.append(f"{grown['preemptions']} preemptions")
    return notes


def _growth(before: MetricsSnapshot, after: MetricsSnapshot, name: str) -> int:
    was, now = getattr(before, name), getattr(after, name)
    return now - was if isinstance(was, int) and isinstance(now, int) else 0


def _table(rows: Sequence[tuple[object, ...]], columns: dict[str, str]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=list(columns)).astype(columns)
    times = [name for name, kind in columns.items() if kind == "float64"]
    rounded: npt.NDArray[np.float64] = np.round(table[times].to_numpy(np.float64), DECIMALS)
    table[times] = rounded
    return table

"""What a reader must know of a measured level before trusting its numbers, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd

from calibration.clients import Job, Recording
from calibration.metrics import MetricsSnapshot
from calibration.stream import Answer
from simulator.results.percentiles import weighted_percentiles

LAG_SHARE = 0.2  # of the median token gap; a client later than that blurs what it measures
CPU_SHARE = 0.8  # of a core
TIMER_GRAIN = 0.001  # s, by which an idle event loop may be late already
FAR = 0.005  # s, a round trip that shows in a TTFT
STRANGE_TOKENS = 0.01  # of ours, that a server may count beyond them
FRAMES = 2  # events of an answer that may carry no token: its opening and its end
FAILED = " requests failed: "
RESTARTED = "the server restarted during the level, or several answer here: its counters do not hold what it did for us"
COUNTED = 0.5  # of the requests answered in a level, which a server that did not restart counts at the least


def notes_of(job: Job, seen: Recording, gaps: pd.DataFrame) -> list[str]:
    """Failures first. Answers must have their final errors, and `gaps` the columns of `GAP_COLUMNS`."""
    good = [answer for answer in seen.answers if not answer.error]
    return [
        *_failures(seen.answers),
        *_counting(seen, good),
        *_client(job, seen, gaps),
        *_server(job, seen),
    ]


def _failures(answers: Sequence[Answer]) -> list[str]:
    kinds = Counter(answer.error for answer in answers if answer.error)
    if not kinds:
        return []
    shown = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(4))
    more = f" and {len(kinds) - 4} other kinds" if len(kinds) > 4 else ""
    detail = next((answer.detail for answer in answers if answer.error and answer.detail), "")
    said = f"; the first said: {detail}" if detail else ""
    return [f"{kinds.total()} of {len(answers)}{FAILED}{shown}{more}{said}"]


def _counting(seen: Recording, good: Sequence[Answer]) -> list[str]:
    notes = []
    if seen.dialect.chat and good:
        counts, asked = [answer.prompt_length for answer in good], [answer.prompt_tokens for answer in good]
        notes.append(
            f"prompts are text to a chat: {min(counts)} to {max(counts)} tokens, {np.mean(counts):.4g} on average, "
            f"where {np.mean(asked):.4g} were asked for"
        )
    if any(answer.counted_output is None for answer in good):
        notes.append("the server sends no usage: every event was counted as one token, and no length could be checked")
    elif seen.dialect.usage != "continuous" and any(answer.events < answer.tokens for answer in good):
        notes.append("events carried several tokens and the server does not say how many: they were spread evenly")
    if any(answer.events > answer.tokens + FRAMES for answer in good):
        notes.append("the server sent more events than it counts tokens: they were spread evenly")
    return notes


def _client(job: Job, seen: Recording, gaps: pd.DataFrame) -> list[str]:
    """Whether we were fast enough, and near enough, for what we measured."""
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
    rate = job.workload.request_rate
    if rate is not None and job.workload.max_concurrency is None and seen.answers:
        late = float(np.percentile([answer.sent - answer.scheduled for answer in seen.answers], 99))
        if late > max(0.005, 0.1 / rate):
            notes.append(f"requests left up to {late * 1e3:.0f} ms after their time (p99)")
    distance = job.endpoint.round_trip or 0.0
    if distance > FAR:
        notes.append(f"a round trip to the server takes {distance * 1e3:.0f} ms, which is in every TTFT and E2EL")
    return notes


def restarted(before: MetricsSnapshot, after: MetricsSnapshot) -> bool:
    """Whether a counter, which only grows, has become less."""
    return any(_growth(before, after, name) < 0 for name in ("requests_finished", "generation_tokens", "prompt_tokens"))


def restarted_within(seen: Recording) -> bool:
    """Whether counters began anew in the level, even where they have outgrown since what they were."""
    before, after = seen.before, seen.after
    if before is None or after is None or before.requests_finished is None or after.requests_finished is None:
        return before is not None and after is not None and restarted(before, after)
    ours = sum(not answer.error for answer in seen.answers)
    return restarted(before, after) or after.requests_finished - before.requests_finished < COUNTED * ours


def _server(job: Job, seen: Recording) -> list[str]:
    """What the server's counters say of the level, where it matters."""
    notes = [] if seen.was_idle else ["other traffic: the server was busy when the level began"]
    cached = sum(answer.cached_prompt for answer in seen.answers)
    if seen.before is None or seen.after is None:
        notes.append(
            "/metrics did not answer: other traffic, a restart and preemptions would not have shown"
            if job.endpoint.has_metrics
            else "the server shows no /metrics: running counts requests in flight, waiting is not known (-1)"
        )
        return [*notes, *_cache_hits(cached)]
    grown = {name: _growth(seen.before, seen.after, name) for name in vars(seen.before)}
    if restarted_within(seen):
        return [*notes, RESTARTED, *_cache_hits(cached)]
    notes += _other_traffic(seen.answers, grown["requests_finished"], grown["generation_tokens"])
    notes += _cache_hits(max(cached, grown["prefix_cache_hits"] + grown["external_prefix_cache_hits"]))
    if grown["preemptions"] > 0:
        notes.append(f"{grown['preemptions']} preemptions")
    return notes


def _other_traffic(answers: Sequence[Answer], finished: int, generated: int) -> list[str]:
    """Requests, or tokens of requests that have not finished, which the server counts and we did not ask for."""
    ours = sum(1 for answer in answers if answer.arrivals)
    if finished > len(answers):
        return [f"other traffic: the server finished {finished - ours} requests that were not ours"]
    received = sum(answer.tokens for answer in answers)
    strange = generated - received
    if strange > STRANGE_TOKENS * received and not any(answer.error for answer in answers):
        return [f"other traffic: the server generated {strange} tokens that were not ours"]
    return []


def _cache_hits(tokens: int) -> list[str]:
    return [f"{tokens} prompt tokens came from the prefix cache"] if tokens > 0 else []


def _growth(before: MetricsSnapshot, after: MetricsSnapshot, name: str) -> int:
    was, now = getattr(before, name), getattr(after, name)
    return now - was if isinstance(was, int) and isinstance(now, int) else 0

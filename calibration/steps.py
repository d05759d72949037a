"""Engine steps, seen from outside.

All streams that get a token in an engine step get it at the same moment, so the arrival times of concurrent streams
show where steps end, how long they took, and which requests were in them. What prompts were computed in a step follows
from vLLM's rules: first come first served, within the step's token budget, until the step that brings the first token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import numpy as np
import pandas as pd

from simulator.engine.engine_flags import EngineFlags
from simulator.results.run import Level

STEP_COLUMNS = {
    "time": "float64",  # s, when its tokens arrived
    "duration": "float64",  # s
    "sequences": "int64",
    "kv_tokens": "int64",  # context read by decoding sequences
    "prefill_tokens": "int64",
    "prefill_attention": "float64",  # sum of t * (context + t / 2) over the chunks
}
SEEN_COLUMNS = STEP_COLUMNS | {"certain": "bool"}  # whether duration and composition are; duration NaN if not seen
MERGING = 0.5  # tokens belong to one step if they are closer than this share of the usual gap

Arrivals = dict[int, tuple[float, int]]


@dataclass
class Stream:
    """One request's tokens: when each chunk came and how many tokens had come by then."""

    request_id: int
    sent: float
    prompt_tokens: int
    times: list[float]
    tokens: list[int]
    unseen: int = field(init=False)  # prompt tokens not yet assigned to a step
    first_step: int = -1

    def __post_init__(self) -> None:
        self.unseen = self.prompt_tokens

    @property
    def computed(self) -> int:
        return self.prompt_tokens - self.unseen


@dataclass
class Delivery:
    """The tokens that arrived together: one step. By stream: when, and the number of the token."""

    arrivals: Arrivals

    @property
    def time(self) -> float:
        return min(time for time, _ in self.arrivals.values())


class NoTokenTimesError(ValueError):
    """A level of which only the latencies were kept. The message is one line."""


def streams(level: Level) -> list[Stream]:
    """The successful requests of a measured level, in the order of sending. Raises `NoTokenTimesError`."""
    if level.tokens is None:
        raise NoTokenTimesError(
            "steps can only be seen in a run with raw token times (tokens.csv), as capsim sweep keeps"
        )
    chunks: dict[object, pd.DataFrame] = dict(list(level.tokens.groupby("request_id", sort=False)))
    done = level.completed.sort_values("arrival")
    found = []
    columns = (done[name].tolist() for name in ("request_id", "arrival", "prompt_tokens"))
    for number, sent, prompt in zip(*columns, strict=True):
        if (group := chunks.get(number)) is not None:
            found.append(Stream(number, sent, prompt, group["time"].tolist(), group["tokens"].tolist()))
    return found


def deliveries(sent: list[Stream]) -> list[Delivery]:
    """Group the chunks of all streams into steps: no stream twice in one, none long after the others."""
    gaps = [b - a for stream in sent for a, b in zip(stream.times, stream.times[1:], strict=False)]
    near = MERGING * float(np.median(gaps)) if gaps else 0.0
    events = sorted(
        (time, number, tokens)
        for number, stream in enumerate(sent)
        for time, tokens in zip(stream.times, stream.tokens, strict=True)
    )
    steps: list[Delivery] = []
    last = -np.inf
    for time, number, tokens in events:
        if not steps or number in steps[-1].arrivals or time - last > near:
            steps.append(Delivery({}))
        steps[-1].arrivals[number] = (time, tokens)
        last = time
    return steps


def reconstruct(level: Level, flags: EngineFlags, request_delay: float) -> pd.DataFrame:
    """The steps of a measured level whose duration and composition are certain: columns of `STEP_COLUMNS`.

    `request_delay` is the time in seconds from sending a request to its reaching the engine.
    """
    steps = all_steps(level, flags, request_delay)
    return steps[steps["certain"]].drop(columns="certain").reset_index(drop=True)


def all_steps(level: Level, flags: EngineFlags, request_delay: float) -> pd.DataFrame:
    """Every step of a measured level that delivered tokens, as well as it could be told: columns of `SEEN_COLUMNS`."""
    sent = streams(level)
    steps = deliveries(sent)
    for index, step in enumerate(steps):
        for number, (_, tokens) in step.arrivals.items():
            if sent[number].first_step < 0:
                sent[number].first_step = index
            if tokens < 1:
                raise ValueError("a chunk without tokens in the raw record")
    waiting = list(sent)
    rows = []
    for index, step in enumerate(steps):
        planned = _planned_at(steps, index, flags, sent)
        if not _follows(steps, index):
            _forget_unseen_steps(waiting, index, flags.max_num_batched_tokens)
        prefill = _prefill(waiting, index, step, planned - request_delay, flags, sent)
        rows.append(_row(steps, index, prefill, sent))
        waiting = [stream for stream in waiting if stream.first_step > index or stream.first_step < 0]
    return pd.DataFrame(rows, columns=list(SEEN_COLUMNS)).astype(SEEN_COLUMNS)


def stream_gaps(level: Level, steps: pd.DataFrame) -> pd.DataFrame:
    """Every stream's own token gap in each of `steps`, as `reconstruct` gave them; columns step (their row) and gap."""
    sent = streams(level)
    rows = {time: row for row, time in enumerate(steps["time"])}
    found = []
    before = Delivery({})
    for step in deliveries(sent):
        row = rows.get(step.time)
        if row is not None:
            now, last = step.arrivals, before.arrivals
            found += [(row, now[number][0] - last[number][0]) for number in _timed(now, last)]
        before = step
    return pd.DataFrame(found, columns=["step", "gap"])


def _timed(step: Arrivals, before: Arrivals) -> list[int]:
    """Streams whose gap shows the step's duration: a first token comes late, so the gap after it is short."""
    return [number for number in step.keys() & before.keys() if before[number][1] > 1]


def _planned_at(steps: list[Delivery], index: int, flags: EngineFlags, sent: list[Stream]) -> float:
    """When a step was planned: as the one before it ended, or with asynchronous scheduling the one before that."""
    back = 2 if flags.async_scheduling else 1
    for before in range(back):
        if not _follows(steps, index - before):
            return _planned_unseen(steps[index - before], back - before, flags, sent)
    return steps[index - back].time


def _planned_unseen(first: Delivery, back: int, flags: EngineFlags, sent: list[Stream]) -> float:
    """The same, where the engine was idle before or took steps that brought no token: `back` steps before `first`."""
    number = min(first.arrivals)
    began = sent[number].sent
    chunks = -(-sent[number].prompt_tokens // flags.max_num_batched_tokens)
    return max(began, first.time - back * (first.time - began) / chunks)


def _follows(steps: list[Delivery], index: int) -> bool:
    """Whether a step came right after the one before: some stream got a token in both."""
    if index < 1:
        return False
    return not steps[index].arrivals.keys().isdisjoint(steps[index - 1].arrivals)


def _forget_unseen_steps(waiting: list[Stream], index: int, budget: int) -> None:
    """After a pause, steps that filled the budget with a prompt's first chunks brought no token: they were not seen."""
    for stream in waiting[:1]:
        if stream.first_step == index and stream.unseen > budget:
            stream.unseen = (stream.unseen - 1) % budget + 1


def _prefill(
    waiting: list[Stream], index: int, step: Delivery, planned: float, flags: EngineFlags, sent: list[Stream]
) -> tuple[int, int, float, bool]:
    """Chunks, prompt tokens and attention of a step, and whether they fit what arrived. Uses up `unseen`."""
    firsts = {number for number in step.arrivals if sent[number].first_step == index}
    room = flags.max_num_batched_tokens - (len(step.arrivals) - len(firsts))
    chunks, tokens, attention, certain = 0, 0, 0.0, True
    for stream in waiting:
        ends = stream.first_step == index
        take = min(stream.unseen, room)
        if not ends and (stream.sent > planned or take == stream.unseen or take == 0):
            break  # it had not arrived, or it would have ended here, or the step is full
        if ends and take < stream.unseen:
            certain, take = False, stream.unseen
        chunks += 1
        tokens += take
        attention += take * (stream.computed + take / 2)
        stream.unseen -= take
        room -= take
    unexplained = [number for number in firsts if sent[number].unseen]
    for number in unexplained:
        sent[number].unseen = 0
    return chunks, tokens, attention, certain and not unexplained


def _row(
    steps: list[Delivery], index: int, prefill: tuple[int, int, float, bool], sent: list[Stream]
) -> tuple[float, float, int, int, int, float, bool]:
    """The step as a row of the table."""
    step, before = steps[index].arrivals, steps[index - 1].arrivals if index else {}
    both = step.keys() & before.keys()
    chunks, tokens, attention, certain = prefill
    skipped = any(step[number][1] - before[number][1] != 1 for number in both)
    missing = any(number not in step and before[number][1] < sent[number].tokens[-1] for number in before)
    timed = _timed(step, before)
    duration = median(step[number][0] - before[number][0] for number in timed) if timed else np.nan
    kv_tokens = sum(sent[number].prompt_tokens + step[number][1] - 2 for number in both)
    certain = certain and bool(timed) and not skipped and not missing
    return steps[index].time, duration, len(both) + chunks, kv_tokens, tokens, attention, certain

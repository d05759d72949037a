"""The middle of a level, where its load is at its plateau; `simulator.results.backlog` tells whether there is one.

A level starts empty and ends empty. Its first requests come in a burst or meet an idle server, its last ones meet a
server that empties. A capacity is about the time in between, so requests are left out by when they were sent, which
favours neither short nor long ones. `simulator.results.steady_window` finds when the clients are all there; here the
start burst that follows is left out too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.loads.workload import Load
from simulator.results.backlog import START_SHARE
from simulator.results.run import Level

Array = npt.NDArray[np.float64]

START_ROUNDS = 2  # requests of each client that are left out at the start of a closed loop


class TooShort(ValueError):
    """A level with too few requests to have a middle. The message is one line."""


@dataclass(frozen=True)
class Middle:
    """The middle of a level: the requests `first` to `last`, in the order of sending and without the latter, and the
    seconds from `start` to `end` in which they were sent."""

    first: int
    last: int
    start: float
    end: float


def middle(level: Level) -> Middle:
    """What a level is without its start and its end.

    A closed loop loses the first `START_ROUNDS` requests, or sessions, of each client and the last one; an open loop
    the first `START_SHARE`, and those that are in the system when the last one is sent. Raises `TooShort` if nothing
    stays.
    """
    sent, e2el = level.requests["arrival"].to_numpy(), level.requests["e2el"].to_numpy()
    clients = level.workload.concurrency
    if clients is not None:
        round_of_all = math.ceil(clients * turns(level.workload))
        first, last = START_ROUNDS * round_of_all, len(sent) - round_of_all
    else:
        in_flight = int((sent + np.nan_to_num(e2el) > sent[-1]).sum())
        first = int(START_SHARE * len(sent))
        last = len(sent) - min(max(in_flight, 1), (len(sent) - first) // 2)
    if not first < last < len(sent):
        raise TooShort(f"{len(sent)} requests are too few to leave out the start and the end of {level.workload}")
    times = np.sort(sent)
    return Middle(first, last, float(times[first]), float(times[last]))


def turns(load: Load) -> float:
    """Requests of a session, mean; 1 where a load has none."""
    conversations = load.conversations()
    return 1.0 if conversations is None else load.num_prompts / len(conversations)


def steady_part(level: Level, part: Middle) -> Level:
    """The requests of the middle of a level, and what else happened while they were sent; times count from there."""
    order = np.argsort(level.requests["arrival"].to_numpy(), kind="stable")[part.first : part.last]
    requests = level.requests.iloc[order].reset_index(drop=True)
    requests["arrival"] -= part.start
    return replace(
        level,
        duration=part.end - part.start,
        requests=requests,
        gaps=_within(level.gaps, part),
        timeline=_within(level.timeline, part),
        tokens=None,
        steps=None if level.steps is None else _steps_within(level.steps, part),
    )


def _within(table: pd.DataFrame, part: Middle) -> pd.DataFrame:
    time = table["time"].to_numpy()
    rows = table[(time >= part.start) & (time <= part.end)].reset_index(drop=True)
    rows["time"] -= part.start
    return rows


def _steps_within(steps: dict[str, Array], part: Middle) -> dict[str, Array]:
    inside = (steps["time"] >= part.start) & (steps["time"] <= part.end)
    kept = {name: column[inside] for name, column in steps.items()}
    return kept | {"time": kept["time"] - part.start}


def delivery_rates(level: Level, part: Middle) -> tuple[float, float]:
    """Requests that ended and output tokens that arrived, a second, in the middle of a level, whenever sent."""
    done, seconds = level.completed, part.end - part.start
    if seconds <= 0:
        return float("nan"), float("nan")

    def inside(time: pd.Series[float]) -> pd.Series[bool]:
        return (time > part.start) & (time <= part.end)

    ended = int(inside(done["arrival"] + done["e2el"]).sum())
    first_tokens = int(inside(done["arrival"] + done["ttft"]).sum())
    later_tokens = int(level.gaps["count"][inside(level.gaps["time"])].sum())
    return ended / seconds, (first_tokens + later_tokens) / seconds


def mean_in_flight(level: Level, part: Middle) -> float:
    """Requests between send and last token, mean over the middle of a level."""
    start = level.requests["arrival"].to_numpy()
    end = start + np.nan_to_num(level.requests["e2el"].to_numpy())
    inside = np.clip(end, part.start, part.end) - np.clip(start, part.start, part.end)
    return float(inside.sum() / (part.end - part.start)) if part.end > part.start else float("nan")

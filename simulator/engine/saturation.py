"""How many requests a second a server serves while more than enough of them wait: what an open loop must stay below.

An open loop is stable below the rate at which its requests leave a server that is never short of them, and above it
each waits longer than the one before (Baccelli and Foss, "On the saturation rule for the stability of queues", Journal
of Applied Probability 32, 1995).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.fleet import Fleet
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.sessions import Sessions
from simulator.loads.trace import Trace
from simulator.loads.workload import Load, OpenLoop, Workload

LEAST = 300  # requests that are sent at once
MORE_THAN_ENOUGH = 2  # times as many requests as a server runs at once, so that it is never short of them
FILLS, START_FILLS = 16, 6  # times as many requests as run at once, and those at the start that do not count

Saturated = Workload | Sessions | Trace


def held_rate(load: Load, flags: EngineFlags, step_time: StepTime, host_time: HostTime, fleet: Fleet) -> float | None:
    """Requests a second of an open loop that the server can hold; None for a load that has no rate, and where a trace
    has too few requests to tell. Raises `simulator.engine.scheduler.CannotFit`."""
    at_once = all_at_once(load)
    return None if at_once is None else saturated_rate(at_once, flags, step_time, host_time, fleet)


def all_at_once(load: Load) -> Saturated | None:
    """The requests of an open loop, sent in one moment; None for any other load. The turns of a session then follow
    each other without thinking. `max_concurrency` stays."""
    if load.concurrency is not None or not isinstance(load, Saturated):
        return None
    at_once = OpenLoop(math.inf, max_concurrency=load.max_concurrency)
    if isinstance(load, Trace):
        return load.sent_by(at_once)
    load = replace(load, arrivals=at_once)
    return replace(load, think_time=None) if isinstance(load, Sessions) else load


@lru_cache(maxsize=64)  # the levels of a curve differ in their rate alone
def saturated_rate(
    load: Saturated, flags: EngineFlags, step_time: StepTime, host_time: HostTime, fleet: Fleet
) -> float | None:
    """Requests a second that leave the server while others wait, of a load as `all_at_once` makes it.

    As many requests are played as it takes to fill the server `FILLS` times over. None where a trace has too few.
    Raises `simulator.engine.scheduler.CannotFit`.
    """
    load = _with(load, LEAST)
    if isinstance(load, Trace):
        load = _in_sight(load, MORE_THAN_ENOUGH * flags.max_num_seqs * fleet.engines)
    while True:
        level = fleet.simulate(load, flags, step_time, host_time)
        running = int(level.timeline["running"].max())
        if level.requests.shape[0] >= FILLS * running:
            break
        longer = _with(load, FILLS * running)
        if longer.num_prompts <= load.num_prompts:
            break
        load = longer
    ends = np.sort((level.requests["arrival"] + level.requests["e2el"]).to_numpy(np.float64))
    first = START_FILLS * running
    fills = (len(ends) - running - first) // running  # whole ones: requests may end in step; the last one only drains
    last = first + fills * running
    return (last - first) / float(ends[last] - ends[first]) if fills >= 1 and ends[last] > ends[first] else None


def _in_sight(trace: Trace, most: int) -> Trace:
    """With no more requests at a time than keep the server full: a trace may have a million, and is played whole."""
    return trace.sent_by(OpenLoop(math.inf, max_concurrency=min(trace.max_concurrency or most, most)))


def _with(load: Saturated, requests: int) -> Saturated:
    """The load with at least so many requests, as far as it has them."""
    if isinstance(load, Trace):
        return load
    if isinstance(load, Sessions):
        return replace(load, num_sessions=math.ceil(requests * load.num_sessions / load.num_prompts))
    return replace(load, num_prompts=requests)

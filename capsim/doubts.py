"""What a reader must know of levels before reading their figures: too few samples, and no steady state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from capsim.tables import DOUBT
from simulator.loads.workload import Load
from simulator.results.backlog import State, in_terms_of
from simulator.results.percentiles import requests_for, unbounded_percentiles
from simulator.results.run import Level
from simulator.results.summary import Summary

SHOWN_RANKS = (50, 90, 99)  # percentiles that tables show
MEANINGS: dict[State, str] = {
    "no steady state": "No steady state: {}. Requests wait ever longer; TTFT and E2EL only tell how long a level is.",
    "not reached": "No steady state yet, too few requests: {}. There is little between the start and the end.",
    "all at once": "No steady state: {} is all requests at once. TTFT and E2EL grow with their number.",
}


def too_few_samples(labels: Sequence[str], summaries: Sequence[Summary]) -> str:
    """What the mark at percentiles means, and which levels need more requests for them; empty for none."""
    few = {label: one.completed for label, one in zip(labels, summaries, strict=True) if one.too_few}
    ranks = [rank for rank in unbounded_percentiles(min(few.values(), default=0)) if rank in SHOWN_RANKS]
    if not few or not ranks:
        return ""
    needed = ", ".join(f"p{rank} {requests_for(rank)}" for rank in ranks)
    told = ", ".join(f"{label} {count}" for label, count in few.items())
    return f"{DOUBT} is a percentile that needs more requests ({needed}) than: {told}"


def unsteady_levels(labels: Sequence[str], loads: Sequence[Load], summaries: Sequence[Summary]) -> list[str]:
    """Which levels have no steady state, what the server can hold, and what that does to their figures."""
    by_state: dict[State, list[str]] = {}
    for label, load, one in zip(labels, loads, summaries, strict=True):
        held = f" (held: about {in_terms_of(load, one.held_rate):.3g}/s)" if one.state == "no steady state" else ""
        by_state.setdefault(one.state, []).append(f"{label}{held}")
    told = {state: ", ".join(dict.fromkeys(names)) for state, names in by_state.items()}
    return [text.format(told[state]) for state, text in MEANINGS.items() if state in told]


def stated_intervals(level: Level, summary: Summary) -> Mapping[str, tuple[float, float]]:
    """The intervals of what a level's summary states."""
    numbers = summary.flat()
    return {
        name: ends
        for name, ends in level.intervals.items()
        if (value := numbers.get(name)) is not None and not math.isnan(value)
    }

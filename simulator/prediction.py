"""From a profile and a load to a simulated run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.engine_rules import version_note
from simulator.engine.fleet import Fleet
from simulator.engine.saturation import held_rate
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import Load
from simulator.profile import Profile
from simulator.results.run import Level, Run
from simulator.uncertainty import intervals, widening


def predict(
    profile: Profile,
    workloads: Sequence[Load],
    flags: EngineFlags | None = None,
    on_level: Callable[[float], None] | None = None,
    with_intervals: bool = False,
    fleet: Fleet | None = None,
) -> Run:
    """Simulate every level of load on the server of `profile`, or on a fleet of such servers.

    `flags` default to the profile's. `on_level` is told how many levels are done, the part of a begun one included
    where it takes several simulations. A level that leaves the measured range says so in its notes, and that of an open
    loop knows the rate that the server can hold. `with_intervals` simulates each level more often, see
    `simulator.uncertainty`. Raises `simulator.engine.scheduler.CannotFit` for a
    request that the engine can never serve.
    """
    flags, fleet = flags or profile.engine_flags, fleet or Fleet()
    levels: list[Level] = []
    for workload in workloads:
        level = fleet.simulate(workload, flags, profile.step_time, profile.host_time)
        level.held_rate = held_rate(workload, flags, profile.step_time, profile.host_time, fleet)
        level.notes += profile.outside_range(fleet.share(workload), flags, _peak_running(level, fleet))
        level.notes += [note] if (note := version_note(flags.engine_version)) else []
        if with_intervals:
            level.intervals = intervals(profile, workload, flags, level, fleet, _within(on_level, len(levels)))
            wider = widening(profile, workload, flags, level, fleet)
            level.notes += [_widened(wider)] if level.intervals and wider > 1 else []
        levels.append(level)
        if on_level is not None:
            on_level(len(levels))
    return Run("simulated", levels, _server(profile, flags, fleet))


def _within(on_level: Callable[[float], None] | None, done: int) -> Callable[[float], None] | None:
    """Takes the share of a level that comes after `done` others."""
    return None if on_level is None else lambda share: on_level(done + share)


def _widened(factor: float) -> str:
    return f"so far outside, intervals take the model's own error {factor:.1f} times"


def _peak_running(level: Level, fleet: Fleet) -> int:
    """Of an engine."""
    return math.ceil(int(level.timeline["running"].max()) / fleet.engines)


def _server(profile: Profile, flags: EngineFlags, fleet: Fleet) -> dict[str, object]:
    """What a run says of its server, by the names that a measured one uses, and what it takes to play it again."""
    server: dict[str, object] = {"profile": profile.name, "model": profile.model, "engine": "vllm"}
    if profile.gpu:
        server["gpu"] = profile.gpu
    if fleet.engines > 1:
        server["fleet"] = str(fleet)
    server |= {"kv_tokens": flags.kv_tokens * fleet.engines} | asdict(flags)
    return server | {"step_time": _terms(profile.step_time), "host_time": _terms(profile.host_time)}


def _terms(coefficients: StepTime | HostTime) -> dict[str, object]:
    """Those that are not zero, by name."""
    terms = asdict(coefficients)
    return {name: list(term) if isinstance(term, tuple) else term for name, term in terms.items() if term}

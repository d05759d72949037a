"""From a profile and a load to a simulated run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from simulator.engine import simulate_level
from simulator.engine_flags import EngineFlags
from simulator.engine_rules import version_note
from simulator.profile import Profile
from simulator.run import Level, Run
from simulator.uncertainty import intervals, widening
from simulator.workload import Load


def predict(
    profile: Profile,
    workloads: Sequence[Load],
    flags: EngineFlags | None = None,
    on_level: Callable[[int], None] | None = None,
    with_intervals: bool = False,
) -> Run:
    """Simulate every level of load on the server of `profile`.

    `flags` default to the profile's. `on_level` is told how many levels are done. A level that leaves the measured
    range says so in its notes. `with_intervals` simulates each level more often, see `simulator.uncertainty`. Raises
    `simulator.scheduler.CannotFit` for a request that the engine can never serve.
    """
    flags = flags or profile.engine_flags
    levels = []
    for workload in workloads:
        level = simulate_level(workload, flags, profile.step_time, profile.host_time)
        level.notes += profile.outside_range(workload, flags, _peak_running(level))
        level.notes += [note] if (note := version_note(flags.engine_version)) else []
        if with_intervals:
            level.intervals = intervals(profile, workload, flags, level)
            wider = widening(profile, workload, flags, level)
            level.notes += [_widened(wider)] if level.intervals and wider > 1 else []
        levels.append(level)
        if on_level is not None:
            on_level(len(levels))
    return Run("simulated", levels, _server(profile, flags))


def _widened(factor: float) -> str:
    return f"so far outside, intervals take the model's own error {factor:.1f} times"


def _peak_running(level: Level) -> int:
    return int(level.timeline["running"].max())


def _server(profile: Profile, flags: EngineFlags) -> dict[str, object]:
    """What a run says of its server, by the names that a measured one uses."""
    server: dict[str, object] = {"profile": profile.name, "model": profile.model, "engine": "vllm"}
    if profile.gpu:
        server["gpu"] = profile.gpu
    return server | {"kv_tokens": flags.kv_tokens} | asdict(flags)

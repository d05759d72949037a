"""What it takes to play a run or a scenario again: loads, flags, and how long steps take."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from capsim.errors import CommandError
from capsim.shipped import PROFILES, find_profile, find_scenario
from capsim.tables import level_labels
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.step_time import HostTime, StepTime
from simulator.flags.vllm_flags import change_flags, parse_flags
from simulator.loads.workload import Load, OpenLoop
from simulator.profile import Profile
from simulator.results.run import Run
from simulator.scenario import Scenario

Terms = TypeVar("Terms", StepTime, HostTime)


@dataclass(frozen=True)
class Replay:
    """Levels to be simulated.

    Attributes
        title: what they are of
        server: model, GPU and so on, by the names of `simulator.results.run.Run.server`
        loads, labels: of each level, and its name in tables
        notes: what of each level lies outside the measured range
        run: the measured run that is played again, None for anything else
    """

    title: str
    server: Mapping[str, object]
    flags: EngineFlags
    step_time: StepTime
    host_time: HostTime
    loads: Sequence[Load]
    labels: Sequence[str]
    notes: Sequence[Sequence[str]]
    run: Run | None = None

    def places(self, name: str | None) -> Sequence[int]:
        """Places of the level of that name, or of all levels."""
        if name is None:
            return range(len(self.loads))
        found = [place for place, label in enumerate(self.labels) if name in (label, label.partition(" ")[0])]
        if not found:
            raise CommandError(f"--level: there is no {name!r}; levels are {', '.join(self.labels)}")
        return found

    def measured(self, place: int) -> dict[str, float]:
        """What was measured of a level, by the names of `Summary.flat`; empty where nothing was."""
        from simulator.results.summary import summarize

        if self.run is None:
            return {}
        numbers = summarize(self.run.levels[place]).flat()
        return {name: math.nan if value is None else float(value) for name, value in numbers.items()}


def replay_of(what: str, profile_name: str | None, flags: Mapping[str, Any], level: str | None = None) -> Replay:
    """The levels of a saved run or a scenario; `flags` win over what is stated there.

    A scenario that searches for a capacity states no level: then it is `level`, such as ``C=16`` or ``2/s``.
    """
    if Path(what).is_dir():
        return _of_run(what, profile_name, flags)
    if profile_name is not None:
        raise CommandError("--profile goes with a saved run; a scenario names its own")
    scenario = find_scenario(what)
    server = scenario.servers(scenario.load_profile(PROFILES), flags)[0]
    if server.fleet.engines > 1:
        raise CommandError(f"{what} is of a fleet; explain tells of one engine: ask for its share of the load alone")
    loads = scenario.workloads() if scenario.load.capacity is None else [_searched(what, scenario, level)]
    return _of_profile(scenario.name, server.profile, server.flags, loads)


def _searched(what: str, scenario: Scenario, level: str | None) -> Load:
    """The load of a search at one level."""
    load = scenario.searched_load()
    by_rate = isinstance(load.arrivals, OpenLoop)
    found = re.fullmatch(r"(\d*\.?\d*[1-9]\d*)/s" if by_rate else r"C=([1-9]\d*)", level or "")
    if found is None:
        told = "" if level is None else f", and {level!r} is none"
        raise CommandError(
            f"{what} searches for a level{told}: say which one to explain, such as capsim explain {what} "
            f"--level {'2/s' if by_rate else 'C=16'}; capsim simulate {what} finds the highest"
        )
    if isinstance(load.arrivals, OpenLoop):
        return replace(load, arrivals=replace(load.arrivals, request_rate=float(found[1])))
    return replace(load, arrivals=replace(load.arrivals, concurrency=int(found[1])))


def _of_run(folder: str, profile_name: str | None, flags: Mapping[str, Any]) -> Replay:
    from calibration.validate import flags_of
    from simulator.results.run_files import load_run

    run = load_run(folder)
    if not run.levels:
        raise CommandError(f"{folder} holds no finished level")
    if "fleet" in run.server:
        raise CommandError(f"{folder} is of a fleet; explain tells of one engine: predict its share of the load alone")
    loads = [level.workload for level in run.levels]
    title = Path(folder).name
    measured = run if run.source == "measured" else None
    if profile_name is not None:
        profile = find_profile(profile_name)
        engine_flags = change_flags(flags_of(run, profile.engine_flags), flags, profile.kv_bytes_per_token)
        return _of_profile(title, profile, engine_flags, loads, measured)
    if measured or "step_time" not in run.server:
        raise CommandError(f"{folder} does not say how long the engine's steps take; give --profile")
    stated = {field.name: run.server[field.name] for field in fields(EngineFlags) if field.name in run.server}
    engine_flags = change_flags(EngineFlags(**parse_flags(stated)), flags, None)
    step_time, host_time = _terms(run, "step_time", StepTime), _terms(run, "host_time", HostTime)
    notes = [level.notes for level in run.levels]
    return Replay(title, run.server, engine_flags, step_time, host_time, loads, _labels(loads), notes)


def _of_profile(
    title: str, profile: Profile, flags: EngineFlags, loads: Sequence[Load], measured: Run | None = None
) -> Replay:
    server = {"model": profile.model, "gpu": profile.gpu, "profile": profile.name}
    notes = [profile.outside_range(load, flags) for load in loads]
    return Replay(title, server, flags, profile.step_time, profile.host_time, loads, _labels(loads), notes, measured)


def _terms(run: Run, name: str, kind: type[Terms]) -> Terms:
    """The coefficients that a predicted run keeps."""
    stated: Any = run.server.get(name, {})
    try:
        values: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in stated.items()}
        return kind(**values)
    except (AttributeError, TypeError, ValueError):
        raise CommandError(f"the run's {name} cannot be read; give --profile") from None


def _labels(loads: Sequence[Load]) -> list[str]:
    arrivals, lengths = [load.label for load in loads], [load.lengths_label for load in loads]
    return level_labels(arrivals, lengths, [False] * len(loads))

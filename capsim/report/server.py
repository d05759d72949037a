"""What served the runs of a report: what they say of it, its engine flags and its KV pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from calibration.validate import flags_of
from capsim.curves import Family
from capsim.replay import _terms as stated_terms
from capsim.shipped import PROFILES
from simulator.engine.engine_flags import EngineFlags, FlagError
from simulator.engine.step_time import HostTime, StepTime
from simulator.planning.ceilings import Ceilings, ceilings
from simulator.profile import Profile
from simulator.results.run import Run


@dataclass(frozen=True)
class Server:
    """The server of a report.

    Attributes
        facts: what its runs say, the measured one first, by their names
        profile: the one that predicts it, where it is known
        profile_name: what to write after ``--profile``
        flags: its engine flags; None where the runs do not tell enough, or for a fleet of several servers
        pool: size of the KV pool in tokens; None likewise
        times: how long its steps take, and what its host adds; None where neither a profile nor a run tells
    """

    facts: Mapping[str, object]
    profile: Profile | None
    profile_name: str
    flags: EngineFlags | None
    pool: int | None
    times: tuple[StepTime, HostTime] | None

    @classmethod
    def of(cls, runs: Sequence[Run], profile: Profile | None, profile_name: str = "") -> Server:
        """The server of a measured run, a predicted one, or both; the measured one counts where they differ."""
        ordered = sorted(runs, key=lambda run: run.source != "measured")
        facts = {name: value for run in reversed(ordered) for name, value in run.server.items()}
        profile = profile or shipped_profile(ordered)
        name = profile_name or (profile.name if profile else "")
        if "fleet" in facts:
            return cls(facts, profile, name, None, None, None)
        flags = _flags(ordered[0], profile)
        pool = facts.get("kv_tokens")
        if not isinstance(pool, int) or pool <= 0:
            pool = flags.kv_tokens if flags else None
        return cls(facts, profile, name, flags, pool, _times(ordered, profile))

    def text(self, name: str) -> str:
        """A fact as text, empty where it is not known."""
        value = self.facts.get(name)
        return "" if value is None else str(value)

    def ceilings(self, family: Family) -> Ceilings | None:
        """What the engine can hold at once of a kind of request."""
        if self.flags is None:
            return None
        return ceilings(family.first.points[-1].level.workload, self.flags)


def shipped_profile(runs: Sequence[Run]) -> Profile | None:
    """The shipped profile that a predicted run names and is of, None for any other."""
    for run in runs:
        name = run.server.get("profile")
        if run.source != "simulated" or name not in {path.stem for path in PROFILES.glob("*.yaml")}:
            continue
        profile = Profile.load(PROFILES / f"{name}.yaml")
        return profile if profile.model == run.server.get("model") else None
    return None


def _flags(run: Run, profile: Profile | None) -> EngineFlags | None:
    """The flags that a run was under; a measured server that does not tell its slots and pool has none."""
    stated = run.server
    try:
        if run.source == "simulated":
            default = EngineFlags()
            kinds = {field.name: type(getattr(default, field.name)) for field in fields(default)}
            return default.changed(
                **{name: stated[name] for name, kind in kinds.items() if type(stated.get(name)) is kind}
            )
        if profile is not None:
            return flags_of(run, profile.engine_flags)
        if type(stated.get("max_num_seqs")) is not int or type(stated.get("num_gpu_blocks")) is not int:
            return None
        slots = stated["max_num_seqs"]
        assert isinstance(slots, int)
        return flags_of(run, EngineFlags(max_num_batched_tokens=max(2048, slots)))
    except FlagError:
        return None


def _times(runs: Sequence[Run], profile: Profile | None) -> tuple[StepTime, HostTime] | None:
    """Those of the profile, or those that a predicted run keeps."""
    if profile is not None:
        return profile.step_time, profile.host_time
    for run in runs:
        if run.source == "simulated" and "step_time" in run.server:
            return stated_terms(run, "step_time", StepTime), stated_terms(run, "host_time", HostTime)
    return None

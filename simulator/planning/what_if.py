"""A server beside the same server started in other ways, under the same load: what changes, how surely, and why.

Every server gets the same requests at the same moments (common random numbers), and every draw of the uncertain
coefficients is the same for all of them. So a difference is much surer than the numbers it is the difference of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.engine_rules import version_note
from simulator.engine.saturation import held_rate
from simulator.engine.scheduler import CannotFit
from simulator.loads.workload import Load
from simulator.planning.alternative import Alternative
from simulator.planning.ceilings import Ceilings, ceilings
from simulator.planning.limits import LIMITS, OF_STEPS, Limits, what_limits
from simulator.planning.paired_draws import Times, paired_times
from simulator.planning.unmodelled import AlternativeError
from simulator.profile import Profile
from simulator.results.backlog import in_terms_of
from simulator.results.run import Level
from simulator.results.summary import LATENCIES, STATISTICS, Summary, stated, summarize
from simulator.uncertainty import (
    LEAST_ERROR,
    intervals_from,
    is_random,
    knows_errors,
    model_error,
    reach_of,
    repeated,
)

Numbers = dict[str, float | int | None]

# what is compared: throughput, both gauges, latencies
METRICS = (
    "output_throughput",
    "request_throughput",
    "mean_concurrency",
    "mean_active_tokens",
    "peak_active_tokens",
    "peak_kv_tokens",
    *(f"{name}_{latency}" for latency in LATENCIES for name in STATISTICS),
)
NEARLY_FULL = 0.95  # share of the KV pool from which on requests may wait for it
ENOUGH_REQUESTS = 200  # that tell whether a load shares prefixes
LITTLE = 0.02  # a change of throughput and of the time of requests that is hardly one


@dataclass(frozen=True)
class Outcome:
    """What one server does under one load.

    `numbers` are those of `simulator.results.summary.Summary.flat` of the `summary`, `intervals` the 90 % intervals of
    them, empty where none were asked for. `notes` say what leaves the measured range. `limits` are None for several
    engines, and `ceilings` are those of all engines together.
    """

    server: Alternative
    summary: Summary
    numbers: Numbers
    intervals: dict[str, tuple[float, float]]
    limits: Limits | None
    ceilings: Ceilings
    notes: list[str]

    def number(self, name: str) -> float:
        """A number of the summary; NaN where there is none."""
        value = self.numbers[name]
        return math.nan if value is None else float(value)


@dataclass(frozen=True)
class Change:
    """A figure of the baseline and of an alternative. `relative` is (value - baseline) / baseline, NaN if that is 0;
    `low` and `high` are the ends of its 90 % interval, NaN without one."""

    baseline: float
    value: float
    relative: float
    low: float = math.nan
    high: float = math.nan

    @property
    def is_clear(self) -> bool | None:
        """Whether the difference is beyond its interval; None where that is not known."""
        return None if math.isnan(self.low) else self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Comparison:
    """Every server under one load. `changes` and `reasons` are those of each alternative, by figure and in words."""

    load: Load
    baseline: Outcome
    alternatives: list[Outcome]
    changes: list[dict[str, Change]]
    reasons: list[str]


def what_if(
    baseline: Alternative,
    alternatives: Sequence[Alternative],
    loads: Sequence[Load],
    with_intervals: bool = True,
    on_load: Callable[[float], None] | None = None,
) -> list[Comparison]:
    """Compare the alternatives with the baseline, load by load.

    `on_load` is told how many loads are done, a begun one in part. Raises
    `simulator.planning.alternative.AlternativeError` where a server can never serve one of the requests.
    """
    compared: list[Comparison] = []
    for load in loads:
        within = _say_nothing if on_load is None else _after(len(compared), on_load)
        compared.append(_compare([baseline, *alternatives], load, with_intervals, within))
        within(1)
    return compared


def _after(done: int, on_load: Callable[[float], None]) -> Callable[[float], None]:
    """Takes the share of a load that comes after `done` others."""
    return lambda share: on_load(done + share)


def _say_nothing(_share: float) -> None:
    """Nobody asked."""


def _compare(
    servers: Sequence[Alternative], load: Load, with_intervals: bool, tell: Callable[[float], None]
) -> Comparison:
    levels = [_level(server, load) for server in servers]
    summaries = [stated(summarize(level), "simulated") for level in levels]
    numbers = [summary.flat() for summary in summaries]
    draws = _Draws(servers, load, numbers, tell) if with_intervals and knows_errors(servers[0].profile) else None
    outcomes, wider = [], []
    for place, (server, level) in enumerate(zip(servers, levels, strict=True)):
        wider.append(1.0 + server.profile.doublings_outside(*_seen_by_one(server, load, level)))
        intervals = draws.intervals(place, wider[place]) if draws else {}
        outcomes.append(_outcome(server, load, level, summaries[place], intervals))
    changes = [
        {name: _change(draws, numbers, name, place, max(wider[0], wider[place])) for name in METRICS}
        for place in range(1, len(servers))
    ]
    reasons = [_why(outcomes[0], outcome, load) for outcome in outcomes[1:]]
    return Comparison(load, outcomes[0], outcomes[1:], changes, reasons)


def _level(server: Alternative, load: Load) -> Level:
    """The load on a server, and the rate that it can hold."""
    level, profile = _simulate(server, load), server.profile
    level.held_rate = held_rate(load, server.flags, profile.step_time, profile.host_time, server.fleet)
    return level


def _simulate(server: Alternative, load: Load, times: Times | None = None) -> Level:
    step_time, host_time = times or (server.profile.step_time, server.profile.host_time)
    try:
        return server.fleet.simulate(load, server.flags, step_time, host_time)
    except CannotFit as problem:
        raise AlternativeError(f"{server.name}: {problem}") from None


def _outcome(
    server: Alternative, load: Load, level: Level, summary: Summary, intervals: dict[str, tuple[float, float]]
) -> Outcome:
    profile, flags = server.profile, server.flags
    notes = level.notes + profile.outside_range(*_seen_by_one(server, load, level))
    notes += [note] if (note := version_note(flags.engine_version)) else []
    alone = server.fleet.engines == 1
    limits = what_limits(level, flags, profile.step_time, profile.host_time) if alone else None
    return Outcome(server, summary, summary.flat(), intervals, limits, _ceilings(server, load), notes)


def _seen_by_one(server: Alternative, load: Load, level: Level) -> tuple[Load, EngineFlags, int]:
    """Load, flags, and most requests at once of one engine, to hold against what was measured."""
    running = math.ceil(level.timeline["running"].max() / server.fleet.engines)
    return server.fleet.share(load), server.flags, running


def _ceilings(server: Alternative, load: Load) -> Ceilings:
    one, engines = ceilings(load, server.flags), server.fleet.engines
    of_all = {name: getattr(one, name) * engines for name in ("slots", "kv_full_length", "kv_average", "kv_tokens")}
    return replace(one, **of_all)


# --- how sure


class _Draws:
    """The numbers of every server under the same draws of coefficients and, for a random load, the same seeds."""

    def __init__(
        self, servers: Sequence[Alternative], load: Load, numbers: Sequence[Numbers], tell: Callable[[float], None]
    ) -> None:
        """`tell` takes the share of the simulations that is done."""
        self.profile: Profile = servers[0].profile
        self.profiles = [server.profile for server in servers]
        self.numbers = numbers
        random, trial = is_random(load), repeated(load)
        self.base = list(numbers)
        if trial != load:
            self.base = [summarize(_simulate(server, trial)).flat() for server in servers]
        self.drawn: list[list[Numbers]] = [[] for _ in servers]
        paired = list(paired_times(self.profiles, at_least_one=random))
        for number, times in enumerate(paired):
            tell((2 + number) / (2 + len(paired)))
            drawn_load = trial.redrawn(1 + number) if random else trial
            for server, kept, drawn in zip(servers, self.drawn, times, strict=True):
                kept.append(summarize(_simulate(server, drawn_load, drawn)).flat())
        self.reach = reach_of(len(self.drawn[0]), random)

    def intervals(self, place: int, wider: float) -> dict[str, tuple[float, float]]:
        """Those of one server's numbers, as `simulator.uncertainty.intervals` has them."""
        profile, numbers = self.profiles[place], self.numbers[place]
        return intervals_from(profile, numbers, self.base[place], self.drawn[place], wider, self.reach)

    def change(self, name: str, place: int, wider: float) -> Change:
        """The change of a number with its interval.

        The model's own error is common to both as far as both do the same: it counts by the share in which they
        differ. A difference that there is has at least the error of two measurements that the model cannot beat.
        """
        plain = _plain_change(self.numbers[0][name], self.numbers[place][name])
        if math.isnan(plain.relative) or plain.relative <= -1:
            return plain
        ratio = math.log1p(plain.relative)
        deviations = self._deviations_of_ratio(name, place)
        if deviations is None:
            return plain
        differ = 1 - math.exp(-abs(ratio))
        floor = LEAST_ERROR if ratio else 0.0
        model = math.sqrt(2) * math.hypot(wider * self._model_error(name) * differ, floor)
        spread = self.reach * math.hypot(float(np.sqrt(np.mean(deviations**2))), model)
        low, high = math.expm1(ratio - spread), math.expm1(ratio + spread)
        return Change(plain.baseline, plain.value, plain.relative, low, high)

    def _deviations_of_ratio(self, name: str, place: int) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
        """How far each draw's logarithm of the ratio is from that of the fitted coefficients."""
        pairs = [(self.base[0], self.base[place]), *zip(self.drawn[0], self.drawn[place], strict=True)]
        ratios = []
        for one, other in pairs:
            before, after = one[name], other[name]
            if before is None or after is None or not (before > 0 and after > 0):
                return None
            ratios.append(math.log(after / before))
        return np.array(ratios[1:] or [ratios[0]]) - ratios[0]

    def _model_error(self, name: str) -> float:
        return max(model_error(self.profile, name), LEAST_ERROR)


def _change(draws: _Draws | None, numbers: Sequence[Numbers], name: str, place: int, wider: float) -> Change:
    """The change of a number from the first server to another, with an interval where there are draws."""
    return draws.change(name, place, wider) if draws else _plain_change(numbers[0][name], numbers[place][name])


def _plain_change(baseline: float | None, value: float | None) -> Change:
    before, after = (math.nan if number is None else float(number) for number in (baseline, value))
    return Change(before, after, (after - before) / before if before else math.nan)


# --- why


def _why(before: Outcome, after: Outcome, load: Load) -> str:
    """One sentence on what the alternative does to the time of requests, and what limits it then."""
    old, new = before.number("mean_e2el"), after.number("mean_e2el")
    faster = after.number("output_throughput") / before.number("output_throughput") - 1
    if unsteady := _why_unsteady(before, after, load):
        return unsteady
    if before.limits is None or after.limits is None:
        return _why_many(before, after, old, new)
    if max(abs(new / old - 1), abs(faster)) < LITTLE:
        return (
            f"throughput and the time of a request, {new:.3g} s, change little: {after.limits.sentence()}"
            f"{_unused(before, after, load)}"
        )
    spent = _seconds(after.limits, new)
    changed = {name: spent[name] - seconds for name, seconds in _seconds(before.limits, old).items()}
    # where slower and faster parts balance each other, the largest change of any kind
    same_way = {name: value for name, value in changed.items() if (value < 0) == (new < old)} or changed
    main = max(same_way, key=lambda name: abs(same_way[name]))
    seconds = changed[main]
    told = LIMITS[main] + _in_steps(before.limits, after.limits, main, seconds)
    return (
        f"a request takes {new:.3g} s instead of {old:.3g} s, with {abs(seconds):.2g} s "
        f"{'less' if seconds < 0 else 'more'} for {told}; now {after.limits.sentence()}"
    )


def _why_unsteady(before: Outcome, after: Outcome, load: Load) -> str:
    """The sentence where requests wait ever longer on one of the servers; empty where on none."""
    known = {"the baseline": before, "this server": after}
    unsteady = {name: one for name, one in known.items() if one.summary.state == "no steady state"}
    told = " and ".join(
        f"{name} holds about {in_terms_of(load, one.summary.held_rate):.3g}/s" for name, one in unsteady.items()
    )
    return f"no steady state at {load.label}: {told}" if told else ""


def _in_steps(before: Limits, after: Limits, main: str, seconds: float) -> str:
    """That the engine does fewer steps, or more, where that is why what every step costs takes less time, or more."""
    fewer = after.steps < before.steps
    if main not in OF_STEPS or fewer != (seconds < 0) or abs(after.steps / before.steps - 1) < LITTLE:
        return ""
    return f", in {after.steps:,} steps of the engine instead of {before.steps:,}"


def _why_many(before: Outcome, after: Outcome, old: float, new: float) -> str:
    """The sentence where several engines share the load, of which each waits and computes for itself."""
    share = after.number("mean_concurrency") / after.server.fleet.engines
    sentence = (
        f"a request takes {new:.3g} s instead of {old:.3g} s; each of {after.server.fleet.engines} engines has "
        f"{share:.3g} requests in flight"
    )
    return sentence + (f". At the baseline {before.limits.sentence()}" if before.limits is not None else "")


def _seconds(limits: Limits, mean: float) -> Mapping[str, float]:
    """Seconds of a request that takes `mean`, by what they are spent on."""
    return {name: limits.shares.get(name, 0.0) * mean for name in LIMITS}


def _unused(before: Outcome, after: Outcome, load: Load) -> str:
    """What to add where the load does not use what the flags offer."""
    old, new = before.server.flags, after.server.flags
    full = before.number("peak_kv_tokens") / before.ceilings.kv_tokens
    if old.kv_tokens != new.kv_tokens and full < NEARLY_FULL:
        return f"; the baseline's KV pool is {full:.0%} full at most"
    if old.enable_prefix_caching != new.enable_prefix_caching and not _shares_prefixes(load, new.block_size):
        return "; no request of this load shares a prefix with another"
    if old.scheduling_policy != new.scheduling_policy:
        return "; no request of this load has a priority"
    return ""


def _shares_prefixes(load: Load, block_size: int) -> bool:
    return any(load.prefix(number, block_size) for number in range(min(load.num_prompts, ENOUGH_REQUESTS)))

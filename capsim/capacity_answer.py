"""What ``capsim capacity`` answers: sentences and tables for people, rows and JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.table import Table

from capsim.tables import console, digits, plain_table
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.fleet import Fleet
from simulator.engine.saturation import held_rate
from simulator.planning.capacity import MARGIN, Capacity, CapacitySearch
from simulator.planning.operating_point import knee, slo_figures
from simulator.planning.replications import Trial
from simulator.planning.targets import targets_label
from simulator.profile import Profile
from simulator.results.backlog import in_terms_of
from simulator.results.percentiles import requests_for, unbounded_percentiles
from simulator.uncertainty import drawn_times


class CapacityAnswer:
    """What was found, for people and for programs."""

    def __init__(
        self,
        server: Profile,
        flags: EngineFlags,
        search: CapacitySearch,
        found: Sequence[Capacity],
        curve: Sequence[Trial],
        met: Sequence[tuple[Trial, int, int]] = (),
    ) -> None:
        """`met` says of levels in how many of so many draws of the profile's coefficients they meet the first SLO."""
        self.server, self.flags, self.search = server, flags, search
        self.found, self.first = found, found[0]
        self.curve, self.met = curve, [(trial, met, draws) for trial, met, draws in met if draws]
        self.knee = curve[knee([trial.numbers for trial in curve])] if curve else None

    # --- sentences

    def verdict(self) -> str:
        """The capacity, and what breaks beyond it."""
        found, wanted = self.first, targets_label(self.first.targets)
        if found.best is None:
            lowest = found.tried[0]
            return f"No level meets {wanted}: even {_label(lowest)} {self._breaks(lowest)}."
        if found.beyond is None:
            return (
                f"{_label(found.best)} and every level below meets {wanted}. The engine runs about "
                f"{found.ceilings.running} requests at once; more clients only wait."
            )
        return f"{_label(found.best)} meets {wanted}; {_label(found.beyond)} {self._breaks(found.beyond)}."

    def _breaks(self, trial: Trial) -> str:
        """What a level that does not meet the targets does."""
        if trial.verdict == "no steady state":
            rate = held_rate(trial.load, self.flags, self.server.step_time, self.server.host_time, Fleet())
            held = "" if rate is None else f", of which about {in_terms_of(trial.load, rate):.3g}/s are held"
            growth = sum(trial.growth) / 2 if trial.growth else 0.0
            return f"has no steady state: its backlog grows by {growth:.0%} of the arrivals{held}"
        if trial.verdict == "undecided":
            return f"could not be decided in {trial.replications} simulations ({', '.join(trial.missed) or 'backlog'})"
        return f"misses {', '.join(trial.missed)}"

    def why(self) -> str | None:
        found = self.first
        if found.limits is None or found.limits_at is None:
            return None
        return f"Why: at {_label(found.limits_at)}, {found.limits.sentence()}."

    def recommendation(self) -> str | None:
        """The level to run at, with the reason, and where the knee lies."""
        found, knee = self.first, self.knee
        if found.best is None:
            return None
        if found.fallback is None:
            return f"Recommended: none; no level below {_label(found.best)} has {MARGIN:.0%} to spare on every target."
        sentence = (
            f"Recommended: {_label(found.fallback)}, the highest level with {MARGIN:.0%} to spare on every target and "
            "to the capacity"
        )
        if knee is None or knee is self.curve[-1]:
            return f"{sentence}."
        side = "below" if found.fallback.value < knee.value else "beyond" if found.fallback.value > knee.value else "at"
        return f"{sentence}; it lies {side} the knee, {_label(knee)}, where throughput over latency peaks."

    def counted(self) -> str:
        """What of a level counts."""
        start = "start" if self.search.is_open else "start burst"
        if self.search.whole_runs:
            return f"Counted with the {start} and the end of a run, as a load generator does."
        return (
            f"Counted without the {start} and the end of a run; capsim capacity --whole-runs counts them, as capsim "
            "predict does."
        )

    def sureness(self) -> str | None:
        """How far the profile's uncertainty lets one trust the levels."""
        if not self.met:
            return None
        (first, met, draws), *others = self.met
        rest = "".join(f", {_label(trial)} in {met} of {draws}" for trial, met, draws in others)
        return (
            f"How sure: with coefficients drawn from the profile's uncertainty, {_label(first)} meets it in {met} of "
            f"{draws} draws{rest}."
        )

    def notes(self) -> list[str]:
        """What lies outside the measured range at the level that was found."""
        best = self.first.best
        if best is None:
            return []
        peak = round(best.numbers["peak_concurrency"])
        return self.server.outside_range(best.load, self.flags, min(peak, self.flags.max_num_seqs))

    def too_few(self) -> str | None:
        """Which percentiles simulations of so few requests do not bound, as where ``--num-prompts`` asks for few."""
        level = self.first.best or self.first.tried[0]
        counted = round(level.numbers["completed"])
        shown = {int(name[1:3]) for name in (*_FIGURES, *self.first.targets) if name[0] == "p"}
        needed = [f"p{rank} needs {requests_for(rank)}" for rank in unbounded_percentiles(counted) if rank in shown]
        if not needed:
            return None
        return f"{counted} requests of a simulation count, too few for its percentiles: {', '.join(needed)}"

    # --- for programs

    def content(self) -> dict[str, object]:
        return {
            "profile": self.server.name,
            "by": "rate" if self.search.is_open else "clients",
            "lengths": self.search.load.lengths_label,
            "engine_flags": asdict(self.flags),
            "slos": [_capacity_content(found) for found in self.found],
            "verdict": self.verdict(),
            "why": self.why(),
            "recommendation": self.recommendation(),
            "counted": "whole runs" if self.search.whole_runs else "steady part",
            "met_in_draws": [{"level": trial.value, "met": met, "draws": draws} for trial, met, draws in self.met],
            "knee": None if self.knee is None else self.knee.value,
            "ceilings": asdict(self.first.ceilings),
            "notes": self.notes(),
            "too_few": self.too_few(),
        }

    def rows(self) -> list[dict[str, object]]:
        """Every level tried, for each SLO."""
        return [
            {"slo": targets_label(found.targets), **_trial_row(trial)} for found in self.found for trial in found.tried
        ]

    # --- for people

    def show(self) -> None:
        screen = console()
        load = self.search.load
        what = " on ".join(text for text in (self.server.model, self.server.gpu) if text)
        loop = "open loop" if self.search.is_open else "closed loop"
        screen.print(f"Capacity of {self.server.name}: {what}, {loop}, {load.lengths_label} tokens", markup=False)
        screen.print()
        screen.print(self.verdict(), markup=False)
        for sentence in (self.why(), self.recommendation(), self.sureness(), self.counted()):
            if sentence:
                screen.print(sentence, markup=False)
        levels = [trial for trial in (self.first.best, self.first.fallback) if trial is not None]
        tables = [self._level_table(levels)] if levels else []
        tables += [self._slo_table(), self._tried_table()]
        for table in tables:
            screen.print()
            screen.print(table)
        screen.print()
        screen.print(f"Ceilings: {self.first.ceilings.sentence()}.", markup=False)
        for note in self.notes():
            screen.print(f"Note: outside the measured range: {note}", markup=False)
        if few := self.too_few():
            screen.print(f"Note: {few}.", markup=False)

    def _level_table(self, levels: Sequence[Trial]) -> Table:
        """The capacity and the level to fall back to, figure by figure."""

        table = plain_table("What comes with it" + ("; 90 % intervals" if levels[0].replications > 1 else ""))
        table.add_column("", no_wrap=True)
        for place, trial in enumerate(levels):
            table.add_column(f"{_label(trial)}{', recommended' if place else ''}", justify="right", no_wrap=True)
        for name, title in _FIGURES.items():
            table.add_row(title, *(_figure(trial, name) for trial in levels))
        table.add_row("requests/s that keep the SLO", *(digits(trial.goodput) for trial in levels))
        pool = self.first.ceilings.kv_tokens
        table.add_row("KV pool, peak", *(f"{trial.numbers['peak_kv_tokens'] / pool:.1%}" for trial in levels))
        for name in self.first.targets:
            if name in levels[0].numbers and name not in _FIGURES:
                table.add_row(_figure_title(name), *(_figure(trial, name) for trial in levels))
        return table

    def _slo_table(self) -> Table:
        """For each SLO the level to choose, as the published report has it."""
        table = plain_table("For each SLO the highest level")
        table.add_column("\nSLO", overflow="fold")
        for header in ("\nlevel", "output\ntok/s", "p99\nTTFT, ms", "p50\nITL, ms"):
            table.add_column(header, justify="right", no_wrap=True)
        for found in self.found:
            figures = slo_figures(found.best.numbers if found.best else {})
            table.add_row(
                targets_label(found.targets),
                _label(found.best) if found.best else "none",
                digits(figures["output_throughput"]),
                digits(figures["p99_ttft"] * 1000),
                digits(figures["p50_itl"] * 1000),
            )
        return table

    def _tried_table(self) -> Table:
        """The levels of the search for the first SLO."""

        shown = [name for name in self.first.targets if name in self.first.tried[0].numbers][:4]
        table = plain_table("Levels tried")
        for header in ("level", "verdict"):
            table.add_column(header, no_wrap=True)
        for header in ("runs", "req/s", "tok/s", *shown):
            table.add_column(header, justify="right", no_wrap=True)
        for trial in self.first.tried:
            steady = trial.verdict != "no steady state"
            table.add_row(
                _label(trial),
                trial.verdict,
                str(trial.replications),
                digits(trial.numbers["request_throughput"]),
                digits(trial.numbers["output_throughput"]),
                *(digits(trial.numbers[name] * 1000 if steady else math.nan) for name in shown),
            )
        return table


def met_in_draws(search: CapacitySearch, found: Capacity, server: Profile) -> list[tuple[Trial, int, int]]:
    """Of the level found and of the one to run at, in how many of how many draws of coefficients they meet the SLO."""
    levels = [trial for trial in (found.best, found.fallback) if trial is not None]
    return [(trial, *search.met_in(trial, found.targets, drawn_times(server))) for trial in levels]


_FIGURES = {
    "request_throughput": "requests/s",
    "output_throughput": "output tok/s",
    "mean_concurrency": "requests in flight",
    "mean_active_tokens": "tokens in flight",
    "p99_ttft": "p99 TTFT, ms",
    "p50_itl": "p50 ITL, ms",
}


def _label(trial: Trial) -> str:
    return trial.load.label


def _figure_title(name: str) -> str:
    statistic, latency = name.split("_")
    return f"{statistic} {latency.upper()}, ms"


def _figure(trial: Trial, name: str) -> str:
    """A number of a level, with its interval where it has one."""
    factor = 1000 if name.rpartition("_")[2] in ("ttft", "tpot", "itl", "e2el") else 1
    low, high = (end * factor for end in trial.intervals[name])
    text = digits(trial.numbers[name] * factor)
    return text if high - low < 1e-9 * abs(high) else f"{text} ({digits(max(low, 0.0))}-{digits(high)})"


def _trial_row(trial: Trial) -> dict[str, object]:
    """A level tried, flat; latencies in seconds, and none where there is no steady state."""
    steady = trial.verdict != "no steady state"
    kept = {
        name: value
        for name, value in trial.numbers.items()
        if steady or name.rpartition("_")[2] not in ("ttft", "tpot", "itl", "e2el")
    }
    return {
        "level": _label(trial),
        "value": trial.value,
        "verdict": trial.verdict,
        "missed": " ".join(trial.missed),
        "replications": trial.replications,
        "goodput": trial.goodput,
        "backlog_growth": None if trial.growth is None else sum(trial.growth) / 2,
        **kept,
    }


def _trial_content(trial: Trial | None) -> Mapping[str, object] | None:
    if trial is None:
        return None
    row = _trial_row(trial)
    return row | {
        "missed": list(trial.missed),
        "intervals_90": {name: ends for name, ends in trial.intervals.items() if name in row},
        "backlog_growth_90": trial.growth,
    }


def _capacity_content(found: Capacity) -> dict[str, object]:
    return {
        "targets_ms": found.targets,
        "level": None if found.best is None else found.best.value,
        "fallback": None if found.fallback is None else found.fallback.value,
        "at_level": _trial_content(found.best),
        "beyond": _trial_content(found.beyond),
        "at_fallback": _trial_content(found.fallback),
        "limits": None if found.limits is None else {**asdict(found.limits), "name": found.limits.name},
        "limits_at": None if found.limits_at is None else found.limits_at.value,
        "tried": [_trial_content(trial) for trial in found.tried],
    }

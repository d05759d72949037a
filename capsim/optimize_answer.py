"""What ``capsim optimize`` answers: sentences and a table for people, rows and JSON for programs."""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from capsim.tables import console, digits, plain_table
from simulator.planning.optimize import Candidate, Found, Optimizer, Verdict
from simulator.planning.targets import ERROR_RATE, STEADY_STATE, targets_label
from simulator.profile import Profile
from simulator.results.percentiles import requests_for, unbounded_percentiles

SHOWN_REFUSALS = 3
MOST_ROWS = 20
WORDS: dict[Verdict, str] = {
    "refused": "refused",
    "out early": "miss by far",
    "misses": "miss",
    "meets": "meet in one run",
    "unsure": "meet, not surely",
    "sure": "surely meet",
}
KEPT = (
    "output_throughput",
    "request_throughput",
    "mean_concurrency",
    "mean_active_tokens",
    "peak_kv_tokens",
    "p50_ttft",
    "p95_ttft",
    "p99_ttft",
    "p50_tpot",
    "p95_tpot",
    "p99_itl",
    "p95_e2el",
)


class OptimizeAnswer:
    """What was found, for people and for programs."""

    def __init__(self, profile: Profile, search: Optimizer, found: Found, priced: bool) -> None:
        self.profile, self.search, self.found, self.priced = profile, search, found, priced

    # --- sentences

    def verdict(self) -> str:
        wanted, best = targets_label(self.search.targets), self.found.best
        if best is not None:
            return (
                f"Cheapest: {best.configuration} at {self._cost(best)}, {self._per_million(best)}. It meets {wanted} "
                f"with 90 % confidence: {self._intervals(best)}."
            )
        meeting = [one for one in self.found.candidates if one.meets]
        if meeting:
            nearest = min(meeting, key=lambda one: one.cost)
            return (
                f"None surely meets {wanted}. The cheapest that met it in one run is {nearest.configuration} at "
                f"{self._cost(nearest)}; not sure: {nearest.reason} ({self._intervals(nearest)})."
            )
        return f"None of {len(self.found.candidates)} configurations meets {wanted}.{self._closest()}"

    def _closest(self) -> str:
        """The one that misses the targets by the least."""
        played = [one for one in self.found.candidates if one.figures]
        steady = [one for one in played if STEADY_STATE not in one.reason]
        if played and not steady:
            most = max(played, key=lambda one: one.numbers["request_throughput"])
            held = digits(most.numbers["request_throughput"])
            return f" None has a steady state; {most.configuration} holds the most, about {held} requests/s."
        if not steady:
            return ""
        closest = min(steady, key=lambda one: max(one.figures[name] for name in self._timed()))
        seen = ", ".join(f"{name} {digits(closest.figures[name])} ms" for name in self._timed())
        return f" Closest: {closest.configuration} with {seen}."

    def _timed(self) -> list[str]:
        return [name for name in self.search.targets if name != ERROR_RATE] or [*self.search.targets]

    def counts(self) -> str:
        counted = Counter(one.verdict for one in self.found.candidates)
        told = ", ".join(f"{counted[verdict]} {words}" for verdict, words in WORDS.items() if counted[verdict])
        return f"{len(self.found.candidates)} configurations: {told}."

    def refusals(self) -> list[str]:
        """Why configurations are refused, the most frequent reasons first."""
        reasons = Counter(one.reason for one in self.found.candidates if one.verdict == "refused")
        told = [f"{count} refused: {reason}" for reason, count in reasons.most_common(SHOWN_REFUSALS)]
        rest = len(reasons) - SHOWN_REFUSALS
        return told + ([f"and {rest} other reasons, in --csv"] if rest > 0 else [])

    def notes(self) -> list[str]:
        """What to know before trusting the best one."""
        best = self.found.best
        if best is None or best.server is None:
            return []
        server, load = best.server, self.search.load
        outside = server.profile.outside_range(load, server.flags) if server.fleet.engines == 1 else []
        notes = [f"outside the measured range: {text}" for text in outside] + list(server.notes)
        if not (self.profile.fit or self.profile.hold_out or self.profile.noise):
            notes.append("the profile does not tell its errors; the confidence counts chance and coefficients alone")
        counted = round(best.numbers["completed"])
        ranks = {int(name[1:3]) for name in (*self.search.targets, self.found.latency) if name[0] == "p"}
        notes += [
            f"p{rank} needs {requests_for(rank)} requests, and {counted} of a simulation count"
            for rank in unbounded_percentiles(counted)
            if rank in ranks
        ]
        return notes

    def _cost(self, one: Candidate) -> str:
        if self.priced:
            return f"{digits(one.cost)} an hour"
        return f"{one.cost:.0f} GPU{'s' if one.cost > 1 else ''}"

    def _per_million(self, one: Candidate) -> str:
        unit = "" if self.priced else " GPU-hours"
        return f"{digits(one.cost_per_million)}{unit} a million output tokens"

    def _intervals(self, one: Candidate) -> str:
        told = []
        for name, (low, high) in one.intervals.items():
            unit = "" if name == ERROR_RATE else " ms"
            told.append(f"{name} {digits(low)} to {digits(high)}{unit}")
        return ", ".join(told)

    # --- for people

    def show(self) -> None:
        screen = console()
        what = " on ".join(text for text in (self.profile.model, self.profile.gpu) if text)
        screen.print(f"Search from {self.profile.name}: {what}; {self.search.load.describe()}", markup=False)
        screen.print()
        screen.print(self.verdict(), markup=False)
        screen.print(self.counts(), markup=False)
        if self.found.front:
            screen.print()
            screen.print(self._front_table())
        lines = [*self.refusals(), *(f"Note: {note}" for note in self.notes())]
        if lines:
            screen.print()
        for line in lines:
            screen.print(line, markup=False)

    def _front_table(self) -> Table:
        """Of those that meet the targets, the ones that nothing beats in both cost and latency."""
        name = self.found.latency
        table = plain_table(f"Pareto front of cost and {name}, of those that meet the targets")
        table.add_column("\nconfiguration", overflow="fold")
        cost = ("cost\nan hour", "cost per\nM tokens") if self.priced else ("\nGPUs", "GPU-h per\nM tokens")
        for header in (*cost, "output\ntok/s", f"{name.replace('_', chr(10))}, ms", "\nsure"):
            table.add_column(header, justify="right", no_wrap=True)
        for one in self.found.front[:MOST_ROWS]:
            table.add_row(
                str(one.configuration),
                digits(one.cost) if self.priced else f"{one.cost:.0f}",
                digits(one.cost_per_million),
                digits(one.numbers["output_throughput"]),
                digits(one.numbers[name] * 1000),
                {"sure": "yes", "unsure": "no"}.get(one.verdict, "-"),
            )
        return table

    # --- for programs

    def row(self, one: Candidate) -> dict[str, object]:
        """One configuration, flat; times in seconds."""
        made = one.configuration
        row: dict[str, object] = {
            "configuration": str(made),
            "gpu": made.gpu or self.profile.gpu,
            "replicas": made.replicas,
            "router": made.router if made.replicas > 1 else "",
            **dict(made.flags),
            "gpus": None if one.server is None else one.server.gpus,
            "cost_per_hour" if self.priced else "cost_gpus": one.cost,
            "cost_per_million_tokens" if self.priced else "gpu_hours_per_million_tokens": one.cost_per_million,
            "verdict": one.verdict,
            "reason": one.reason,
            "on_front": one in self.found.front,
        }
        grow = ("ttft", "e2el") if STEADY_STATE in one.reason else ()  # and only tell how long the simulation was
        names = [name for name in dict.fromkeys((*KEPT, self.found.latency)) if not name.endswith(grow)]
        return row | dict.fromkeys((*KEPT, self.found.latency)) | {name: one.numbers.get(name) for name in names}

    def rows(self) -> list[dict[str, object]]:
        """One for each configuration."""
        return [self.row(one) for one in self.found.candidates]

    def content(self) -> dict[str, object]:
        best = self.found.best
        return {
            "profile": self.profile.name,
            "load": self.search.load.describe(),
            "targets": self.search.targets,
            "verdict": self.verdict(),
            "best": None if best is None else self.row(best) | {"intervals_90": best.intervals},
            "front": [self.row(one) for one in self.found.front],
            "latency": self.found.latency,
            "configurations": [self.row(one) for one in self.found.candidates],
            "notes": self.notes(),
        }

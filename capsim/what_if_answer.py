"""What ``capsim what-if`` answers: tables and sentences for people, rows and JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from rich.table import Table

from capsim.output import met_up_to
from capsim.tables import (
    NOTHING,
    console,
    digits,
    latency_cell,
    metric_label,
    milliseconds,
    plain_table,
    share_of_pool,
    whole,
)
from simulator.planning.alternative import Alternative
from simulator.planning.targets import ERROR_RATE, figures_of, missed_targets, targets_label
from simulator.planning.what_if import METRICS, Change, Comparison, Outcome
from simulator.results.summary import LATENCIES

SHORT = 12  # letters of a name that a table has room for
ABREAST = 2  # alternatives whose differences fit side by side
LABELS = {
    "output_throughput": "output tok/s",
    "request_throughput": "requests/s",
    "mean_concurrency": "reqs in flight",
    "mean_active_tokens": "tokens in flight",
    "peak_active_tokens": "peak of these",
    "peak_kv_tokens": "KV tokens, peak",
}
_SHOWN = ["output_throughput", "mean_concurrency", "mean_active_tokens"] + [
    f"{statistic}_{latency}" for latency in LATENCIES for statistic in ("p50", "p99")
]


def server_keys(servers: Sequence[Alternative]) -> list[str]:
    """How tables call servers: by their names where these are short, else by letters."""
    letters = (chr(ord("A") + number % 26) + str(number // 26 or "") for number in range(len(servers)))
    return [
        server.name if len(server.name) <= SHORT and not server.name.startswith("-") else letter
        for server, letter in zip(servers, letters, strict=True)
    ]


class WhatIfAnswer:
    """Compared servers, for people and for programs."""

    def __init__(
        self,
        profile: str,
        baseline: Alternative,
        alternatives: Sequence[Alternative],
        found: list[Comparison],
        targets: Mapping[str, float] | None = None,
    ) -> None:
        self.profile, self.baseline, self.alternatives, self.found = profile, baseline, alternatives, found
        self.targets = targets or {}
        self.keys = server_keys(alternatives)

    # --- for programs

    def content(self) -> dict[str, object]:
        return {
            "profile": self.profile,
            "baseline": _server_content(self.baseline),
            "alternatives": [_server_content(server) for server in self.alternatives],
            "targets_ms": dict(self.targets),
            "levels": [_level_content(comparison, self.targets) for comparison in self.found],
        }

    def rows(self) -> list[dict[str, object]]:
        """One row for each level, alternative and figure; times in seconds."""
        return [
            {
                "level": comparison.load.label,
                "alternative": outcome.server.name,
                "metric": name,
                **asdict(change),
                "is_clear": change.is_clear,
                "baseline_state": comparison.baseline.summary.state,
                "state": outcome.summary.state,
                "too_few": name in comparison.baseline.summary.too_few or name in outcome.summary.too_few,
            }
            for comparison in self.found
            for outcome, changes in zip(comparison.alternatives, comparison.changes, strict=True)
            for name, change in changes.items()
        ]

    # --- for people

    def show(self) -> None:
        screen = console()
        profile = self.baseline.profile
        what = " on ".join(text for text in (profile.model, profile.gpu) if text)
        screen.print(f"What if: {what}, vLLM {profile.engine_version}", markup=False)
        screen.print(f"  baseline: {self.baseline.name}", markup=False)
        for key, server in zip(self.keys, self.alternatives, strict=True):
            screen.print(f"  {key}" + (f": {server.name}" if key != server.name else ""), markup=False)
        if self.targets:
            screen.print(f"\nSLO {targets_label(self.targets)}", markup=False)
            for place, (key, _) in enumerate(self._servers()):
                screen.print(f"  {key}: {self._met_up_to(place)}", markup=False)
        for comparison in self.found:
            outcomes = [comparison.baseline, *comparison.alternatives]
            screen.print(f"\n{comparison.load.describe()}", markup=False)
            screen.print()
            screen.print(self._throughput_table(outcomes))
            screen.print()
            screen.print(self._latency_table(outcomes))
            for sentence in _doubts(comparison, ["baseline", *self.keys]):
                screen.print(sentence, markup=False)
            for start in range(0, len(self.keys), ABREAST):
                screen.print()
                screen.print(self._change_table(comparison, range(start, min(start + ABREAST, len(self.keys)))))
            screen.print()
            for key, reason in zip(self.keys, comparison.reasons, strict=True):
                screen.print(f"Why {key}: {reason}.", markup=False)
        unclear = any(
            change.is_clear is False for row in self.found for all_ in row.changes for change in all_.values()
        )
        if unclear:
            screen.print("\n~ is within its 90 % interval: there may be no difference.", markup=False)
        self._show_trust()

    def _met_up_to(self, place: int) -> str:
        """Up to which level the server at that place meets the targets."""
        outcomes = [[comparison.baseline, *comparison.alternatives][place] for comparison in self.found]
        missed = [_missed_with_figures(outcome, self.targets) for outcome in outcomes]
        return met_up_to([comparison.load.label for comparison in self.found], missed)

    def _show_trust(self) -> None:
        """What is assumed, what has no effect, and what leaves the measured range, of each server."""
        said: dict[str, list[str]] = {}
        for place, (key, server) in enumerate(self._servers()):
            for sentence in [f"assumed: {text}" for text in server.assumed] + list(server.notes):
                said.setdefault(sentence, []).append(key)
            outside: dict[str, list[str]] = {}
            for comparison in self.found:
                for note in [comparison.baseline, *comparison.alternatives][place].notes:
                    outside.setdefault(note, []).append(comparison.load.label)
            for note, levels in outside.items():
                at = f" ({', '.join(levels)})" if len(self.found) > 1 else ""
                said.setdefault(f"outside the measured range: {note}{at}", []).append(key)
        screen = console()
        screen.print()
        for sentence, keys in said.items():
            screen.print(f"Note on {', '.join(keys)}: {sentence}", markup=False)

    def _servers(self) -> list[tuple[str, Alternative]]:
        """Every server by its name in tables."""
        return list(zip(("baseline", *self.keys), (self.baseline, *self.alternatives), strict=True))

    def _throughput_table(self, outcomes: Sequence[Outcome]) -> Table:
        table = plain_table("Throughput, both gauges, and ceilings")
        table.add_column("\nserver", overflow="fold")
        headers = ["output\ntok/s", "\nreq/s", "in flight\nrequests", "\ntokens", "KV pool\npeak", "pre-\nempt."]
        headers += ["most\nslots", "at once\nby KV"]
        for header in headers:
            table.add_column(header, justify="right", no_wrap=True)
        for key, outcome in zip(("baseline", *self.keys), outcomes, strict=True):
            preemptions = outcome.numbers["preemptions"]
            table.add_row(
                key,
                digits(outcome.number("output_throughput")),
                digits(outcome.number("request_throughput")),
                digits(outcome.number("mean_concurrency")),
                whole(outcome.number("mean_active_tokens")),
                share_of_pool(outcome.number("peak_kv_tokens"), outcome.ceilings.kv_tokens),
                NOTHING if preemptions is None else f"{preemptions:,}",
                f"{outcome.ceilings.slots:,}",
                f"{outcome.ceilings.kv_full_length:,}",
            )
        return table

    def _latency_table(self, outcomes: Sequence[Outcome]) -> Table:
        table = plain_table("Latency, ms")
        table.add_column("\nserver", overflow="fold")
        columns = [
            ("ttft", ("p50", "p99")),
            ("tpot", ("p50", "p99")),
            ("itl", ("p50", "p99")),
            ("e2el", ("p50", "p99")),
        ]
        for latency, statistics in columns:
            for number, statistic in enumerate(statistics):
                header = f"{latency.upper() if number == 0 else ''}\n{statistic}"
                table.add_column(header, justify="right", no_wrap=True)
        for key, outcome in zip(("baseline", *self.keys), outcomes, strict=True):
            names = [f"{statistic}_{latency}" for latency, statistics in columns for statistic in statistics]
            table.add_row(key, *(latency_cell(outcome.summary, name) for name in names))
        return table

    def _change_table(self, comparison: Comparison, places: range) -> Table:
        sure = any(change.is_clear is not None for all_ in comparison.changes for change in all_.values())
        table = plain_table(f"Difference to the baseline{', with 90 % intervals' if sure else ''}")
        table.add_column("", no_wrap=True)
        table.add_column("baseline", justify="right", no_wrap=True)
        for place in places:
            table.add_column(self.keys[place], justify="right", no_wrap=True)
        for name in dict.fromkeys([*_SHOWN, *(target for target in self.targets if target in METRICS)]):
            label = LABELS.get(name) or metric_label(name)
            value = comparison.baseline.number(name)
            shown = digits(value) if name in LABELS else milliseconds(value)
            table.add_row(label, shown, *(_difference(comparison.changes[place][name]) for place in places))
        return table


def _doubts(comparison: Comparison, keys: Sequence[str]) -> Iterator[str]:
    """What to know of the servers' figures under one load."""
    from capsim.doubts import too_few_samples, unsteady_levels

    summaries = [outcome.summary for outcome in (comparison.baseline, *comparison.alternatives)]
    yield "Figures are of the whole level, start and end included."
    yield from filter(None, [too_few_samples(keys, summaries)])
    yield from unsteady_levels(keys, [comparison.load] * len(keys), summaries)


def _missed_with_figures(outcome: Outcome, targets: Mapping[str, float]) -> list[str]:
    """The targets that are missed, each with what is there instead."""
    found = figures_of(outcome.numbers)
    return [
        name
        if math.isnan(found.get(name, math.nan))
        else f"{name} ({digits(found[name])}{'' if name == ERROR_RATE else ' ms'})"
        for name in missed_targets(outcome.summary, targets)
    ]


def _difference(change: Change) -> str:
    """A change with its interval; a tilde where it is within it."""
    if math.isnan(change.relative):
        return NOTHING
    text = _percent(change.relative)
    if change.is_clear is None:
        return text
    if change.relative == change.low == change.high == 0:
        return "none"
    low, high = _percent(change.low), _percent(change.high)
    return f"{'' if change.is_clear else '~ '}{text} ({low.removesuffix('%')} to {high.removesuffix('%')})"


def _percent(share: float) -> str:
    """With the digits that matter: +6.5%, +255%, and x 12 from ten times on."""
    if share >= 10:
        return f"x{1 + share:.3g}"
    return f"{share:+.{0 if abs(share) >= 0.995 else 1}%}"


def _server_content(server: Alternative) -> dict[str, object]:
    return {
        "name": server.name,
        "gpu": server.profile.gpu,
        "fleet": asdict(server.fleet),
        "engine_flags": asdict(server.flags),
        "kv_tokens": server.flags.kv_tokens,
        "assumed": list(server.assumed),
        "notes": list(server.notes),
    }


def _level_content(comparison: Comparison, targets: Mapping[str, float]) -> dict[str, object]:
    from simulator.results.run_files import workload_to_json

    return {
        "workload": workload_to_json(comparison.load),
        "baseline": _outcome_content(comparison.baseline, targets),
        "alternatives": [
            {
                **_outcome_content(outcome, targets),
                "changes": {name: asdict(changes[name]) | {"is_clear": changes[name].is_clear} for name in METRICS},
                "why": reason,
            }
            for outcome, changes, reason in zip(
                comparison.alternatives, comparison.changes, comparison.reasons, strict=True
            )
        ],
    }


def _outcome_content(outcome: Outcome, targets: Mapping[str, float]) -> dict[str, object]:
    return {
        "name": outcome.server.name,
        **outcome.numbers,
        "intervals_90": outcome.intervals,
        "state": outcome.summary.state,
        "held_rate": outcome.summary.held_rate,
        "too_few": outcome.summary.too_few,
        "missed_targets": missed_targets(outcome.summary, targets),
        "limits": None if outcome.limits is None else {**asdict(outcome.limits), "name": outcome.limits.name},
        "ceilings": asdict(outcome.ceilings),
        "outside_measured_range": outcome.notes,
    }

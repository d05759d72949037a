"""What ``capsim explain`` answers: tables and sentences for people, rows and JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from capsim.doubts import unsteady_levels
from capsim.replay import Replay
from capsim.tables import NOTHING, console, milliseconds, plain_table
from capsim.terminal import printable
from simulator.results.run import Level
from simulator.results.summary import summarize
from simulator.steps.explanation import CAUSES, DECODE_PARTS, TAIL, TTFT_PARTS, Explanation
from simulator.steps.step_log import ObservedLevel

Phase = Literal["ttft", "decode"]
WORTH_SAYING = 0.01  # share of the whole
SLOWEST = 99  # percentile of the requests that are told of apart
COMPARED = {"p50_ttft": "TTFT p50", "p99_ttft": "TTFT p99", "p50_itl": "ITL p50", "p99_itl": "ITL p99"}

_TTFT_HEADERS = ("slots", "KV\npool", "bud-\nget", "under\nway", "pre-\nempt.", "own\nprefill", "other\nprompts",
                 "deco-\nding", "\nhost")  # fmt: skip
_DECODE_HEADERS = ("con-\nstant", "seq-\nuences", "KV\nread", "prompt\nchunks", "graph\nedges", "KV\nstall",
                   "re-\ncomp.", "bud-\nget", "\npauses")  # fmt: skip
_CAUSE_HEADERS = ("plain\ndecode", "prompt\nchunks", "graph\nedges", "pre-\nempt.", "bud-\nget")


@dataclass(frozen=True)
class ExplainedLevel:
    """One level, what its latency is made of, and what was measured of it where that is known."""

    label: str
    level: Level
    explanation: Explanation
    observed: ObservedLevel | None
    measured: Mapping[str, float]
    notes: Sequence[str]

    def without_log(self) -> ExplainedLevel:
        """The same without what only a trace needs."""
        return replace(self, observed=None)


class ExplainAnswer:
    """What was found, for people and for programs."""

    def __init__(self, replay: Replay, levels: Sequence[ExplainedLevel]) -> None:
        self.replay, self.levels, self.last = replay, levels, levels[-1]

    # --- files

    def write_trace(self, path: Path) -> None:
        from simulator.steps.chrome_trace import write_trace

        assert self.last.observed is not None
        write_trace(path, self.last.observed, self.last.explanation, f"{self.replay.title}, {self.last.label}")

    def write_figure(self, path: Path) -> None:
        from capsim.figures.style import as_png, as_svg, styled
        from capsim.figures.timeline import timeline_figure

        with styled():
            drawing = timeline_figure(self.last.level, self.replay.flags)
        if path.suffix == ".png":
            path.write_bytes(as_png(drawing))
        else:
            path.write_text(as_svg(drawing), encoding="utf-8")

    # --- for programs

    def content(self) -> dict[str, object]:
        return {
            "title": self.replay.title,
            "server": {name: value for name, value in self.replay.server.items() if value is not None},
            "engine_flags": asdict(self.replay.flags),
            "levels": [self._level_content(level) for level in self.levels],
        }

    def _level_content(self, played: ExplainedLevel) -> dict[str, object]:
        found, summary = played.explanation, summarize(played.level)
        return {
            "level": played.label,
            "state": summary.state,
            "held_rate": summary.held_rate,
            "ttft": found.parts("ttft"),
            "ttft_slowest": found.parts("ttft", SLOWEST),
            "decode": found.parts("decode"),
            "decode_slowest": found.parts("decode", SLOWEST),
            "itl": asdict(found.itl),
            "steps": asdict(found.steps),
            "gauges": {name: asdict(gauge) for name, gauge in found.gauges.items()},
            "sentences": list(sentences(found)),
            "measured": {name: played.measured[name] for name in COMPARED if name in played.measured},
            "notes": list(played.notes),
        }

    def rows(self) -> list[dict[str, object]]:
        """One row for each level and part: mean seconds a request, and its share of the whole."""
        rows: list[dict[str, object]] = []
        for played in self.levels:
            for phase, names in (("ttft", TTFT_PARTS), ("decode", DECODE_PARTS)):
                parts = played.explanation.parts(phase)
                whole = sum(parts.values())
                for name, meaning in names.items():
                    share = parts[name] / whole if whole else math.nan
                    row = {"level": played.label, "of": phase, "part": name, "seconds": parts[name], "share": share}
                    rows.append({**row, "meaning": meaning})
        return rows

    # --- for people

    def show(self) -> None:
        screen = console()
        server = " on ".join(str(self.replay.server[name]) for name in ("model", "gpu") if self.replay.server.get(name))
        screen.print(f"{self.replay.title}: {server}", markup=False)
        levels = [played.level for played in self.levels]
        labels, summaries = [played.label for played in self.levels], [summarize(level) for level in levels]
        screen.print("Figures are of whole levels, start and end included.")
        for sentence in unsteady_levels(labels, [level.workload for level in levels], summaries):
            screen.print(sentence, markup=False)
        tables = [
            self._parts_table("ttft", "Time to first token: mean, and shares of it, %", _TTFT_HEADERS),
            self._parts_table("decode", "From first to last token: mean, and shares of it, %", _DECODE_HEADERS),
            self._tail_table(),
        ]
        if any(played.measured for played in self.levels):
            tables.append(self._measured_table())
        for table in tables:
            screen.print()
            screen.print(table)
        screen.print(f"\nAt {self.last.label}:")
        points = Table.grid(padding=(0, 1, 0, 0))
        for sentence in sentences(self.last.explanation):
            points.add_row("-", Text(printable(sentence)))
        screen.print(points)
        outside = dict.fromkeys((played.label, "; ".join(played.notes)) for played in self.levels if played.notes)
        if outside:
            screen.print("\nOutside the measured range:")
        for label, notes in outside:
            screen.print(f"  {label}: {notes}", markup=False)

    def _parts_table(self, phase: Phase, title: str, headers: Sequence[str]) -> Table:
        table = _level_table(title, ["mean\nms", *headers])
        for played in self.levels:
            parts = played.explanation.parts(phase)
            whole = sum(parts.values())
            table.add_row(played.label, milliseconds(whole), *(_share(part, whole) for part in parts.values()))
        return table

    def _tail_table(self) -> Table:
        """Percentiles of the gaps between tokens, and what makes those that are longest."""
        title = f"Gaps between tokens, ms; causes of the tail (from {TAIL:g} x the median on), %"
        table = _level_table(title, ["\np50", "\np90", "\np99", "\nlongest", "splits\nat", *_CAUSE_HEADERS])
        for played in self.levels:
            itl = played.explanation.itl
            values = [*(itl.percentiles[p] for p in (50, 90, 99)), itl.longest]
            split = NOTHING if itl.splits_at is None else f"p{itl.splits_at:.1f}"
            causes = (_share(itl.tail.get(name, 0.0), 1.0) if itl.tail else NOTHING for name in CAUSES)
            table.add_row(played.label, *map(milliseconds, values), split, *causes)
        return table

    def _measured_table(self) -> Table:
        """How near the replay of a measured run comes."""
        headers = [header for name in COMPARED.values() for header in (f"{name}\nmeasured", "\nplayed")]
        table = _level_table("Measured, and as it was played here, ms", headers)
        for played in self.levels:
            numbers = summarize(played.level).flat()
            pairs = ((played.measured[name], float(numbers[name] or math.nan)) for name in COMPARED)
            table.add_row(played.label, *(milliseconds(value) for pair in pairs for value in pair))
        return table


def sentences(found: Explanation) -> Iterator[str]:
    """What a reader should take away from one level."""
    for phase, what, names in (("ttft", "TTFT", TTFT_PARTS), ("decode", "First to last token", DECODE_PARTS)):
        parts, slow = found.parts(phase), found.parts(phase, SLOWEST)
        if sum(parts.values()) > 0:
            yield f"{what} is {milliseconds(sum(parts.values()))} ms on average: {_largest(parts, names)}."
            yield f"The slowest 1 % take {milliseconds(sum(slow.values()))} ms: {_largest(slow, names)}."
    yield _tail(found)
    use, gauges = found.steps, found.gauges
    if use.with_prompts > 0:
        yield (
            f"{use.with_prompts:.1%} of {use.steps:,} steps compute prompts: {use.prompt_tokens:,.0f} tokens and "
            f"{milliseconds(use.prompt_seconds)} ms more, on average."
        )
    budgets = {"with prompts": use.budget_with_prompts, "without": use.budget_without}
    told = ", ".join(f"{value:.0%} in steps {name}" for name, value in budgets.items() if not math.isnan(value))
    yield (
        f"Token budget used: {told}; it is used up {use.full:.0%} of the time. The engine is idle {1 - use.busy:.1%} "
        "of the time."
    )
    running, waiting, held, active = (gauges[name] for name in ("running", "waiting", "kv_tokens", "active_tokens"))
    yield (
        f"Requests: {running.mean:,.1f} run on average, {running.peak:,.0f} at most, of {running.limit} slots; "
        f"{waiting.mean:,.1f} wait, {waiting.peak:,.0f} at most."
    )
    pool = held.limit or math.nan
    yield (
        f"Tokens: {active.mean:,.0f} active on average, {active.peak:,.0f} at most; the KV pool holds "
        f"{held.mean / pool:.0%} on average, {held.peak / pool:.1%} at most."
    )


def _tail(found: Explanation) -> str:
    itl = found.itl
    preempted = f"{itl.preemptions:,} preemptions" if itl.preemptions else "No preemption"
    if math.isnan(itl.longest):
        return f"No request has a second token. {preempted}."
    if itl.splits_at is None:
        return f"ITL has no tail: the longest gap is {itl.longest / itl.percentiles[50]:.2f} x the median. {preempted}."
    causes = ", ".join(f"{share:.0%} {CAUSES[name]}" for name, share in itl.tail.items() if share >= WORTH_SAYING / 10)
    return (
        f"ITL splits at p{itl.splits_at:.1f}: gaps beyond are {TAIL:g} x the median or longer. They are {causes}. "
        f"{preempted}."
    )


def _largest(parts: Mapping[str, float], names: Mapping[str, str]) -> str:
    """Parts worth saying, the largest first."""
    whole = sum(parts.values())
    shares = sorted(((seconds / whole, names[name]) for name, seconds in parts.items()), reverse=True)
    return ", ".join(f"{share:.0%} {meaning}" for share, meaning in shares if share >= WORTH_SAYING)


def _level_table(title: str, headers: Sequence[str]) -> Table:
    table = plain_table(title)
    table.add_column("\nlevel", overflow="fold")
    for header in headers:
        table.add_column(header if "\n" in header else f"\n{header}", justify="right", no_wrap=True)
    return table


def _share(part: float, whole: float) -> str:
    """A share in per cent without the sign; nothing where it is nothing."""
    if not whole or abs(part) < 5e-5 * whole:
        return NOTHING
    return f"{100 * part / whole:.0f}" if part >= 0.0995 * whole else f"{100 * part / whole:.1f}"

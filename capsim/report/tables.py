"""The tables of a report, once for the page, for Markdown and for CSV: every level, and the level for each SLO."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from capsim.curves import Curve, Family, Point
from capsim.tables import DOUBT, NOTHING
from capsim.tables import digits as figures
from capsim.terminal import harmless_cell, printable
from simulator.planning.operating_point import Numbers, OperatingPoint, highest_that_meets, slo_figures
from simulator.planning.targets import missed_targets, targets_label

# what each column of the table of levels holds: its title, unit, and the factor to that unit
LEVEL_COLUMNS = {
    "output_throughput": ("output", "tok/s", 1),
    "request_throughput": ("req/s", "", 1),
    "mean_concurrency": ("in flight", "requests", 1),
    "mean_active_tokens": ("in flight", "tokens", 1),
    "p50_ttft": ("TTFT p50", "ms", 1000),
    "p90_ttft": ("TTFT p90", "ms", 1000),
    "p99_ttft": ("TTFT p99", "ms", 1000),
    "p50_tpot": ("TPOT p50", "ms", 1000),
    "p99_tpot": ("TPOT p99", "ms", 1000),
    "p50_itl": ("ITL p50", "ms", 1000),
    "p90_itl": ("ITL p90", "ms", 1000),
    "p99_itl": ("ITL p99", "ms", 1000),
    "p50_e2el": ("E2EL p50", "ms", 1000),
    "p99_e2el": ("E2EL p99", "ms", 1000),
}
WITH_INTERVAL = ("output_throughput", "p50_ttft", "p99_ttft", "p99_itl", "p50_e2el")
KNEE = "none: the knee, where throughput over latency is highest"
# asked where no SLO is given: what people often promise
CUSTOMARY: tuple[Mapping[str, float], ...] = (
    {"p99_ttft": 500},
    {"p99_ttft": 1000},
    {"p99_ttft": 2000},
    {"p99_ttft": 5000},
    {"p99_itl": 50},
    {"p99_itl": 100},
    {"p99_itl": 200},
    {"p99_ttft": 2000, "p99_itl": 200},
)


@dataclass(frozen=True)
class Cell:
    """What a cell shows, the number behind it where there is one, and its interval in the same unit."""

    text: str
    value: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def between(self) -> str:
        """The interval as people read it, empty where it is too narrow to show."""
        if self.interval is None:
            return ""
        low, high = map(figures, self.interval)
        return f"{low}-{high}" if low != high else ""


@dataclass(frozen=True)
class Column:
    """The head of a column; numbers stand on the right."""

    title: str
    unit: str = ""
    is_number: bool = True

    @property
    def head(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


@dataclass(frozen=True)
class DataTable:
    """A table; the rows whose places are in `marked` are of the recommended level."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    marked: frozenset[int]

    def csv(self) -> str:
        """The numbers as they are, an interval in two more columns; text otherwise."""
        spread = {place for row in self.rows for place, cell in enumerate(row) if cell.interval}
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        head: list[str] = []
        for place, column in enumerate(self.columns):
            head += [column.head] + ([f"{column.head}, low", f"{column.head}, high"] if place in spread else [])
        writer.writerow([*head, "recommended"])
        for number, row in enumerate(self.rows):
            line: list[object] = []
            for place, cell in enumerate(row):
                line.append(_csv(cell))
                line += (cell.interval or ("", "")) if place in spread else ()
            writer.writerow([*line, "yes" if number in self.marked else ""])
        return stream.getvalue()


def _csv(cell: Cell) -> object:
    if cell.value is not None:
        return "" if math.isnan(cell.value) else cell.value
    if cell.text == NOTHING:
        return ""
    return harmless_cell(printable(cell.text))


def level_table(found: Sequence[Family], pool: int | None, recommended: Point | None) -> DataTable:
    """Every level of every kind of load, one row for each source. Latencies are milliseconds."""
    both = any(len(family.curves) > 1 for family in found)
    head = [Column("level", is_number=True)]
    head += [Column("lengths", "tokens", is_number=False)] if len(found) > 1 else []
    head += [Column("source", is_number=False)] if both else []
    head += [Column("sent"), Column("failed")]
    numbers = [Column(title, unit) for title, unit, _ in LEVEL_COLUMNS.values()]
    head += [*numbers[:4], Column("KV peak", "% of pool" if pool else "tokens"), Column("pre-empted"), *numbers[4:]]
    head += [Column("state", is_number=False), Column("too few requests for", is_number=False)]
    rows: list[list[Cell]] = []
    marked: set[int] = set()
    for family in found:
        for value in family.values:
            for curve in family.curves:
                point = curve.at(value)
                if point is None:
                    continue
                if recommended is not None and family is found[0] and math.isclose(value, recommended.value):
                    marked.add(len(rows))
                rows.append(_level_row(point, curve, len(found) > 1, both, pool))
    return DataTable("levels", "All levels", head, rows, frozenset(marked))


def _level_row(point: Point, curve: Curve, with_lengths: bool, with_source: bool, pool: int | None) -> list[Cell]:
    load, summary = point.level.workload, point.summary
    row = [Cell(f"{point.label}{'*' if point.level.notes else ''}", point.value)]
    row += [Cell(load.lengths_label)] if with_lengths else []
    row += [Cell(curve.source)] if with_source else []
    row += [Cell(f"{summary.requests:,}", summary.requests), Cell(f"{summary.errors:,}", summary.errors)]
    numbers = [_number(point, name, factor) for name, (_, _, factor) in LEVEL_COLUMNS.items()]
    peak = summary.peak_kv_tokens * (100 / pool if pool else 1)
    preempted = math.nan if summary.preemptions is None else float(summary.preemptions)
    preemptions = Cell(NOTHING if math.isnan(preempted) else f"{preempted:,.0f}", preempted)
    doubts = [Cell(summary.state), Cell(_too_few(summary.too_few) or NOTHING)]
    return [*row, *numbers[:4], Cell(figures(peak), peak), preemptions, *numbers[4:], *doubts]


def _too_few(names: Sequence[str]) -> str:
    """Percentiles that their samples do not bound, those of token gaps apart: ``p95 p99, p99 of ITL``."""
    ranks = {name.partition("_")[0]: None for name in names if not name.endswith("_itl")}
    gaps = [name.partition("_")[0] for name in names if name.endswith("_itl")]
    return ", ".join(filter(None, [" ".join(ranks), f"{' '.join(gaps)} of ITL" if gaps else ""]))


def _number(point: Point, name: str, factor: float) -> Cell:
    value = point.number(name) * factor
    low, high = (end * factor for end in point.interval(name))
    known = name in WITH_INTERVAL and math.isfinite(low) and low < high and not math.isnan(value)
    doubt = DOUBT if name in point.summary.too_few else ""
    return Cell(figures(value) + doubt, value, (low, high) if known else None)


def slo_look_up(
    family: Family, slos: Sequence[Mapping[str, float]], chosen: Mapping[str, float], recommended: OperatingPoint | None
) -> DataTable:
    """For each SLO the level to choose and what comes with it; the row of the `chosen` one is marked.

    An empty choice is the knee, which then has a row of its own.
    """
    both = len(family.curves) > 1
    head = [Column("SLO", is_number=False)] + ([Column("source", is_number=False)] if both else [])
    head += [Column("level"), Column("output", "tok/s"), Column("req/s"), Column("in flight", "requests")]
    head += [Column("TTFT p99", "ms"), Column("ITL p50", "ms"), Column("next level misses", is_number=False)]
    rows: list[list[Cell]] = []
    marked: set[int] = set()
    if not chosen and recommended is not None:
        marked.add(0)
        rows.append(_knee_row(family.first, recommended, both))
    for slo in slos:
        for curve in family.curves:
            if slo == chosen and curve is family.first and recommended is not None:
                marked.add(len(rows))
            rows.append(_slo_row(curve, slo, both))
    return DataTable("slo", "Which level for which SLO", head, rows, frozenset(marked))


def _slo_row(curve: Curve, slo: Mapping[str, float], with_source: bool) -> list[Cell]:
    met = highest_that_meets([point.summary for point in curve.points], slo)
    row = [Cell(_slo_label(slo))] + ([Cell(curve.source)] if with_source else [])
    if met is None:
        row.append(Cell("none", math.nan))
    else:
        row.append(Cell(curve.points[met].label, curve.points[met].value))
    row += _come_with({} if met is None else curve.points[met].summary.flat())
    beyond = curve.points[0 if met is None else met + 1 :]
    missed = f"{beyond[0].label}: {', '.join(missed_targets(beyond[0].summary, slo))}" if beyond else ""
    return [*row, Cell(missed or "highest level tried")]


def _knee_row(curve: Curve, knee: OperatingPoint, with_source: bool) -> list[Cell]:
    point = curve.points[knee.place]
    row = [Cell(KNEE)] + ([Cell(curve.source)] if with_source else [])
    row.append(Cell(point.label, point.value))
    return [*row, *_come_with(point.summary.flat()), Cell(NOTHING)]


def _come_with(numbers: Numbers) -> list[Cell]:
    """What the published report says of the level for an SLO."""
    found = slo_figures(numbers)
    names = ("output_throughput", "request_throughput", "mean_concurrency", "p99_ttft", "p50_itl")
    values = [found[name] * (1000 if name.startswith("p") else 1) for name in names]
    return [Cell(figures(value), value) for value in values]


def _slo_label(slo: Mapping[str, float]) -> str:
    return targets_label(slo).replace("<=", "≤")

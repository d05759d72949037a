"""Everything that a report says, before it becomes a page or files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from capsim.curves import Curve, Family, Point, families
from capsim.figures.kv_pool import kv_pool_use
from capsim.figures.latency import latency_parts, token_gaps
from capsim.figures.load import marginal, scaling, throughput_and_latency
from capsim.figures.style import Drawing, styled
from capsim.figures.validation import prediction_errors
from capsim.report.advice import Advice, advise
from capsim.report.facts import Fact, definitions, memory_facts, server_facts, trust
from capsim.report.server import Server
from capsim.report.tables import CUSTOMARY, Cell, DataTable, level_table, slo_look_up
from capsim.tables import digits as figures
from simulator.planning.ceilings import Ceilings
from simulator.planning.operating_point import OperatingPoint, recommend
from simulator.planning.targets import targets_label
from simulator.profile import Profile
from simulator.results.run import Run

DRAWN = 3  # kinds of load that get figures; those with most levels


class ReportError(ValueError):
    """Runs of which there is nothing to report. The message is one line."""


@dataclass(frozen=True)
class Conclusion:
    """The first thing that a reader sees.

    Attributes
        headline: the level to run at
        reason: why it, in one sentence
        tiles: the numbers that come with it
        ceiling: what the server can hold at once, by requests and by tokens
        advice: what limits, what to change; None without a level to look at
    """

    headline: str
    reason: str
    tiles: Sequence[tuple[str, Cell]]
    ceiling: str
    advice: Advice | None


@dataclass(frozen=True)
class Section:
    """The figures of one kind of load."""

    title: str
    drawings: Sequence[Drawing]


@dataclass(frozen=True)
class Report:
    """What a report says. `facts` are lists with a title; `trust` are sentences."""

    title: str
    subtitle: str
    conclusion: Conclusion
    sections: Sequence[Section]
    tables: Sequence[DataTable]
    facts: Mapping[str, Sequence[Fact]]
    definitions: Sequence[Fact]
    trust: Sequence[str]
    version: str


def build_report(
    runs: Sequence[Run],
    profile: Profile | None = None,
    slos: Sequence[Mapping[str, float]] = (),
    names: Mapping[str, str] | None = None,
) -> Report:
    """The report of a measured run, a predicted one, or both.

    The first of `slos` decides the level to recommend, without one the knee; all are looked up. `names` say where the
    runs come from, by their source, and what ``--profile`` was. Raises `ReportError`.
    """
    from capsim import __version__

    found = families(runs)
    if not found:
        raise ReportError("the run has no finished level; there is nothing to report")
    names = names or {}
    server = Server.of(runs, profile, names.get("profile", ""))
    main, chosen = found[0], dict(slos[0]) if slos else {}
    asked = [*slos, *(slo for slo in CUSTOMARY if slo not in slos)]
    point = recommend(main.first.run, chosen)
    level = main.first.points[point.place] if point else None
    with styled():
        sections = [*_sections(found, server, asked if slos else CUSTOMARY[1:3])]
    return Report(
        title=_title(server),
        subtitle=_subtitle(server, found),
        conclusion=_conclusion(server, main, chosen, point, level),
        sections=sections,
        tables=[level_table(found, server.pool, level), slo_look_up(main, asked, chosen, point)],
        facts={"Server": server_facts(server), "Memory and ceilings": memory_facts(server, main)},
        definitions=definitions(),
        trust=trust(runs, server, found, names),
        version=__version__,
    )


def _title(server: Server) -> str:
    parts = [server.text("model") or "LLM server", server.text("gpu")]
    return " on ".join(part for part in parts if part)


def _subtitle(server: Server, found: Sequence[Family]) -> str:
    version = server.text("engine_version")
    sources = " and ".join(curve.source for curve in found[0].curves)
    loads = found[0].name[0].lower() + found[0].name[1:]
    more = len(found) - 1
    others = f" and {more} other kind{'s' if more > 1 else ''} of load" if more else ""
    return f"{f'vLLM {version}, ' if version else ''}{loads}{others}; {sources}"


def _conclusion(
    server: Server, main: Family, chosen: Mapping[str, float], found: OperatingPoint | None, level: Point | None
) -> Conclusion:
    ceiling = _ceiling(server.ceilings(main), server)
    if found is None or level is None:
        lowest = main.first.points[0]
        missing = f"No level meets {targets_label(chosen).replace('<=', '≤')}"
        reason = f"Even {lowest.label}, the lowest one, misses it."
        return Conclusion(missing, reason, _tiles(lowest), ceiling, advise(server, main, lowest, chosen))
    more = "s" if main.kind != "open" and level.value != 1 else ""
    headline = f"Run it at {level.value:g} {main.unit}{more}"
    reason = found.reason.replace("<=", "≤")
    return Conclusion(headline, reason, _tiles(level), ceiling, advise(server, main, level, chosen))


_TILES = {
    "output_throughput": ("output tok/s", 1),
    "request_throughput": ("requests/s", 1),
    "p99_ttft": ("p99 TTFT, ms", 1000),
    "p50_itl": ("p50 ITL, ms", 1000),
    "p99_itl": ("p99 ITL, ms", 1000),
    "mean_concurrency": ("requests in flight", 1),
    "mean_active_tokens": ("tokens in flight", 1),
}


def _tiles(point: Point) -> list[tuple[str, Cell]]:
    made = []
    for name, (label, factor) in _TILES.items():
        low, high = (end * factor for end in point.interval(name))
        value = point.number(name) * factor
        between = (low, high) if math.isfinite(low) and low < high else None
        made.append((label, Cell(figures(value), value, between)))
    return made


def _ceiling(ceilings: Ceilings | None, server: Server) -> str:
    if ceilings is None:
        pool = f" The KV pool holds {server.pool:,} tokens." if server.pool else ""
        return f"Not known: the run does not tell --max-num-seqs and the KV pool.{pool}"
    most = min(ceilings.slots, ceilings.kv_full_length)
    tokens = min(round(most * ceilings.full_tokens), ceilings.kv_tokens)
    return f"{most} requests at once, {tokens:,} tokens at their full length. {_capital(ceilings.sentence())}."


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _sections(found: Sequence[Family], server: Server, slos: Sequence[Mapping[str, float]]) -> Iterator[Section]:
    """The kind of load with most levels, and others with more than one."""
    drawn = [family for family in found if family is found[0] or len(family.values) > 1][:DRAWN]
    for family in drawn:
        yield Section(family.name, [*_drawings(family, server, slos)])


def _drawings(family: Family, server: Server, slos: Sequence[Mapping[str, float]]) -> Iterator[Drawing]:
    if any(_has_answers(curve) for curve in family.curves):
        yield throughput_and_latency(family, slos)
        yield scaling(family)
        yield marginal(family)
        yield token_gaps(family)
        yield latency_parts(family)
    for drawing in (kv_pool_use(family, server.ceilings(family), server.pool), prediction_errors(family)):
        if drawing is not None:
            yield drawing


def _has_answers(curve: Curve) -> bool:
    return any(point.summary.completed for point in curve.points)

"""Tables for people: 80 columns, milliseconds, plain text where the output is no terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from capsim.terminal import printable

if TYPE_CHECKING:
    from calibration.drift import Drift
    from calibration.validate import Comparison, LevelValidation, Validation
    from simulator.profile import LevelErrors, Profile
    from simulator.results.summary import Summary

WIDTH = 80
NOTHING = "-"
DOUBT = "?"  # after a percentile whose sample does not bound it

THROUGHPUT = {
    "output_throughput": "output tok/s",
    "total_throughput": "total tok/s",
    "request_throughput": "requests/s",
    "mean_concurrency": "requests in flight",
}


def console(stderr: bool = False) -> Console:
    """Where tables go; no colours and no more than 80 columns outside of a terminal."""
    screen = _Screen(stderr=stderr, highlight=False, markup=False, emoji=False)
    if screen.is_terminal:
        return screen
    return _Screen(stderr=stderr, highlight=False, markup=False, emoji=False, width=WIDTH, no_color=True)


class _Screen(Console):
    """Takes every text as it stands: no markup, and nothing that a terminal would obey."""

    def render_str(self, text: str, **look: Any) -> Text:
        return super().render_str(printable(text), **look)


def throughput_table(labels: Sequence[str], summaries: Sequence[Summary], kv_pool: int | None) -> Table:
    """Throughput and both gauges of concurrency, one row a level. `kv_pool` is the size of the KV pool in tokens."""
    table = plain_table("Throughput and concurrency")
    table.add_column("\nlevel", overflow="fold")
    headers = ["\nsent", "\nfailed", "output\ntok/s", "\nreq/s", "in flight\nrequests", "\ntokens"]
    headers += ["KV pool\npeak", "pre-\nempt."]
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for label, summary in zip(labels, summaries, strict=True):
        table.add_row(
            label,
            f"{summary.requests:,}",
            str(summary.errors or 0),
            digits(summary.output_throughput),
            digits(summary.request_throughput),
            digits(summary.mean_concurrency),
            whole(summary.mean_active_tokens),
            share_of_pool(summary.peak_kv_tokens, kv_pool),
            NOTHING if summary.preemptions is None else f"{summary.preemptions:,}",
        )
    return table


def latency_table(labels: Sequence[str], summaries: Sequence[Summary]) -> Table:
    """Latencies in milliseconds, one row a level; percentiles of too few samples have a `DOUBT`."""
    table = plain_table("Latency, ms")
    if any(summary.too_few for summary in summaries):
        table.padding = 0  # room for the marks
    table.add_column("\nlevel", overflow="fold")
    for latency, statistics in _LATENCY_COLUMNS.items():
        for number, statistic in enumerate(statistics):
            table.add_column(f"{latency.upper() if number == 0 else ''}\n{statistic}", justify="right", no_wrap=True)
    for label, summary in zip(labels, summaries, strict=True):
        names = [
            f"{statistic}_{latency}" for latency, statistics in _LATENCY_COLUMNS.items() for statistic in statistics
        ]
        table.add_row(label, *(latency_cell(summary, name) for name in names))
    return table


def latency_cell(summary: Summary, name: str) -> str:
    """A latency of a level in milliseconds, with a `DOUBT` where it is a percentile of too few samples."""
    statistic, _, latency = name.partition("_")
    return milliseconds(getattr(getattr(summary, latency), statistic)) + (DOUBT if name in summary.too_few else "")


def interval_table(labels: Sequence[str], found: Sequence[Mapping[str, tuple[float, float]]], what: str) -> Table:
    """90 % intervals of what matters most, one row a level; `what` they are of."""
    table = plain_table(f"90 % intervals of the {what}; tok/s and ms")
    table.add_column("\nlevel", overflow="fold")
    for header in _INTERVAL_COLUMNS.values():
        table.add_column(header, justify="right", no_wrap=True)
    for label, intervals in zip(labels, found, strict=True):
        table.add_row(label, *(_between(name, intervals.get(name)) for name in _INTERVAL_COLUMNS))
    return table


def _between(name: str, ends: tuple[float, float] | None) -> str:
    if ends is None:
        return NOTHING
    low, high = (digits(end) if name in THROUGHPUT else milliseconds(end) for end in ends)
    return low if low == high else f"{low}-{high}"


_INTERVAL_COLUMNS = {
    "output_throughput": "output\ntok/s",
    "p50_ttft": "TTFT\np50",
    "p99_ttft": "TTFT\np99",
    "p99_itl": "ITL\np99",
    "p50_e2el": "E2EL\np50",
}
_LATENCY_COLUMNS = {
    "ttft": ("p50", "p90", "p99"),
    "tpot": ("p50", "p99"),
    "itl": ("p50", "p90", "p99"),
    "e2el": ("p50", "p99"),
}


def comparison_table(level: LevelValidation) -> Table:
    """Every metric of one level, measured and predicted."""
    table = plain_table(level.workload.describe())
    table.add_column("metric", no_wrap=True)
    for header in ("measured", "predicted", "error", "noise"):
        table.add_column(header, justify="right", no_wrap=True)
    for metric in level.metrics.values():
        noise = NOTHING if metric.noise is None else percent(metric.noise, sign=False)
        doubt = DOUBT if metric.too_few else ""
        table.add_row(metric_label(metric.metric), *_both(metric), f"{percent(metric.error)}{doubt}", noise)
    return table


def error_table(labels: Sequence[str], validation: Validation) -> Table:
    """Signed errors of the metrics that matter most, one row a level, and the largest noise of any."""
    noise: dict[str, float] = {}
    for level in validation.levels:
        for name, metric in level.metrics.items():
            if metric.noise is not None:
                noise[name] = max(noise.get(name, 0.0), metric.noise)
    return errors_table("Error of the prediction", labels, [level.errors for level in validation.levels], noise)


def errors_table(
    title: str, labels: Sequence[str], errors: Sequence[Mapping[str, float]], noise: Mapping[str, float]
) -> Table:
    """Signed relative errors by metric, one row a level; at last the `noise` between repeats, where it is known.

    Means stand in for medians that nobody states.
    """
    table = plain_table(title)
    table.add_column("\nlevel", overflow="fold")
    known = {name for row in errors for name in row}
    shown = {name: header for name, header in _ERROR_COLUMNS.items() if name in known}
    means = {name: header for name, header in _MEAN_COLUMNS.items() if name in known and f"p50{name[4:]}" not in known}
    shown |= means
    for header in shown.values():
        table.add_column(header, justify="right", no_wrap=True)
    for label, by_metric in zip(labels, errors, strict=True):
        table.add_row(label, *[percent(by_metric.get(name, math.nan)) for name in shown])
    if any(name in noise for name in shown):
        table.add_section()
        table.add_row("noise", *[percent(noise.get(name, math.nan), sign=False) for name in shown])
    return table


def drift_table(drift: Drift) -> Table:
    """Every figure of the level that was measured again, and by how much it may be off."""
    table = plain_table(drift.workload.describe())
    table.add_column("metric", no_wrap=True)
    for header in ("measured", "predicted", "change", "allowed", ""):
        table.add_column(header, justify="right", no_wrap=True)
    for name, figure in drift.figures.items():
        show = digits if name in THROUGHPUT else milliseconds
        allowed = percent(figure.allowed / figure.predicted, sign=False)
        outside = "outside" if figure.excess > 1 else ""
        numbers = show(figure.measured), show(figure.predicted)
        table.add_row(metric_label(name), *numbers, percent(figure.error), allowed, outside)
    return table


_ERROR_COLUMNS = {
    "output_throughput": "output\ntok/s",
    "p50_ttft": "TTFT\np50",
    "p99_ttft": "\np99",
    "p50_tpot": "TPOT\np50",
    "p50_itl": "ITL\np50",
    "p99_itl": "\np99",
    "p50_e2el": "E2EL\np50",
    "p99_e2el": "\np99",
}
_MEAN_COLUMNS = {f"mean_{latency}": f"{latency.upper()}\nmean" for latency in ("ttft", "tpot", "itl", "e2el")}


def coefficient_table(profile: Profile) -> Table:
    """What was fitted, with its uncertainty, in microseconds."""
    table = plain_table("Step time and host time, µs")
    table.add_column("coefficient", no_wrap=True)
    for header in ("value", "90 % interval", "origin"):
        table.add_column(header, justify="right", no_wrap=True)
    for terms in (profile.coefficients.step_time, profile.coefficients.host_time):
        for name, term in terms.items():
            interval = NOTHING
            if term.low is not None and term.high is not None:
                interval = f"{_microseconds(term.low)} to {_microseconds(term.high)}"
            table.add_row(name, _microseconds(term.value), interval, term.origin)
    return table


def fit_table(title: str, levels: Sequence[LevelErrors], noise: Mapping[str, float]) -> Table:
    """Errors that a profile states of its own fit, and the noise of its calibration."""
    labels = [level.level.partition(" tokens")[0].replace(",", "") for level in levels]
    return errors_table(title, labels, [level.errors for level in levels], noise)


def level_labels(arrivals: Sequence[str], lengths: Sequence[str], marked: Iterable[bool]) -> list[str]:
    """Names of levels: the arrivals, with a star for those that are marked, and the lengths where they differ."""
    differ = len(set(lengths)) > 1
    return [
        f"{arrival}{'*' if mark else ''}{f' {length}' if differ else ''}"
        for arrival, length, mark in zip(arrivals, lengths, marked, strict=True)
    ]


def metric_label(name: str) -> str:
    """A metric's name and unit as people read it."""
    if name in THROUGHPUT:
        return THROUGHPUT[name]
    statistic, latency = name.split("_")
    return f"{statistic} {latency.upper()}, ms"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, with three to four digits."""
    return digits(seconds * 1000)


def percent(share: float, sign: bool = True) -> str:
    """A share as per cent, signed unless told otherwise."""
    return NOTHING if math.isnan(share) else f"{share:{'+' if sign else ''}.1%}"


def _both(metric: Comparison) -> tuple[str, str]:
    show = digits if metric.metric in THROUGHPUT else milliseconds
    return show(metric.measured), show(metric.predicted)


def digits(value: float) -> str:
    """A number with the digits that matter: 1,234, 123.4, 12.34."""
    if math.isnan(value):
        return NOTHING
    return f"{value:,.{0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2}f}"


def _microseconds(seconds: float) -> str:
    """Four digits, whole numbers from 1,000 on."""
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def whole(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:,.0f}"


def share_of_pool(tokens: float, pool: int | None) -> str:
    if math.isnan(tokens):
        return NOTHING
    return f"{tokens:,.0f}" if not pool else f"{tokens / pool:.1%}"


def plain_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)

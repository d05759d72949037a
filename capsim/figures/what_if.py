"""Servers side by side: bars for one level of load, curves for several, each with its 90 % interval."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from capsim.figures.style import BLUE, GREEN, GROUND, INK, MUTED, ORANGE, PURPLE, log_ticks, make_printable, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from capsim.what_if_answer import WhatIfAnswer
    from simulator.planning.what_if import Outcome

# markers and hatches tell servers apart in grey, too
COLOURS = (MUTED, BLUE, ORANGE, GREEN, PURPLE, "#b8860b", "#56b4e9", INK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":")  # where curves lie over each other, each shows
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo", "***")

PANELS = {
    "output_throughput": ("Output tokens/s", 1.0),
    "mean_active_tokens": ("Tokens in flight", 1.0),
    "p99_ttft": ("p99 TTFT, ms", 1000.0),
    "p50_tpot": ("p50 TPOT, ms", 1000.0),
    "p99_itl": ("p99 ITL, ms", 1000.0),
    "p50_e2el": ("p50 E2EL, ms", 1000.0),
}
WIDE = 20.0  # largest over smallest value from which an axis is logarithmic


def draw_what_if(answer: WhatIfAnswer, path: Path) -> None:
    """Write the figure; the same answer gives the same bytes."""
    with styled():
        figure = _drawn(answer)
        make_printable(figure)
        with mpl.rc_context({"svg.hashsalt": "what-if"}):
            dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}
            figure.savefig(path, dpi=150, metadata=dated[path.suffix])


def _drawn(answer: WhatIfAnswer) -> Figure:
    names = ["baseline", *answer.keys]
    columns = [[level.baseline, *level.alternatives] for level in answer.found]
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    axes = figure.subplots(2, 3)
    for axis, (metric, (title, factor)) in zip(axes.flat, PANELS.items(), strict=True):
        for number, name in enumerate(names):
            outcomes = [column[number] for column in columns]
            if len(columns) > 1:
                _curve(axis, outcomes, metric, factor, number, name)
            else:
                _bar(axis, outcomes[0], metric, factor, number, name)
        _finish(axis, title, metric, [level.load.label for level in answer.found], columns, names)
    handles, _ = axes.flat[0].get_legend_handles_labels()
    legend = [
        name if name in ("baseline", server.name) else f"{name}: {_shortened(server.name)}"
        for name, server in zip(names, (answer.baseline, *answer.alternatives), strict=True)
    ]
    figure.legend(handles, legend, loc="outside lower center", ncols=min(len(names), 2), frameon=False)
    figure.suptitle(_title(answer), fontsize=11)
    return figure


def _curve(axis: Axes, outcomes: list[Outcome], metric: str, factor: float, number: int, name: str) -> None:
    values = np.array([outcome.number(metric) * factor for outcome in outcomes])
    places = np.arange(len(outcomes))
    colour = COLOURS[number % len(COLOURS)]
    style, marker, size = LINES[number % len(LINES)], MARKERS[number % len(MARKERS)], max(8 - 1.5 * number, 3.5)
    axis.plot(places, values, color=colour, linestyle=style, marker=marker, markersize=size, label=name)
    if all(metric in outcome.intervals for outcome in outcomes):
        ends = np.array([outcome.intervals[metric] for outcome in outcomes]) * factor
        axis.fill_between(places, ends[:, 0], ends[:, 1], color=colour, alpha=0.15, linewidth=0)


def _bar(axis: Axes, outcome: Outcome, metric: str, factor: float, number: int, name: str) -> None:
    value = outcome.number(metric) * factor
    error = None
    if metric in outcome.intervals:
        low, high = outcome.intervals[metric]
        error = np.array([[max(value - low * factor, 0.0)], [max(high * factor - value, 0.0)]])
    axis.bar(
        number,
        value,
        yerr=error,
        capsize=4,
        color=COLOURS[number % len(COLOURS)],
        alpha=0.6,
        hatch=HATCHES[number % len(HATCHES)],
        edgecolor=GROUND,
        ecolor=INK,
        label=name,
    )


def _finish(
    axis: Axes, title: str, metric: str, labels: list[str], columns: list[list[Outcome]], names: list[str]
) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xticks(range(len(labels)) if len(labels) > 1 else range(len(names)), labels if len(labels) > 1 else names)
    values = [outcome.number(metric) for column in columns for outcome in column]
    positive = [value for value in values if value > 0]
    if len(labels) > 1 and positive and max(positive) > WIDE * min(positive):
        log_ticks(axis)
        return
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _place: f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}")
    )


def _title(answer: WhatIfAnswer) -> str:
    profile = answer.baseline.profile
    on = f" on {profile.gpu}" if profile.gpu else ""
    load = answer.found[0].load
    one = load.describe() if len(answer.found) == 1 else f"{load.lengths_label} tokens in/out"
    ranges = ", with 90 % intervals" if answer.found[0].baseline.intervals else ""
    return f"{profile.model}{on}: {one}{ranges}"


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."

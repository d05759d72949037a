"""Figures of latency: the spread of token gaps, and what a request's time is made of."""

from __future__ import annotations

import math
from typing import Any

from capsim.curves import Curve, Family, Point
from capsim.figures.load import legend_label, line_style, milliseconds, shade_interval, tip
from capsim.figures.style import (
    BLUE,
    GREEN,
    GROUND,
    MUTED,
    ORANGE,
    PURPLE,
    Drawing,
    Value,
    bar_ticks,
    level_ticks,
    log_ticks,
    new_drawing,
)
from capsim.tables import digits

GAPS = {
    "p99_itl": ("p99", ORANGE),
    "p90_itl": ("p90", GREEN),
    "mean_itl": ("mean", PURPLE),
    "p50_itl": ("p50", BLUE),
}
BOTH = ("p99_itl", "p50_itl")  # of a second curve
TAIL_SPLITS = 3.0  # times p50, from which on the tail is one of its own


def token_gaps(family: Family) -> Drawing:
    """p50, p90, p99 and mean of the token gaps over the load, on a log axis, the range from p50 to p99 shaded."""
    drawing = new_drawing("token-gaps", "Inter-token latency")
    axes = drawing.axes
    for place, curve in enumerate(family.curves):
        points = [point for point in curve.points if point.number("p50_itl") > 0]
        xs = [point.value for point in points]
        if not place and points:
            low, high = ([point.number(name) * 1000 for point in points] for name in ("p50_itl", "p99_itl"))
            axes.fill_between(xs, low, high, color=MUTED, alpha=0.13, linewidth=0)
        for name in GAPS if not place else BOTH:
            label, colour = GAPS[name]
            ys = [point.number(name) * 1000 for point in points]
            axes.plot(xs, ys, color=colour, label=legend_label(family, curve, label), **line_style(family, curve))
            if name in BOTH:
                shade_interval(axes, xs, points, name, 1000, colour)
            for point, x, y in zip(points, xs, ys, strict=True):
                told = {f"{label} ITL": milliseconds(point, name)}
                drawing.values.append(Value(axes, x, y, tip(curve, point, told)))
    log_ticks(axes)
    level_ticks(axes, family.values)
    axes.set_xlabel(family.axis + ", log")
    axes.set_ylabel("gap between tokens, ms (log)")
    drawing.legend(4 if len(family.curves) == 1 else 3)
    drawing.caption = _tail(family.first)
    return drawing


def _tail(curve: Curve) -> str:
    """Where the tail of the gaps splits off."""
    seen = [point for point in curve.points if math.isfinite(_ratio(point))]
    if not seen:
        return "No gaps between tokens were seen."
    splits = next((point for point in seen if _ratio(point) >= TAIL_SPLITS), None)
    if splits is None:
        return f"The grey range is p50 to p99; p99 stays within {max(map(_ratio, seen)):.1f} times p50."
    where = f"from {splits.label} on p99 is a tail of its own, {_ratio(splits):.1f} times p50"
    return f"The grey range is p50 to p99; {where}."


def _ratio(point: Point) -> float:
    middle = point.number("p50_itl")
    return point.number("p99_itl") / middle if middle > 0 else math.nan


def latency_parts(family: Family) -> Drawing:
    """Median time to first token and median decode time of a request, stacked, for each level."""
    drawing = new_drawing("latency-parts", "What end-to-end latency is made of")
    axes = drawing.axes
    values, count = family.values, len(family.curves)
    width = 0.8 / count
    top = 0.0
    for place, curve in enumerate(family.curves):
        for point in curve.points:
            x = values.index(point.value) + (place - (count - 1) / 2) * width
            wait, decode = point.number("p50_ttft"), point.decode
            if not (math.isfinite(wait) and math.isfinite(decode)):
                continue
            first = point is curve.points[0]
            for bottom, part, colour, what in (
                (0.0, decode, BLUE, "decode p50"),
                (decode, wait, ORANGE, "wait p50"),
            ):
                look: Any = (
                    {"color": colour} if not place else {"facecolor": GROUND, "edgecolor": colour, "hatch": "//"}
                )
                label = legend_label(family, curve, what) if first else None
                axes.bar(x, part, width * 0.9, bottom=bottom, label=label, **look)
            share = wait / (wait + decode)
            told = {"wait": f"{digits(wait * 1000)} ms ({share:.1%})", "decode": f"{digits(decode * 1000)} ms"}
            drawing.values.append(Value(axes, x, wait + decode, tip(curve, point, told)))
            top = max(top, wait + decode)
            if not place:
                over = (x, wait + decode)
                axes.annotate(f"{share:.0%}", over, (0, 3), textcoords="offset points", ha="center", fontsize=9.5)
    axes.set_ylim(0, top * 1.12 or 1)
    bar_ticks(axes, [f"{value:g}" for value in values])
    axes.set_xlabel(family.axis)
    axes.set_ylabel("seconds")
    drawing.legend(2)
    drawing.caption = "The wait is the one for the first token; percentages are its share."
    return drawing

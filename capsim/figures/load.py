"""Figures of throughput: against latency, against ideal scaling, and for each further client."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes

from capsim.curves import Curve, Family, Point
from capsim.figures.style import (
    BLUE,
    GOOD,
    GROUND,
    MARKS,
    MUTED,
    ORANGE,
    Drawing,
    Value,
    bar_ticks,
    level_ticks,
    log_ticks,
    new_drawing,
)
from capsim.tables import digits

TTFT = {"p99_ttft": ("p99", ORANGE), "p50_ttft": ("p50", BLUE)}
MAX_BANDS = 3
ON_LINES = {"facecolor": GROUND, "edgecolor": "none", "pad": 0.6}  # behind a number that lies on a line


def line_style(family: Family, curve: Curve) -> dict[str, Any]:
    """Lines and markers of a curve: the predicted one is dashed and hollow where there is a measured one too."""
    hollow = curve.source == "predicted" and len(family.curves) > 1
    return {
        "linestyle": "--" if hollow else "-",
        "marker": MARKS[curve.source],
        "markerfacecolor": GROUND if hollow else None,
    }


def legend_label(family: Family, curve: Curve, what: str) -> str:
    return f"{what}, {curve.source}" if len(family.curves) > 1 else what


def tip(curve: Curve, point: Point, lines: Mapping[str, str]) -> str:
    """What a reader sees at a point."""
    return "\n".join([f"{point.label}, {curve.source}", *(f"{name}: {value}" for name, value in lines.items())])


def milliseconds(point: Point, name: str) -> str:
    """A latency with its interval."""
    low, high = point.interval(name)
    between = "" if math.isnan(low) else f" (90 %: {digits(low * 1000)} to {digits(high * 1000)})"
    return f"{digits(point.number(name) * 1000)} ms{between}"


def shade_interval(
    axes: Axes, xs: Sequence[float], points: Sequence[Point], name: str, factor: float, colour: str
) -> None:
    """The 90 % intervals of a number, shaded from point to point."""
    ends = [(x, *point.interval(name)) for x, point in zip(xs, points, strict=True)]
    known = [(x, low * factor, high * factor) for x, low, high in ends if math.isfinite(low) and high > low > 0]
    if len(known) > 1:
        where, lows, highs = zip(*known, strict=True)
        axes.fill_between(where, lows, highs, color=colour, alpha=0.2, linewidth=0)
    elif known:
        x, low, high = known[0]
        axes.plot([x, x], [low, high], color=colour, linewidth=5, alpha=0.3)


def throughput_and_latency(family: Family, slos: Sequence[Mapping[str, float]]) -> Drawing:
    """Output tokens a second against TTFT, with the bands of the TTFT targets among `slos`."""
    drawing = new_drawing("throughput-latency", "Throughput against time to first token", left=0.9)
    axes = drawing.axes
    seen: list[float] = []
    for curve in family.curves:
        for name, (label, colour) in TTFT.items():
            points = [p for p in curve.points if p.number(name) > 0 and p.number("output_throughput") > 0]
            xs = [point.number("output_throughput") for point in points]
            ys = [point.number(name) * 1000 for point in points]
            legend = legend_label(family, curve, f"{label} TTFT")
            axes.plot(xs, ys, color=colour, label=legend, **line_style(family, curve))
            shade_interval(axes, xs, points, name, 1000, colour)
            for point, x, y in zip(points, xs, ys, strict=True):
                told = {"output": f"{digits(x)} tok/s", f"{label} TTFT": milliseconds(point, name)}
                drawing.values.append(Value(axes, x, y, tip(curve, point, told)))
                seen.append(y)
                if name == "p99_ttft" and curve is family.first:
                    axes.annotate(point.label, (x, y), (0, 7), textcoords="offset points", ha="center", fontsize=9.5)
    axes.set_xlim(0, 1.06 * max((one.x for one in drawing.values), default=1.0))
    if seen:
        axes.set_ylim(min(seen) / 1.8, max(seen) * 2)
        log_ticks(axes)
        _slo_bands(axes, slos, max(seen))
    axes.set_xlabel("output tokens/s")
    axes.set_ylabel("TTFT, ms (log)")
    drawing.legend()
    drawing.caption = _latency_caption(family.first)
    return drawing


def _slo_bands(axes: Axes, slos: Sequence[Mapping[str, float]], highest: float) -> None:
    """The range that each target on TTFT allows; the stricter, the darker."""
    targets = {slo[name]: name for slo in slos for name in ("p50_ttft", "p99_ttft") if name in slo}
    for target, name in sorted(targets.items())[:MAX_BANDS]:
        if not axes.get_ylim()[0] < target <= 2 * highest:
            continue
        axes.axhspan(axes.get_ylim()[0], target, color=GOOD, alpha=0.06, linewidth=0)
        axes.axhline(target, color=GOOD, linewidth=1, linestyle=":")
        text = f"{name.replace('_ttft', '')} ≤ {target:,.0f} ms"
        place: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right", "va": "top"}
        axes.annotate(text, (1, target), (-3, -2), color=MUTED, fontsize=9, **place)


def _latency_caption(curve: Curve) -> str:
    answered = [point for point in curve.points if point.summary.completed]
    if not answered:
        return "No request was answered."
    first, last = answered[0], answered[-1]
    if first is last:
        return f"{first.label}: {digits(first.number('output_throughput'))} tok/s at a p99 TTFT of {_ms(first)}."
    low, high = (digits(point.number("output_throughput")) for point in (first, last))
    return (
        f"From {first.label} to {last.label} ({curve.source}) output goes from {low} to {high} tok/s, p99 TTFT from "
        f"{_ms(first)} to {_ms(last)}."
    )


def _ms(point: Point) -> str:
    return f"{digits(point.number('p99_ttft') * 1000)} ms"


def scaling(family: Family) -> Drawing:
    """Output tokens a second over the load, log-log, beside what the first level would give if it scaled."""
    drawing = new_drawing("scaling", "Scaling against ideal linear")
    axes = drawing.axes
    base = next((point for point in family.first.points if point.summary.completed), family.first.points[0])
    start, values = base.number("output_throughput"), family.values
    if start > 0:
        ideal = [start * value / base.value for value in values]
        axes.plot(values, ideal, color=MUTED, linestyle=":", linewidth=1.5, label="ideal linear")
    for place, curve in enumerate(family.curves):
        points = [point for point in curve.points if point.number("output_throughput") > 0]
        xs = [point.value for point in points]
        ys = [point.number("output_throughput") for point in points]
        colour = ORANGE if place else BLUE
        axes.plot(xs, ys, color=colour, label=curve.source, **line_style(family, curve))
        shade_interval(axes, xs, points, "output_throughput", 1, colour)
        for point, x, y in zip(points, xs, ys, strict=True):
            share = efficiency(base, point)
            told = {"output": f"{digits(y)} tok/s", "efficiency": f"{share:.1%}"}
            drawing.values.append(Value(axes, x, y, tip(curve, point, told)))
            if not place and point is not base and math.isfinite(share):
                axes.annotate(f"{share:.0%}", (x, y), (3, -13), textcoords="offset points", fontsize=9.5)
    log_ticks(axes)
    level_ticks(axes, values)
    axes.set_xlabel(family.axis + ", log")
    axes.set_ylabel("output tokens/s (log)")
    drawing.legend(3)
    last = family.first.points[-1]
    if base is last:
        drawing.caption = "One level alone shows no scaling."
        return drawing
    drawing.caption = (
        f"Percentages are output tokens/s over {base.label}'s, divided by the load's ratio; {last.label} reaches "
        f"{efficiency(base, last):.1%}."
    )
    return drawing


def efficiency(base: Point, point: Point) -> float:
    """Throughput of a level over what the first one would give if it scaled with the load."""
    ideal = base.number("output_throughput") * point.value / base.value
    return point.number("output_throughput") / ideal if ideal > 0 else math.nan


def marginal(family: Family) -> Drawing:
    """Output tokens a second that each further client, or request a second, brings."""
    unit = family.unit
    drawing = new_drawing("marginal-throughput", f"Marginal throughput of each further {unit}")
    axes = drawing.axes
    gains = {curve.source: marginal_gains(curve) for curve in family.curves}
    names = list(dict.fromkeys(name for found in gains.values() for name in found))
    width = 0.8 / len(family.curves)
    for place, curve in enumerate(family.curves):
        found = gains[curve.source]
        xs = [names.index(name) + (place - (len(family.curves) - 1) / 2) * width for name in found]
        look: Any = {"color": BLUE} if not place else {"facecolor": GROUND, "edgecolor": ORANGE, "hatch": "//"}
        axes.bar(xs, list(found.values()), width * 0.9, label=curve.source, **look)
        for x, (name, gain) in zip(xs, found.items(), strict=True):
            text = f"{name}, {curve.source}\n{gain:+,.4g} tok/s for each further {unit}"
            drawing.values.append(Value(axes, x, gain, text))
            if not place:
                shown = f"{gain:,.0f}" if abs(gain) >= 100 else f"{gain:.1f}"
                up = (0, 3) if gain >= 0 else (0, -12)
                axes.annotate(
                    shown, (x, gain), up, textcoords="offset points", ha="center", fontsize=9.5, bbox=ON_LINES
                )
    first_name, first_gain = next(iter(gains[family.first.source].items()))
    alone = f"first level, {first_gain:.1f}"
    axes.axhline(first_gain, color=MUTED, linestyle="--", linewidth=1.2, label=alone)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    bar_ticks(axes, names, crowded=8)
    axes.set_xlabel(family.axis)
    axes.set_ylabel(f"output tok/s per {unit}")
    drawing.legend(3)
    last_name, last_gain = list(gains[family.first.source].items())[-1]
    drawing.caption = f"From {first_gain:,.1f} tok/s at {first_name} to {last_gain:,.1f} at {last_name}."
    return drawing


def marginal_gains(curve: Curve) -> dict[str, float]:
    """Output tokens a second for each unit of load that was added, by the step; the first level by itself."""
    points = [point for point in curve.points if math.isfinite(point.number("output_throughput"))]
    gains = {f"{points[0].value:g}": points[0].number("output_throughput") / points[0].value} if points else {}
    for one, two in pairwise(points):
        more = two.number("output_throughput") - one.number("output_throughput")
        gains[f"{one.value:g}-{two.value:g}"] = more / (two.value - one.value)
    return gains

"""The figure of a prediction's errors, level by level, metric by metric."""

from __future__ import annotations

import math

from matplotlib import colormaps
from matplotlib.colors import to_hex

from capsim.curves import Family, Point
from capsim.figures.style import INK, MUTED, Drawing, Value, new_drawing
from capsim.tables import digits

METRICS = {
    "output_throughput": "output tok/s",
    "p50_ttft": "p50 TTFT",
    "p99_ttft": "p99 TTFT",
    "p50_tpot": "p50 TPOT",
    "p99_tpot": "p99 TPOT",
    "p50_itl": "p50 ITL",
    "p90_itl": "p90 ITL",
    "p99_itl": "p99 ITL",
    "p50_e2el": "p50 E2EL",
    "p99_e2el": "p99 E2EL",
}
MARKERS = "oDs^vPX<>*"


def prediction_errors(family: Family) -> Drawing | None:
    """(predicted - measured) / measured for each metric and level, with the noise of repeats; None without both."""
    pairs = matched(family)
    if not pairs:
        return None
    drawing = new_drawing("validation", "Prediction against measurement", 4.4, 1.15)
    axes = drawing.axes
    rows = list(METRICS)[::-1]
    for place, (measured, predicted) in enumerate(pairs):
        shade = to_hex(colormaps["viridis"](0.12 + 0.7 * place / max(len(pairs) - 1, 1)))
        step = (place - (len(pairs) - 1) / 2) * 0.6 / len(pairs)
        found = [(row, error(measured, predicted, name)) for row, name in enumerate(rows)]
        known = [(value * 100, row - step) for row, value in found if math.isfinite(value)]
        if not known:
            continue
        xs, ys = zip(*known, strict=True)
        axes.plot(xs, ys, MARKERS[place % len(MARKERS)], color=shade, markeredgecolor=INK, markeredgewidth=0.5,
                  label=measured.label)  # fmt: skip
        for row, value in found:
            if math.isfinite(value):
                drawing.values.append(Value(axes, value * 100, row - step, _tip(measured, predicted, rows[row])))
    for row, name in enumerate(rows):
        spread = max((noise(measured, name) for measured, _ in pairs), default=0.0)
        if spread > 0:
            axes.barh(row, 200 * spread, 0.8, left=-100 * spread, color=MUTED, alpha=0.18, linewidth=0)
    axes.axvline(0, color=INK, linewidth=1)
    widest = max((abs(value.x) for value in drawing.values), default=1.0)
    axes.set_xlim(-1.15 * max(widest, 5), 1.15 * max(widest, 5))
    axes.set_yticks(range(len(rows)), [METRICS[name] for name in rows])
    axes.grid(True, axis="x")
    axes.set_xlabel("(predicted - measured) / measured, %")
    drawing.legend(min(len(pairs), 6))
    drawing.caption = _caption(family)
    return drawing


def matched(family: Family) -> list[tuple[Point, Point]]:
    """The measured and the predicted points of the levels that have both."""
    measured, predicted = family.of("measured"), family.of("predicted")
    if measured is None or predicted is None:
        return []
    found = [(point, predicted.at(point.value)) for point in measured.points]
    return [(point, other) for point, other in found if other is not None]


def error(measured: Point, predicted: Point, name: str) -> float:
    """Signed relative error of a prediction."""
    value = measured.number(name)
    return (predicted.number(name) - value) / value if value > 0 else math.nan


def noise(point: Point, name: str) -> float:
    """The range of a number over repeats by its mean, 0 where the level was measured once."""
    values = [value for one in point.repeats if (value := one.flat()[name]) is not None and math.isfinite(value)]
    mean = sum(values) / len(values) if values else 0.0
    return (max(values) - min(values)) / mean if mean > 0 else 0.0


def covered(family: Family) -> tuple[int, int]:
    """How many measured numbers lie in the 90 % interval of their prediction, and how many have one."""
    inside = known = 0
    for measured, predicted in matched(family):
        for name in METRICS:
            low, high = predicted.interval(name)
            if math.isfinite(low) and math.isfinite(measured.number(name)):
                known += 1
                inside += low <= measured.number(name) <= high
    return inside, known


def _caption(family: Family) -> str:
    errors = [abs(error(one, two, name)) for one, two in matched(family) for name in METRICS]
    known = sorted(value for value in errors if math.isfinite(value))
    middle = known[len(known) // 2] if known else math.nan
    inside, with_interval = covered(family)
    shares = f"; {inside} of {with_interval} measurements lie in the 90 % interval" if with_interval else ""
    grey = "; grey is the range between repeats" if any(one.repeats for one, _ in matched(family)) else ""
    return f"Median error {middle:.1%}, largest {max(known, default=math.nan):.1%}{shares}{grey}."


def _tip(measured: Point, predicted: Point, name: str) -> str:
    factor, unit = (1, "tok/s") if name == "output_throughput" else (1000, "ms")
    low, high = predicted.interval(name)
    between = "" if math.isnan(low) else f" (90 %: {digits(low * factor)} to {digits(high * factor)})"
    return (
        f"{measured.label}, {METRICS[name]}\nmeasured: {digits(measured.number(name) * factor)} {unit}\n"
        f"predicted: {digits(predicted.number(name) * factor)} {unit}{between}\n"
        f"error: {error(measured, predicted, name):+.1%}"
    )

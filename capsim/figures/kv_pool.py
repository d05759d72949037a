"""The figure of the KV pool: how much of it each level uses, and which levels do not fit."""

from __future__ import annotations

import math

from capsim.curves import Family
from capsim.figures.load import tip
from capsim.figures.style import BLUE, GREEN, GROUND, INK, MUTED, ORANGE, Drawing, Value, bar_ticks, new_drawing
from simulator.planning.ceilings import Ceilings

MORE_LEVELS = 3  # at most, beyond the last one, towards --max-num-seqs


def kv_pool_use(family: Family, ceilings: Ceilings | None, pool: int | None) -> Drawing | None:
    """Peak use of the KV pool of `pool` tokens, beside what every request at its full length would need.

    `ceilings` tell how many tokens a request holds; None where the server's flags are not known. None where neither
    that nor the pool's use is known.
    """
    drawing = new_drawing("kv-pool", "KV pool")
    axes = drawing.axes
    unit = 100 / pool if pool else 1.0
    need = None if ceilings is None or family.kind == "open" else ceilings.full_tokens
    values = family.values + (_further(family, ceilings) if need and pool else [])
    width = 0.8 / (len(family.curves) + bool(need))
    if need:
        _draw_needs(drawing, values, need, unit, pool, width)
    for place, curve in enumerate(family.curves, start=bool(need)):
        colour = BLUE if curve is family.first else GREEN
        known = [point for point in curve.points if math.isfinite(point.number("peak_kv_tokens"))]
        xs = [values.index(point.value) + (place + 0.5) * width - 0.4 for point in known]
        ys = [point.number("peak_kv_tokens") * unit for point in known]
        axes.bar(xs, ys, width * 0.9, color=colour, label=f"{curve.source} peak")
        for point, x, y in zip(known, xs, ys, strict=True):
            told = {
                "peak": f"{point.number('peak_kv_tokens'):,.0f} tokens" + (f", {y:.1f} % of the pool" if pool else "")
            }
            drawing.values.append(Value(axes, x, y, tip(curve, point, told)))
    if not drawing.values:
        return None
    bar_ticks(axes, [f"{value:g}" for value in values])
    if pool:
        axes.axhline(100, color=INK, linewidth=1.2)
        axes.annotate(
            f"pool, {pool:,} tokens", (axes.get_xlim()[0], 100), (4, 4), textcoords="offset points", fontsize=9.5
        )
        axes.set_ylim(0, max(112, axes.get_ylim()[1]))
    axes.set_xlabel(family.axis)
    axes.set_ylabel("KV pool used, %" if pool else "KV tokens held")
    drawing.legend(2)
    drawing.caption = _caption(ceilings, pool)
    return drawing


def _draw_needs(
    drawing: Drawing, values: list[float], need: float, unit: float, pool: int | None, width: float
) -> None:
    """What each level needs if all its requests are at their full length; hatched where that does not fit."""
    axes = drawing.axes
    groups: dict[bool, list[int]] = {True: [], False: []}
    for place, value in enumerate(values):
        groups[not pool or value * need <= pool].append(place)
    looks = {True: (MUTED, "", "all at full length"), False: (ORANGE, "///", "does not fit")}
    for fits, places in groups.items():
        if places:
            edge, hatch, label = looks[fits]
            xs = [place + width / 2 - 0.4 for place in places]
            ys = [values[place] * need * unit for place in places]
            axes.bar(xs, ys, width * 0.9, facecolor=GROUND, edgecolor=edge, hatch=hatch, label=label)
            for place, x, y in zip(places, xs, ys, strict=True):
                text = f"{values[place]:g} requests at full length: {values[place] * need:,.0f} tokens"
                share = f", {y / 100:.2f} times the pool" if pool else ""
                drawing.values.append(Value(axes, x, y, text + share))
                if not fits:
                    over = (f"{y / 100:.1f}x", (x, y), (0, 3))
                    axes.annotate(*over, textcoords="offset points", ha="center", fontsize=9.5)


def _further(family: Family, ceilings: Ceilings | None) -> list[float]:
    """Levels beyond the last one, each twice the one before, up to the nominal ceiling."""
    assert ceilings is not None
    more: list[float] = []
    value = family.values[-1]
    while len(more) < MORE_LEVELS and value < ceilings.slots:
        value = min(2 * value, ceilings.slots)
        more.append(value)
    return more


def _caption(ceilings: Ceilings | None, pool: int | None) -> str:
    if ceilings is None or not pool:
        return "Peak of the tokens whose KV cache is held."
    return f"{ceilings.sentence()[0].upper()}{ceilings.sentence()[1:]}."

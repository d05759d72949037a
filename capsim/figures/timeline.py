"""The time line of a level: requests that run and wait, tokens that are held and active."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from capsim.figures.style import BLUE, GREEN, MUTED, ORANGE, POINTS, PURPLE, WIDTH, Drawing
from simulator.engine.engine_flags import EngineFlags
from simulator.results.run import Level

HEIGHT, LEFT = 5.2, 0.9  # inches
NEAR = 3  # a limit is drawn if it is no more than so many times the peak


def timeline_figure(level: Level, flags: EngineFlags) -> Drawing:
    """Both gauges of concurrency over a level's time; within `capsim.figures.style.styled`."""
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=POINTS)
    requests, tokens = figure.subplots(2, sharex=True)
    drawing = Drawing(
        "timeline", f"Both gauges of concurrency over time, {level.workload.label}", figure, height=HEIGHT, left=LEFT
    )
    table = level.timeline
    time = table["time"].to_numpy(np.float64)
    running, waiting, held, active = (
        table[name].to_numpy(np.float64) for name in ("running", "waiting", "kv_tokens", "active_tokens")
    )
    requests.fill_between(time, running, step="post", color=BLUE, alpha=0.2, linewidth=0)
    requests.plot(time, running, drawstyle="steps-post", color=BLUE, linewidth=1.2, label="running")
    requests.plot(time, waiting, drawstyle="steps-post", color=ORANGE, linewidth=1.2, label="waiting")
    tokens.fill_between(time, held, color=GREEN, alpha=0.25, linewidth=0)
    tokens.plot(time, held, color=GREEN, linewidth=1.2, label="KV tokens held")
    tokens.plot(time, active, color=PURPLE, linewidth=1.0, linestyle="--", label="active tokens")
    pool = flags.usable_blocks * flags.block_size
    _limit(requests, flags.max_num_seqs, max(running.max(), waiting.max()), f"--max-num-seqs {flags.max_num_seqs}")
    _limit(tokens, pool, max(held.max(), active.max()), f"KV pool, {pool:,} tokens")
    for axes, label in ((requests, "requests"), (tokens, "tokens")):
        axes.set_ylim(bottom=0)
        axes.set_ylabel(label)
    requests.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    thousands = max(held.max(), active.max()) >= 100_000
    tokens.yaxis.set_major_formatter(FuncFormatter(_thousands if thousands else _whole))
    tokens.set_xlim(time[0], time[-1])
    tokens.set_xlabel("time, s")
    figure.align_ylabels()
    handles = [handle for axes in (requests, tokens) for handle in axes.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="upper left", ncols=4, borderaxespad=0.0, columnspacing=1.2)
    drawing.arrange(titled=False)
    drawing.caption = (
        f"At most {running.max():,.0f} requests run and {waiting.max():,.0f} wait; {held.max() / pool:.0%} of the KV "
        "pool is held at most."
    )
    return drawing


def _limit(axes: Axes, limit: float, peak: float, text: str) -> None:
    """A line where the flags end, unless it is so far off that it would press the curves flat."""
    if limit > NEAR * peak:
        return
    axes.axhline(limit, color=MUTED, linewidth=1, linestyle=":")
    axes.set_ylim(top=max(limit, peak) * 1.15)
    axes.annotate(text, (0, limit), (4, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                  color=MUTED, fontsize=8.5)  # fmt: skip


def _whole(value: float, _place: object) -> str:
    return f"{value:,.0f}"


def _thousands(value: float, _place: object) -> str:
    return f"{value / 1000:,.0f}k"

"""Where to run: the level that each SLO allows, and the knee of the curve. For measured and simulated runs alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from simulator.planning.targets import missed_targets, targets_label
from simulator.results.run import Run
from simulator.results.summary import Summary, stated, summarize

Numbers = Mapping[str, float | int | None]  # by the names of `Summary.flat`


@dataclass(frozen=True)
class OperatingPoint:
    """The level to run at, by its place in the run, and why, in one sentence."""

    place: int
    label: str
    reason: str


def power(numbers: Numbers) -> float:
    """Kleinrock's power of a level: output tokens a second over the mean end-to-end latency, 0 where nothing was seen.

    Below the level of greatest power more load brings more throughput than latency, above it more latency than
    throughput (Kleinrock, "Power and deterministic rules of thumb for probabilistic problems in computer
    communications", ICC 1979).
    """
    throughput, latency = numbers["output_throughput"], numbers["mean_e2el"]
    return throughput / latency if throughput and latency and latency > 0 else 0.0


def knee(levels: Sequence[Numbers]) -> int:
    """The place of the level of greatest power. Raises `ValueError` without levels."""
    if not levels:
        raise ValueError("without levels there is no knee")
    return max(range(len(levels)), key=lambda place: power(levels[place]))


def highest_that_meets(summaries: Sequence[Summary], targets: Mapping[str, float]) -> int | None:
    """The place of the last level, from the first one on, up to which all levels meet the targets; None for none.

    A level that meets them above one that does not was lucky, and does not count. Levels ascend.
    """
    met = next((place for place, one in enumerate(summaries) if missed_targets(one, targets)), len(summaries))
    return met - 1 if met else None


def slo_table(run: Run, slos: Sequence[Mapping[str, float]]) -> pd.DataFrame:
    """For each SLO the level to choose, and the throughput, p99 TTFT and p50 ITL that come with it; times in seconds.

    Columns: slo, level, concurrency (clients or the mean in flight), output_throughput, request_throughput, p99_ttft,
    p50_itl, next_level and what it misses. Where no level meets the SLO, `level` is empty.
    """
    summaries = [summarize(level) for level in run.levels]
    labels = [level.workload.label for level in run.levels]
    rows = []
    for targets in slos:
        met = highest_that_meets(summaries, targets)
        beyond = 0 if met is None else met + 1
        rows.append(
            {
                "slo": targets_label(targets),
                "level": "" if met is None else labels[met],
                **slo_figures({} if met is None else summaries[met].flat()),
                "next_level": labels[beyond] if beyond < len(labels) else "",
                "misses": ", ".join(missed_targets(summaries[beyond], targets)) if beyond < len(labels) else "",
            }
        )
    return pd.DataFrame(rows)


def slo_figures(numbers: Numbers) -> dict[str, float]:
    """What the report's SLO table says of a level; NaN where there is none."""
    names = ("mean_concurrency", "output_throughput", "request_throughput", "p99_ttft", "p50_itl")
    return {name: float("nan") if (value := numbers.get(name)) is None else float(value) for name in names}


def recommend(run: Run, targets: Mapping[str, float] | None = None) -> OperatingPoint | None:
    """The level of a run to operate at: the highest that meets the targets, or without targets the knee.

    None where no level meets them, or there are no levels.
    """
    if not run.levels:
        return None
    summaries = [stated(summarize(level), run.source) for level in run.levels]
    labels = [level.workload.label for level in run.levels]
    if not targets:
        best = knee([one.flat() for one in summaries])
        return OperatingPoint(best, labels[best], _why_knee(labels, best))
    met = highest_that_meets(summaries, targets)
    if met is None:
        return None
    wanted = targets_label(targets)
    if met + 1 == len(labels):
        return OperatingPoint(met, labels[met], f"{labels[met]} is the highest level tried, and it meets {wanted}.")
    missed = ", ".join(missed_targets(summaries[met + 1], targets))
    reason = f"{labels[met]} is the highest level that meets {wanted}; {labels[met + 1]} misses {missed}."
    return OperatingPoint(met, labels[met], reason)


def _why_knee(labels: Sequence[str], best: int) -> str:
    if best + 1 == len(labels):
        return f"{labels[best]} is the highest level tried; throughput still rises faster than latency."
    return (
        f"{labels[best]} is the knee: throughput over latency is highest there, and beyond it latency grows faster "
        "than throughput."
    )

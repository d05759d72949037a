"""A measured run beside its prediction, level by level, metric by metric.

Both play the same workload: as many requests, with the same lengths. An error is (predicted - measured) / measured.
Where the measured run repeats a level, the spread between the repeats says how small an error can mean anything; else
the one that the profile keeps of its calibration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from simulator.engine.engine_flags import EngineFlags
from simulator.loads.workload import Load, Workload
from simulator.prediction import predict
from simulator.profile import Profile
from simulator.results.run import Level, Run
from simulator.results.summary import summarize

METRICS = (
    "output_throughput",
    "mean_concurrency",
    *(f"{percentile}_{latency}" for latency in ("ttft", "tpot", "itl", "e2el") for percentile in ("p50", "p90", "p99")),
)
# flags that a run may state of its server
STATED_SIZES = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "num_gpu_blocks",
    "long_prefill_token_threshold",
)
STATED_SWITCHES = ("async_scheduling", "enable_chunked_prefill")


@dataclass(frozen=True)
class Comparison:
    """One metric of one level. Latencies are seconds, throughput is tokens a second.

    `noise` is the relative spread of the metric over repeats of the level or, where it was measured once, over those of
    the calibration; None where nothing was repeated. `too_few` says that it is a percentile of too few measured or
    predicted samples.
    """

    metric: str
    measured: float
    predicted: float
    noise: float | None = None
    too_few: bool = False

    @property
    def error(self) -> float:
        """(predicted - measured) / measured; NaN where it was not measured."""
        return (self.predicted - self.measured) / self.measured if self.measured else math.nan


@dataclass(frozen=True)
class LevelValidation:
    """One measured level and its prediction, by metric."""

    workload: Load
    metrics: dict[str, Comparison]

    @property
    def errors(self) -> dict[str, float]:
        """Signed relative errors of the metrics that were measured."""
        return {name: metric.error for name, metric in self.metrics.items() if math.isfinite(metric.error)}


@dataclass(frozen=True)
class Validation:
    """A measured run beside its prediction. `notes` are sentences that a reader must know."""

    levels: list[LevelValidation]
    notes: list[str]

    def table(self) -> pd.DataFrame:
        """One row for each metric of each level."""
        rows = [
            {
                "level": level.workload.label,
                "workload": level.workload.describe(),
                "metric": metric.metric,
                "measured": metric.measured,
                "predicted": metric.predicted,
                "error": metric.error,
                "noise": math.nan if metric.noise is None else metric.noise,
                "too_few": metric.too_few,
            }
            for level in self.levels
            for metric in level.metrics.values()
        ]
        return pd.DataFrame(rows)


def validate(measured: Run, profile: Profile, flags: EngineFlags | None = None) -> Validation:
    """Predict what was measured and compare.

    `flags` default to the profile's, with those that the measured run states in their place.
    """
    flags = flags or flags_of(measured, profile.engine_flags)
    predicted = predict(profile, [level.workload for level in measured.levels], flags)
    notes = differences(measured.server, profile, flags) + _level_notes(measured)
    return replace(compare(measured, predicted, profile.noise), notes=notes)


def compare(measured: Run, predicted: Run, floor: Mapping[str, float] | None = None) -> Validation:
    """Two runs of the same levels, in the same order; `floor` is the noise of levels that were measured once."""
    if [level.workload for level in measured.levels] != [level.workload for level in predicted.levels]:
        raise ValueError("the two runs are not of the same levels of load")
    noise = _noise(measured.levels)
    levels = [
        LevelValidation(
            measured_level.workload,
            _comparisons(measured_level, predicted_level, noise.get(_repeated(measured_level.workload), floor or {})),
        )
        for measured_level, predicted_level in zip(measured.levels, predicted.levels, strict=True)
    ]
    return Validation(levels, [])


def noise_floor(levels: Sequence[Level]) -> dict[str, float]:
    """The range of each metric over repeats of a level by its mean, the largest of all levels that were repeated.

    Empty where no level was measured twice. Repeats have the same load; their seeds may differ.
    """
    found: dict[str, float] = {}
    for ranges in _noise(levels).values():
        for name, value in ranges.items():
            if math.isfinite(value):
                found[name] = max(found.get(name, 0.0), value)
    return found


def flags_of(measured: Run, flags: EngineFlags) -> EngineFlags:
    """`flags` with what the measured run says of its server's flags."""
    server = measured.server
    kinds = {int: STATED_SIZES, bool: STATED_SWITCHES, str: ("scheduling_policy",)}
    known: dict[str, Any] = {
        name: server[name] for kind, names in kinds.items() for name in names if type(server.get(name)) is kind
    }
    if "num_gpu_blocks" in known:
        engines = server.get("engines")
        known["num_gpu_blocks"] //= engines if isinstance(engines, int) and engines > 0 else 1
    return flags.changed(**known)


def _comparisons(measured: Level, predicted: Level, noise: Mapping[str, float]) -> dict[str, Comparison]:
    summaries = summarize(measured), summarize(predicted)
    ours, theirs = (summary.flat() for summary in summaries)
    too_few = {name for summary in summaries for name in summary.too_few}
    return {
        name: Comparison(name, _number(ours[name]), _number(theirs[name]), noise.get(name), name in too_few)
        for name in METRICS
    }


def _noise(levels: Sequence[Level]) -> dict[Load, dict[str, float]]:
    """For every level that was measured more than once, the range of each metric over its repeats by its mean."""
    groups: dict[Load, list[dict[str, float]]] = {}
    for level in levels:
        numbers = summarize(level).flat()
        groups.setdefault(_repeated(level.workload), []).append({name: _number(numbers[name]) for name in METRICS})
    return {workload: _relative_ranges(repeats) for workload, repeats in groups.items() if len(repeats) > 1}


def _relative_ranges(repeats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    table = pd.DataFrame(list(repeats))
    ranges = (table.max() - table.min()) / table.mean()
    return {str(name): float(value) for name, value in ranges.items()}


def _repeated(load: Load) -> Load:
    """What two repeats of a level have in common: all but the seed."""
    return replace(load, seed=0) if isinstance(load, Workload) else load


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def differences(server: Mapping[str, object], profile: Profile, flags: EngineFlags) -> list[str]:
    """In what the measured server, predicted with `flags`, differs from the profile's; a sentence each."""
    notes = []
    model, version = server.get("model"), server.get("engine_version")
    if model is not None and model != profile.model:
        notes.append(f"measured was {model}, the profile is of {profile.model}")
    if version is not None and version != profile.engine_version:
        notes.append(f"measured was version {version} of the engine, the profile is of {profile.engine_version}")
    if flags != profile.engine_flags:
        ours, theirs = vars(flags), vars(profile.engine_flags)
        changed = [f"{name} {ours[name]} (not {theirs[name]})" for name in ours if ours[name] != theirs[name]]
        notes.append(f"predicted with other flags than the profile's: {', '.join(changed)}")
    return notes


def _level_notes(measured: Run) -> list[str]:
    """What the measurement says against itself, once for each sentence."""
    said: dict[str, list[str]] = {}
    for level in measured.levels:
        for note in level.notes:
            said.setdefault(note, []).append(level.workload.label)
    return [f"measured {', '.join(dict.fromkeys(levels))}: {note}" for note, levels in said.items()]

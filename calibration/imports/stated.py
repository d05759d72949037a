"""What a file states of a level without its requests: figures to fit and to hold predictions against.

A `Run` needs a row for every request, so aggregates are never made into one. They stay what they are: numbers about a
load, each with the uncertainty that its sample size leaves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import NormalDist
from typing import Any

from calibration.foreign_text import one_line
from calibration.imports.lengths import length_of
from calibration.imports.source import GREATEST, Fields, ImplausibleError, ImportFileError, read_source, shown
from calibration.trial import Figure, figure_of
from calibration.validate import Comparison, LevelValidation, Validation
from simulator.engine.engine_flags import EngineFlags
from simulator.loads.workload import Shape, Workload
from simulator.prediction import predict
from simulator.profile import Profile
from simulator.results.percentiles import PERCENTILES
from simulator.results.run_files import RunFileError, workload_from_json, workload_to_json
from simulator.results.summary import LATENCIES, Summary
from simulator.schema_version import readable, stamp

SCHEMA_VERSION = 1
FIGURES = "figures.json"  # in the folder that ``capsim import`` makes
LEAST = 0.005  # relative; clocks, rounding and other definitions leave no less
MOST_UNCERTAIN = 1e6  # relative; beyond it nothing is stated
USUAL_SPREAD = 0.2  # standard deviation by mean, where a file does not state it


METRICS = {
    *(field.name for field in fields(Summary) if field.name not in LATENCIES),
    *(f"{part}_{latency}" for latency in LATENCIES for part in ("mean", *(f"p{number}" for number in PERCENTILES))),
    "p50_decode_time",
}


@dataclass(frozen=True)
class StatedLevel:
    """One level of load and what a file states of it. `server` is as in `simulator.results.run.Run`."""

    workload: Workload
    figures: tuple[Figure, ...]
    notes: list[str]
    server: dict[str, object] = field(default_factory=dict)

    def value(self, metric: str) -> float | None:
        return next((figure.value for figure in self.figures if figure.metric == metric), None)


@dataclass(frozen=True)
class Statistics:
    """Mean, standard deviation and percentiles of a latency, seconds; None is what a file does not state."""

    mean: float | None = None
    std: float | None = None
    percentiles: Mapping[int, float] = field(default_factory=dict)


def statistics_in(fields: Fields, name_of: Callable[[str], str], unit: float) -> Statistics:
    """Statistics from a flat or nested object: `name_of` gives the key of "mean", "std", "p50" and so on.

    `unit` is the seconds of one of theirs.
    """

    def read(name: str) -> float | None:
        key = name_of(name)
        return fields.real(key) * unit if key in fields else None

    found = {percentile: read(f"p{percentile}") for percentile in PERCENTILES}
    return Statistics(read("mean"), read("std"), {key: value for key, value in found.items() if value is not None})


def stated_shape(prompt: Fields, output: Fields, mean: str, std: str) -> Shape:
    """The shape of stated statistics of prompt and output tokens, whose keys are `mean` and `std`."""
    return Shape(
        length_of(prompt.real(mean), prompt.real_or(std, 0.0)), length_of(output.real(mean), output.real_or(std, 0.0))
    )


def figures_of(
    workload: Workload,
    latencies: Mapping[str, Statistics],
    rates: Mapping[str, float | None],
    requests: int,
) -> tuple[Figure, ...]:
    """Figures under the names of `simulator.results.summary.Summary.flat`; what is zero or not stated is left out.

    Raises `calibration.imports.source.ImplausibleError`.

    Uncertainties are those of a sample of `requests` requests with the stated spread, as if it were normal; a rate may
    be off by half a request.
    """
    found = [
        _figure(workload, metric, value, max(LEAST, 0.5 / max(1, requests))) for metric, value in rates.items() if value
    ]
    for latency, statistics in latencies.items():
        spread = _relative_spread(statistics)
        if statistics.mean:
            error = spread / math.sqrt(max(1, requests))
            found.append(_figure(workload, f"mean_{latency}", statistics.mean, max(LEAST, error)))
        for percentile, value in sorted(statistics.percentiles.items()):
            if value:
                error = spread * _quantile_error(percentile) / math.sqrt(max(1, requests))
                found.append(_figure(workload, f"p{percentile}_{latency}", value, max(LEAST, error)))
    return tuple(found)


def _figure(workload: Workload, metric: str, value: float, uncertainty: float) -> Figure:
    if not (value <= GREATEST and uncertainty <= MOST_UNCERTAIN):
        raise ImplausibleError(f"{metric} cannot be {value:.4g}, known to {uncertainty:.3g} of it")
    return Figure(workload, metric, value, uncertainty)


def validate_stated(levels: Sequence[StatedLevel], profile: Profile, flags: EngineFlags | None = None) -> Validation:
    """Predict the stated levels and compare, figure by figure. `flags` default to the profile's."""
    predicted = predict(profile, [level.workload for level in levels], flags)
    validations = [
        LevelValidation(
            stated.workload,
            {
                figure.metric: Comparison(figure.metric, figure.value, figure_of(level, figure.metric))
                for figure in stated.figures
            },
        )
        for stated, level in zip(levels, predicted.levels, strict=True)
    ]
    notes = [f"stated {level.workload.arrivals}: {note}" for level in levels for note in level.notes]
    return Validation(validations, list(dict.fromkeys(notes)))


def save_stated(levels: Iterable[StatedLevel], path: Path) -> None:
    """Write figures as JSON that `load_stated` reads."""
    rows = [
        {
            "workload": workload_to_json(level.workload),
            "notes": level.notes,
            "server": level.server,
            "figures": [
                {"metric": figure.metric, "value": figure.value, "uncertainty": figure.uncertainty}
                for figure in level.figures
            ],
        }
        for level in levels
    ]
    content = {"kind": "stated figures", **stamp(SCHEMA_VERSION), "levels": rows}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def is_stated(path: str | Path) -> bool:
    """Whether a file is one that `save_stated` wrote."""
    with suppress(OSError), Path(path).open("rb") as file:
        return b'"stated figures"' in file.read(200)
    return False


def load_stated(path: str | Path) -> list[StatedLevel]:
    """The levels that `save_stated` wrote. Raises `ImportFileError`."""
    source = read_source(path)
    content = Fields(source.path, source.first if isinstance(source.first, dict) else {})
    if content.text("kind") != "stated figures":
        raise ImportFileError(f"{path}: not figures that capsim has imported")
    stated = content.get("schema_version")
    try:
        readable(stated, SCHEMA_VERSION)
    except ValueError as error:
        raise ImportFileError(f"{path}: schema_version: {error}") from None
    levels = [_load_level(level) for level in content.sections("levels")]
    if not levels:
        raise ImportFileError(f"{path}: figures of no level")
    return levels


def _load_level(level: Fields) -> StatedLevel:
    try:
        workload = workload_from_json(level.get("workload"))
    except RunFileError as error:
        raise ImportFileError(f"{level.path}: {error}") from None
    figures = tuple(_load_figure(workload, figure) for figure in level.sections("figures"))
    server: dict[str, Any] = dict(level.section_or_empty("server").data)
    try:
        json.dumps(server, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise level.problem("server", "holds what JSON cannot keep") from None
    return StatedLevel(workload, figures, [one_line(note) for note in level.texts("notes")], server)


def _load_figure(workload: Workload, figure: Fields) -> Figure:
    metric = figure.text("metric")
    if metric not in METRICS:
        raise figure.problem("metric", f"is {shown(metric)}, not a figure that capsim knows")
    return Figure(workload, metric, figure.positive("value"), figure.positive("uncertainty"))


def _relative_spread(statistics: Statistics) -> float:
    """Standard deviation by mean; from the percentiles where it is not stated."""
    if statistics.std is not None and statistics.mean:
        return statistics.std / statistics.mean
    middle, high = statistics.percentiles.get(50), statistics.percentiles.get(90)
    if middle and high:
        return max(0.0, high / middle - 1) / NormalDist().inv_cdf(0.9)
    return USUAL_SPREAD


def _quantile_error(percentile: int) -> float:
    """Standard error of a quantile of a normal sample of one, in its standard deviations."""
    share = percentile / 100
    return math.sqrt(share * (1 - share)) / NormalDist().pdf(NormalDist().inv_cdf(share))

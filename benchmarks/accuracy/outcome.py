"""What a paced formula's calibration found: coefficients beside the truth, predictions beside measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.accuracy import steps
from benchmarks.accuracy.cases import CALIBRATED, cases
from benchmarks.accuracy.formulas import Formula
from benchmarks.accuracy.judge import Judgement, judge, short_name, show, summary
from simulator.loads.workload import Load, Workload
from simulator.profile import Coefficient, Profile
from simulator.results.run import Run
from simulator.results.run_files import load_run

GOALS = {
    "output_throughput": 0.02,
    "p50_tpot": 0.02,
    "p50_itl": 0.02,
    "p50_e2el": 0.02,
    "p50_ttft": 0.05,
    **{f"{percentile}_{latency}": 0.07 for latency in ("ttft", "itl", "e2el") for percentile in ("p90", "p99")},
}
LOOP_SECONDS = 3e-3  # the longest work of the engine's loop between two steps
REQUEST_DELAY = 4e-3  # s from sending to the engine, which tells whose prompt a step can hold


@dataclass(frozen=True)
class Term:
    """A coefficient of the step time, true and found, in seconds; `low` and `high` are None where it was dropped.

    The truth is the formula's, and where steps are not scheduled ahead, what the engine's loop adds by the step log.
    """

    name: str
    true: float
    found: float
    low: float | None
    high: float | None

    @property
    def is_inside(self) -> bool | None:
        """Whether the truth lies in the 90 % interval; None where the fit says that it cannot tell."""
        return None if self.low is None or self.high is None else self.low <= self.true <= self.high

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"  {self.name:<22} {self.true:>10.4g}  {self.found:>10.4g}  not told by these measurements"
        verdict = "" if self.is_inside else "  OUTSIDE"
        return f"  {self.name:<22} {self.true:>10.4g}  {self.found:>10.4g}  {self.low:.4g} to {self.high:.4g}{verdict}"


@dataclass(frozen=True)
class Outcome:
    """All that is found of one formula.

    `steps` are the reconstructed steps of the calibration beside the server's log, level by level. `notes` are what
    measured runs say against themselves.
    """

    formula: Formula
    terms: list[Term]
    steps: list[steps.LevelSteps]
    judgements: list[Judgement]
    notes: list[str]

    def as_json(self) -> dict[str, object]:
        return {
            "formula": self.formula.name,
            "steps_found": sum(level.found for level in self.steps) / sum(level.delivering for level in self.steps),
            "terms": [asdict(term) | {"is_inside": term.is_inside} for term in self.terms],
            "judgements": [asdict(item) | {"error": item.error, "verdict": item.verdict} for item in self.judgements],
            "notes": self.notes,
        }

    def markdown(self) -> str:
        """Signed errors, a row a level; the noise of repeats in brackets."""
        levels = list(dict.fromkeys(item.level for item in self.judgements))
        errors = {(item.level, item.metric): _cell(item) for item in self.judgements}
        lines = [
            f"#### {self.formula.name}\n",
            f"| level | {' | '.join(metric.replace('_', ' ') for metric in GOALS)} |",
            f"| --- |{' --- |' * len(GOALS)}",
            *(f"| {level} | {' | '.join(errors[level, metric] for metric in GOALS)} |" for level in levels),
            f"\n{summary(self.judgements)}. Coefficients, found (90 % interval) against true: {self._terms()}.",
        ]
        return "\n".join(lines) + "\n"

    def _terms(self) -> str:
        found = [
            f"{term.name} not told (true {term.true:g})"
            if term.is_inside is None
            else f"{term.name} {term.found:.4g} ({term.low:.4g} to {term.high:.4g}; true {term.true:g})"
            for term in self.terms
        ]
        return "; ".join(found)


def judge_formula(formula: Formula, profile: Profile, folder: Path) -> Outcome:
    """Judge every run of cases that `folder` holds."""
    log = steps.read_log(next((folder / str(CALIBRATED)).glob("steps-*.csv")))
    judgements, notes = [], _notes("calibration", load_run(folder / "calibration"))
    for place in sorted(path.parent for path in folder.glob("*/run")):
        run = load_run(place / "run")
        judgements += judge(run, profile, GOALS, _names(formula, place.name))
        notes += _notes(place.name, run)
    true = formula.step if formula.asynchronous else with_engine_loop(formula.step, log)
    return Outcome(formula, terms(true, profile), _steps(formula, folder, log), judgements, notes)


def _steps(formula: Formula, folder: Path, log: pd.DataFrame) -> list[steps.LevelSteps]:
    flags = CALIBRATED.engine_flags.changed(async_scheduling=formula.asynchronous)
    levels = load_run(folder / "calibration").levels
    return [steps.judge(level, log, flags, REQUEST_DELAY) for level in levels]


def _names(formula: Formula, start: str) -> Callable[[Load], str]:
    """The names of the cases of one server start; a load may last longer or shorter than in the case."""
    own = [case for case in cases(formula) if str(case.start) == start]
    names: dict[tuple[object, ...], str] = {(case.load.arrivals, case.load.shapes): case.name for case in own}

    def name(load: Load) -> str:
        kind = (load.arrivals, load.shapes) if isinstance(load, Workload) else ()
        return names.get(kind) or short_name(load)

    return name


def with_engine_loop(true: Mapping[str, float], log: pd.DataFrame) -> dict[str, float]:
    """The step times that a synchronous engine shows: between two steps of the device comes its loop's own work.

    Taken from pairs of steps that only decode; a step with prompts has about half a millisecond more around it.
    """
    idle = (log["start"].shift(-1) - log["end"]).to_numpy()
    decodes = (log["prefill_tokens"] + log["prefill_tokens"].shift(-1) == 0).to_numpy()
    busy = decodes & (idle < LOOP_SECONDS)  # else the engine had no request
    by_size = pd.Series(idle[busy]).groupby(log["sequences"].to_numpy()[busy])
    typical = by_size.median()  # the mean would be that of a few delays of the machine
    weights = np.sqrt(by_size.size().to_numpy(np.float64))
    per_sequence, constant = np.polyfit(typical.index, typical, 1, w=weights)
    added = {"constant": float(constant), "per_sequence": float(per_sequence)}
    return {**true, **{name: true.get(name, 0.0) + seconds for name, seconds in added.items()}}


def terms(true: Mapping[str, float], profile: Profile) -> list[Term]:
    """Every true coefficient, and those that the fit found without their being there."""
    found = profile.coefficients.step_time
    named = dict.fromkeys([*(name for name in true if name != "noise"), *found])
    rows = [_term(name, true.get(name, 0.0), found.get(name)) for name in named]
    return [term for term in rows if term.true or term.found]


def _term(name: str, true: float, found: Coefficient | None) -> Term:
    return Term(name, true, 0.0, None, None) if found is None else Term(name, true, found.value, found.low, found.high)


def report(outcome: Outcome) -> None:
    """Print coefficients and errors."""
    print(f"\n=== {outcome.formula.name}\n  {'coefficient':<22} {'true':>10}  {'found':>10}  90 % interval")
    for term in outcome.terms:
        print(term)
    print("reconstructed steps of the calibration beside the server's log")
    for line in steps.lines(outcome.steps):
        print(f"  {line}")
    for note in outcome.notes:
        print(note)
    show("signed errors, (predicted - measured) / measured", outcome.judgements)


def _notes(name: str, run: Run) -> list[str]:
    """What levels say against themselves, once for each sentence."""
    said: dict[str, list[str]] = {}
    for level in run.levels:
        for note in level.notes:
            said.setdefault(note, []).append(short_name(level.workload))
    return [f"{name}: {note} [{', '.join(dict.fromkeys(levels))}]" for note, levels in said.items()]


def _cell(item: Judgement) -> str:
    mark = {"met": "", "noise": " n", "jump": " j", "missed": " **missed**"}[item.verdict]
    return f"{item.error:+.1%} ({item.noise:.1%}){mark}"


def markdown(outcomes: Sequence[Outcome]) -> str:
    key = (
        "Signed errors, the spread of the repeats in brackets. n: within that spread. j: the percentile jumps there.\n"
    )
    return "\n".join([key, *(outcome.markdown() for outcome in outcomes)])

"""What a command prints: tables, JSON or CSV."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from capsim.errors import CommandError
from capsim.tables import (
    DOUBT,
    comparison_table,
    console,
    drift_table,
    error_table,
    interval_table,
    latency_table,
    level_labels,
    throughput_table,
)
from capsim.terminal import echo, harmless_cell, printable_json

if TYPE_CHECKING:
    import pandas as pd

    from calibration.drift import Drift
    from calibration.validate import Validation
    from simulator.results.run import Run


@dataclass(frozen=True)
class Output:
    """How a command was asked to answer."""

    as_json: bool = False
    as_csv: bool = False
    save: Path | None = None
    overwrite: bool = False
    targets: Mapping[str, float] = field(default_factory=dict)  # ms by name

    def __post_init__(self) -> None:
        if self.as_json and self.as_csv:
            raise CommandError("give either --json or --csv")

    def tell(self, answer: Answer) -> None:
        """Print the answer as it was asked for."""
        if self.as_json:
            echo(json_text(answer.content()))
        elif self.as_csv:
            import pandas as pd

            echo(csv_text(pd.DataFrame(answer.rows())), nl=False)
        else:
            answer.show()


class Answer(Protocol):
    """What a command found, for programs and for people."""

    def content(self) -> Mapping[str, object]:
        """All of it, for JSON."""
        ...

    def rows(self) -> Sequence[Mapping[str, object]]:
        """What makes a table, for CSV."""
        ...

    def show(self) -> None:
        """Print sentences and tables."""
        ...


def show_run(title: str, run: Run, output: Output) -> None:
    """Print a run, measured or simulated, and save it where that was asked for."""
    from simulator.results.run_files import save_run

    if output.save is not None:
        save_run(run, output.save, output.overwrite)
    if output.as_json:
        echo(_run_as_json(run, output.targets))
    elif output.as_csv:
        from simulator.results.summary import summary_table

        echo(csv_text(summary_table(run)), nl=False)
    else:
        _print_run(title, run, output.targets)
        if output.save is not None:
            echo(f"saved in {output.save}")


def show_validation(validation: Validation, output: Output) -> None:
    """Print a measured run beside its prediction."""
    if output.as_json:
        rows = validation.table().to_dict("records")
        echo(json_text({"notes": validation.notes, "metrics": rows}))
    elif output.as_csv:
        echo(csv_text(validation.table()), nl=False)
    else:
        screen = console()
        for level in validation.levels:
            screen.print(comparison_table(level))
            screen.print()
        workloads = [level.workload for level in validation.levels]
        lengths = [workload.lengths_label for workload in workloads]
        labels = level_labels([workload.label for workload in workloads], lengths, [False] * len(workloads))
        screen.print(error_table(labels, validation))
        screen.print("Errors are (predicted - measured) / measured; noise is the spread between repeats of a level,")
        screen.print("here or in the calibration.")
        if any(metric.too_few for level in validation.levels for metric in level.metrics.values()):
            screen.print(f"{DOUBT} is a percentile of too few samples, measured or predicted.")
        for note in validation.notes:
            screen.print(f"Note: {note}", markup=False)


def show_drift(drift: Drift, output: Output) -> None:
    """Print the verdict on a profile, and what it rests on."""
    from calibration.drift import verdict

    rows = [
        {"metric": name, **vars(figure), "change": figure.error, "outside": figure.excess > 1}
        for name, figure in drift.figures.items()
    ]
    if output.as_json:
        content = {"state": drift.state, "verdict": verdict(drift), "workload": drift.workload.describe()}
        echo(json_text({**content, "figures": rows, "notes": drift.notes}))
    elif output.as_csv:
        import pandas as pd

        echo(csv_text(pd.DataFrame(rows)), nl=False)
    else:
        screen = console()
        screen.print(drift_table(drift))
        screen.print(f"\nVerdict: {verdict(drift)}.", markup=False)
        for note in drift.notes:
            screen.print(f"Note: {note}", markup=False)


def _print_run(title: str, run: Run, targets: Mapping[str, float]) -> None:
    from capsim.doubts import stated_intervals, too_few_samples, unsteady_levels
    from simulator.planning.targets import missed_targets, targets_label
    from simulator.results.summary import lengths_label, stated, summarize

    screen = console()
    summaries = [stated(summarize(level), run.source) for level in run.levels]
    arrivals = [level.workload.label for level in run.levels]
    lengths = [lengths_label(level) for level in run.levels]
    labels = level_labels(arrivals, lengths, [bool(level.notes) for level in run.levels])
    screen.print(_heading(title, run, lengths), markup=False)
    screen.print()
    screen.print(throughput_table(labels, summaries, _kv_pool(run)))
    screen.print()
    screen.print(latency_table(labels, summaries))
    screen.print("Figures are of whole levels, start and end included.")
    loads = [level.workload for level in run.levels]
    for sentence in (too_few_samples(arrivals, summaries), *unsteady_levels(arrivals, loads, summaries)):
        if sentence:
            screen.print(sentence, markup=False)
    if any(level.intervals for level in run.levels):
        what = "prediction" if run.source == "simulated" else "measurement"
        screen.print()
        screen.print(interval_table(labels, [*map(stated_intervals, run.levels, summaries)], what))
    if any(level.cached_tokens for level in run.levels):
        screen.print(f"\n{_cached(arrivals, run)}", markup=False)
    if any(level.replica_tokens for level in run.levels):
        screen.print(f"\n{_spread(arrivals, run)}", markup=False)
    if targets:
        screen.print()
        missed = [missed_targets(summary, targets) for summary in summaries]
        screen.print(f"SLO {targets_label(targets)}: {met_up_to(arrivals, missed)}", markup=False)
    if any(level.notes for level in run.levels):
        screen.print("\n* " + ("outside the measured range:" if run.source == "simulated" else "to be read with care:"))
        for label, level in zip(labels, run.levels, strict=True):
            if level.notes:
                screen.print(f"  {label.removesuffix('*')}: {'; '.join(level.notes)}", markup=False)


def _cached(arrivals: Sequence[str], run: Run) -> str:
    """How much of the prompts the prefix cache held, level by level."""
    shares = [(level.cached_tokens or 0) / level.requests["prompt_tokens"].sum() for level in run.levels]
    told = ", ".join(f"{name} {share:.0%}" for name, share in zip(arrivals, shares, strict=True))
    return f"Prompt tokens found in the prefix cache: {told}"


def _spread(arrivals: Sequence[str], run: Run) -> str:
    """How far the busiest engine of a fleet has more to do than the mean, level by level."""
    shares = [max(tokens) * len(tokens) / sum(tokens) - 1 for level in run.levels if (tokens := level.replica_tokens)]
    told = ", ".join(f"{name} {share:.0%}" for name, share in zip(arrivals, shares, strict=True))
    return f"Fleet of {run.server['fleet']}; tokens of the busiest engine above the mean: {told}"


def _heading(title: str, run: Run, lengths: Sequence[str]) -> str:
    """One sentence on what was served, and on what."""
    server = run.server
    on = " on ".join(str(server[name]) for name in ("model", "gpu") if name in server)
    version = f", vLLM {server['engine_version']}" if "engine_version" in server else ""
    same = f", {lengths[0]} tokens in/out" if len(set(lengths)) == 1 else ""
    pool = f", KV pool {server['kv_tokens']:,} tokens" if isinstance(server.get("kv_tokens"), int) else ""
    return f"{title}: {on}{version}{pool}{same}, {run.source}"


def _kv_pool(run: Run) -> int | None:
    tokens = run.server.get("kv_tokens")
    return tokens if isinstance(tokens, int) else None


def met_up_to(arrivals: Sequence[str], missed: Sequence[Sequence[str]]) -> str:
    """The last level up to which all targets are met, and what the next one misses."""
    met = next((number for number, names in enumerate(missed) if names), len(missed))
    up_to = f"met up to {arrivals[met - 1]}" if met else "met by no level"
    beyond = f"; {arrivals[met]} misses {', '.join(missed[met])}" if met < len(missed) else ""
    return f"{up_to}{beyond}"


def _run_as_json(run: Run, targets: Mapping[str, float]) -> str:
    from capsim.doubts import stated_intervals
    from simulator.planning.targets import missed_targets
    from simulator.results.run_files import workload_to_json
    from simulator.results.summary import stated, summarize

    levels = []
    for level in run.levels:
        summary = stated(summarize(level), run.source)
        entry: dict[str, object] = {
            "workload": workload_to_json(level.workload),
            **summary.flat(),
            "state": summary.state,
            "held_rate": summary.held_rate,
            "too_few": summary.too_few,
            "notes": level.notes,
        }
        if level.cached_tokens is not None:
            entry["cached_tokens"] = level.cached_tokens
        if level.replica_tokens is not None:
            entry["replica_tokens"] = level.replica_tokens
        if level.intervals:
            entry["intervals_90"] = stated_intervals(level, summary)
        if targets:
            entry["missed_targets"] = missed_targets(summary, targets)
        levels.append(entry)
    content: dict[str, object] = {"source": run.source, "server": run.server, "counted": "whole levels"}
    content["levels"] = levels
    if targets:
        content["targets_ms"] = dict(targets)
    return json_text(content)


def json_text(content: object) -> str:
    return printable_json(json.dumps(_without_nan(content), indent=1, ensure_ascii=False))


def csv_text(table: pd.DataFrame) -> str:
    """A table as comma-separated values, whose texts no spreadsheet takes for formulas."""
    texts = table.select_dtypes(exclude=["number", "bool"])
    return table.assign(**{str(name): texts[name].map(harmless_cell) for name in texts}).to_csv(index=False)


def _without_nan(content: object) -> object:
    """JSON knows neither NaN nor infinity: null stands for both."""
    if isinstance(content, Mapping):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_without_nan(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content

"""``capsim import``: result files of other load generators as a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capsim.options import AsCsv, AsJson
from capsim.terminal import echo

if TYPE_CHECKING:
    from calibration.imports import StatedLevel
    from capsim.output import Output


def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Result files, one level or more in each.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the run; absent or empty.")],
    *,
    file_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Insist on vllm-bench, sglang, aiperf, guidellm, inference-perf or llm-d; else told by the content.",
        ),
    ] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Read result files of vLLM bench, SGLang, AIPerf, GuideLLM, inference-perf or llm-d-benchmark.

    Files with a row for every request become a run, as if capsim had measured it: definitions are converted, and what
    was met on the way is noted. Files of aggregates become figures in DIR/figures.json, which can validate only.
    """
    from calibration.imports import NoRequestsError, import_files
    from capsim.output import Output, show_run

    answer = Output(as_json, as_csv, save=output)
    try:
        run = import_files(files, file_format)
    except NoRequestsError as reason:
        _import_aggregates(files, file_format, answer, reason)
    else:
        show_run(str(output), run, answer)


def _import_aggregates(files: list[Path], file_format: str | None, output: Output, reason: Exception) -> None:
    """Keep what the files state, where none of them has requests; `reason` is the error where some have."""
    from calibration.imports import FIGURES, import_stated, save_stated
    from capsim.errors import CommandError
    from simulator.results.run_files import check_free

    if len(files) > 1 and _some_have_requests(files, file_format):
        raise CommandError(f"{reason}; import it apart from the files with requests")
    levels = import_stated(files, file_format)
    folder = output.save
    assert folder is not None
    check_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_stated(levels, folder / FIGURES)
    _show(levels, output)
    if not (output.as_json or output.as_csv):
        echo(f"aggregates only, which can validate and not calibrate: saved in {folder / FIGURES}")


def _some_have_requests(files: list[Path], file_format: str | None) -> bool:
    from calibration.imports import NoRequestsError, import_files

    for file in files:
        try:
            import_files([file], file_format)
        except NoRequestsError:
            continue
        return True
    return False


def _show(levels: list[StatedLevel], output: Output) -> None:
    """The figures of every level, seconds for programs and milliseconds for people."""
    from capsim.output import json_text
    from simulator.results.run_files import workload_to_json

    if output.as_json:
        rows = [
            {
                "workload": workload_to_json(level.workload),
                **{figure.metric: figure.value for figure in level.figures},
                "notes": level.notes,
            }
            for level in levels
        ]
        echo(json_text({"source": "stated", "server": levels[0].server, "levels": rows}))
    elif output.as_csv:
        echo("level,metric,value,uncertainty")
        for level in levels:
            for figure in level.figures:
                echo(f"{level.workload.arrivals},{figure.metric},{figure.value!r},{figure.uncertainty:.4g}")
    else:
        _show_tables(levels)


def _show_tables(levels: list[StatedLevel]) -> None:
    from capsim.tables import console, percent

    screen = console()
    for level in levels:
        screen.print(level.workload.describe())
        for figure in level.figures:
            is_time = figure.metric.endswith(("_ttft", "_tpot", "_itl", "_e2el"))
            value = f"{figure.value * 1000:,.2f} ms" if is_time else f"{figure.value:,.2f}"
            screen.print(f"  {figure.metric:<18} {value:>14}  +- {percent(figure.uncertainty, sign=False)}")
        for note in level.notes:
            screen.print(f"  Note: {note}", markup=False)

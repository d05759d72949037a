"""``capsim report``: a page on a measured run, a predicted one, or both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capsim.completion import complete_profile
from capsim.options import Overwrite
from capsim.terminal import echo

if TYPE_CHECKING:
    from simulator.profile import Profile
    from simulator.results.run import Run


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders of a measured run and of a predicted one, or files of other load generators.",
        ),
    ],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The page; other formats are written beside it.")
    ] = Path("report.html"),
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            help="The server's profile: predicts a measured run, says what limits and which flag helps.",
            autocompletion=complete_profile,
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            "--slo",
            metavar="NAME:MS,...",
            help="Targets in ms; the first SLO decides the recommended level. Repeat for more rows.",
        ),
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", metavar="NAME,...", help="Some of html, png, svg, csv, md.")
    ] = "html",
    overwrite: Overwrite = False,
) -> None:
    """Write a self-contained page: the conclusion, figures, tables, facts, and how far to trust it."""
    from capsim.report.content import build_report
    from capsim.report.files import check_page, write_report
    from capsim.shipped import find_profile
    from simulator.planning.targets import join_targets

    wanted = _formats(formats)
    check_page(output, wanted, overwrite)
    slos = [join_targets([text]) for text in slo or ()]
    known = None if profile is None else find_profile(profile)
    found, names = _runs(runs)
    names |= {} if profile is None else {"profile": profile}
    if known is not None and [run.source for run in found] == ["measured"]:
        found.append(_prediction(found[0], known))
    written = write_report(build_report(found, known, slos, names), output, wanted, overwrite)
    for path in written:
        echo(f"written: {path}")


def _formats(text: str) -> list[str]:
    from capsim.report.files import FORMATS

    names = [name.strip().lower() for name in text.split(",")]
    strangers = [name for name in names if name not in FORMATS]
    if strangers:
        raise typer.BadParameter(f"{strangers[0]!r} is none of {', '.join(FORMATS)}", param_hint="--format")
    return names


def _runs(paths: list[Path]) -> tuple[list[Run], dict[str, str]]:
    """The measured run and the predicted one among `paths`, and where each comes from."""
    from calibration.imports import load_measured_or_stated
    from capsim.curves import SOURCES
    from capsim.errors import CommandError
    from simulator.results.run import Run

    files = [path for path in paths if not path.is_dir()]
    groups = [[path] for path in paths if path.is_dir()] + ([files] if files else [])
    runs: dict[str, Run] = {}
    names: dict[str, str] = {}
    for group in groups:
        run = load_measured_or_stated(group)
        label = ", ".join(path.name for path in group)
        if not isinstance(run, Run):
            raise CommandError(f"{label}: holds aggregates only; a report needs requests, try capsim validate")
        source = SOURCES[run.source]
        if source in runs:
            raise CommandError(f"{names[source]} and {label} are both {source}; a report takes one run of each kind")
        runs[source], names[source] = run, label
    return list(runs.values()), names


def _prediction(measured: Run, profile: Profile) -> Run:
    """What the profile says of the levels that were measured, each once."""
    from calibration.validate import flags_of
    from capsim.progress import predict_with_progress

    loads = {level.workload.describe(): level.workload for level in measured.levels}
    flags = flags_of(measured, profile.engine_flags)
    return predict_with_progress(profile, list(loads.values()), flags, with_intervals=True)

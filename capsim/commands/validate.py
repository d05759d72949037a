"""``capsim validate``: what was measured, or is measured now, beside its prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated

import typer

from capsim.exit_codes import ExitCode
from capsim.measuring_options import LoadOptions, ServerOptions, with_load, with_server
from capsim.options import OUTPUT, SERVER, AsCsv, AsJson, ProfileName, Resume
from capsim.terminal import echo

if TYPE_CHECKING:
    from capsim.measuring import KnownServer
    from capsim.output import Output
    from simulator.profile import Profile
    from simulator.results.run import Run


@with_server
@with_load
def validate(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILES]...", help="A run's folder, result files of other tools, or what import made of them."
        ),
    ] = None,
    *,
    profile: ProfileName,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Measure this server now instead.", rich_help_panel=SERVER),
    ] = None,
    drift: Annotated[
        bool,
        typer.Option(
            "--drift", help="With --endpoint: measure one level again and say whether the profile still holds."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Keep what is measured in this folder.", rich_help_panel=OUTPUT
        ),
    ] = None,
    resume: Resume = False,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    load: LoadOptions,
    server: ServerOptions,
) -> None:
    """Predict what was measured and print both, metric by metric, with signed errors.

    Files may hold requests or aggregates only. With --endpoint the given load is measured first; with --drift one level
    of about 45 s, chosen unless a load is given: exit code 0 if the profile still holds, 3 if the server has drifted
    away from it, 4 if the measurement was too disturbed to tell. Flags that the run states of its server win over the
    profile's, and those given here over both.
    """
    from capsim.measuring import ask_server
    from capsim.output import Output
    from capsim.shipped import find_profile

    answer = Output(as_json, as_csv)
    _check_usage(files, endpoint, drift, output, resume)
    known = find_profile(profile)
    if endpoint is None:
        _validate_files(files or [], known, server.flags, answer)
        return
    asked = ask_server(endpoint, server)
    with _folder(output) as folder:
        if drift:
            _check_drift(asked, known, load, folder, resume, answer)
        else:
            resumed_with = () if output is not None else ("--output", str(folder))
            _measure_and_validate(asked, known, load, folder, resume, resumed_with, answer)


def _check_usage(
    files: list[Path] | None, endpoint: str | None, drift: bool, output: Path | None, resume: bool
) -> None:
    if (endpoint is None) == (not files):
        raise typer.BadParameter(
            "give either what was measured or a server to measure", param_hint="FILES or --endpoint"
        )
    if endpoint is None and (drift or output is not None or resume):
        raise typer.BadParameter("goes with --endpoint", param_hint="--drift, --output and --resume")
    if resume and output is None:
        raise typer.BadParameter("needs the folder of what was measured: give --output", param_hint="--resume")


@contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    """Where the run is kept: for good if that was asked for, or if only a part of it could be measured."""
    if output is not None:
        yield output
        return
    place = Path(mkdtemp(prefix="capsim-"))
    folder = place / "run"
    try:
        yield folder
    except BaseException as problem:
        if isinstance(problem, typer.Exit) or not (folder / "levels").exists():
            rmtree(place)
        elif not isinstance(problem, KeyboardInterrupt):
            echo(f"Note: what was measured is in {folder}; to go on add --output {folder} --resume", err=True)
        raise
    rmtree(place)


def _validate_files(files: list[Path], profile: Profile, flags: Mapping[str, object], output: Output) -> None:
    from calibration.imports import load_measured_or_stated, validate_stated
    from calibration.validate import flags_of
    from capsim.output import show_validation
    from simulator.flags.vllm_flags import change_flags
    from simulator.results.run import Run

    found = load_measured_or_stated(files)
    if isinstance(found, Run):
        _show(found, profile, flags, output)
        return
    server = Run("measured", [], found[0].server)
    engine_flags = change_flags(flags_of(server, profile.engine_flags), flags, profile.kv_bytes_per_token)
    show_validation(validate_stated(found, profile, engine_flags), output)


def _measure_and_validate(
    server: KnownServer,
    profile: Profile,
    load: LoadOptions,
    folder: Path,
    resume: bool,
    resumed_with: Sequence[str],
    output: Output,
) -> None:
    from capsim.errors import CommandError
    from capsim.measuring import measure, plan

    if not load.is_given:
        raise CommandError("give the load to measure, --concurrency or --request-rate; or --drift, which chooses one")
    run = measure(server, plan(server, load, probes=False), folder, resume=resume, resumed_with=resumed_with)
    _show(run, profile, dict(server.stated), output)


def _check_drift(
    server: KnownServer, profile: Profile, load: LoadOptions, folder: Path, resume: bool, output: Output
) -> None:
    from calibration.drift import drift_level, drift_plan, judge_drift
    from calibration.validate import flags_of
    from capsim.errors import CommandError
    from capsim.measuring import measure, plan
    from capsim.output import show_drift
    from simulator.flags.vllm_flags import change_flags
    from simulator.results.run import Run

    told = Run("measured", [], {**server.facts(), **server.endpoint.server()})
    flags = change_flags(flags_of(told, profile.engine_flags), server.stated, profile.kv_bytes_per_token)
    levels = plan(server, load, probes=False) if load.is_given else drift_plan(drift_level(profile, flags))
    if len(levels.levels) > 1:
        raise CommandError("--drift measures one level: give one --concurrency or --request-rate, or none")
    drift = judge_drift(measure(server, levels, folder, resume=resume), profile, flags)
    show_drift(drift, output)
    if drift.state != "holds":
        raise typer.Exit(ExitCode.DRIFTED if drift.state == "drifted" else ExitCode.UNCLEAR)


def _show(run: Run, profile: Profile, flags: Mapping[str, object], output: Output) -> None:
    from calibration.validate import flags_of
    from calibration.validate import validate as compare_with_prediction
    from capsim.output import show_validation
    from capsim.progress import status_line
    from simulator.flags.vllm_flags import change_flags

    engine_flags = change_flags(flags_of(run, profile.engine_flags), flags, profile.kv_bytes_per_token)
    with status_line("predicting"):
        validation = compare_with_prediction(run, profile, engine_flags)
    show_validation(validation, output)

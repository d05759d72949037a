"""``capsim validate``: what was measured, or is measured now, beside its prediction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsim.exit_codes import ExitCode
from capsim.options import (
    OUTPUT,
    SERVER,
    ApiKeyFile,
    AsCsv,
    AsJson,
    Burstiness,
    Concurrency,
    DcgmUrl,
    InputLen,
    Insecure,
    Model,
    NumPrompts,
    OutputLen,
    ProfileName,
    RangeRatio,
    RequestRate,
    RequestsPerClient,
    Resume,
    ServerLog,
    Shapes,
    read_key,
    with_engine_flags,
)

if TYPE_CHECKING:
    from capsim.measuring import KnownServer, LoadOptions
    from capsim.output import Output
    from simulator.profile import Profile
    from simulator.results.run import Run


@with_engine_flags
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
    model: Model = None,
    api_key_file: ApiKeyFile = None,
    insecure: Insecure = False,
    server_log: ServerLog = None,
    dcgm_url: DcgmUrl = None,
    concurrency: Concurrency = None,
    request_rate: RequestRate = None,
    burstiness: Burstiness = 1.0,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    range_ratio: RangeRatio = 0.0,
    shapes: Shapes = None,
    num_prompts: NumPrompts = None,
    requests_per_client: RequestsPerClient = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    flags: dict[str, Any],
) -> None:
    """Predict what was measured and print both, metric by metric, with signed errors.

    Files may hold requests or aggregates only. With --endpoint the given load is measured first; with --drift one level
    of about 45 s, chosen unless a load is given: exit code 0 if the profile still holds, 3 if the server has drifted
    away from it, 4 if the measurement was too disturbed to tell. Flags that the run states of its server win over the
    profile's, and those given here over both.
    """
    from capsim.measuring import LoadOptions, ServerOptions, ask_server
    from capsim.output import Output
    from capsim.shipped import find_profile

    answer = Output(as_json, as_csv)
    _check_usage(files, endpoint, drift, output, resume)
    known = find_profile(profile)
    if endpoint is None:
        _validate_files(files or [], known, flags, answer)
        return
    load = LoadOptions(
        concurrency,
        request_rate,
        burstiness,
        input_len,
        output_len,
        range_ratio,
        shapes,
        num_prompts,
        requests_per_client,
    )
    server = ask_server(ServerOptions(endpoint, model, read_key(api_key_file), insecure, flags, server_log, dcgm_url))
    with _folder(output) as folder:
        if drift:
            _check_drift(server, known, load, folder, resume, answer)
        else:
            _measure_and_validate(server, known, load, folder, resume, answer)


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
    """Where the run is kept: for good if that was asked for."""
    if output is not None:
        yield output
        return
    with TemporaryDirectory(prefix="capsim-") as place:
        yield Path(place) / "run"


def _validate_files(files: list[Path], profile: Profile, flags: dict[str, Any], output: Output) -> None:
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
    server: KnownServer, profile: Profile, load: LoadOptions, folder: Path, resume: bool, output: Output
) -> None:
    from capsim.errors import CommandError
    from capsim.measuring import measure, plan

    if not load.is_given:
        raise CommandError("give the load to measure, --concurrency or --request-rate; or --drift, which chooses one")
    run = measure(server, plan(server, load, probes=False), folder, resume=resume)
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


def _show(run: Run, profile: Profile, flags: dict[str, Any], output: Output) -> None:
    from calibration.validate import flags_of
    from calibration.validate import validate as compare_with_prediction
    from capsim.output import show_validation
    from capsim.progress import status_line
    from simulator.flags.vllm_flags import change_flags

    engine_flags = change_flags(flags_of(run, profile.engine_flags), flags, profile.kv_bytes_per_token)
    with status_line("predicting"):
        validation = compare_with_prediction(run, profile, engine_flags)
    show_validation(validation, output)

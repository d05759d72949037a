"""``capsim calibrate``: measure a live server and fit a profile to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from capsim.options import (
    LOAD,
    OUTPUT,
    SERVER,
    ApiKeyFile,
    Concurrency,
    InputLen,
    Model,
    OutputLen,
    integers,
    read_key,
    with_engine_flags,
)


@with_engine_flags
def calibrate(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The profile to write, such as profile.yaml.")
    ],
    *,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="The server's address, such as http://localhost:8000.", rich_help_panel=SERVER
        ),
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="A run measured before, or result files of another tool, instead of a server.",
        ),
    ] = None,
    model: Model = None,
    api_key_file: ApiKeyFile = None,
    server_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The server's log: it tells flags and memory.", rich_help_panel=SERVER),
    ] = None,
    dcgm_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="DCGM exporter that tells the GPU.", rich_help_panel=SERVER),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the profile, else its file's.", rich_help_panel=OUTPUT)
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the raw run, else FILE-run.", rich_help_panel=OUTPUT),
    ] = None,
    concurrency: Concurrency = "1,2,4,8,16",
    hold_out: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Levels kept out of the fit; 0 for none.", rich_help_panel=LOAD),
    ] = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of each level; else as time allows.", rich_help_panel=LOAD),
    ] = None,
    flags: dict[str, Any],
) -> None:
    """Measure a live server for a few minutes, fit its step times and write a profile.

    Takes model, KV pool and version from the server. Give --max-num-seqs and --max-num-batched-tokens as the server was
    started with; without them vLLM's defaults are assumed, and the profile says so.
    """
    from calibration.fit import fit_profile
    from capsim.measuring import Sweeping, from_files, from_server
    from capsim.output import show_profile

    if output.is_dir() or not output.parent.is_dir():
        raise typer.BadParameter(f"{output} cannot be written: it is a folder, or is in none", param_hint="--output")
    if (endpoint is None) == (not measured):
        raise typer.BadParameter("give either a server or what was measured", param_hint="--endpoint or --from")
    if measured:
        run, known = from_files(measured, flags, server_log)
        kept_out = _kept_out([level.workload.concurrency or 1 for level in run.levels], hold_out)
    else:
        clients = integers("--concurrency", concurrency or "")
        kept_out = _kept_out(clients, hold_out)
        folder = run_dir or output.with_name(f"{output.stem}-run")
        sweeping = Sweeping(clients, input_len, output_len, num_prompts, folder)
        run, known = from_server(
            endpoint or "", model, read_key(api_key_file), flags, sweeping, server_log=server_log, dcgm_url=dcgm_url
        )
    profile = fit_profile(run, known.flags, hold_out=kept_out, name=name or output.stem)
    told = {"assumed": [*profile.assumed, *known.assumed, *known.inferred]}
    profile = profile.model_copy(update=told)
    profile.save(output)
    show_profile(profile)
    for doubt in known.contradictions:
        typer.echo(f"Doubtful: {doubt}")
    typer.echo(f"profile: {output}" + ("" if measured else f"\nraw run: {folder}"))


def _kept_out(clients: list[int], hold_out: str | None) -> tuple[int, ...]:
    """Levels that judge the fit: those asked for, else the middle one of three or more."""
    if hold_out is None:
        levels = sorted(set(clients))
        return (levels[len(levels) // 2],) if len(levels) >= 3 else ()
    chosen = tuple(number for number in integers("--hold-out", hold_out) if number)
    if strangers := [number for number in chosen if number not in clients]:
        raise typer.BadParameter(f"{strangers[0]} is not among --concurrency", param_hint="--hold-out")
    return chosen

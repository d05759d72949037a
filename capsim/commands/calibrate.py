"""``capsim calibrate``: measure a live server and fit a profile to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from capsim.options import (
    LOAD,
    OUTPUT,
    ApiKeyFile,
    Concurrency,
    Endpoint,
    InputLen,
    Model,
    OutputLen,
    integers,
    read_key,
    with_engine_flags,
)


@with_engine_flags
def calibrate(
    endpoint: Endpoint,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The profile to write, such as profile.yaml.")
    ],
    *,
    model: Model = None,
    api_key_file: ApiKeyFile = None,
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
    from calibration.endpoint import discover
    from calibration.fit import fit_profile
    from calibration.server_flags import server_flags
    from capsim.measuring import measure, plan, state_flags
    from capsim.output import show_profile

    clients = integers("--concurrency", concurrency or "")
    kept_out = _kept_out(clients, hold_out)
    if output.is_dir() or not output.parent.is_dir():
        raise typer.BadParameter(f"{output} cannot be written: it is a folder, or is in none", param_hint="--output")
    folder = run_dir or output.with_name(f"{output.stem}-run")
    server = state_flags(discover(endpoint, model=model, api_key=read_key(api_key_file)), flags)
    engine_flags, assumed = server_flags(server, flags)
    run = measure(server, plan(server, clients, input_len, output_len, num_prompts), folder)
    profile = fit_profile(run, engine_flags, hold_out=kept_out, name=name or output.stem)
    profile = profile.model_copy(update={"assumed": [*profile.assumed, *assumed]})
    profile.save(output)
    show_profile(profile)
    typer.echo(f"profile: {output}\nraw run: {folder}")


def _kept_out(clients: list[int], hold_out: str | None) -> tuple[int, ...]:
    """Levels that judge the fit: those asked for, else the middle one of three or more."""
    if hold_out is None:
        levels = sorted(set(clients))
        return (levels[len(levels) // 2],) if len(levels) >= 3 else ()
    chosen = tuple(number for number in integers("--hold-out", hold_out) if number)
    if strangers := [number for number in chosen if number not in clients]:
        raise typer.BadParameter(f"{strangers[0]} is not among --concurrency", param_hint="--hold-out")
    return chosen

"""``capsim sweep``: measure a live server and keep the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from capsim.options import (
    LOAD,
    ApiKeyFile,
    AsCsv,
    AsJson,
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
def sweep(
    endpoint: Endpoint,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the run; absent or empty.")],
    *,
    model: Model = None,
    api_key_file: ApiKeyFile = None,
    concurrency: Concurrency = "1,2,4,8,16",
    input_len: InputLen = None,
    output_len: OutputLen = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of each level; else as time allows.", rich_help_panel=LOAD),
    ] = None,
    probes: Annotated[
        bool,
        typer.Option(
            "--probes/--no-probes", help="Prompts of several lengths first; a fit needs them.", rich_help_panel=LOAD
        ),
    ] = True,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    flags: dict[str, Any],
) -> None:
    """Measure a live server: prompts of several lengths alone, then one level for each number of clients.

    A number given several times, as in --concurrency 4,4,4, is measured as often; validate then tells the noise. Flags
    given here are noted in the run.
    """
    from calibration.endpoint import discover
    from capsim.measuring import measure, plan, state_flags
    from capsim.output import Output, show_run

    answer = Output(as_json, as_csv)
    clients = integers("--concurrency", concurrency or "")
    server = state_flags(discover(endpoint, model=model, api_key=read_key(api_key_file)), flags)
    run = measure(server, plan(server, clients, input_len, output_len, num_prompts, probes), output)
    show_run(str(output), run, answer)

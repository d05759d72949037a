"""``capsim sweep``: measure a live server and keep the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsim.measuring_options import LoadOptions, ServerOptions, with_load, with_server
from capsim.options import LOAD, OUTPUT, AsCsv, AsJson, Endpoint, Resume


@with_server
@with_load
def sweep(
    endpoint: Endpoint,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the run; absent, empty or to --resume.")
    ],
    *,
    no_probes: Annotated[
        bool,
        typer.Option(
            "--no-probes", help="Without lone prompts of several lengths; a fit needs them.", rich_help_panel=LOAD
        ),
    ] = False,
    resume: Resume = False,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Also write vLLM bench's JSON: to FILE.json, or to a folder with a file for each level.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    load: LoadOptions,
    server: ServerOptions,
) -> None:
    """Measure a live server: prompts of several lengths alone, then one level for each number of clients or rate.

    Without --concurrency and --request-rate: 1, 2, 4, 8 and 16 clients. A number given several times, as in
    --concurrency 4,4,4, is measured as often; validate then tells the noise. Flags given here are noted in the run.
    """
    from calibration.exports import check_exportable, export_vllm_bench
    from capsim.measuring import ask_server, measure, plan
    from capsim.output import Output, show_run

    answer = Output(as_json, as_csv)
    if export is not None:
        check_exportable(export)
    known = ask_server(endpoint, server)
    run = measure(known, plan(known, load, probes=not no_probes), output, resume=resume)
    if export is not None:
        export_vllm_bench(run, export)
    show_run(str(output), run, answer)

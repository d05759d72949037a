"""``capsim sweep``: measure a live server and keep the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from capsim.options import (
    LOAD,
    OUTPUT,
    ApiKeyFile,
    AsCsv,
    AsJson,
    Burstiness,
    Concurrency,
    DcgmUrl,
    Endpoint,
    InputLen,
    Insecure,
    Model,
    NumPrompts,
    OutputLen,
    RangeRatio,
    RequestRate,
    RequestsPerClient,
    Resume,
    ServerLog,
    Shapes,
    read_key,
    with_engine_flags,
)


@with_engine_flags
def sweep(
    endpoint: Endpoint,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the run; absent, empty or to --resume.")
    ],
    *,
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
    flags: dict[str, Any],
) -> None:
    """Measure a live server: prompts of several lengths alone, then one level for each number of clients or rate.

    Without --concurrency and --request-rate: 1, 2, 4, 8 and 16 clients. A number given several times, as in
    --concurrency 4,4,4, is measured as often; validate then tells the noise. Flags given here are noted in the run.
    """
    from calibration.exports import check_exportable, export_vllm_bench
    from capsim.measuring import LoadOptions, ServerOptions, ask_server, measure, plan
    from capsim.output import Output, show_run

    answer = Output(as_json, as_csv)
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
    if export is not None:
        check_exportable(export)
    server = ask_server(ServerOptions(endpoint, model, read_key(api_key_file), insecure, flags, server_log, dcgm_url))
    run = measure(server, plan(server, load, probes=not no_probes), output, resume=resume)
    if export is not None:
        export_vllm_bench(run, export)
    show_run(str(output), run, answer)

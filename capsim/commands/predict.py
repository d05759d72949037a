"""``capsim predict``: what a profile's server would do under a load."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from capsim.load_options import with_load
from capsim.options import (
    AsCsv,
    AsJson,
    Intervals,
    OtherGpu,
    Overwrite,
    ProfileName,
    SaveDir,
    Targets,
    TensorParallel,
    with_engine_flags,
)

FLEET = "Fleet"
CURVE = "1,2,4,8,16,32,64"


@with_engine_flags
@with_load(CURVE)
def predict(
    profile: ProfileName,
    *,
    replicas: Annotated[
        int, typer.Option(min=1, metavar="N", help="Servers behind a router.", rich_help_panel=FLEET)
    ] = 1,
    router: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="round-robin, random, least-requests, least-kv, prefix-aware, session-sticky.",
            rich_help_panel=FLEET,
        ),
    ] = "least-requests",
    data_parallel_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Engines of each server, as for vLLM.", rich_help_panel=FLEET)
    ] = 1,
    tensor_parallel_size: TensorParallel = None,
    slo: Targets = None,
    gpu: OtherGpu = None,
    intervals: Intervals = True,
    save: SaveDir = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    flags: dict[str, Any],
    loads: list[Any],
) -> None:
    """Predict latency and throughput. Without --concurrency or --request-rate: a curve from 1 to 64 clients."""
    from capsim.output import Output, show_run
    from capsim.progress import predict_with_progress
    from capsim.shipped import find_profile
    from capsim.started import started
    from simulator.engine.fleet import Fleet
    from simulator.planning.targets import parse_targets

    output = Output(as_json, as_csv, save, overwrite, parse_targets(slo) if slo else {})
    server = started(find_profile(profile), flags, gpu, tensor_parallel_size).profile
    fleet = Fleet(replicas, router, data_parallel_size)
    show_run(server.name, predict_with_progress(server, loads, server.engine_flags, intervals, fleet), output)

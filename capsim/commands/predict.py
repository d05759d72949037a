"""``capsim predict``: what a profile's server would do under a load."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from capsim.options import (
    LOAD,
    AsCsv,
    AsJson,
    Burstiness,
    Concurrency,
    InputLen,
    Intervals,
    OutputLen,
    Overwrite,
    ProfileName,
    RangeRatio,
    RequestRate,
    SaveDir,
    Seed,
    Shapes,
    Targets,
    integers,
    reals,
    request_shapes,
    with_engine_flags,
)

CURVE = "1,2,4,8,16,32,64"


@with_engine_flags
def predict(
    profile: ProfileName,
    *,
    concurrency: Concurrency = None,
    request_rate: RequestRate = None,
    burstiness: Burstiness = 1.0,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    range_ratio: RangeRatio = 0.0,
    shapes: Shapes = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests of each level.", rich_help_panel=LOAD)] = 1000,
    seed: Seed = 0,
    slo: Targets = None,
    intervals: Intervals = False,
    save: SaveDir = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    flags: dict[str, Any],
) -> None:
    """Predict latency and throughput. Without --concurrency or --request-rate: a curve from 1 to 64 clients."""
    from capsim.output import Output, show_run
    from capsim.progress import predict_with_progress
    from capsim.shipped import find_profile
    from simulator.levels import plan_levels
    from simulator.targets import parse_targets
    from simulator.vllm_flags import change_flags

    if concurrency is None and request_rate is None:
        concurrency = CURVE
    workloads = plan_levels(
        request_shapes(input_len, output_len, range_ratio, shapes),
        concurrency=None if concurrency is None else integers("--concurrency", concurrency),
        request_rate=None if request_rate is None else reals("--request-rate", request_rate),
        burstiness=burstiness,
        num_prompts=num_prompts,
        seed=seed,
    )
    output = Output(as_json, as_csv, save, overwrite, parse_targets(slo) if slo else {})
    server = find_profile(profile)
    engine_flags = change_flags(server.engine_flags, flags, server.kv_bytes_per_token)
    show_run(server.name, predict_with_progress(server, workloads, engine_flags, intervals), output)

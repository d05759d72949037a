"""``capsim predict``: what a profile's server would do under a load."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from capsim.load_options import (
    DurationText,
    MaxInFlight,
    RateCurveText,
    SessionsText,
    Speed,
    ThinkTimeText,
    TraceFile,
    TraceFormat,
    parsed,
    planned_load,
)
from capsim.options import (
    LOAD,
    AsCsv,
    AsJson,
    Burstiness,
    Concurrency,
    InputLen,
    Intervals,
    OtherGpu,
    OutputLen,
    Overwrite,
    ProfileName,
    RangeRatio,
    RequestRate,
    SaveDir,
    Seed,
    Shapes,
    Targets,
    TensorParallel,
    integers,
    reals,
    request_shapes,
    with_engine_flags,
)

FLEET = "Fleet"
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
    sessions: SessionsText = None,
    trace: TraceFile = None,
    trace_format: TraceFormat = None,
    speed: Speed = None,
    think_time: ThinkTimeText = None,
    rate_curve: RateCurveText = None,
    max_in_flight: MaxInFlight = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Requests of each level; 1000, or a whole trace.", rich_help_panel=LOAD),
    ] = None,
    duration: DurationText = None,
    seed: Seed = 0,
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
) -> None:
    """Predict latency and throughput. Without --concurrency or --request-rate: a curve from 1 to 64 clients."""
    from capsim.output import Output, show_run
    from capsim.progress import predict_with_progress
    from capsim.shipped import find_profile
    from capsim.started import started
    from simulator.arrivals import parse_curve, parse_seconds, parse_think_time
    from simulator.fleet import Fleet
    from simulator.levels import Levels
    from simulator.targets import parse_targets

    if concurrency is None and request_rate is None and trace is None:
        concurrency = CURVE
    levels = Levels(
        concurrency=None if concurrency is None else integers("--concurrency", concurrency),
        request_rate=None if request_rate is None else reals("--request-rate", request_rate),
        burstiness=None if trace is not None and burstiness == 1 else burstiness,  # a trace keeps its pattern
        think_time=parsed("--think-time", think_time, parse_think_time),
        max_concurrency=max_in_flight,
        rate_curve=parsed("--rate-curve", rate_curve, parse_curve),
        num_prompts=num_prompts,
        duration=parsed("--duration", duration, parse_seconds),
        speed=speed,
        seed=seed,
    )
    loads = planned_load(
        levels,
        shapes=lambda: request_shapes(input_len, output_len, range_ratio, shapes),
        sessions=sessions,
        trace=trace,
        trace_format=trace_format,
        plain=input_len is None and output_len is None and not range_ratio and shapes is None,
    )
    output = Output(as_json, as_csv, save, overwrite, parse_targets(slo) if slo else {})
    server = started(find_profile(profile), flags, gpu, tensor_parallel_size).profile
    fleet = Fleet(replicas, router, data_parallel_size)
    show_run(server.name, predict_with_progress(server, loads, server.engine_flags, intervals, fleet), output)

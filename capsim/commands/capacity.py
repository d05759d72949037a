"""``capsim capacity``: the highest level of load that meets an SLO, what breaks beyond it, and where to stay."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from capsim.load_options import SessionsText, ThinkTimeText, parsed, planned_load
from capsim.options import (
    LOAD,
    AsCsv,
    AsJson,
    Burstiness,
    InputLen,
    OtherGpu,
    OutputLen,
    ProfileName,
    RangeRatio,
    Seed,
    Shapes,
    TensorParallel,
    request_shapes,
    with_engine_flags,
)


class By(StrEnum):
    """What is raised until a target is missed."""

    CLIENTS = "clients"
    RATE = "rate"


@with_engine_flags
def capacity(
    profile: ProfileName,
    *,
    slo: Annotated[
        list[str],
        typer.Option(
            "--slo",
            metavar="NAME:MS,...",
            help="Targets that hold together, in ms; error_rate is a share. Repeat as you like.",
        ),
    ],
    also_slo: Annotated[
        list[str] | None,
        typer.Option("--also-slo", metavar="NAME:MS,...", help="Another SLO to look up; one row each."),
    ] = None,
    by: Annotated[
        By, typer.Option(help="Raise the clients of a closed loop, or the rate of an open one.", rich_help_panel=LOAD)
    ] = By.CLIENTS,
    burstiness: Burstiness = 1.0,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    range_ratio: RangeRatio = 0.0,
    shapes: Shapes = None,
    sessions: SessionsText = None,
    think_time: ThinkTimeText = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of one simulation; else as many as needed.", rich_help_panel=LOAD),
    ] = None,
    whole_runs: Annotated[
        bool,
        typer.Option(
            "--whole-runs", help="Count start burst and end too, as a load generator does.", rich_help_panel=LOAD
        ),
    ] = False,
    seed: Seed = 0,
    tensor_parallel_size: TensorParallel = None,
    gpu: OtherGpu = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    flags: dict[str, Any],
) -> None:
    """Find the most clients, or the highest request rate, that meets an SLO.

    A level counts when the 90 % interval of several simulations meets every target, and not by luck. Says which target
    breaks first and why, and to which level to fall back.
    """
    from capsim.capacity_answer import CapacityAnswer, met_in_draws
    from capsim.output import Output
    from capsim.progress import search_progress
    from capsim.shipped import find_profile
    from capsim.started import started
    from simulator.loads.arrivals import parse_think_time
    from simulator.loads.levels import Levels
    from simulator.planning.capacity import CapacitySearch
    from simulator.planning.replications import AnyLoad
    from simulator.planning.targets import join_targets

    output = Output(as_json, as_csv)
    slos = [join_targets(slo), *(join_targets([text]) for text in also_slo or ())]
    if think_time is not None and by is By.RATE and sessions is None:
        raise typer.BadParameter("goes with --by clients, or with --sessions", param_hint="--think-time")
    levels = Levels(
        concurrency=[1] if by is By.CLIENTS else None,
        request_rate=[1.0] if by is By.RATE else None,
        burstiness=burstiness,
        think_time=parsed("--think-time", think_time, parse_think_time),
        num_prompts=1,  # the search says how many a level needs
        seed=seed,
    )
    (load,) = planned_load(
        levels,
        shapes=lambda: request_shapes(input_len, output_len, range_ratio, shapes),
        sessions=sessions,
        trace=None,
        trace_format=None,
        plain=input_len is None and output_len is None and not range_ratio and shapes is None,
    )
    assert isinstance(load, AnyLoad)
    server = started(find_profile(profile), flags, gpu, tensor_parallel_size).profile
    with search_progress() as tell:
        search = CapacitySearch(
            load,
            server.engine_flags,
            server.step_time,
            server.host_time,
            whole_runs=whole_runs,
            num_prompts=num_prompts,
            on_trial=tell,
        )
        found = [search.find(targets) for targets in slos]
        curve = search.curve(slos[0])
        met = met_in_draws(search, found[0], server)
    output.tell(CapacityAnswer(server, server.engine_flags, search, found, curve, met))

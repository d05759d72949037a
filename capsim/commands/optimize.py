"""``capsim optimize``: the cheapest flags, GPUs and number of replicas that meet an SLO under a load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsim.completion import complete_gpu
from capsim.load_options import SessionsText, ThinkTimeText, TraceFile, TraceFormat, parsed, planned_load
from capsim.options import (
    LOAD,
    AsCsv,
    AsJson,
    Burstiness,
    InputLen,
    OutputLen,
    ProfileName,
    RangeRatio,
    Seed,
    Shapes,
    request_shapes,
    with_engine_flags,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SPACE, WORKERS = "What to choose from", "Who computes"


class Backend(StrEnum):
    """Who computes."""

    LOKY = "loky"
    DASK = "dask"
    RAY = "ray"


@with_engine_flags
def optimize(
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
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLAG=VALUES",
            help="A flag of vllm serve and its values: --max-num-seqs=64,128 or =1..8, =512..8192:log2, =true,false.",
            rich_help_panel=SPACE,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="GPUs; the profile's own unless given.",
            rich_help_panel=SPACE,
            autocompletion=complete_gpu,
        ),
    ] = None,
    replicas: Annotated[
        str, typer.Option(metavar="N,...", help="Servers behind a router: 1,2,4 or 1..8.", rich_help_panel=SPACE)
    ] = "1",
    router: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="round-robin, random, least-requests, least-kv, prefix-aware, session-sticky.",
            rich_help_panel=SPACE,
        ),
    ] = "least-requests",
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GPU=PRICE/h", help="What an hour of a GPU costs. Without: GPUs count.", rich_help_panel=SPACE
        ),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="What the front weighs against cost, else the first target.", rich_help_panel=SPACE
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Closed loop: clients.", rich_help_panel=LOAD)
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(metavar="R", help="Open loop: requests per second.", rich_help_panel=LOAD)
    ] = None,
    burstiness: Burstiness = 1.0,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    range_ratio: RangeRatio = 0.0,
    shapes: Shapes = None,
    sessions: SessionsText = None,
    trace: TraceFile = None,
    trace_format: TraceFormat = None,
    think_time: ThinkTimeText = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Requests of one simulation; else as needed.", rich_help_panel=LOAD),
    ] = None,
    seed: Seed = 0,
    backend: Annotated[
        Backend,
        typer.Option(help="Processes of this machine, or a cluster by its name.", rich_help_panel=WORKERS),
    ] = Backend.LOKY,
    jobs: Annotated[int, typer.Option(metavar="N", help="Processes; -1 for all cores.", rich_help_panel=WORKERS)] = -1,
    scheduler_address: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Of the cluster, such as tcp://10.0.0.1:8786.", rich_help_panel=WORKERS),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep every simulation here; a search that was interrupted goes on from it.",
            rich_help_panel=WORKERS,
        ),
    ] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    flags: dict[str, Any],
) -> None:
    """Find the cheapest configuration that meets an SLO under a load.

    Every combination of the varied flags, GPUs, replicas and routers is a configuration. Those that are bad by far are
    dropped after a few requests. The answer holds with 90 % confidence, the profile's uncertainty included.
    """
    from capsim.optimize_answer import OptimizeAnswer
    from capsim.output import Output
    from capsim.shipped import find_profile
    from simulator.loads.arrivals import parse_think_time
    from simulator.loads.levels import Levels
    from simulator.planning.optimize import Optimizer
    from simulator.planning.search_log import SearchLog
    from simulator.planning.search_space import configurations, parse_counts, parse_prices, parse_vary
    from simulator.planning.targets import join_targets
    from simulator.planning.workers import Workers

    output = Output(as_json, as_csv)
    space = configurations(
        parse_vary(vary or ()), _names(gpu), parse_counts("--replicas", replicas), _names(router) or ("least-requests",)
    )
    levels = Levels(
        concurrency=None if concurrency is None else [concurrency],
        request_rate=None if request_rate is None else [request_rate],
        burstiness=None if trace is not None and burstiness == 1 else burstiness,
        think_time=parsed("--think-time", think_time, parse_think_time),
        seed=seed,
    )
    (load,) = planned_load(
        levels,
        shapes=lambda: request_shapes(input_len, output_len, range_ratio, shapes),
        sessions=sessions,
        trace=trace,
        trace_format=trace_format,
        plain=input_len is None and output_len is None and not range_ratio and shapes is None,
    )
    workers = Workers(backend.value, jobs, scheduler_address)
    server = find_profile(profile)
    prices = parse_prices(price or ())
    given = {name.removeprefix("--").replace("-", "_"): value for name, value in flags.items()}
    try:
        with SearchLog(results) as log, _progress() as tell:
            search = Optimizer(
                server,
                load,
                join_targets(slo),
                given=given,
                prices=prices,
                num_prompts=num_prompts,
                latency=latency,
                workers=workers,
                log=log,
                on_progress=tell,
            )
            found = search.find(space)
    except KeyboardInterrupt:
        if results is None:
            raise
        raise KeyboardInterrupt(f"what was simulated is in {results}; the same command goes on from there") from None
    output.tell(OptimizeAnswer(server, search, found, bool(prices)))


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()] if text else []


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """The time left of each stage of the search."""
    from capsim.progress import status_line

    with status_line("simulating") as tell:
        yield lambda stage, done, of: tell(f"{stage}: {done} of {of}", done / max(1, of))

"""``capsim capacity``: the highest level of load that meets an SLO, what breaks beyond it, and where to stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

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

    from simulator.replications import Trial


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
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    flags: dict[str, Any],
) -> None:
    """Find the most clients, or the highest request rate, that meets an SLO.

    A level counts when the 90 % interval of several simulations meets every target, and not by luck. Says which target
    breaks first and why, and to which level to fall back.
    """
    from capsim.capacity_answer import CapacityAnswer
    from capsim.output import Output, _json
    from capsim.shipped import find_profile
    from simulator.capacity import CapacitySearch
    from simulator.targets import join_targets
    from simulator.vllm_flags import change_flags
    from simulator.workload import ClosedLoop, OpenLoop, Workload

    output = Output(as_json, as_csv)
    slos = [join_targets(slo), *(join_targets([text]) for text in also_slo or ())]
    kinds = tuple(request_shapes(input_len, output_len, range_ratio, shapes))
    arrivals = ClosedLoop(1) if by is By.CLIENTS else OpenLoop(1.0, burstiness)
    server = find_profile(profile)
    engine_flags = change_flags(server.engine_flags, flags, server.kv_bytes_per_token)
    with _progress() as tell:
        search = CapacitySearch(
            Workload(arrivals, kinds, 1, seed),
            engine_flags,
            server.step_time,
            server.host_time,
            whole_runs=whole_runs,
            num_prompts=num_prompts,
            on_trial=tell,
        )
        found = [search.find(targets) for targets in slos]
        curve = search.curve(slos[0])
    answer = CapacityAnswer(server, engine_flags, search, found, curve)
    if output.as_json:
        typer.echo(_json(answer.content()))
    elif output.as_csv:
        import pandas as pd

        typer.echo(pd.DataFrame(answer.rows()).to_csv(index=False), nl=False)
    else:
        answer.show()


@contextmanager
def _progress() -> Iterator[Callable[[Trial], None]]:
    """A line on a terminal that says which level was tried last."""
    from capsim.tables import console

    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _say_nothing
        return
    with screen.status("simulating") as status:
        yield lambda trial: status.update(f"simulating: {trial.load.label} {trial.verdict}")


def _say_nothing(_trial: Trial) -> None:
    """Progress is for terminals."""

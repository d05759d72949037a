"""Options for loads beyond fixed lengths sent by clients or at a rate, and how their texts become levels."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from capsim.options import (
    LEVEL_OPTIONS,
    LOAD,
    Seed,
    integers,
    reals,
    request_shapes,
    with_options,
)

if TYPE_CHECKING:
    from simulator.loads.levels import Levels
    from simulator.loads.sessions import Talk
    from simulator.loads.trace import Trace
    from simulator.loads.workload import Load, Shape

Value = TypeVar("Value")

ThinkTimeText = Annotated[
    str | None,
    typer.Option(
        "--think-time",
        metavar="TIME",
        help="Clients pause between answer and next request: 2s or exponential(2s).",
        rich_help_panel=LOAD,
    ),
]
MaxInFlight = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Open loop or trace: most requests in flight; others wait at the client.",
        rich_help_panel=LOAD,
    ),
]
RateCurveText = Annotated[
    str | None,
    typer.Option(
        "--rate-curve",
        metavar="CURVE",
        help="Multiply the rate over time: ramp(0.1-1,10min), bursts(5s,20s), daily(3h:0.1,12h:1).",
        rich_help_panel=LOAD,
    ),
]
DurationText = Annotated[
    str | None,
    typer.Option(
        "--duration",
        metavar="TIME",
        help="Open loop or trace: requests arrive for 10min, instead of --num-prompts.",
        rich_help_panel=LOAD,
    ),
]
SessionsText = Annotated[
    str | None,
    typer.Option(
        "--sessions",
        metavar="turns=N,user=N,output=N,...",
        help="Chats that grow turn by turn, with system=N and max-context=N; clients are users.",
        rich_help_panel=LOAD,
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Recorded requests: Azure, BurstGPT, Mooncake, a saved run, ...", rich_help_panel=LOAD
    ),
]
TraceFormat = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The trace's format, where the file does not tell.", rich_help_panel=LOAD),
]
Speed = Annotated[
    float | None,
    typer.Option(metavar="X", help="Play the trace X times as fast as recorded.", rich_help_panel=LOAD),
]

NumPrompts = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Requests of each level; 1000, or a whole trace.", rich_help_panel=LOAD),
]

# with their defaults, for `with_load`
LOAD_OPTIONS: dict[str, tuple[Any, Any]] = {
    **LEVEL_OPTIONS,
    "sessions": (SessionsText, None),
    "trace": (TraceFile, None),
    "trace_format": (TraceFormat, None),
    "speed": (Speed, None),
    "think_time": (ThinkTimeText, None),
    "rate_curve": (RateCurveText, None),
    "max_in_flight": (MaxInFlight, None),
    "num_prompts": (NumPrompts, None),
    "duration": (DurationText, None),
    "seed": (Seed, 0),
}

# what an error of `simulator.loads.levels` names, as it is typed
_TYPED = {
    "concurrency": "--concurrency",
    "request_rate": "--request-rate",
    "requests_per_client": "--requests-per-client",
    "num_prompts": "--num-prompts",
    "think_time": "--think-time",
    "sessions": "--sessions",
    "rate_curve": "--rate-curve",
    "max_concurrency": "--max-in-flight",
    "duration": "--duration",
    "speed": "--speed",
    "a trace": "--trace",
}


def with_load(default: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a load; its parameter `loads` gets the levels, those of `default` clients where no
    other are stated."""
    return lambda command: with_options(command, "loads", LOAD_OPTIONS, lambda values: _stated_loads(values, default))


def _stated_loads(values: Mapping[str, Any], default: str) -> list[Load]:
    """The levels that the values of `LOAD_OPTIONS` state."""
    from simulator.loads.arrivals import parse_curve, parse_seconds, parse_think_time
    from simulator.loads.levels import Levels

    clients, rates, trace = values["concurrency"], values["request_rate"], values["trace"]
    if clients is None and rates is None and trace is None:
        clients = default
    burstiness, range_ratio, shapes = values["burstiness"], values["range_ratio"], values["shapes"]
    input_len, output_len = values["input_len"], values["output_len"]
    levels = Levels(
        concurrency=None if clients is None else integers("--concurrency", clients),
        request_rate=None if rates is None else reals("--request-rate", rates),
        burstiness=None if trace is not None and burstiness == 1 else burstiness,  # a trace keeps its pattern
        think_time=parsed("--think-time", values["think_time"], parse_think_time),
        max_concurrency=values["max_in_flight"],
        rate_curve=parsed("--rate-curve", values["rate_curve"], parse_curve),
        num_prompts=values["num_prompts"],
        duration=parsed("--duration", values["duration"], parse_seconds),
        speed=values["speed"],
        seed=values["seed"],
    )
    return planned_load(
        levels,
        shapes=lambda: request_shapes(input_len, output_len, range_ratio, shapes),
        sessions=values["sessions"],
        trace=trace,
        trace_format=values["trace_format"],
        plain=input_len is None and output_len is None and not range_ratio and shapes is None,
    )


def parsed(option: str, text: str | None, parse: Callable[[str], Value]) -> Value | None:
    """An option's value; what `parse` refuses is told with the option's name."""
    try:
        return None if text is None else parse(text)
    except ValueError as problem:
        raise typer.BadParameter(str(problem), param_hint=option) from None


def planned_load(
    levels: Levels,
    *,
    shapes: Callable[[], Sequence[Shape]],
    sessions: str | None,
    trace: Path | None,
    trace_format: str | None,
    plain: bool,
) -> list[Load]:
    """The levels of a load whose requests are told by at most one of `--sessions`, `--trace` and lengths.

    `shapes` makes those of the options for lengths; `plain` is whether none of these was given.
    """
    from simulator.loads.levels import LoadError, plan_load
    from simulator.loads.sessions import parse_talk
    from simulator.loads.trace_files import read_trace

    if (not plain) + (sessions is not None) + (trace is not None) > 1:
        raise typer.BadParameter("give either lengths, or --sessions, or --trace", param_hint="the load")
    if trace_format is not None and trace is None:
        raise typer.BadParameter("goes with --trace", param_hint="--trace-format")
    requests: Sequence[Shape] | Talk | Trace | None = parsed("--sessions", sessions, parse_talk)
    if trace is not None:
        requests = read_trace(trace, trace_format)
    requests = shapes() if requests is None else requests
    try:
        levels.check(requests)
    except LoadError as problem:
        raise LoadError(_as_typed(str(problem))) from None
    return plan_load(requests, levels)


def _as_typed(message: str) -> str:
    """A message with the options in place of the keys of a scenario."""
    return re.sub(rf"\b({'|'.join(_TYPED)})\b", lambda found: _TYPED[found[1]], message)

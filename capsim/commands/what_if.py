"""``capsim what-if``: the measured server beside the same one with other flags or on another GPU, under one load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsim.completion import complete_model
from capsim.load_options import with_load
from capsim.options import (
    OUTPUT,
    SERVER,
    AsCsv,
    AsJson,
    Intervals,
    ProfileName,
    Targets,
)
from capsim.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulator.flags.serve_line import ServeLine
    from simulator.loads.workload import Load
    from simulator.planning.alternative import Alternative, MeasuredMemory
    from simulator.planning.what_if import Comparison
    from simulator.profile import Profile

LEVELS = "8,32,128"  # clients
MOST_BYTES = 1 << 20  # of a file of alternatives


@with_load(LEVELS)
def what_if(
    profile: ProfileName,
    *,
    alt: Annotated[
        list[str] | None,
        typer.Option(
            "--alt",
            metavar="FLAGS",
            help="Flags that differ, or a whole 'vllm serve ...' line; --gpu NAME, --replicas N and --router NAME too. "
            "name=LABEL in front names it. Repeat as you like.",
        ),
    ] = None,
    alt_file: Annotated[
        Path | None, typer.Option("--alt-file", metavar="FILE", help="A file with one alternative a line.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="FLAGS", help="What to compare with; the measured server unless given."),
    ] = None,
    server_log: Annotated[
        Path | None,
        typer.Option(
            "--server-log",
            metavar="FILE",
            help="What the measured server printed: it tells its memory.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    measured_utilization: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=0.01,
            max=1.0,
            help="--gpu-memory-utilization of the measured server; vLLM's default unless given.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Its architecture: a known model or the path of a config.json.",
            rich_help_panel=SERVER,
            autocompletion=complete_model,
        ),
    ] = None,
    slo: Targets = None,
    intervals: Intervals = True,
    figure: Annotated[
        Path | None,
        typer.Option("--figure", metavar="FILE", help="Draw it: a .png, .svg or .pdf.", rich_help_panel=OUTPUT),
    ] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    loads: list[Any],
) -> None:
    """Compare other flags, or another GPU, with the measured server under the same load, and say why."""
    from capsim.output import Output
    from capsim.shipped import find_profile
    from capsim.what_if_answer import WhatIfAnswer
    from simulator.planning.alternative import BASELINE, Alternative
    from simulator.planning.targets import parse_targets

    output = Output(as_json, as_csv, targets=parse_targets(slo) if slo else {})
    _check_figure(figure)
    lines = _lines(alt or [], alt_file)
    server = find_profile(profile)
    memory = _measured_memory(server, server_log, measured_utilization, model)
    beside = Alternative(BASELINE, server)
    if baseline is not None:
        beside = _each(server, _lines([baseline], None, "--baseline"), memory)[0]
    others = _each(server, lines, memory)
    found = _compared(beside, others, loads, intervals)
    answer = WhatIfAnswer(server.name, beside, others, found, output.targets)
    if figure is not None:
        from capsim.figures.what_if import draw_what_if

        draw_what_if(answer, figure)
    output.tell(answer)
    if figure is not None:
        echo(f"drawn in {figure}", err=True)


def _lines(texts: list[str], file: Path | None, option: str = "--alt") -> list[tuple[str, ServeLine]]:
    """The alternatives, each with the words that an error about it begins with."""
    from simulator.engine.engine_flags import FlagError
    from simulator.flags.serve_line import ServeLineError, read_line, read_lines

    found = []
    for text in texts:
        try:
            line = read_line(text)
        except FlagError as problem:
            raise ServeLineError(f"{option}: {problem}") from None
        found.append((f"{option} {line.label}", line))
    if file is not None:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ServeLineError(f"{file}: larger than {MOST_BYTES >> 20} MiB; such a file is not read")
        try:
            lines = read_lines(content.decode("utf-8", "replace"))
            found += [(f"{file}, {line.label}", line) for line in lines]
        except FlagError as problem:
            raise ServeLineError(f"{file}, {problem}") from None
    if not found:
        raise typer.BadParameter(
            f"{file} has none" if file else "give at least one, such as --alt '--max-num-seqs 256'", param_hint="--alt"
        )
    return found


def _each(server: Profile, lines: Sequence[tuple[str, ServeLine]], memory: MeasuredMemory) -> list[Alternative]:
    """The servers that the lines start."""
    from capsim.errors import CommandError, user_message
    from simulator.planning.alternative import alternative

    found = []
    for label, line in lines:
        try:
            found.append(alternative(server, line, memory))
        except ValueError as problem:
            message = user_message(problem)
            if message is None:
                raise
            raise CommandError(f"{label}: {message}") from None
    return found


def _measured_memory(server: Profile, log: Path | None, utilization: float | None, model: str | None) -> MeasuredMemory:
    """What is known of the measured server's memory."""
    from capsim.errors import CommandError
    from simulator.hardware.model_config import find_model
    from simulator.planning.alternative import MeasuredMemory

    architecture = find_model(model) if model else None
    if log is None:
        return MeasuredMemory(utilization, None, architecture)
    from calibration.server_log import read_server_log
    from calibration.server_memory import server_memory

    told = server_memory(read_server_log(log), architecture)
    logged, measured = told.account.kv_cache // told.layout.block_bytes * told.flags.block_size, server.engine_flags
    if abs(logged - measured.kv_tokens) > measured.block_size:
        raise CommandError(
            f"{log} tells of a KV pool of {logged:,} tokens and the profile of {measured.kv_tokens:,}: give the log of "
            "the server that was measured"
        )
    return MeasuredMemory(told.account.utilization or utilization, told.account, told.model)


def _compared(
    beside: Alternative, others: Sequence[Alternative], loads: Sequence[Load], intervals: bool
) -> list[Comparison]:
    """The comparison, with the time left."""
    from capsim.progress import level_of, status_line
    from simulator.planning.what_if import what_if as compare

    with status_line("simulating") as tell:
        return compare(beside, others, loads, intervals, lambda done: tell(*level_of(done, len(loads))))


def _check_figure(figure: Path | None) -> None:
    if figure is not None and figure.suffix not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"{figure} must end in .png, .svg or .pdf", param_hint="--figure")

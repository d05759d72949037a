"""``capsim explain``: where the latency of a load comes from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsim.completion import complete_profile, complete_scenario
from capsim.options import OUTPUT, AsCsv, AsJson, with_engine_flags
from capsim.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Callable

    from capsim.explain_answer import ExplainedLevel
    from capsim.replay import Replay


@with_engine_flags
def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="RUN|SCENARIO",
            help="Folder of a saved run, a scenario's file or a shipped name.",
            autocompletion=complete_scenario,
        ),
    ],
    *,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Profile to play a run with; a measured run needs one.",
            autocompletion=complete_profile,
        ),
    ] = None,
    level: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Only this level, by its name in the tables, such as C=16; for a search, any level."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write steps and requests for ui.perfetto.dev, of the last level.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png|.svg", help="Draw both gauges over time, of the last level.", rich_help_panel=OUTPUT
        ),
    ] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    flags: dict[str, Any],
) -> None:
    """Explain where latency comes from: of TTFT, of the gaps between tokens, of their tail.

    Plays each level again, step by step. The parts of a request's time add up to the whole. A measured run is played
    with --profile, and says how near that comes.
    """
    from capsim.errors import CommandError
    from capsim.explain_answer import ExplainAnswer, ExplainedLevel
    from capsim.output import Output
    from capsim.replay import replay_of
    from simulator.engine.fleet import Fleet
    from simulator.engine.saturation import held_rate
    from simulator.steps.explanation import explain as divide
    from simulator.steps.step_log import observe_level

    output = Output(as_json, as_csv)
    if figure is not None and figure.suffix not in (".png", ".svg"):
        raise CommandError(f"{figure}: a figure is a .png or an .svg")
    replay = replay_of(what, profile, flags, level)
    done: list[ExplainedLevel] = []
    with _progress() as tell:
        for place in replay.places(level):
            tell(replay, place)
            server = replay.flags, replay.step_time, replay.host_time
            observed = observe_level(replay.loads[place], *server)
            observed.level.held_rate = held_rate(replay.loads[place], *server, Fleet())
            found, measured = divide(observed), replay.measured(place)
            if done:
                done[-1] = done[-1].without_log()  # files are of the last level; the others' logs are large
            label, notes = replay.labels[place], replay.notes[place]
            done.append(ExplainedLevel(label, observed.level, found, observed, measured, notes))
    answer = ExplainAnswer(replay, done)
    for path, write in ((trace, answer.write_trace), (figure, answer.write_figure)):
        if path is not None:
            write(path)
    output.tell(answer)
    for path in (trace, figure):
        if path is not None:
            echo(f"{done[-1].label} is in {path}", err=True)


@contextmanager
def _progress() -> Iterator[Callable[[Replay, int], None]]:
    """Which level is being played, and the time left."""
    from capsim.progress import status_line

    with status_line("simulating") as tell:
        yield lambda replay, place: tell(f"simulating {replay.labels[place]}", place / len(replay.loads))

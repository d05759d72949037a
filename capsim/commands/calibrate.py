"""``capsim calibrate``: measure a live server and fit a profile to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capsim.measuring_options import LoadOptions, ServerOptions, with_load, with_server
from capsim.options import LOAD, OUTPUT, SERVER, AsCsv, AsJson, Resume, integers, seconds_of

if TYPE_CHECKING:
    from calibration.server_flags import ServerFlags
    from simulator.loads.workload import Workload
    from simulator.results.run import Run

NO_TIME = "The budget left no time for a level that judges the fit: give more of it, or --hold-out 0."


@with_server
@with_load
def calibrate(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The profile to write, such as profile.yaml.")
    ],
    *,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="The server's address, such as http://localhost:8000.", rich_help_panel=SERVER
        ),
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="A run measured before, or result files of another tool, instead of a server.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the profile, else its file's.", rich_help_panel=OUTPUT)
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the raw run, else FILE-run.", rich_help_panel=OUTPUT),
    ] = None,
    resume: Resume = False,
    time_budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Measure for so long, 5m or 300s: each next level is the one that tells most.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    hold_out: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Levels kept out of the fit; 0 for none.", rich_help_panel=LOAD),
    ] = None,
    no_repeat: Annotated[
        bool,
        typer.Option(
            "--no-repeat", help="Do not measure a level again at last, to know the noise.", rich_help_panel=LOAD
        ),
    ] = False,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    load: LoadOptions,
    server: ServerOptions,
) -> None:
    """Measure a live server for a few minutes, fit its step times and write a profile.

    Takes model, KV pool and version from the server. Give --max-num-seqs and --max-num-batched-tokens as the server was
    started with; without them vLLM's defaults are assumed, and the profile says so. Without --concurrency and
    --request-rate: 1, 2, 4, 8 and 16 clients.
    """
    from calibration.fit import fit_profile
    from capsim.calibration_answer import CalibrationAnswer
    from capsim.measuring import from_files
    from capsim.output import Output
    from capsim.progress import status_line

    answer = Output(as_json, as_csv)
    if output.is_dir() or not output.parent.is_dir():
        raise typer.BadParameter(f"{output} cannot be written: it is a folder, or is in none", param_hint="--output")
    if (endpoint is None) == (not measured):
        raise typer.BadParameter("give either a server or what was measured", param_hint="--endpoint or --from")
    if measured:
        run, known = from_files(measured, server.flags, server.server_log)
        kept_out = _kept_out([level.workload.concurrency or 1 for level in run.levels], hold_out)
    else:
        folder = run_dir or output.with_name(f"{output.stem}-run")
        levels = load.levels()
        kept_out = _kept_out([level.concurrency for level in levels if level.concurrency], hold_out)
        if time_budget is None:
            run, known = _measure(endpoint or "", server, load, not no_repeat, folder, resume)
        else:
            chosen = _choosing(load, levels, kept_out, not no_repeat, seconds_of("--time-budget", time_budget))
            run, known = _measure_within(chosen, endpoint or "", server, folder, resume)
    with status_line("fitting the step times"):
        profile = fit_profile(run, known.flags, hold_out=kept_out, name=name or output.stem)
    told = {"assumed": [*profile.assumed, *known.assumed, *known.inferred]}
    profile = profile.model_copy(update=told)
    profile.save(output)
    unjudged = time_budget is not None and kept_out and not profile.hold_out
    remarks = [NO_TIME] if unjudged else []
    answer.tell(CalibrationAnswer(profile, output, None if measured else folder, known.contradictions, remarks))


def _measure(
    url: str, options: ServerOptions, load: LoadOptions, repeat: bool, folder: Path, resume: bool
) -> tuple[Run, ServerFlags]:
    """The planned levels; the run, and all that is known of the server's flags afterwards."""
    from capsim.measuring import ask_server, measure, plan

    server = ask_server(url, options)
    run = measure(server, plan(server, load, probes=True, repeat=repeat), folder, resume=resume)
    return run, server.flags(run)


@dataclass(frozen=True)
class _Choosing:
    """Levels to choose from within `budget` seconds, without those with as many clients as `kept_out` says."""

    levels: Sequence[Workload]
    kept_out: Sequence[int]
    repeat: bool
    budget: float


def _choosing(
    load: LoadOptions, levels: Sequence[Workload], kept_out: Sequence[int], repeat: bool, budget: float
) -> _Choosing:
    from capsim.errors import CommandError

    if load.request_rate is not None or not load.is_paced:
        raise CommandError("--time-budget chooses the requests itself: give --concurrency alone, to choose among")
    return _Choosing(levels, kept_out, repeat, budget)


def _measure_within(
    chosen: _Choosing, url: str, options: ServerOptions, folder: Path, resume: bool
) -> tuple[Run, ServerFlags]:
    """Levels that are chosen one after the other."""
    from calibration.next_level import LevelChooser, candidate_levels, hold_out_levels, start_plan
    from capsim.measuring import ask_server, measure

    server = ask_server(url, options)
    longest = server.endpoint.max_model_len
    chooser = LevelChooser(
        server.flags().flags,
        chosen.budget,
        candidate_levels(chosen.levels, longest, chosen.kept_out),
        hold_out_levels(chosen.levels, chosen.kept_out),
        chosen.repeat,
    )
    start = start_plan([level for level in chosen.levels if level.concurrency not in chosen.kept_out], longest)
    run = measure(server, start, folder, resume=resume, choose=chooser, budget=chosen.budget)
    return run, server.flags(run)


def _kept_out(clients: list[int], hold_out: str | None) -> tuple[int, ...]:
    """Levels that judge the fit: those asked for, else the middle one of three or more."""
    if hold_out is None:
        levels = sorted(set(clients))
        return (levels[len(levels) // 2],) if len(levels) >= 3 else ()
    chosen = tuple(number for number in integers("--hold-out", hold_out) if number)
    if strangers := [number for number in chosen if number not in clients]:
        raise typer.BadParameter(f"{strangers[0]} is not among --concurrency", param_hint="--hold-out")
    return chosen

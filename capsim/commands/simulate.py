"""``capsim simulate``: answer the question of a scenario."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsim.completion import complete_scenario
from capsim.options import AsCsv, AsJson, Intervals, Overwrite, SaveDir, with_engine_flags
from capsim.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from capsim.capacities_answer import CapacitiesAnswer
    from capsim.capacity_answer import CapacityAnswer
    from capsim.output import Output
    from capsim.progress import Tell
    from capsim.what_if_answer import WhatIfAnswer
    from simulator.planning.alternative import Alternative
    from simulator.planning.replications import Trial
    from simulator.scenario import Scenario


@with_engine_flags
def simulate(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="SCENARIO",
            autocompletion=complete_scenario,
            help="A scenario's file, or the name of a shipped one; without: their list.",
        ),
    ] = None,
    *,
    intervals: Intervals = True,
    save: SaveDir = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    flags: dict[str, Any],
) -> None:
    """Simulate a scenario: a load on the server of a profile. Engine flags given here win over the scenario's.

    A scenario with alternatives is answered as by what-if, one that searches for a capacity as by capacity.
    """
    from capsim.errors import CommandError
    from capsim.output import Output
    from capsim.shipped import PROFILES, find_scenario

    if name is None:
        _list(Output(as_json, as_csv))
        return
    scenario = find_scenario(name)
    output = Output(as_json, as_csv, save, overwrite, scenario.slo)
    servers = scenario.servers(scenario.load_profile(PROFILES), flags)
    searches, compares = scenario.load.capacity is not None, len(servers) > 1
    if save is not None and (searches or compares):
        raise CommandError("--save keeps one run, and this scenario compares or searches; keep its --json")
    if not (searches or compares):
        _show_curve(scenario, servers[0], output, intervals)
        return
    answer = _capacity(scenario, servers) if searches else _comparison(scenario, servers, intervals)
    if not (as_json or as_csv):
        echo(f"{scenario.name}: {scenario.description}\n" if scenario.description else f"{scenario.name}\n")
    output.tell(answer)


def _list(output: Output) -> None:
    """The shipped scenarios, and what each is about."""
    from capsim.output import csv_text, json_text
    from capsim.shipped import SCENARIOS
    from capsim.tables import console, plain_table
    from simulator.scenario import Scenario

    found = [Scenario.read(path) for path in sorted(SCENARIOS.glob("*.yaml"))]
    rows = [{"name": scenario.name, "description": scenario.description} for scenario in found]
    if output.as_json:
        echo(json_text(rows))
    elif output.as_csv:
        import pandas as pd

        echo(csv_text(pd.DataFrame(rows)), nl=False)
    else:
        table = plain_table("Scenarios")
        table.add_column("name", no_wrap=True)
        table.add_column("what it is about")
        for row in rows:
            table.add_row(row["name"], row["description"])
        console().print(table)
        echo(f"\ncapsim simulate NAME runs one; the head of its file in {SCENARIOS} explains it.")


def _show_curve(scenario: Scenario, server: Alternative, output: Output, intervals: bool) -> None:
    from capsim.output import show_run
    from capsim.progress import predict_with_progress

    run = predict_with_progress(server.profile, scenario.workloads(), server.flags, intervals, server.fleet)
    show_run(scenario.name, run, output)
    for sentence in [f"assumed: {text}" for text in server.assumed] + list(server.notes):
        echo(f"Note: {sentence}", err=True)


def _comparison(scenario: Scenario, servers: Sequence[Alternative], intervals: bool) -> WhatIfAnswer:
    from capsim.progress import level_of, status_line
    from capsim.what_if_answer import WhatIfAnswer
    from simulator.planning.what_if import what_if

    loads = scenario.workloads()
    with status_line("simulating") as tell:
        found = what_if(servers[0], servers[1:], loads, intervals, lambda done: tell(*level_of(done, len(loads))))
    return WhatIfAnswer(servers[0].profile.name, servers[0], servers[1:], found, scenario.slo)


def _capacity(scenario: Scenario, servers: Sequence[Alternative]) -> CapacityAnswer | CapacitiesAnswer:
    from capsim.capacities_answer import CapacitiesAnswer
    from capsim.capacity_answer import CapacityAnswer, met_in_draws
    from capsim.progress import status_line
    from simulator.planning.capacity import CapacitySearch

    load, answers = scenario.searched_load(), []
    with status_line("simulating") as tell:
        for place, server in enumerate(servers):
            share = place / len(servers)
            search = CapacitySearch(
                load,
                server.flags,
                server.profile.step_time,
                server.profile.host_time,
                num_prompts=scenario.load.num_prompts,
                on_trial=_teller(tell, server.name, share),
            )
            found = search.find(scenario.slo)
            curve = search.curve(scenario.slo) if len(servers) == 1 else []
            met = met_in_draws(search, found, server.profile) if len(servers) == 1 else []
            answers.append(CapacityAnswer(server.profile, server.flags, search, [found], curve, met))
    return answers[0] if len(answers) == 1 else CapacitiesAnswer(servers, answers)


def _teller(tell: Tell, name: str, share: float) -> Callable[[Trial], None]:
    """A listener for the search of one server, before which a share of all searches is done."""
    return lambda trial: tell(f"{name}: {trial.load.label} {trial.verdict}", share)

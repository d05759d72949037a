"""``capsim simulate``: answer the question of a scenario."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from capsim.options import AsCsv, AsJson, Intervals, Overwrite, SaveDir, with_engine_flags


@with_engine_flags
def simulate(
    name: Annotated[str, typer.Argument(metavar="SCENARIO", help="A scenario's file, or the name of a shipped one.")],
    *,
    intervals: Intervals = True,
    save: SaveDir = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    flags: dict[str, Any],
) -> None:
    """Simulate a scenario: a load on the server of a profile. Engine flags given here win over the scenario's."""
    from capsim.output import Output, show_run
    from capsim.progress import predict_with_progress
    from capsim.shipped import PROFILES, find_scenario
    from simulator.vllm_flags import change_flags

    scenario = find_scenario(name)
    output = Output(as_json, as_csv, save, overwrite, scenario.slo)
    profile = scenario.load_profile(PROFILES)
    engine_flags = change_flags(scenario.flags(profile), flags, profile.kv_bytes_per_token)
    show_run(scenario.name, predict_with_progress(profile, scenario.workloads(), engine_flags, intervals), output)

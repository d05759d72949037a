"""``capsim validate``: a measured run beside its prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from capsim.options import AsCsv, AsJson, ProfileName, with_engine_flags


@with_engine_flags
def validate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a measured run.")],
    *,
    profile: ProfileName,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    flags: dict[str, Any],
) -> None:
    """Predict what was measured and print both, metric by metric, with signed errors.

    Flags that the run states of its server win over the profile's, and those given here over both.
    """
    from calibration.validate import flags_of
    from calibration.validate import validate as compare_with_prediction
    from capsim.output import Output, show_validation
    from capsim.shipped import find_profile
    from simulator.run_files import load_run
    from simulator.vllm_flags import change_flags

    output = Output(as_json, as_csv)
    server = find_profile(profile)
    measured = load_run(run)
    engine_flags = change_flags(flags_of(measured, server.engine_flags), flags, server.kv_bytes_per_token)
    show_validation(compare_with_prediction(measured, server, engine_flags), output)

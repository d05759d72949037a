"""A saved run, a profile and a scenario with hostile words in every text that a server or a file can name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from simulator.loads.levels import parse_shapes, plan_levels
from simulator.prediction import predict
from simulator.profile import Profile
from simulator.results.run_files import load_run, save_run

PAGE = "</title></style></textarea></svg>]]>--></script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
TERMINAL = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\u2066\u200f\r\x7f"  # NUL, which YAML text cannot hold, is tested alone
SIGNS = "{{7*7}} ${1} `id` [red]r[/red] [x](javascript:alert(3)) | ~~s~~ *b* _i_ &lt; \\ :smile:"
HOSTILE = f"=cmd|' /C calc'!A0 {PAGE} {SIGNS} {TERMINAL}"
SEEN = HOSTILE.encode("unicode_escape").decode().replace("\\\\", "\\")  # every sign of it, visible
FILE_NAME = "<img src=x onerror=alert(4)>[red]&amp;\x1b[31m"


def hostile(value: Any) -> Any:
    """A JSON value with hostile words in place of its texts."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, dict):
        return {name: hostile(one) for name, one in value.items()}
    return [hostile(one) for one in value] if isinstance(value, list) else value


def write_hostile(folder: Path, profile: Profile) -> tuple[Path, Path]:
    """Write a run and a profile to `folder`; returns their paths, whose names are hostile as well."""
    loads = plan_levels(parse_shapes("64/16"), concurrency=[1, 2], num_prompts=12)
    run_folder, profile_file = folder / FILE_NAME, folder / f"{FILE_NAME}.yaml"
    save_run(predict(profile, loads, profile.engine_flags), run_folder)
    content = json.loads((run_folder / "run.json").read_text())
    kept = {name: content["server"][name] for name in ("scheduling_policy",) if name in content["server"]}
    more = dict.fromkeys(("gpu", "engine", "system_fingerprint", "source_version", "url", "dtype"), "x")
    content["server"] = hostile(content["server"] | more) | kept
    content |= {"source": "measured", "started_at": HOSTILE}
    (run_folder / "run.json").write_text(json.dumps(content))
    for place in (run_folder / "levels").iterdir():
        level = json.loads((place / "level.json").read_text())
        (place / "level.json").write_text(json.dumps(level | {"notes": [HOSTILE, f"+{HOSTILE}"]}))
        table = pd.read_csv(place / "requests.csv", dtype=str, keep_default_na=False)
        table["finish_reason"] = "=stop()<b>"
        table.loc[0, "error"] = "=oops()<script>alert(5)</script>"
        table.to_csv(place / "requests.csv", index=False)
    assert load_run(run_folder).server["model"] == HOSTILE
    stated = yaml.safe_load(profile.to_yaml())
    stated |= {"name": HOSTILE, "model": HOSTILE, "gpu": HOSTILE, "assumed": [HOSTILE]}
    stated["provenance"] = hostile(stated["provenance"])
    for level in stated.get("hold_out", []):
        level["level"] = HOSTILE
    profile_file.write_text(yaml.safe_dump(stated))
    return run_folder, profile_file

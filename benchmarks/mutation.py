"""How many mutants of the scheduler, the KV cache and the step time the tests notice.

    pip install -e ".[test]" mutmut==3.8.1
    python -m benchmarks.mutation [--folder FOLDER] [--children N]

A mutant is the program with one operator, number, name, argument, branch or text of one method changed. mutmut makes
them all in a copy of the repository and runs, for each, those of the tests below that reach the method, the quickest
first, until one fails. It leaves alone the bodies of properties and what stands outside of methods. A mutant that runs
many times as long as its tests should is dead too: its loop does not end.

With --folder the copy stays there: the same command goes on where it was stopped, and `mutmut results` and
`mutmut show NAME` in that folder show the survivors.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MUTMUT = (sys.executable, "-c", "from mutmut.__main__ import cli; cli()")

MODULES = ("scheduler", "kv_cache", "step_time")
TESTS = (
    *("scheduler", "preemption", "async_scheduling", "prefix_caching", "kv_cache", "step_time"),
    *("engine_rules", "conformance"),
)

CONFIG = f"""
[tool.mutmut]
source_paths = ["simulator"]
only_mutate = {[f"simulator/engine/{module}.py" for module in MODULES]}
pytest_add_cli_args_test_selection = {[f"tests/simulator/test_{name}.py" for name in TESTS]}
timeout_multiplier = 5.0
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutation", description="Do the tests notice mutants?")
    parser.add_argument("--folder", type=Path, help="where the mutants are kept; a temporary folder unless given")
    parser.add_argument("--children", type=int, default=1, help="mutants that are tested at a time")
    arguments = parser.parse_args()
    if arguments.folder:
        report(results(arguments.folder, arguments.children))
        return
    with tempfile.TemporaryDirectory() as folder:
        report(results(Path(folder), arguments.children))


def results(folder: Path, children: int) -> list[tuple[str, str]]:
    """Each mutant's name and what became of it: killed, timeout, survived, ..."""
    for part in ("simulator", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + CONFIG)
    environment = os.environ | {"CI": "1", "PYTHONHASHSEED": "0"}  # Hypothesis takes the same examples every time
    subprocess.run([*MUTMUT, "run", "--max-children", str(children)], cwd=folder, env=environment, check=True)
    told = subprocess.run(
        [*MUTMUT, "results", "--all", "true"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    return [tuple(line.strip().split(": ")) for line in told.splitlines()]  # type: ignore[misc]


def report(results: list[tuple[str, str]]) -> None:
    print(f"\n{'module':12}{'mutants':>9}{'killed':>9}{'timeout':>9}{'survived':>9}{'dead':>9}")
    for module in MODULES:
        fates = Counter(fate for name, fate in results if name.startswith(f"simulator.engine.{module}."))
        dead = (fates["killed"] + fates["timeout"]) / fates.total()
        counts = (fates.total(), fates["killed"], fates["timeout"], fates.total() - fates["killed"] - fates["timeout"])
        print(f"{module:12}" + "".join(f"{count:9}" for count in counts) + f"{dead:9.1%}")
    for name, fate in results:
        if fate not in ("killed", "timeout"):
            print(f"{fate}: {name}")


if __name__ == "__main__":
    main()

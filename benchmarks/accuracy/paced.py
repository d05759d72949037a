"""A real vLLM with exactly known step times: calibrate on a few levels, predict what the calibration never saw.

    python -m benchmarks.accuracy.paced --venv .vllm --folder measured
    python -m benchmarks.accuracy.paced --folder measured --reuse

`tests/live/install_vllm.sh .vllm` installs vLLM for CPU. The server is the whole vLLM, its executor takes the time that
a formula gives (`tests/live/paced_executor.py`). Each formula of `benchmarks.accuracy.formulas` is calibrated once on
1, 4 and 8 clients; other levels, lengths, arrivals and flags (`benchmarks.accuracy.cases`) are predictions. Measuring
takes about an hour; as root it runs ahead of all other processes. Runs stay in the folder, so that `--reuse` fits and
judges them again in seconds:

    FOLDER/FORMULA/calibration          the run that is fitted
    FOLDER/FORMULA/profile.yaml         what came of it
    FOLDER/FORMULA/FLAGS/run            the cases of one server start, repeats in turn
    FOLDER/FORMULA/FLAGS/steps-*.csv    the truth of every step of that start
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

from benchmarks.accuracy.cases import CALIBRATED, SECONDS, Case, ServerStart, cases
from benchmarks.accuracy.formulas import FORMULAS, Formula
from benchmarks.accuracy.outcome import judge_formula, markdown, report
from calibration.endpoint import discover
from calibration.sweep import run_sweep
from calibration.sweep_plan import SweepPlan
from simulator.loads.workload import ClosedLoop, Workload
from simulator.profile import Profile
from tests.live.server import Server, ahead_of_others, paced_server

FITTED = "1,4,8"


def measure(formula: Formula, chosen: Sequence[Case], repeats: int, venv: Path, folder: Path) -> None:
    """Measure the calibration and the cases, server by server. A run that is there already is kept."""
    for start in dict.fromkeys([CALIBRATED, *(case.start for case in chosen)]):
        loads = [case.load for case in chosen if case.start == start] * repeats
        with ahead_of_others():
            measure_start(formula, start, loads, venv, folder)


def measure_start(formula: Formula, start: ServerStart, loads: Sequence[Workload], venv: Path, folder: Path) -> None:
    """Measure on one server what is not there yet: `loads`, and on `CALIBRATED` the calibration before them."""
    place, calibration = folder / str(start), folder / "calibration"
    calibrates = start == CALIBRATED and not calibration.exists()
    sweeps = bool(loads) and not (place / "run").exists()
    if not calibrates and not sweeps:
        return
    place.mkdir(parents=True, exist_ok=True)
    with paced_server(
        venv,
        *start.flags,
        "--no-enable-prefix-caching",
        step=formula.step,
        asynchronous=formula.asynchronous,
        kv_tokens=start.kv_tokens,
        log_dir=place,
    ) as server:
        if calibrates:
            began = monotonic()
            calibrate(formula, folder, "--endpoint", server.url, "--run-dir", str(calibration))
            print(f"{formula.name}: calibrated in {monotonic() - began:.0f} s", flush=True)
        if sweeps:
            sweep(server, start, loads, place / "run")


def sweep(server: Server, start: ServerStart, loads: Sequence[Workload], folder: Path) -> None:
    """Measure `loads`, one after the other, once the server is warm."""
    endpoint = discover(server.url)
    stated = replace(endpoint, max_num_seqs=start.max_num_seqs, max_num_batched_tokens=start.max_num_batched_tokens)
    crowd = max(load.concurrency or 1 for load in loads)
    warm_up = Workload(ClosedLoop(crowd), loads[0].shapes, crowd)
    run_sweep(stated, SweepPlan(tuple(loads), (warm_up,)), folder)


def calibrate(formula: Formula, folder: Path, *source: str) -> Profile:
    """Run ``capsim calibrate`` as a user would, on a server or on the run that is kept."""
    profile = folder / "profile.yaml"
    levels = ("--concurrency", FITTED) if "--endpoint" in source else ()
    flags = (*CALIBRATED.flags, *(() if formula.asynchronous else ("--no-async-scheduling",)))
    capsim("calibrate", *source, "-o", str(profile), *levels, "--hold-out", "0", *flags)
    return Profile.load(profile)


def capsim(*arguments: str) -> None:
    """Run a command of capsim as a user would; its last words are in the error if it fails."""
    command = [sys.executable, "-m", "capsim", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        raise RuntimeError(f"capsim {arguments[0]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".vllm"))
    parser.add_argument("--formula", nargs="+", choices=FORMULAS, default=list(FORMULAS), metavar="NAME")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="of benchmarks.accuracy.cases, else the formula's")
    parser.add_argument("--repeats", type=int, metavar="N", help="of each case, else the formula's")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that a level lasts, about")
    parser.add_argument("--folder", type=Path, help="keep the measured runs here")
    parser.add_argument("--reuse", action="store_true", help="measure nothing: fit and judge what the folder holds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.reuse and given.folder is None:
        parser.error("--reuse needs the --folder of an earlier call")
    folder = given.folder or Path(tempfile.mkdtemp(prefix="capsim-paced-"))
    outcomes = []
    for formula in (FORMULAS[name] for name in given.formula):
        place = folder / formula.name
        if given.reuse and not (place / "calibration").exists():
            continue
        if not given.reuse:
            wanted = [case for case in cases(formula, given.seconds) if case.name in (given.cases or formula.cases)]
            measure(formula, wanted, given.repeats or formula.repeats, given.venv.absolute(), place)
        profile = calibrate(formula, place, "--from", str(place / "calibration"))
        outcomes.append(judge_formula(formula, profile, place))
        report(outcomes[-1])
    if given.json:
        given.json.write_text(json.dumps([outcome.as_json() for outcome in outcomes], indent=1) + "\n")
    if given.markdown:
        given.markdown.write_text(markdown(outcomes))


if __name__ == "__main__":
    main()

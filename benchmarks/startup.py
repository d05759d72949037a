"""How long a person waits for `capsim` from a fresh process.

    python -m benchmarks.startup [--repeats 7]

Wall time of the whole process: Python's start, imports, work, output. A first run that is not counted leaves all files
compiled and in the page cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

COMMANDS = {
    "capsim --help": ["--help"],
    "capsim predict, seven levels with 1,000 requests each": [
        *("predict", "--profile", "rtx4090-qwen2.5-7b"),
        *("--concurrency", "1,2,4,8,16,32,64", "--num-prompts", "1000"),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description="Wall time of fresh processes.")
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    if hasattr(os, "getloadavg"):
        print(f"load average {os.getloadavg()[0]:.1f}")
    for name, arguments in COMMANDS.items():
        wall_seconds(arguments)
        seconds = [wall_seconds(arguments) for _ in range(repeats)]
        print(f"{name}: {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")


def wall_seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "capsim", *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

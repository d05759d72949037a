"""Traces of a million lines: what reading and playing them costs, by the line.

    python -m benchmarks.load_held.traces --lines 1000000

Files of every format are made up in a temporary folder, with a tenth of the lines and with all of them. Each is read in
a process of its own; then `capsim predict` plays some. Reading keeps 24 bytes a line, and 8 for a hash id. Playing
keeps 0.7 kB a request, and 0.1 kB for each engine step, of which there are many to a request where few are in flight.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

from benchmarks.load_held.processes import MB, Spent, capsim, need_proc, spent

RATE, SLOW_RATE = 4.0, 1.0  # requests a second, which the server of `PROFILE` can hold; the second with long prompts
BLOCK = 512  # tokens of a hashed block
SHARED = 6  # blocks, at most, that a prompt has in common with others
PROFILE = "rtx4090-qwen2.5-7b"
READ = "import sys; from simulator.loads.trace_files import read_trace; read_trace(*sys.argv[1:])"


def azure(lines: int) -> Iterator[str]:
    random, moment = Random(0), datetime(2024, 5, 10, tzinfo=UTC)
    yield "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    for _ in range(lines):
        moment += timedelta(seconds=random.expovariate(RATE))
        yield f"{moment:%Y-%m-%d %H:%M:%S.%f},{random.randint(20, 1500)},{random.randint(5, 200)}\n"


def timed(lines: int) -> Iterator[str]:
    random, moment = Random(0), 0.0
    for _ in range(lines):
        moment += random.expovariate(RATE)
        lengths = {"input_length": random.randint(20, 1500), "output_length": random.randint(5, 200)}
        yield json.dumps({"timestamp": round(moment, 3), **lengths}) + "\n"


def mooncake(lines: int) -> Iterator[str]:
    """Prompts of up to 24 blocks, half of which, but no more than `SHARED`, begin like those of others."""
    random, moment = Random(0), 0.0
    for line in range(lines):
        moment += 1000 * random.expovariate(SLOW_RATE)
        blocks = random.randint(1, 24)
        common = min(blocks // 2, SHARED)
        ids = [*range(common), *(SHARED + 24 * line + place for place in range(blocks - common))]
        lengths = {"input_length": blocks * BLOCK - random.randrange(BLOCK), "output_length": random.randint(5, 200)}
        yield json.dumps({"timestamp": int(moment), **lengths, "hash_ids": ids}) + "\n"


MAKERS: dict[str, tuple[Callable[[int], Iterator[str]], str]] = {
    "azure.csv": (azure, "azure"),
    "azure.csv.gz": (azure, "azure"),
    "timed.jsonl": (timed, "timed"),
    "mooncake.jsonl": (mooncake, "mooncake"),
}


def write(name: str, lines: int, folder: Path) -> Path:
    """A trace of so many lines, the same at every call."""
    path = folder / f"{lines}-{name}"
    with gzip.open(path, "wt", compresslevel=1) if name.endswith(".gz") else path.open("w") as file:
        file.writelines(MAKERS[name][0](lines))
    return path


def read(path: Path) -> Spent:
    """Read a trace that `write` has made. Raises RuntimeError where that fails."""
    return _done([sys.executable, "-c", READ, str(path), MAKERS[path.name.partition("-")[2]][1]])


def play(path: Path) -> Spent:
    """Predict it, prefixes shared where the trace tells. Raises RuntimeError where that fails."""
    caching = ["--enable-prefix-caching"] if "mooncake" in path.name else []
    options = ["--trace-format", MAKERS[path.name.partition("-")[2]][1], "--no-intervals", *caching]
    return _done(capsim("predict", "--profile", PROFILE, "--trace", str(path), *options))


def _done(command: list[str]) -> Spent:
    found = spent(command)
    if found.status:
        raise RuntimeError(f"{' '.join(command)} ended with {found.status}: {found.output[-500:]}")
    return found


def bytes_a_line(few: tuple[int, Spent], many: tuple[int, Spent]) -> float:
    """By which the peak grows, from two numbers of lines."""
    return (many[1].peak - few[1].peak) / (many[0] - few[0])


def print_costs(what: str, costs: dict[int, Spent]) -> None:
    for lines, cost in costs.items():
        print(f"| {what} | {lines:,} | {cost.seconds:.1f} | {cost.seconds / lines * 1e6:.1f} | {cost.peak / MB:.0f} |")
    few, many = costs.items()
    print(f"| | | | | {bytes_a_line(few, many):.0f} bytes more for each line more |", flush=True)


def main() -> None:
    need_proc()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    lines = parser.parse_args().lines
    print("| trace | lines | CPU s | us a line | peak MB |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for name in MAKERS:
            print_costs(
                f"read {name}", {count: read(write(name, count, Path(folder))) for count in (lines // 10, lines)}
            )
        for name, most in (("azure.csv", lines), ("mooncake.jsonl", lines // 10)):
            sizes = (most // 10, most)
            print_costs(f"predict {name}", {count: play(write(name, count, Path(folder))) for count in sizes})


if __name__ == "__main__":
    main()

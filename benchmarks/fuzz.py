"""Every reader of the project against inputs that are wrong in many ways.

    python -m benchmarks.fuzz [--reader NAME ...] [--inputs 10000] [--seed 0] [--folder fuzz-findings]

Prints, for each reader, how many inputs it took, refused in one line, or broke on: another error than its own, more
than 2 s of CPU time, more than 1 GiB, or a message that is no printable line. Every input that broke one is written to
the folder. Input number N of a seed is always the same.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import inside, outside
from tests.fuzz.check import Outcome, check, inputs

READERS = {reader.name: reader for reader in (*inside.READERS, *outside.READERS)}
CHUNK = 250  # inputs that a process takes at once


@dataclass
class Tally:
    """What came of a reader's inputs. `broke` holds the first input's number of each kind of finding, and how often."""

    accepted: int = 0
    rejected: int = 0
    found: int = 0
    slowest: float = 0.0
    broke: dict[str, tuple[int, Outcome]] = field(default_factory=dict)
    often: collections.Counter[str] = field(default_factory=collections.Counter)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    names = options.reader or list(READERS)
    print(f"{'reader':28} {'inputs':>7} {'accepted':>9} {'refused':>8} {'found':>6} {'slowest':>8}")
    any_found = False
    for name in names:
        tally = _fuzzed(name, options.inputs, str(options.seed), options.folder, options.processes)
        counted = tally.accepted + tally.rejected + tally.found
        print(
            f"{name:28} {counted:7} {tally.accepted:9} {tally.rejected:8} {tally.found:6} {tally.slowest:6.2f} s",
            flush=True,
        )
        for kind, (number, outcome) in tally.broke.items():
            print(f"    {tally.often[kind]} x, first input {number}: {outcome.told[:200]} ({outcome.place})")
        any_found = any_found or bool(tally.found)
    return 1 if any_found else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", action="append", choices=sorted(READERS), help="only this one; may be repeated")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return parser.parse_args(arguments)


def _fuzzed(name: str, count: int, run: str, folder: Path, processes: int) -> Tally:
    chunks = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    whole = Tally()
    context = multiprocessing.get_context("spawn")  # the limit of memory is that of a fresh process
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        for outcomes in pool.map(_chunk, *zip(*((name, run, chunk, folder) for chunk in chunks), strict=True)):
            for number, outcome in outcomes:
                _count(whole, number, outcome)
    return whole


def _chunk(name: str, run: str, numbers: range, folder: Path) -> list[tuple[int, Outcome]]:
    reader, outcomes = READERS[name], []
    for number, content in inputs(reader, run, numbers):
        outcome = check(reader, content)
        if outcome.verdict == "found":
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name.replace(' ', '-')}-{run}-{number}").write_bytes(content)
        outcomes.append((number, outcome))
    return outcomes


def _count(tally: Tally, number: int, outcome: Outcome) -> None:
    setattr(tally, outcome.verdict, getattr(tally, outcome.verdict) + 1)
    tally.slowest = max(tally.slowest, outcome.seconds)
    if outcome.verdict == "found":
        kind = re.sub(r"\d+", "N", f"{outcome.place} {outcome.told.partition(':')[0]}")
        tally.broke.setdefault(kind, (number, outcome))
        tally.often[kind] += 1


if __name__ == "__main__":
    sys.exit(main())

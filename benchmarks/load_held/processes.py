"""What processes take, from /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[2]
PROC = Path("/proc")
MB = 1e6
PATIENCE = 10.0  # s, for connections whose other end has gone
BLOCKS = 8  # means of so many stretches are fitted: samples of one stretch resemble each other


def need_proc() -> None:
    """Raise SystemExit where there is no /proc."""
    if not (PROC / "self" / "smaps_rollup").exists():
        raise SystemExit("this reads /proc, which only Linux has")


def capsim(*arguments: str) -> list[str]:
    """The command of a process of its own."""
    return [sys.executable, "-m", "capsim", *arguments]


@dataclass(frozen=True)
class Usage:
    """What some processes take at a moment. `zombies` have ended and nobody has heard of it."""

    rss: int  # bytes in memory
    pss: int  # bytes, pages that are shared counted in part
    descriptors: int
    threads: int
    processes: int
    zombies: int


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def usage(pids: Sequence[int]) -> Usage:
    """What these take together; those that have ended nothing."""
    parts = [part for part in map(_usage_of, pids) if part is not None]
    return Usage(*(sum(numbers) for numbers in zip(*parts, strict=True))) if parts else Usage(0, 0, 0, 0, 0, 0)


def settled(pid: int, descriptors: int) -> Usage:
    """What a process takes once it has no more descriptors than these, or `PATIENCE` has passed."""
    until = time.perf_counter() + PATIENCE
    while (found := usage([pid])).descriptors > descriptors and time.perf_counter() < until:
        time.sleep(0.1)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has heard of counts."""
    return bool(_stat(pid))


def _usage_of(pid: int) -> tuple[int, ...] | None:
    fields = _stat(pid)
    if not fields:
        return None
    if fields[0] == "Z":
        return 0, 0, 0, 0, 0, 1
    try:
        memory = dict(line.split()[:2] for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:])
        descriptors = sum(1 for _ in (PROC / str(pid) / "fd").iterdir())
    except OSError:  # it has just ended
        return None
    return 1024 * int(memory["Rss:"]), 1024 * int(memory["Pss:"]), descriptors, int(fields[17]), 1, 0


def _stat(pid: int) -> list[str]:
    """The fields of a process after its name: state, parent, and so on; none where it has ended."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


@dataclass(frozen=True)
class Seen:
    """Both sides at a moment. `seconds` since the watch began."""

    seconds: float
    server: Usage
    client: Usage  # the process that wants the load
    helpers: Usage  # the processes that it has started
    pids: tuple[int, ...]  # of these


@dataclass
class Watch:
    """Looks at a server and a client every so many seconds until the block ends."""

    server: int
    client: int
    every: float
    seen: list[Seen] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        began = time.perf_counter()
        while not self._stop.is_set():
            helpers = family(self.client)[1:]
            seconds = time.perf_counter() - began
            client = usage([self.client])
            self.seen.append(Seen(seconds, usage([self.server]), client, usage(helpers), tuple(helpers)))
            self._stop.wait(self.every)


@dataclass(frozen=True)
class Trend:
    """Growth of a number in a unit of another, and its standard error."""

    slope: float
    error: float


def trend(x: Sequence[float], y: Sequence[float]) -> Trend:
    """A straight line through the means of `BLOCKS` stretches; NaN where there are too few values."""
    if len(x) < 2 * BLOCKS:
        return Trend(float("nan"), float("nan"))
    at, value = (np.array([part.mean() for part in np.array_split(np.array(v, float), BLOCKS)]) for v in (x, y))
    slope, level = np.polyfit(at, value, 1)
    rest: npt.NDArray[np.float64] = value - level - slope * at
    spread = ((at - at.mean()) ** 2).sum()
    return Trend(float(slope), float(np.sqrt((rest**2).sum() / (BLOCKS - 2) / spread)))


@dataclass(frozen=True)
class Spent:
    """What a command took: CPU seconds and the most bytes that it had in memory at once."""

    status: int
    seconds: float
    peak: int
    output: str


def spent(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Spent:
    """Run a command to its end."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=os.environ | (environment or {})
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        return Spent(process.returncode, used.ru_utime + used.ru_stime, 1024 * used.ru_maxrss, output.read())

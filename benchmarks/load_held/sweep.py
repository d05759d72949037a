"""A long sweep, or one of many levels, against the twin: what grows on either side, and what is left behind.

    python -m benchmarks.load_held.sweep --minutes 10
    python -m benchmarks.load_held.sweep --levels 200 --level-seconds 2

`capsim emulate` runs in a process, `capsim sweep` in another with its client processes, on real sockets. What may grow:

- The twin: nothing, it keeps no request that has ended. It is called flat where a line through its memory in the last
  three quarters of the time rises by less than `FLAT` of it.
- A client process: 16 bytes a token, for its time and its number, and what a list holds in reserve. It ends with its
  level, and all is given back.
- The sweep: 48 bytes a token, in the tables of the levels that it has measured and prints at the end, and for a moment,
  as a level ends, about as much again. By then the level is in files too.
- Descriptors and processes: nothing, from level to level.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load_held.processes import (
    MB,
    ROOT,
    Seen,
    Trend,
    Usage,
    Watch,
    alive,
    capsim,
    need_proc,
    settled,
    trend,
    usage,
)
from benchmarks.twin import server_lateness, twin
from simulator.results.run import Run
from simulator.results.run_files import load_run

PROMPT, LONGEST_OUTPUT = 64, 200  # tokens
FLAT = 0.02
ROWS = 20  # of the printed table, at most
LAG = "client-bound"  # how a level's note on a slow client begins


@dataclass(frozen=True)
class Held:
    """A sweep that was watched.

    Attributes
        status: exit code of the sweep
        run: what it kept
        seen: both sides, every few seconds
        idle: the twin before the first and after the last request
        files_left: in the sweep's folder for temporary files, when it had ended
        processes_left: of those that it had started
        lateness: what the twin says of itself
    """

    status: int
    run: Run
    seen: list[Seen]
    idle: tuple[Usage, Usage]
    files_left: list[str]
    processes_left: list[int]
    lateness: str

    @property
    def tokens(self) -> int:
        """That were received."""
        return sum(int(level.requests["output_tokens"].sum()) for level in self.run.levels)

    @property
    def requests(self) -> int:
        return sum(len(level.requests) for level in self.run.levels)

    @property
    def failed(self) -> int:
        return self.requests - sum(len(level.completed) for level in self.run.levels)

    @property
    def levels(self) -> list[list[Seen]]:
        """What was seen in each level, which has client processes of its own."""
        groups: list[list[Seen]] = []
        for one in self.seen:
            if groups and not set(one.pids).isdisjoint(groups[-1][-1].pids):
                groups[-1].append(one)
            elif one.pids:
                groups.append([one])
        return groups[-len(self.run.levels) :]

    def server_trend(self) -> Trend:
        """Bytes a second by which the twin grows, in the last three quarters of the time."""
        warm = _warm(self.seen)
        return trend([seen.seconds for seen in warm], [seen.server.rss for seen in warm])

    def client_trends(self) -> list[Trend]:
        """Bytes a token by which the client processes of a level grow together, likewise; of levels seen enough."""
        found = []
        for level, seen in zip(self.run.levels, self.levels, strict=False):
            rate, warm = level.requests["output_tokens"].sum() / level.duration, _warm(seen)
            grown = trend([one.seconds for one in warm], [one.helpers.rss for one in warm])
            found.append(Trend(grown.slope / rate, grown.error / rate))
        return [one for one in found if one.slope == one.slope]


def _warm(seen: Sequence[Seen]) -> list[Seen]:
    """What was seen in the last three quarters of the time."""
    first, last = seen[0].seconds, seen[-1].seconds
    return [one for one in seen if one.seconds - first > (last - first) / 4]


def hold(streams: int, levels: int, level_seconds: float, step: float, every: float) -> Held:
    """Sweep a twin whose steps take `step` seconds, looking at both sides `every` so many seconds."""
    output = max(1, min(LONGEST_OUTPUT, round(level_seconds / step)))
    rounds = max(1, round(level_seconds / (output * step)))
    with tempfile.TemporaryDirectory() as folder, twin(step) as (host, port, pid):
        kept, scratch = Path(folder) / "run", Path(folder) / "scratch"
        scratch.mkdir()
        options = {
            "--endpoint": f"http://{host}:{port}",
            "--output": str(kept),
            "--concurrency": ",".join([str(streams)] * levels),
            "--input-len": str(PROMPT),
            "--output-len": str(output),
            "--requests-per-client": str(rounds),
        }
        command = capsim("sweep", "--no-probes", *(word for option in options.items() for word in option))
        before = usage([pid])
        with (
            subprocess.Popen(
                command, cwd=ROOT, env=os.environ | {"TMPDIR": str(scratch)}, stdout=subprocess.DEVNULL
            ) as sweep,
            Watch(pid, sweep.pid, every) as watch,
        ):
            status = sweep.wait()
        return Held(
            status,
            load_run(kept),
            watch.seen,
            (before, settled(pid, before.descriptors)),
            sorted(path.name for path in scratch.iterdir()),
            [one for one in {pid for seen in watch.seen for pid in seen.pids} if alive(one)],
            server_lateness(host, port),
        )


def print_table(seen: Sequence[Seen]) -> None:
    """Memory in MB; pss in brackets."""
    print("| s | twin | its fds | threads | sweep | its fds | threads | clients | number | their fds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for one in seen[:: max(1, -(-len(seen) // ROWS))]:
        server, client, helpers = one.server, one.client, one.helpers
        print(
            f"| {one.seconds:.0f} | {_memory(server)} | {server.descriptors} | {server.threads} "
            f"| {_memory(client)} | {client.descriptors} | {client.threads} "
            f"| {_memory(helpers)} | {helpers.processes} | {helpers.descriptors} |"
        )


def _memory(one: Usage) -> str:
    return f"{one.rss / MB:.1f} ({one.pss / MB:.1f})"


def print_findings(held: Held) -> bool:
    """In sentences. Returns whether all was as it should be."""
    last, took = held.seen[-1], held.seen[-1].seconds
    print(
        f"\nexit code {held.status}; {held.requests:,} requests, {held.failed} failed, {held.tokens:,} tokens received"
    )
    print(f"levels kept: {len(held.run.levels)}")
    grown = held.server_trend()
    rise, least = 0.75 * took * grown.slope, 0.75 * took * grown.error
    flat = rise < FLAT * last.server.rss
    rate = held.requests / took
    print(
        f"twin: {grown.slope * 60 / 1e3:+.1f} +- {grown.error * 60 / 1e3:.1f} kB a minute after the first quarter, "
        f"{grown.slope / rate:+.0f} bytes a request; in that time {rise / MB:+.2f} +- {least / MB:.2f} MB of "
        f"{last.server.rss / MB:.0f}: {'flat' if flat else 'NOT FLAT'}"
    )
    fds = held.idle[0].descriptors, held.idle[1].descriptors
    print(f"twin's descriptors while idle: {fds[0]} before, {fds[1]} after; most {_most(held.seen)}")
    for number, one in enumerate(held.client_trends(), 1):
        print(f"client processes of level {number}: {one.slope:+.1f} +- {one.error:.1f} bytes a token, then they end")
    starts = [seen[0].client for seen in held.levels]
    peak = max(seen.client.rss for seen in held.seen)
    print(
        f"sweep: {starts[0].rss / MB:.1f} MB and {starts[0].descriptors} descriptors as the first level began, "
        f"{starts[-1].rss / MB:.1f} MB and {starts[-1].descriptors} as the last did; peak {peak / MB:.1f} MB"
    )
    if len(starts) > 2:  # the first level also loads what makes its tables
        between = sum(int(level.requests["output_tokens"].sum()) for level in held.run.levels[1:-1])
        print(f"sweep: {(starts[-1].rss - starts[1].rss) / between:.0f} bytes kept for each token of those between")
    zombies = max(seen.client.zombies + seen.helpers.zombies for seen in held.seen)
    print(f"most client processes at once {max(seen.helpers.processes for seen in held.seen)}, zombies {zombies}")
    print(f"left behind: {len(held.files_left)} temporary files, {len(held.processes_left)} processes")
    slow = [note for level in held.run.levels for note in level.notes if note.startswith(LAG)]
    print(f"levels that say their client was late: {len(slow)}" + (f"; the first: {slow[0]}" if slow else ""))
    print(held.lateness)
    clean = not (held.status or held.failed or held.files_left or held.processes_left)
    return clean and flat and fds[0] == fds[1] and starts[0].descriptors == starts[-1].descriptors


def _most(seen: Sequence[Seen]) -> int:
    return max(one.server.descriptors for one in seen)


def main() -> None:
    need_proc()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="instead of --level-seconds: of all levels together")
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--level-seconds", type=float, default=120.0)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=40.0, help="between two tokens of a stream")
    parser.add_argument("--every", type=float, help="seconds between two looks; else 2, or four in a level")
    options = parser.parse_args()
    seconds = options.minutes * 60 / options.levels if options.minutes else options.level_seconds
    print(
        f"{options.streams} streams, a token every {options.step_ms:g} ms, {options.levels} levels of {seconds:g} s\n"
    )
    every = options.every or min(2.0, seconds / 4)
    held = hold(options.streams, options.levels, seconds, options.step_ms / 1e3, every)
    print_table(held.seen)
    raise SystemExit(0 if print_findings(held) else 1)


if __name__ == "__main__":
    main()

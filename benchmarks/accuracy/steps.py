"""Engine steps as a client sees them, beside the steps that the engine took.

    python -m benchmarks.accuracy.steps --run DIR --log FILE

DIR is a run that capsim measured on the paced server (tests/live/server.py), with raw token times. FILE is that
server's step log (CAPSIM_PACED_LOG), which tells the start, duration and work of every step. Both have clocks of
their own: a level is shifted to where its tokens fall most often on the end of a logged step.

A step that delivered tokens is *found* if tokens arrived together after its end, one delivery a step. Errors of the
duration are of all found steps of which some stream got the token before, too; a composition is right if sequences,
prompt tokens and context tokens are those of the log.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from calibration.steps import all_steps
from simulator.engine.engine_flags import EngineFlags
from simulator.results.run import Level
from simulator.results.run_files import load_run

BIN = 1e-3  # s, of the shifts between the clocks
ANCHORS = 400  # deliveries of a level that vote on the shift
CANDIDATES = 60  # shifts that are tried; equal steps would let a level slip by one of them
EARLY = 0.5e-3  # s by which a delivery may seem to come before its step's end: the shift is no better
LATE = 12e-3  # s, the longest way of a token to the client that is taken for one
WORK = ("sequences", "prefill_tokens", "kv_tokens")
GOALS = {"found": 0.99, "duration": 0.3e-3}

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LevelSteps:
    """What was seen of one level.

    Attributes
        delivering: steps in the log that gave tokens
        found: those of them that were seen
        errors: s, reconstructed minus logged duration of the found ones
        certain: found ones whose composition the reconstruction takes for certain
        right: certain ones with the composition of the log
    """

    name: str
    delivering: int
    found: int
    errors: Array
    certain: int
    right: int


def read_log(path: Path) -> pd.DataFrame:
    """The server's steps, in order, with the column `end`, s."""
    log = pd.read_csv(path)
    return log.assign(end=log["start"] + log["seconds"]).sort_values("end", ignore_index=True)


def delivering(log: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Whether a step gave tokens: somebody decoded, or decodes in the next step what this one's prompts began."""
    decoded = (log["kv_tokens"] > 0).to_numpy()
    return decoded | np.append(decoded[1:], True)


def shifts(times: Array, ends: Array) -> list[float]:
    """Seconds from the level's clock to the log's: those that put most deliveries on the end of a step."""
    chosen = times[:: max(1, len(times) // ANCHORS)]
    votes, counts = np.unique(np.round((ends[:, None] - chosen) / BIN).astype(np.int64), return_counts=True)
    near = np.convolve(counts, [1, 1, 1], mode="same")  # bins without a vote are left out, which does no harm
    return [_sharpened(vote * BIN, chosen, ends) for vote in votes[np.argsort(-near, kind="stable")[:CANDIDATES]]]


def _sharpened(rough: float, times: Array, ends: Array) -> float:
    """A shift by which hardly any token comes before its step has ended."""
    after = np.clip(np.searchsorted(ends, times + rough), 1, len(ends) - 1)
    before = ends[after - 1]
    nearest = np.where(ends[after] - times - rough < times + rough - before, ends[after], before)
    off = nearest - times
    return float(np.percentile(off[np.abs(off - rough) <= 2 * BIN], 95))


def match(times: Array, ends: Array) -> npt.NDArray[np.int64]:
    """The step of each delivery, -1 for none: the last one that had ended, if no earlier delivery has taken it."""
    steps = np.searchsorted(ends, times + EARLY, side="right") - 1
    near = (steps >= 0) & (times - ends[np.maximum(steps, 0)] < LATE)
    steps = np.where(near, steps, -1)
    first = np.append(True, steps[1:] != steps[:-1])
    return np.where(first, steps, -1)


def judge(level: Level, log: pd.DataFrame, flags: EngineFlags, request_delay: float) -> LevelSteps:
    seen = all_steps(level, flags, request_delay)
    ends = log["end"].to_numpy()
    tries = [seen["time"].to_numpy() + shift for shift in shifts(seen["time"].to_numpy(), ends)]
    times, steps = max(
        ((times, match(times, ends)) for times in tries), key=lambda tried: _same(seen, log, tried[1]).sum()
    )
    began, ended = times[0] - LATE, times[-1] + EARLY
    gave = delivering(log) & (ends >= began) & (ends <= ended)
    errors = (seen["duration"].to_numpy() - log["seconds"].to_numpy()[steps])[steps >= 0]
    errors = errors[~np.isnan(errors)]
    certain = seen["certain"].to_numpy() & (steps >= 0)
    found = int(np.isin(np.flatnonzero(gave), steps).sum())
    right = int((_same(seen, log, steps) & certain).sum())
    return LevelSteps(level.workload.describe(), int(gave.sum()), found, errors, int(certain.sum()), right)


def _same(seen: pd.DataFrame, log: pd.DataFrame, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether a delivery has a step, of the same work."""
    truth = log.iloc[steps]
    return np.all([steps >= 0, *(seen[name].to_numpy() == truth[name].to_numpy() for name in WORK)], axis=0)


def lines(levels: list[LevelSteps]) -> Iterator[str]:
    yield f"{'level':<34}{'steps':>6} {'found':>7} {'|error| p50':>12} {'p99':>9} {'certain':>8} {'right':>7}"
    for level in [*levels, _all(levels)]:
        sizes = np.percentile(np.abs(level.errors), [50, 99]) * 1e3 if len(level.errors) else (np.nan, np.nan)
        yield (
            f"{level.name:<34}{level.delivering:>6} {level.found / level.delivering:>7.2%} {sizes[0]:>9.3f} ms"
            f" {sizes[1]:>6.2f} ms {level.certain / level.delivering:>8.1%} {level.right / max(level.certain, 1):>7.1%}"
        )
    whole = _all(levels)
    share, error = whole.found / whole.delivering, float(np.median(np.abs(whole.errors)))
    yield f"goal {GOALS['found']:.0%} found: {'met' if share >= GOALS['found'] else 'MISSED'}"
    yield f"goal median error {GOALS['duration'] * 1e3:.1f} ms: {'met' if error <= GOALS['duration'] else 'MISSED'}"


def _all(levels: list[LevelSteps]) -> LevelSteps:
    counts = [sum(getattr(level, name) for level in levels) for name in ("delivering", "found", "certain", "right")]
    errors = np.concatenate([level.errors for level in levels])
    return LevelSteps("all", counts[0], counts[1], errors, counts[2], counts[3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="a measured run, with tokens.csv")
    parser.add_argument("--log", type=Path, required=True, metavar="FILE", help="the paced server's step log")
    parser.add_argument("--delay", type=float, default=0.004, help="s from sending to the engine; usual is 4 ms")
    parser.add_argument("--sync", action="store_true", help="the server ran without asynchronous scheduling")
    arguments = parser.parse_args()
    run, log = load_run(arguments.run), read_log(arguments.log)
    server = run.server
    flags = EngineFlags(
        max_num_seqs=int(str(server["max_num_seqs"])),
        max_num_batched_tokens=int(str(server["max_num_batched_tokens"])),
        async_scheduling=not arguments.sync,
    )
    for line in lines([judge(level, log, flags, arguments.delay) for level in run.levels if level.tokens is not None]):
        print(line)


if __name__ == "__main__":
    main()

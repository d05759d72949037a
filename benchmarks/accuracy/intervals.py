"""Do 90 % intervals of predictions hold what a server then shows?

    python -m benchmarks.accuracy.intervals [--runs 12] [--processes 2]

Every run simulates a calibration of a server with known coefficients, with the noise of a measurement, and fits it as
`capsim calibrate` does: steps, percentiles, a level kept out. Then it predicts levels that were not measured, and a
server of the same coefficients, with noise of its own and other arrivals, shows what a client would measure there.
Prints the share of figures inside their interval by metric, how wide the intervals are, and the share over all.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from benchmarks.accuracy.recovery import FLAGS, NOISES, SERVERS, WANTED
from calibration.fit import fit_profile
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.prediction import predict
from simulator.results.run import Level, Run
from simulator.results.summary import summarize
from tests.calibration.synthetic import Noise, closed, measured_level

METRICS = (
    "output_throughput",
    *(f"{percentile}_ttft" for percentile in ("p50", "p90", "p99")),
    "p50_tpot",
    *(f"{percentile}_{latency}" for latency in ("itl", "e2el") for percentile in ("p50", "p90", "p99")),
)
CALIBRATED, HELD_OUT = (1, 2, 4, 8, 16), (4,)  # clients
PROBES = (64, 256, 1024, 4096, 8000)  # tokens


@dataclass(frozen=True)
class Held:
    """One figure of one prediction; seconds, or tokens a second."""

    load: str
    metric: str
    shown: float
    predicted: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        return self.low <= self.shown <= self.high

    @property
    def width(self) -> float:
        """Half of the interval, relative to the prediction."""
        return (self.high - self.low) / 2 / self.predicted


def unseen(step_time: StepTime) -> list[Workload]:
    """Levels within the measured range, twice beyond it, and of random lengths and arrivals."""
    jittered = Shape(Length.jittered(1024, 0.5), Length.jittered(128, 0.5))
    # a step's constant and prompts bound what one engine serves; half of that is a calm load
    rate = 0.5 / (1024 * step_time.per_prefill_token + 128 * step_time.duration(16, 16 * 1100) / 16)
    return [
        closed(3, 1024, 128, 24),
        closed(12, 512, 64, 96),
        closed(32, 1024, 128, 128),
        Workload(ClosedLoop(8), (jittered,), 80),
        Workload(OpenLoop(rate), (jittered,), 100),
    ]


def calibrate(step_time: StepTime, host_time: HostTime, noise: Noise, seed: int) -> Run:
    """What `capsim calibrate` measures, smaller: lone prompts, a burst of brief requests, and levels of clients."""
    loads = [closed(1, length, 8, 5) for length in PROBES]
    loads += [closed(2, 3000, 32, 8), closed(16, 64, 16, 96)]
    loads += [closed(clients, 1024, 128, max(8, 4 * clients)) for clients in CALIBRATED]
    levels = [
        as_client_saw(measured_level(load, FLAGS, step_time, host_time, noise, 1000 * seed + number))
        for number, load in enumerate(loads)
    ]
    return Run("measured", levels, {"model": "synthetic"})


def as_client_saw(level: Level) -> Level:
    """A synthetic level whose requests and gaps are those of its token times, lateness and all."""
    assert level.tokens is not None
    tokens = level.tokens.sort_values(["request_id", "time"], kind="stable")
    times = tokens.groupby("request_id")["time"]
    requests = level.requests.set_index("request_id", drop=False)
    requests["ttft"] = times.first() - requests["arrival"]
    requests["e2el"] = times.last() - requests["arrival"]
    more = np.maximum(requests["output_tokens"] - 1, 1)
    requests["tpot"] = (requests["e2el"] - requests["ttft"]) / more
    gaps = pd.DataFrame({"time": tokens["time"], "gap": times.diff(), "count": 1}).dropna()
    return replace(
        level,
        requests=requests.reset_index(drop=True),
        gaps=gaps.sort_values("time", ignore_index=True),
        duration=float((requests["arrival"] + requests["e2el"]).max()),
    )


def hold(name: str, noise: Noise, seed: int) -> list[Held]:
    """One calibration and its predictions beside what the server shows."""
    step_time, rng = SERVERS[name], np.random.default_rng(seed)
    share = float(rng.uniform(0.1, 0.9))
    host_time = HostTime(per_request=0.006 * (1 - share), per_request_serial=0.006 * share)
    profile = fit_profile(calibrate(step_time, host_time, noise, seed), FLAGS, hold_out=HELD_OUT)
    found = []
    for number, load in enumerate(unseen(step_time)):
        shown = show(load.redrawn(1000 + seed), FLAGS, step_time, host_time, noise, 1000 * seed + 500 + number)
        (level,) = predict(profile, [load], with_intervals=True).levels
        predicted = summarize(level).flat()
        found += [
            Held(load.describe(), metric, shown[metric], float(predicted[metric] or math.nan), *level.intervals[metric])
            for metric in METRICS
        ]
    return found


def show(
    load: Workload, flags: EngineFlags, step_time: StepTime, host_time: HostTime, noise: Noise, seed: int
) -> dict[str, float]:
    """What a client measures."""
    numbers = summarize(as_client_saw(measured_level(load, flags, step_time, host_time, noise, seed))).flat()
    return {metric: float(numbers[metric] or math.nan) for metric in METRICS}


def study(runs: int, processes: int = 1) -> list[Held]:
    """`runs` calibrations, by turns of the servers and of the noises."""
    names = [[*SERVERS][number % len(SERVERS)] for number in range(runs)]
    noises = [NOISES[number // len(SERVERS) % len(NOISES)] for number in range(runs)]
    if processes == 1:
        found = [hold(*job) for job in zip(names, noises, range(runs), strict=True)]
    else:
        with ProcessPoolExecutor(processes) as pool:
            found = list(pool.map(hold, names, noises, range(runs)))
    return [item for items in found for item in items]


def lines(found: Sequence[Held]) -> Iterator[str]:
    for title, key in (("metric", "metric"), ("level", "load")):
        yield f"{title:<52}{'inside 90 %':>12}{'of':>6}{'median half width':>19}"
        for name in dict.fromkeys(getattr(item, key) for item in found):
            items = [item for item in found if getattr(item, key) == name]
            width = np.median([item.width for item in items])
            yield f"{name:<52}{coverage(items):>12.0%}{len(items):>6}{width:>19.1%}"
    share = coverage(found)
    met = WANTED[0] <= share <= WANTED[1]
    yield f"all: {share:.1%} inside, goal {WANTED[0]:.0%} to {WANTED[1]:.0%}: {'met' if met else 'MISSED'}"


def coverage(found: Sequence[Held]) -> float:
    """Share of the figures inside their interval."""
    return float(np.mean([item.inside for item in found]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=12, help="calibrations (default 12)")
    parser.add_argument("--processes", type=int, default=2, help="at once (default 2)")
    arguments = parser.parse_args()
    for line in lines(study(arguments.runs, arguments.processes)):
        print(line)


if __name__ == "__main__":
    main()

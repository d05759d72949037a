"""Are known coefficients found again, and do 90 % intervals hold the truth nine times out of ten?

    python -m benchmarks.accuracy.recovery [--runs 40] [--processes 2]

Every run simulates a calibration of a server with known coefficients, adds the noise of a measurement (step times,
packets, host), fits it, and asks of every coefficient whether the truth lies inside its 90 % interval. Servers and
noise differ from run to run. Coefficients that are there and were dropped, and the other way round, are counted beside.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np

from calibration.step_fit import fit_step_time
from calibration.step_rows import HOST_TERMS, TERMS
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload
from simulator.results.run import Level
from tests.calibration.synthetic import Noise, closed, measured_level

FLAGS = EngineFlags(max_num_seqs=128, max_num_batched_tokens=2048, num_gpu_blocks=8000)
SERVERS = {
    "like an RTX 4090": StepTime(15.7e-3, 35e-6, 62e-9, 80e-6, 3.1e-9),
    "host-bound": StepTime(8e-3, 150e-6, 20e-9, 20e-6, 0.5e-9),
    "mixed cost": StepTime(10e-3, 20e-6, 40e-9, 50e-6, 1e-9, mixed_per_sequence=120e-6),
    "roofline": StepTime(7e-3, 20e-6, 40e-9, 22e-6, 0.6e-9, weights=4.5e-3),
}
NOISES = (
    Noise(step=0.002, jitter=0.05e-3, late_share=0.002, late=2e-3, lag=1e-6, intake=1e-3),
    Noise(step=0.01, jitter=0.15e-3, late_share=0.005, late=3e-3, lag=2e-6, intake=2e-3),
    Noise(step=0.02, jitter=0.3e-3, late_share=0.01, late=4e-3, lag=2e-6, intake=1e-3),
)
HOST_TIME = HostTime(per_request=0.002, per_request_serial=0.004)
CLIENTS = (1, 4, 8, 16)
INTERVAL = 1.645  # standard errors on either side for 90 % confidence
WANTED = (0.80, 0.97)


@dataclass(frozen=True)
class Recovered:
    """One coefficient of one run, in seconds."""

    server: str
    term: str
    truth: float
    value: float
    stderr: float
    dropped: bool

    @property
    def covered(self) -> bool:
        return abs(self.value - self.truth) <= INTERVAL * self.stderr


def calibration(step_time: StepTime, noise: Noise, seed: int, clients: Sequence[int]) -> list[Level]:
    """The levels that `capsim calibrate` measures by default, smaller: lone prompts, mixed lengths, `clients`."""
    loads = [closed(1, length, 8, 5, seed) for length in (64, 256, 512, 1024, 2048, 4096, 8000)]
    loads.append(Workload(ClosedLoop(2), (Shape(Length(64, 4096), Length.fixed(32)),), 24, seed))
    loads += [closed(count, 1024, 128, max(6, 3 * count), seed) for count in clients]
    return [
        measured_level(load, FLAGS, step_time, HOST_TIME, noise, seed=1000 * seed + number)
        for number, load in enumerate(loads)
    ]


def recover(name: str, noise: Noise, seed: int, clients: Sequence[int] = CLIENTS) -> list[Recovered]:
    """Fit one synthetic calibration. The host's times are not judged: the noise of the way to the client is in them."""
    step_time = SERVERS[name]
    fit = fit_step_time(calibration(step_time, noise, seed, clients), FLAGS)
    truth = asdict(step_time)
    return [
        Recovered(name, term, truth[term], found.value, found.stderr, found.dropped)
        for term in TERMS
        if term not in HOST_TERMS
        for found in [fit.coefficients[term]]
    ]


def study(runs: int, processes: int = 1) -> list[Recovered]:
    """`runs` calibrations, by turns of the servers and of the noises."""
    names = [[*SERVERS][number % len(SERVERS)] for number in range(runs)]
    noises = [NOISES[number // len(SERVERS) % len(NOISES)] for number in range(runs)]
    if processes == 1:
        found = [recover(*job) for job in zip(names, noises, range(runs), strict=True)]
    else:
        with ProcessPoolExecutor(processes) as pool:
            found = list(pool.map(recover, names, noises, range(runs)))
    return [item for items in found for item in items]


def lines(found: Sequence[Recovered]) -> Iterator[str]:
    yield f"{'coefficient':<24}{'inside':>7}{'of':>6}{'median +-':>11}{'wrongly dropped':>17}{'wrongly found':>15}"
    for term in dict.fromkeys(item.term for item in found):
        items = [item for item in found if item.term == term]
        kept = [item for item in items if not item.dropped]
        judged = [item for item in kept if item.truth > 0]
        inside = f"{np.mean([item.covered for item in judged]):.0%}" if judged else ""
        spread = f"{np.median([item.stderr / item.truth for item in judged]):.1%}" if judged else ""
        lost = sum(item.dropped and item.truth > 0 for item in items)
        made_up = sum(item.truth == 0 for item in kept)
        yield f"{term:<24}{inside:>7}{len(judged):>6}{spread:>11}{lost:>17}{made_up:>15}"
    share = coverage(found)
    met = WANTED[0] <= share <= WANTED[1]
    yield f"all: {share:.1%} inside, goal {WANTED[0]:.0%} to {WANTED[1]:.0%}: {'met' if met else 'MISSED'}"


def coverage(found: Sequence[Recovered]) -> float:
    """Share of the coefficients that are there, and were found, whose interval holds the truth."""
    return float(np.mean([item.covered for item in found if item.truth > 0 and not item.dropped]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=48, help="calibrations (default 48)")
    parser.add_argument("--processes", type=int, default=2, help="at once (default 2)")
    arguments = parser.parse_args()
    for line in lines(study(arguments.runs, arguments.processes)):
        print(line)


if __name__ == "__main__":
    main()

"""What the calibration never saw: other levels, lengths, arrivals and flags, by the server that they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.accuracy.formulas import Formula
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime
from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload

LEVELS = (2, 16, 32, 64)
SECONDS = 18.0  # that a level lasts, about
LEAST_ROUNDS = 2  # of a closed loop: in the first one all prompts come at once
LOADS = (0.5, 0.8, 0.95)  # of the capacity
HOST = HostTime(per_request=0.003, per_request_serial=0.003)  # about that of vLLM 0.32 on a slow core


def shape(prompt: int, output: int, weight: float = 1.0) -> Shape:
    return Shape(Length.fixed(prompt), Length.fixed(output), weight)


USUAL = (shape(1024, 256),)  # what the calibration measures
JITTERED = (Shape(Length.jittered(1024, 0.3), Length.jittered(256, 0.3)),)
SHORT, LONG = (shape(64, 64),), (shape(6000, 128),)
MIXED = (shape(512, 128, 0.7), shape(4096, 256, 0.3))


@dataclass(frozen=True)
class ServerStart:
    """Flags of a server; `kv_tokens` is the size of its KV pool."""

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    kv_tokens: int = 86_896

    @property
    def flags(self) -> tuple[str, ...]:
        """Those that capsim is told; it reads the size of the pool from the server."""
        budget = str(self.max_num_batched_tokens)
        return ("--max-num-seqs", str(self.max_num_seqs), "--max-num-batched-tokens", budget)

    @property
    def engine_flags(self) -> EngineFlags:
        return EngineFlags(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=8192,
            num_gpu_blocks=self.kv_tokens // 16,
        )

    def __str__(self) -> str:
        return f"seqs-{self.max_num_seqs}-budget-{self.max_num_batched_tokens}-pool-{self.kv_tokens}"


CALIBRATED = ServerStart()


@dataclass(frozen=True)
class Case:
    """A level of load on a server."""

    name: str
    start: ServerStart
    load: Workload


def cases(formula: Formula, seconds: float = SECONDS) -> Iterator[Case]:
    """All there are. Levels last about `seconds` each by the true step times."""
    timed = _Lengthen(formula, seconds)
    for clients in LEVELS:
        yield Case(f"clients-{clients}", CALIBRATED, timed.closed(clients, USUAL))
    yield Case("jittered", CALIBRATED, timed.closed(16, JITTERED))
    yield Case("short", CALIBRATED, timed.closed(16, SHORT))
    yield Case("long", CALIBRATED, timed.closed(4, LONG))
    yield Case("mixed", CALIBRATED, timed.closed(8, MIXED))
    for load in LOADS:
        yield Case(f"poisson-{load:.0%}".rstrip("%"), CALIBRATED, timed.poisson(load))
    for tokens in (512, 8192):
        budget = ServerStart(max_num_batched_tokens=tokens)
        yield Case(f"budget-{tokens}", budget, timed.closed(16, USUAL))
        yield Case(f"budget-{tokens}-mixed", budget, timed.closed(8, MIXED))
    yield Case("seqs-16", ServerStart(max_num_seqs=16), timed.closed(32, USUAL))
    yield Case("small-pool", ServerStart(kv_tokens=12_288), timed.closed(16, USUAL))


@dataclass(frozen=True)
class _Lengthen:
    """Chooses the number of requests so that a level lasts about `seconds`."""

    formula: Formula
    seconds: float

    def closed(self, clients: int, shapes: tuple[Shape, ...]) -> Workload:
        trial = self._simulated(Workload(ClosedLoop(clients), shapes, 4 * clients))
        rounds = max(LEAST_ROUNDS, round(4 * self.seconds / trial))
        return Workload(ClosedLoop(clients), shapes, rounds * clients)

    def poisson(self, load: float) -> Workload:
        """Arrivals at a share of the capacity: what as many clients as the server has places get."""
        crowd = Workload(ClosedLoop(CALIBRATED.max_num_seqs), USUAL, 1000)
        rate = round(load * crowd.num_prompts / self._simulated(crowd), 2)
        return Workload(OpenLoop(rate), USUAL, max(8, round(rate * self.seconds)))

    def _simulated(self, workload: Workload) -> float:
        """Seconds that `workload` takes by the true step times."""
        return simulate_level(workload, CALIBRATED.engine_flags, self.formula.step_time, HOST).duration

"""Step times of the paced vLLM (`tests/live/paced_executor.py`) that calibration has to find from outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from simulator.engine.step_time import StepTime

RTX4090 = MappingProxyType(  # the defaults of the paced executor: about Qwen2.5-7B on an RTX 4090
    {
        "constant": 15.7e-3,
        "per_sequence": 35e-6,
        "per_kv_token": 62e-9,
        "per_prefill_token": 80e-6,
        "per_prefill_attention": 3.1e-9,
    }
)
ALL = (
    *("clients-2", "clients-16", "clients-32", "clients-64"),
    *("jittered", "short", "long", "mixed"),
    *("poisson-50", "poisson-80", "poisson-95"),
    *("budget-512", "budget-512-mixed", "budget-8192", "budget-8192-mixed", "seqs-16", "small-pool"),
)
FEW = ("clients-2", "clients-16", "clients-32", "jittered", "mixed", "poisson-80", "budget-512", "budget-512-mixed")


@dataclass(frozen=True)
class Formula:
    """A device with known step times.

    `step` are coefficients in seconds by their names in `StepTime`, and `noise`, the standard deviation of the
    logarithm of a random factor. `asynchronous` schedules a step while the one before runs. `cases` are names of
    `benchmarks.accuracy.cases`, each measured `repeats` times.
    """

    name: str
    step: Mapping[str, float] = field(default_factory=lambda: RTX4090)
    asynchronous: bool = True
    cases: tuple[str, ...] = FEW
    repeats: int = 2

    @property
    def step_time(self) -> StepTime:
        """The truth, without the noise."""
        return StepTime(**{name: value for name, value in self.step.items() if name != "noise"})


HOST_BOUND = {  # steps as short as those of a small model on a large GPU: the host's share of a latency is large
    "constant": 4e-3,
    "per_sequence": 20e-6,
    "per_kv_token": 20e-9,
    "per_prefill_token": 20e-6,
    "per_prefill_attention": 0.5e-9,
}
FORMULAS = {
    formula.name: formula
    for formula in (
        Formula("4090", cases=ALL, repeats=3),
        Formula("host-bound", HOST_BOUND, cases=tuple(name for name in FEW if name != "clients-32")),
        Formula("mixed-cost", {**RTX4090, "mixed_per_sequence": 200e-6}),
        Formula("noisy", {**RTX4090, "noise": 0.02}),
        Formula("sync", asynchronous=False),
        Formula("roofline", {**RTX4090, "weights": 12e-3}),
    )
}

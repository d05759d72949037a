"""The loads that speed is measured on."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload

# an RTX 4090 with a 7B model, about
STEP_TIME = StepTime(15.7e-3, 35e-6, 62e-9, 80e-6, 3.1e-9)
HOST_TIME = HostTime(5e-3)
FLAGS = EngineFlags(max_num_seqs=128, max_num_batched_tokens=2048, num_gpu_blocks=5431)

FIXED = (Shape(Length.fixed(1024), Length.fixed(256)),)

# ShareGPT: quantiles of the output length as a public benchmark states them (akamaslabs/vllm-benchmark), and prompts of
# a similar spread; uniform in between
_QUANTILES = (0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1)
_OUTPUTS = (1, 11, 30, 57, 123, 242, 360, 522, 647, 782, 1237)
_PROMPTS = (4, 5, 8, 11, 17, 40, 190, 600, 820, 930, 1020)


def sharegpt_shapes() -> tuple[Shape, ...]:
    """Prompt and output lengths drawn independently from the quantiles."""
    return tuple(
        Shape(prompt, output, weight * other)
        for prompt, weight in _between(_PROMPTS)
        for output, other in _between(_OUTPUTS)
    )


def _between(values: Sequence[int]) -> list[tuple[Length, float]]:
    pairs = zip(values, values[1:], _QUANTILES, _QUANTILES[1:], strict=False)
    return [(Length(low, high), above - below) for low, high, below, above in pairs]


def closed_loop(num_prompts: int, concurrency: int = 64) -> Workload:
    return Workload(ClosedLoop(concurrency), FIXED, num_prompts)


def open_loop(num_prompts: int, request_rate: float) -> Workload:
    return Workload(OpenLoop(request_rate), FIXED, num_prompts)


def sharegpt(num_prompts: int, concurrency: int = 64) -> Workload:
    return Workload(ClosedLoop(concurrency), sharegpt_shapes(), num_prompts)


TIGHT_FLAGS = FLAGS.changed(num_gpu_blocks=2000)  # room for about a third of 64 requests


def tight(num_prompts: int, concurrency: int = 64) -> Workload:
    """Lengths that differ, so that admissions and preemptions come at all moments."""
    return Workload(ClosedLoop(concurrency), (Shape(Length(200, 1500), Length(50, 400)),), num_prompts)

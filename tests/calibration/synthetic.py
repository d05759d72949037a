"""Levels that look measured: simulated ones with the raw token times that a client would have written down."""

from __future__ import annotations

import numpy as np
import pandas as pd

from simulator.engine import simulate_level
from simulator.engine_flags import EngineFlags
from simulator.run import TOKEN_COLUMNS, Level
from simulator.step_time import HostTime, StepTime
from simulator.workload import ClosedLoop, Length, Shape, Workload


def measured_level(
    workload: Workload,
    flags: EngineFlags,
    step_time: StepTime,
    host_time: HostTime,
    jitter: float = 0.0,
    seed: int = 0,
) -> Level:
    """A simulated level without preemptions, with tokens.

    `jitter` is the mean delay in seconds of a step's delivery and of each token within it, both exponential.
    """
    level = simulate_level(workload, flags, step_time, host_time)
    assert not level.requests["preemptions"].any(), "token times can only be told without preemption"
    rng = np.random.default_rng(seed)
    requests = level.requests
    first = (requests["arrival"] + requests["ttft"]).to_numpy()
    last = (requests["arrival"] + requests["e2el"]).to_numpy()
    steps = np.unique(np.concatenate([level.gaps["time"].to_numpy(), first]).round(9))
    delays = rng.exponential(jitter, len(steps)) if jitter else np.zeros(len(steps))
    tables = []
    for number, begin, end in zip(requests["request_id"], first, last, strict=True):
        chosen = (steps >= begin - 1e-8) & (steps <= end + 1e-8)
        times = steps[chosen] + delays[chosen]
        times = times + (rng.exponential(jitter, len(times)) if jitter else 0.0)
        counts = np.arange(1, len(times) + 1)
        tables.append(pd.DataFrame({"request_id": number, "time": np.maximum.accumulate(times), "tokens": counts}))
    level.tokens = pd.concat(tables, ignore_index=True).astype(TOKEN_COLUMNS)
    return level


def closed(concurrency: int, input_len: int, output_len: int, num_prompts: int, seed: int = 0) -> Workload:
    shape = Shape(Length.fixed(input_len), Length.fixed(output_len))
    return Workload(ClosedLoop(concurrency), (shape,), num_prompts, seed)

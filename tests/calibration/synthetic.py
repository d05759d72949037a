"""Levels that look measured: simulated ones with the raw token times that a client would have written down."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload
from simulator.results.run import TOKEN_COLUMNS, Level


@dataclass(frozen=True)
class Noise:
    """What makes a measurement differ from its formula, each drawn anew for every step, token or request.

    Attributes
        step: standard deviation of the logarithm of a step's duration
        jitter: s, mean of the delay of a step's delivery and of that of each token within it, both exponential
        late_share, late: share of the tokens that come late, and s, mean of the exponential by which
        lag: s by which a step's delivery comes later for each of its prompt tokens, up to the token budget
        intake: s, mean of the exponential by which lone requests reach the engine late
    """

    step: float = 0.0
    jitter: float = 0.0
    late_share: float = 0.0
    late: float = 0.0
    lag: float = 0.0
    intake: float = 0.0


class NoisySteps(StepTime):
    """Every step takes its formula's time, times a factor with a median of 1."""

    def duration(
        self, sequences: int, kv_tokens: int, prefill_tokens: int = 0, prefill_attention: float = 0.0
    ) -> float:
        seconds = super().duration(sequences, kv_tokens, prefill_tokens, prefill_attention)
        return seconds * float(np.exp(self.rng.normal(0.0, self.deviation)))

    @classmethod
    def of(cls, step_time: StepTime, deviation: float, seed: int) -> NoisySteps:
        noisy = cls(**asdict(step_time))
        object.__setattr__(noisy, "deviation", deviation)
        object.__setattr__(noisy, "rng", np.random.default_rng(seed))
        return noisy

    rng: np.random.Generator
    deviation: float


def measured_level(
    workload: Workload,
    flags: EngineFlags,
    step_time: StepTime,
    host_time: HostTime,
    noise: Noise | float = 0.0,
    seed: int = 0,
) -> Level:
    """A simulated level without preemptions, with tokens. `noise` as a number is its `jitter`."""
    noise = noise if isinstance(noise, Noise) else Noise(jitter=noise)
    if noise.step:
        noisy = NoisySteps.of(step_time, noise.step, seed)
        level = simulate_level(workload, flags, noisy, host_time, single_steps=True)
    else:
        level = simulate_level(workload, flags, step_time, host_time)
    assert not level.requests["preemptions"].any(), "token times can only be told without preemption"
    rng = np.random.default_rng(seed)
    requests = level.requests
    if noise.intake and workload.concurrency == 1:
        _take_in_late(level, rng.exponential(noise.intake, len(requests)))
    first = (requests["arrival"] + requests["ttft"]).to_numpy()
    last = (requests["arrival"] + requests["e2el"]).to_numpy()
    steps = np.unique(np.concatenate([level.gaps["time"].to_numpy(), first]).round(9))
    delays = rng.exponential(noise.jitter, len(steps)) if noise.jitter else np.zeros(len(steps))
    prompts = np.minimum(requests["prompt_tokens"].to_numpy(), flags.max_num_batched_tokens)
    delays[np.clip(np.searchsorted(steps, first - 1e-8), 0, len(steps) - 1)] += noise.lag * prompts
    tables = []
    for number, begin, end in zip(requests["request_id"], first, last, strict=True):
        chosen = (steps >= begin - 1e-8) & (steps <= end + 1e-8)
        times = steps[chosen] + delays[chosen]
        times = times + (rng.exponential(noise.jitter, len(times)) if noise.jitter else 0.0)
        times = times + (rng.random(len(times)) < noise.late_share) * rng.exponential(noise.late or 1.0, len(times))
        counts = np.arange(1, len(times) + 1)
        times = np.minimum(np.maximum.accumulate(times), end)  # the last token is in time: it has let the next go
        tables.append(pd.DataFrame({"request_id": number, "time": times, "tokens": counts}))
    level.tokens = pd.concat(tables, ignore_index=True).astype(TOKEN_COLUMNS)
    return level


def _take_in_late(level: Level, delays: npt.NDArray[np.float64]) -> None:
    """Let each request of a single client reach the engine late, and everything after it happen later."""
    requests, gaps = level.requests, level.gaps
    later = np.cumsum(delays)
    number = np.searchsorted(requests["arrival"].to_numpy(), gaps["time"].to_numpy()) - 1
    gaps["time"] += later[number]
    requests["arrival"] += later - delays
    requests[["ttft", "e2el"]] = requests[["ttft", "e2el"]].add(delays, axis=0)


def closed(concurrency: int, input_len: int, output_len: int, num_prompts: int, seed: int = 0) -> Workload:
    shape = Shape(Length.fixed(input_len), Length.fixed(output_len))
    return Workload(ClosedLoop(concurrency), (shape,), num_prompts, seed)

"""What limits a simulated level: slots, KV pool, step token budget, compute, memory bandwidth, steps, or the host.

The time that requests spend is divided among what they spend it on. Where a request waits for admission, the scheduler
has stopped for one of three reasons, and which one can be told from the step: no slot was left, the KV pool had no room
for a prompt, or the step's token budget was used up. Where a request is in a step, the step's duration is divided
as `simulator.engine.step_time` builds it up. A step that is full up to its token budget waits for the budget only as
far as it
does not compute: a larger budget saves the constant of a step, and no computing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.step_time import HostTime, StepTime
from simulator.results.run import Level

Array = npt.NDArray[np.float64]
Phase = Literal["ttft", "decode", "e2el"]

LIMITS = {
    "slots": "waiting for a slot (--max-num-seqs)",
    "kv_pool": "waiting for room in the KV pool",
    "step_token_budget": "waiting for the step token budget (--max-num-batched-tokens)",
    "compute": "computing prompt and output tokens",
    "memory_bandwidth": "reading memory (KV cache and weights)",
    "step_constant": "the constant part of every step (reading weights, launching kernels)",
    "launching": "launching the kernels of every step",
    "sequences": "what every sequence adds to a step (scheduling, sampling, its share of kernels)",
    "host": "the host outside of steps (API server, way to the engine and back)",
}
ALSO_LARGE = 0.2  # a second share of this size is worth saying
OF_STEPS = ("step_constant", "launching", "sequences", "memory_bandwidth")  # which fewer steps make less
PHASES: dict[Phase, str] = {
    "ttft": "the time to first token",
    "decode": "the time between tokens",
    "e2el": "the time of requests",
}


@dataclass(frozen=True)
class Limits:
    """What the requests of a level spend their time on.

    Attributes
        phase: whose time is divided: that before the first token, that after it, or both
        shares: by the names of `LIMITS`, all together 1; the first is the largest
        busy: share of the level's time in which the engine has a step to do
        computing: share of the level's time in which it computes tokens; the rest goes to reading, launching and idling
        steps: how many steps the engine does
        budget_used: tokens of a step that computes prompts, over ``--max-num-batched-tokens``, mean over time
        full_steps: share of the busy time in steps that use the whole budget
        peak_kv: largest share of the KV pool in use
        mean_waiting: requests that wait for admission, mean over the busy time
        preemptions: of all requests
    """

    phase: Phase
    shares: dict[str, float]
    busy: float
    computing: float
    steps: int
    budget_used: float
    full_steps: float
    peak_kv: float
    mean_waiting: float
    preemptions: int

    @property
    def name(self) -> str:
        """What takes the largest share."""
        return next(iter(self.shares))

    def sentence(self) -> str:
        """What takes the largest share, and of what; the second one too if it is large."""
        (first, share), (second, other) = list(self.shares.items())[:2]
        also = f", {other:.0%} {LIMITS[second]}" if other >= ALSO_LARGE else ""
        return f"{share:.0%} of {PHASES[self.phase]} is {LIMITS[first]}{also}{self._evidence()}"

    def _evidence(self) -> str:
        seen = {
            "slots": f"; {self.mean_waiting:.1f} requests wait on average, KV pool {self.peak_kv:.0%} used at most",
            "kv_pool": f"; {self.mean_waiting:.1f} requests wait on average, {self.preemptions} preemptions",
            "step_token_budget": f"; the engine computes tokens in only {self.computing:.0%} of the time",
            "compute": f"; the engine computes tokens in {self.computing:.0%} of the time",
        }
        return seen.get(self.name, "")


def phase_of(target: str) -> Phase:
    """The time of a request that the target ``p95_ttft``, ``mean_tpot`` and so on is about."""
    latency = target.rpartition("_")[2]
    return "ttft" if latency == "ttft" else "decode" if latency in ("tpot", "itl") else "e2el"


def what_limits(
    level: Level,
    flags: EngineFlags,
    step_time: StepTime,
    host_time: HostTime | None = None,
    phase: Phase = "e2el",
) -> Limits:
    """Divide the time that the requests of a simulated level spend, by what they spend it on.

    Raises `ValueError` for a level without steps, such as a measured one.
    """
    if level.steps is None:
        raise ValueError("only a level that was just simulated tells what its steps did")
    steps = _Steps(level, flags, step_time)
    host = _host_seconds(level, host_time or HostTime())
    seconds = dict.fromkeys(LIMITS, 0.0)
    if phase != "decode":
        _add(seconds, steps.of_waiting())
        _add(seconds, steps.of_prefilling())
    if phase != "ttft":
        _add(seconds, steps.of_decoding())
    # the rest of a request's time passes while a step runs that was planned before it came
    rest = _spent(level, phase) - sum(seconds.values()) - (host if phase != "decode" else 0.0)
    if rest > 0:
        _add(seconds, {name: rest * share for name, share in steps.composition().items()})
    if phase != "decode":
        seconds["host"] += host
    total = sum(seconds.values())
    shares = {name: value / total for name, value in seconds.items()} if total > 0 else seconds
    return Limits(
        phase=phase,
        shares=dict(sorted(shares.items(), key=lambda item: -item[1])),
        busy=min(steps.busy / level.duration, 1.0) if level.duration > 0 else float("nan"),
        computing=min(float(steps.compute.sum()) / level.duration, 1.0) if level.duration > 0 else float("nan"),
        steps=steps.number,
        budget_used=steps.budget_used(),
        full_steps=steps.mean(steps.is_full),
        peak_kv=float(level.timeline["kv_tokens"].max()) / (flags.usable_blocks * flags.block_size),
        mean_waiting=steps.mean(steps.waiting),
        preemptions=int(np.maximum(level.requests["preemptions"], 0).sum()),
    )


class _Steps:
    """The steps of a level: how long each row of them lasts, what that time is made of, and who is there."""

    def __init__(self, level: Level, flags: EngineFlags, step_time: StepTime) -> None:
        assert level.steps is not None
        working = level.steps["tokens"] > 0
        column = {name: values[working] for name, values in level.steps.items()}
        self._flags = flags
        self._column = column
        self._free = flags.usable_blocks * flags.block_size - column["held_tokens"]
        self._prompt = float(level.requests["prompt_tokens"].mean())
        self.waiting, self.running = column["waiting"], column["running"]
        self.decodes = column["decodes"]
        self.is_full = (column["tokens"] >= flags.max_num_batched_tokens).astype(np.float64)
        parts = _parts(column, step_time)
        self.parts = {name: part * column["steps"] for name, part in parts.items()}
        self.compute = self.parts["compute"]
        self.seconds: Array = np.asarray(sum(self.parts.values()))
        self.busy = float(self.seconds.sum())
        self.number = round(float(column["steps"].sum()))

    def mean(self, values: Array) -> float:
        """Mean over the busy time."""
        return float((values * self.seconds).sum() / self.busy) if self.busy else float("nan")

    def composition(self) -> dict[str, float]:
        """Shares of the busy time by what it is made of."""
        return {name: float(part.sum()) / self.busy for name, part in self.parts.items()} if self.busy else {}

    def of_waiting(self) -> dict[str, float]:
        """Request-seconds of those that wait for admission, by why.

        In a step that is full, as many wait for the budget as slots and pool would still take; the others would have to
        wait all the same.
        """
        slots_left = np.maximum(self._flags.max_num_seqs - self.running, 0.0)
        prompts_left = np.floor(self._free / self._prompt)
        for_budget = np.minimum(self.waiting, np.minimum(slots_left, prompts_left)) * self.is_full
        blocked = (self.waiting - for_budget) * self.seconds
        by_slots = np.where(self.is_full > 0, slots_left <= prompts_left, slots_left == 0)
        return {
            "slots": float((blocked * by_slots).sum()),
            "kv_pool": float((blocked * ~by_slots).sum()),
            **self._for_budget(for_budget),
        }

    def of_prefilling(self) -> dict[str, float]:
        """Request-seconds of those that are admitted and have prompt tokens to compute."""
        prefilling = np.maximum(self.running - self.decodes, 0.0)
        starved = self._for_budget(prefilling * self.is_full)
        working = self._divided(prefilling * (1 - self.is_full))
        return {name: starved.get(name, 0.0) + working.get(name, 0.0) for name in LIMITS}

    def of_decoding(self) -> dict[str, float]:
        """Request-seconds of those that decode, by what the steps are made of."""
        return self._divided(self.decodes)

    def _divided(self, requests: Array) -> dict[str, float]:
        return {name: float((requests * part).sum()) for name, part in self.parts.items()}

    def _for_budget(self, requests: Array) -> dict[str, float]:
        computing = float((requests * self.compute).sum())
        return {"compute": computing, "step_token_budget": float((requests * self.seconds).sum()) - computing}

    def budget_used(self) -> float:
        """Share of the token budget that steps with prompt tokens use."""
        with_prompts = self.seconds * (self._column["prefill_tokens"] > 0)
        if not with_prompts.any():
            return 0.0
        used = self._column["tokens"] / self._flags.max_num_batched_tokens
        return float((used * with_prompts).sum() / with_prompts.sum())


def _parts(column: Mapping[str, Array], step_time: StepTime) -> dict[str, Array]:
    """Seconds of one step of each row by what they are made of.

    Where the profile knows what reading the weights takes, the rest of the constant is launching.
    """
    sequences, prefill = column["sequences"], column["prefill_tokens"]
    mixed = prefill > 0
    computing = step_time.per_prefill_attention * column["prefill_attention"]
    if step_time.weights:
        tokens = step_time.per_prefill_token * (prefill + sequences)
        computing = computing + np.hypot(step_time.weights, tokens) - step_time.weights
        constant, launching = 0.0, max(step_time.constant - step_time.weights, 0.0)
    else:
        computing = computing + step_time.per_prefill_token * prefill
        constant, launching = step_time.constant, 0.0
    per_sequence = step_time.per_sequence + step_time.mixed_per_sequence * mixed
    return {
        "compute": computing,
        "memory_bandwidth": step_time.per_kv_token * column["kv_tokens"] + min(step_time.weights, step_time.constant),
        "step_constant": np.full(len(sequences), constant),
        "launching": np.full(len(sequences), launching),
        "sequences": per_sequence * sequences,
    }


def _host_seconds(level: Level, host_time: HostTime) -> float:
    """Request-seconds before the first token that pass outside of the engine."""
    done = level.completed
    intake = host_time.per_request_serial
    free = waited = 0.0
    if intake:
        for sent in done["arrival"].tolist():
            free = max(free, sent) + intake
            waited += free - sent
    prompts = float(done["prompt_tokens"].sum())
    return waited + host_time.per_request * len(done) + host_time.per_prompt_token * prompts


def _spent(level: Level, phase: Phase) -> float:
    """Request-seconds of a phase, as clients see it."""
    done = level.completed
    ttft, e2el = float(done["ttft"].sum()), float(done["e2el"].sum())
    return {"ttft": ttft, "decode": e2el - ttft, "e2el": e2el}[phase]


def _add(seconds: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        seconds[name] += value

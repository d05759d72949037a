"""What a sweep measures and in which order, and how many requests each level gets from what a server's pace allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.loads.workload import ClosedLoop, Length, Load, OpenLoop, Shape, Workload
from simulator.results.run import Level

PROBE_LENGTHS = (64, 256, 512, 1024, 2048, 4096, 8192)  # tokens of the prompts that are measured alone
UNTOLD_LENGTH = 4096  # tokens; no longer prompt is tried where the server does not tell its longest
PROBE_OUTPUT = 8  # tokens
PROBE_REPEATS = 5
MIXED_CLIENTS, MIXED_OUTPUT, MIXED_REQUESTS = 2, 32, 24  # prompts of all lengths beside another client's decoding
CROWD, CROWD_REQUESTS = 16, 96  # clients with short requests, such as the two below
TOGETHER = Shape(Length.fixed(64), Length.fixed(16))  # all alike, so they come together and queue at the API server
IN_TURN = Shape(Length(64, 256), Length(8, 24))  # they come one by one, so most steps carry a prompt and many decodes
WARM_UP_OUTPUT = 16  # tokens, of warm-up requests that only fill the batch
OPEN_CROWD = 8  # requests at once in the warm-up of an open loop

LEAST_PER_CLIENT, MOST_PER_CLIENT = 3, 12  # requests
LEAST_PER_LEVEL = 8
MOST_OPEN_SECONDS = 60.0  # of arrivals in an open loop, where a closed one gets `MOST_PER_CLIENT`
LEVEL_SECONDS = 180.0  # for the levels of a planned sweep; warm-up and probes come on top
REPEATED_CLIENTS = 4  # a level of so many shows the noise of prompts beside decoding


@dataclass(frozen=True)
class SweepPlan:
    """Levels in the order they are measured, and what is played before them and not kept.

    With `level_seconds` the levels after the first `probes` get as many requests as fit that time, once the warm-up has
    shown how fast the server is: between `LEAST_PER_CLIENT` and `MOST_PER_CLIENT` a client.
    """

    levels: tuple[Workload, ...]
    warm_up: tuple[Workload, ...] = ()
    probes: int = 0
    level_seconds: float | None = None


@dataclass(frozen=True)
class Pace:
    """How fast a server is: good enough to say when a sweep will end."""

    prefill: float  # s per prompt token
    decode: float  # s per output token

    @classmethod
    def of(cls, level: Level) -> Pace | None:
        """The pace of a level, best one of a single client; None where nothing was answered."""
        done = level.completed
        if done.empty:
            return None
        tpot = done["tpot"].median()
        return cls(float((done["ttft"] / done["prompt_tokens"]).median()), 0.0 if math.isnan(tpot) else float(tpot))

    def seconds(self, workload: Workload) -> float:
        """What `workload` will take: in every round of a closed loop a client also waits for the others' prompts."""
        shapes, weight = workload.shapes, sum(shape.weight for shape in workload.shapes)
        prefill = sum(shape.weight * shape.input_len.mean for shape in shapes) / weight * self.prefill
        decode = sum(shape.weight * shape.output_len.mean for shape in shapes) / weight * self.decode
        if isinstance(workload.arrivals, OpenLoop):
            return workload.num_prompts / workload.arrivals.request_rate + prefill + decode
        clients = min(workload.arrivals.concurrency, workload.num_prompts)
        return workload.num_prompts / clients * (clients * prefill + decode)


def plan_sweep(
    levels: Sequence[Workload],
    max_model_len: int | None = None,
    *,
    paced: bool = True,
    probes: bool = True,
    repeat: bool = False,
) -> SweepPlan:
    """Prompts of several lengths, each alone in the server, then `levels`, each with a seed of its own.

    Two clients with prompts of all lengths come between: what a chunk costs shows in the other's token gaps, without
    the host's time. Then crowds with short requests: only a queue at the API server shows how much of the host's time
    passes before the engine has a request, and what a prompt costs beside many others shows in few steps of the levels.
    Without `probes` there are none of these. With `repeat` one level is measured again at the end, with the
    same lengths, which shows the noise.

    Where the sweep is `paced` the server's pace decides how many requests the levels get, and theirs do not count:
    three to twelve a client and at least eight a level. Levels 1 to 16 at 1024/256 then take three minutes on a server
    with steps of 16 ms, the sweep under four. Raises ValueError for requests that `max_model_len` forbids.
    """
    if not levels:
        raise ValueError("a sweep needs at least one level")
    for level in levels:
        _refuse_too_long(level, max_model_len)
    lone, together = probe_levels(levels, max_model_len) if probes else ([], [])
    first = lone + together
    if paced:
        levels = [with_effort(level, 0.0) for level in levels]
    order = [replace(workload, seed=seed) for seed, workload in enumerate([*first, *levels])]
    again = [_cheapest_informative(order[len(first) :])] if repeat else []
    return SweepPlan(
        levels=(*order, *again),
        warm_up=(*warm_up_of(levels), *(replace(probe, num_prompts=1) for probe in lone)),
        probes=len(first),
        level_seconds=LEVEL_SECONDS if paced else None,
    )


def probe_levels(levels: Sequence[Workload], max_model_len: int | None) -> tuple[list[Workload], list[Workload]]:
    """Prompts of several lengths alone; then such prompts beside another client's decoding, and crowds."""
    room = max_model_len or UNTOLD_LENGTH + MIXED_OUTPUT
    longest = min(PROBE_LENGTHS[-1], room - PROBE_OUTPUT)
    lengths = [length for length in PROBE_LENGTHS if length <= longest]
    if longest >= 1.25 * max(lengths, default=0) and longest > 0:
        lengths.append(longest)
    asked = max(shape.input_len.high for level in levels for shape in level.shapes)
    if asked > max(lengths, default=0):
        lengths.append(asked)  # a long prompt belongs on the curve itself
    output = min(PROBE_OUTPUT, max(shape.output_len.high for level in levels for shape in level.shapes))
    lone = [closed_level(1, length, output, PROBE_REPEATS) for length in lengths]
    longest = min(max(lengths), room - MIXED_OUTPUT)
    if longest < min(lengths):
        return lone, []
    any_length = Shape(Length(min(lengths), longest), Length.fixed(MIXED_OUTPUT))
    mixed = Workload(ClosedLoop(MIXED_CLIENTS), (any_length,), MIXED_REQUESTS)
    crowds = [shape for shape in (TOGETHER, IN_TURN) if longest_request([shape]) <= room]
    return lone, [mixed, *(Workload(ClosedLoop(CROWD), (shape,), CROWD_REQUESTS) for shape in crowds)]


def is_probe(load: Load) -> bool:
    """Whether a level is one of `probe_levels` with several clients: it is there for the fit alone."""
    if not isinstance(load, Workload):
        return False
    if (load.concurrency, load.num_prompts) == (CROWD, CROWD_REQUESTS):
        return load.shapes in ((TOGETHER,), (IN_TURN,))
    outputs = {shape.output_len for shape in load.shapes}
    mixed = (MIXED_CLIENTS, MIXED_REQUESTS, {Length.fixed(MIXED_OUTPUT)})
    return (load.concurrency, load.num_prompts, outputs) == mixed


def warm_up_of(levels: Sequence[Workload]) -> tuple[Workload, ...]:
    """What a server compiles at its first request, its pace, and every batch size on the way up and down."""
    shape = max((shape for level in levels for shape in level.shapes), key=lambda shape: shape.weight)
    prompt, output = round(shape.input_len.mean), round(shape.output_len.mean)
    brief = min(output, WARM_UP_OUTPUT)
    crowd = max(level.concurrency or OPEN_CROWD for level in levels)
    return (closed_level(1, prompt, brief, 1), closed_level(1, prompt, output, 1), _crowd(levels, crowd))


def closed_level(clients: int, input_len: int, output_len: int, requests: int) -> Workload:
    """A closed loop of requests that are all alike."""
    shape = Shape(Length.fixed(input_len), Length.fixed(output_len))
    return Workload(ClosedLoop(clients), (shape,), requests)


def with_effort(workload: Workload, effort: float) -> Workload:
    """The level with as many requests as `effort` between 0, the fewest that tell something, and 1 allows."""
    if isinstance(workload.arrivals, OpenLoop):
        least = MOST_OPEN_SECONDS * LEAST_PER_CLIENT / MOST_PER_CLIENT
        seconds = least + effort * (MOST_OPEN_SECONDS - least)
        rate = workload.arrivals.request_rate
        requests = LEAST_PER_LEVEL if math.isinf(rate) else round(seconds * rate)
    else:
        per_client = LEAST_PER_CLIENT + math.floor(effort * (MOST_PER_CLIENT - LEAST_PER_CLIENT) + 1e-9)
        requests = per_client * workload.arrivals.concurrency
    return replace(workload, num_prompts=max(LEAST_PER_LEVEL, requests))


def fitted_levels(plan: SweepPlan, pace: Pace) -> list[Workload]:
    """The plan's levels with as many requests as its `level_seconds` allow at this pace."""
    if plan.level_seconds is None:
        return list(plan.levels)
    fixed, flexible = plan.levels[: plan.probes], plan.levels[plan.probes :]
    steps = MOST_PER_CLIENT - LEAST_PER_CLIENT
    for step in range(steps, -1, -1):
        fitted = [with_effort(workload, step / steps) for workload in flexible]
        if sum(pace.seconds(workload) for workload in fitted) <= plan.level_seconds:
            break
    return [*fixed, *fitted]


def longest_request(shapes: Sequence[Shape]) -> int:
    """Prompt and output tokens of the longest request."""
    return max(shape.input_len.high + shape.output_len.high for shape in shapes)


def _crowd(levels: Sequence[Workload], clients: int) -> Workload:
    """All clients at once, with prompts of every shape and short answers."""
    shapes = {shape.input_len: shape for level in levels for shape in level.shapes}
    brief = tuple(
        replace(shape, output_len=Length.fixed(min(shape.output_len.high, WARM_UP_OUTPUT))) for shape in shapes.values()
    )
    return Workload(ClosedLoop(clients), brief, clients if len(brief) == 1 else max(clients, 2 * len(brief)))


def _cheapest_informative(levels: Sequence[Workload]) -> Workload:
    """The level to repeat: the fewest clients of which some share their steps with others' prompts."""
    clients = sorted((level.concurrency, number) for number, level in enumerate(levels) if level.concurrency)
    if not clients:
        return levels[0]
    _, chosen = next((pair for pair in clients if pair[0] >= REPEATED_CLIENTS), clients[-1])
    return levels[chosen]


def _refuse_too_long(level: Workload, max_model_len: int | None) -> None:
    for shape in level.shapes:
        if max_model_len is not None and longest_request([shape]) > max_model_len:
            raise ValueError(
                f"{shape.input_len.high} input and {shape.output_len.high} output tokens exceed the server's "
                f"max_model_len of {max_model_len}"
            )

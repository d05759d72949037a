"""What a pencil and queueing theory say of the simple cases: closed forms, laws and bounds, with derived tolerances."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import simpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.special import stdtrit

from simulator.engine.clients import ApiServer, Clients
from simulator.engine.engine_core import IDLE_SLEEP, EngineCore
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.fleet import Fleet
from simulator.engine.recorder import Recorder
from simulator.engine.scheduler import Scheduler
from simulator.engine.simulation import Engine, simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.trace import Trace
from simulator.loads.workload import ClosedLoop, Length, Load, OpenLoop, Shape, ThinkTime, Workload
from simulator.results.run import Level
from simulator.results.summary import summarize

examples = settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

Array = npt.NDArray[np.float64]

STEP = StepTime(
    constant=15e-3,
    per_sequence=40e-6,
    per_kv_token=60e-9,
    per_prefill_token=80e-6,
    per_prefill_attention=3e-9,
    mixed_per_sequence=5e-6,
)
ONE_SLOT = EngineFlags(max_num_seqs=1, async_scheduling=False)


def shape(prompt: int, output: int) -> tuple[Shape]:
    return (Shape(Length.fixed(prompt), Length.fixed(output)),)


def seconds(highest: float) -> st.SearchStrategy[float]:
    return st.one_of(st.just(0.0), st.floats(highest / 100, highest))


STEP_TIMES = st.builds(
    StepTime,
    constant=st.floats(5e-3, 50e-3),
    per_sequence=seconds(1e-3),
    per_kv_token=seconds(1e-6),
    per_prefill_token=seconds(1e-4),
    per_prefill_attention=seconds(1e-8),
    mixed_per_sequence=seconds(1e-4),
    per_padded_sequence=seconds(1e-4),
    without_graph=seconds(1e-2),
    weights=seconds(5e-3),
)
HOST_TIMES = st.builds(
    HostTime, per_request=seconds(5e-3), per_request_serial=seconds(5e-3), per_prompt_token=seconds(2e-6)
)


# --- a request alone


def chunk_seconds(step: StepTime, tokens: int, context: int) -> float:
    """A step with one chunk of a prompt, written out."""
    computing = step.per_prefill_token * tokens
    if step.weights:
        computing = math.hypot(step.weights, step.per_prefill_token * (tokens + 1)) - step.weights
    attention = step.per_prefill_attention * tokens * (context + tokens / 2)
    return step.constant + step.per_sequence + computing + attention + step.mixed_per_sequence


def decode_seconds(step: StepTime, context: int, captured: bool) -> float:
    """A step that decodes one sequence, written out; a batch of 1 is captured as it is, without empty places."""
    computing = math.hypot(step.weights, step.per_prefill_token) - step.weights if step.weights else 0.0
    graph = 0.0 if captured else step.without_graph
    return step.constant + step.per_sequence + step.per_kv_token * context + computing + graph


def engine_seconds(step: StepTime, prompt: int, output: int, flags: EngineFlags) -> tuple[float, list[float], int]:
    """Seconds to the first token, the gaps after it, and the tokens of the last chunk."""
    budget, first, chunk = flags.max_num_batched_tokens, 0.0, 0
    for context in range(0, prompt, budget):
        chunk = min(budget, prompt - context)
        first += chunk_seconds(step, chunk, context)
    contexts = range(prompt, prompt + output - 1)
    return first, [decode_seconds(step, context, not flags.enforce_eager) for context in contexts], chunk


@examples
@given(
    step=STEP_TIMES,
    host=HOST_TIMES,
    prompt=st.integers(1, 3000),
    output=st.integers(1, 60),
    budget=st.integers(8, 3500),
    slots=st.integers(1, 8),
    asynchronous=st.booleans(),
    eager=st.booleans(),
    single_steps=st.booleans(),
)
def test_a_request_alone_takes_the_time_of_its_steps(
    step: StepTime,
    host: HostTime,
    prompt: int,
    output: int,
    budget: int,
    slots: int,
    asynchronous: bool,
    eager: bool,
    single_steps: bool,
) -> None:
    """Chunks of the budget, one step a token, and the host before, after and behind a prompt's last chunk."""
    flags = EngineFlags(
        max_num_batched_tokens=budget, max_num_seqs=slots, async_scheduling=asynchronous, enforce_eager=eager
    )
    load = Workload(ClosedLoop(1), shape(prompt, output), 1)
    level = simulate_level(load, flags, step, host, single_steps)
    (request,) = level.requests.to_dict("records")
    first, gaps, last_chunk = engine_seconds(step, prompt, output, flags)
    late = host.per_prompt_token * last_chunk
    around = host.per_request_serial + host.per_request
    assert request["ttft"] == pytest.approx(around + first + late, rel=1e-9)
    whole = around + first + sum(gaps) + (late if output == 1 else 0.0)
    assert request["e2el"] == pytest.approx(whole, rel=1e-9)
    seen = np.repeat(level.gaps["gap"], level.gaps["count"])
    expected = np.array(gaps) - late * (np.arange(output - 1) == 0)
    assert np.allclose(np.sort(seen), np.sort(expected), rtol=1e-9, atol=1e-12)
    if output > 1:
        assert request["tpot"] == pytest.approx((whole - request["ttft"]) / (output - 1), rel=1e-9)


@examples
@given(step=STEP_TIMES, clients=st.integers(1, 40), slots=st.integers(1, 48), eager=st.booleans())
def test_equal_requests_decode_in_the_graph_that_holds_them(
    step: StepTime, clients: int, slots: int, eager: bool
) -> None:
    """All prompts in one step, then every gap is a step of all of them, padded to the next captured size."""
    flags = EngineFlags(max_num_seqs=slots, max_num_batched_tokens=4096, enforce_eager=eager, async_scheduling=False)
    level = simulate_level(Workload(ClosedLoop(clients), shape(10, 4), clients), flags, step)
    sizes = {1, 2, 4, slots, *range(8, 2 * slots + 1, 8)}
    batches = [min(slots, clients - done) for done in range(0, clients, slots)]
    expected: list[float] = []
    for batch in batches:
        padding = min(size for size in sizes if size >= batch) - batch
        graph = step.without_graph if eager else step.per_padded_sequence * padding
        for token in range(3):
            duration = step.duration(batch, batch * (10 + token)) + graph
            expected += [duration] * batch
    seen = np.repeat(level.gaps["gap"], level.gaps["count"])
    assert np.allclose(np.sort(seen), np.sort(expected), rtol=1e-9, atol=1e-12)


@examples
@given(step=STEP_TIMES, others=st.integers(1, 8), prompt=st.integers(1, 900))
def test_a_prompt_that_joins_makes_one_step_of_those_that_decode_longer(
    step: StepTime, others: int, prompt: int
) -> None:
    """All of them pay for its tokens, and a step with a prompt costs more for each sequence."""
    flags = EngineFlags(max_num_seqs=16, max_num_batched_tokens=4096, async_scheduling=False)
    begun = step.duration(others, 0, 10 * others, others * 10 * 5) + step.duration(others, 10 * others) / 2
    trace = Trace(
        "joined", np.append(np.zeros(others), begun), np.append([10] * others, prompt), np.append([12] * others, 1)
    )
    level = simulate_level(trace, flags, step)
    computed, sequences = step.per_prefill_token * prompt, others + 1
    if step.weights:
        computed = math.hypot(step.weights, step.per_prefill_token * (prompt + sequences)) - step.weights
    mixed = (
        step.constant
        + sequences * (step.per_sequence + step.mixed_per_sequence)
        + step.per_kv_token * others * 11  # their prompts and the first token
        + computed
        + step.per_prefill_attention * prompt * prompt / 2
    )
    (joined,) = level.requests[level.requests["arrival"] > 0].to_dict("records")
    waited = joined["queue_time"]
    assert joined["e2el"] == pytest.approx(waited + mixed, rel=1e-9)
    second = level.gaps.sort_values("time").iloc[1]  # of each of the others: the first gap was the step before
    assert (second["gap"], second["count"]) == (pytest.approx(mixed, rel=1e-9), others)


# --- one request at a time: a queue with one server


def service_seconds(load: Load, step: StepTime = STEP) -> Array:
    """How long a one-slot engine works for each request of a load."""
    times = {}
    for prompt, output in zip(*(lengths.tolist() for lengths in load.lengths()), strict=True):
        if (prompt, output) not in times:
            first, gaps, _ = engine_seconds(step, prompt, output, ONE_SLOT)
            times[prompt, output] = first + sum(gaps)
    return np.array([times[pair] for pair in zip(*(lengths.tolist() for lengths in load.lengths()), strict=True)])


def lindley(arrivals: Array, services: Array) -> Array:
    """Waits of a first-come-first-served queue, from one to the next (Lindley 1952)."""
    waits = np.zeros(len(arrivals))
    for number in range(1, len(arrivals)):
        gap = arrivals[number] - arrivals[number - 1]
        waits[number] = max(0.0, waits[number - 1] + services[number - 1] - gap)
    return waits


MIXED = (Shape(Length(10, 300), Length(1, 8), 3.0), Shape(Length(1000, 6000), Length(2, 30), 1.0))


@examples
@given(
    utilization=st.floats(0.2, 1.6),
    burstiness=st.sampled_from([0.3, 1.0, 4.0, math.inf]),
    shapes=st.sampled_from([shape(100, 5), MIXED]),
    seed=st.integers(0, 1000),
)
def test_every_wait_is_lindleys(utilization: float, burstiness: float, shapes: Any, seed: int) -> None:
    """G/G/1, request by request, below and above capacity."""
    mean = float(service_seconds(Workload(ClosedLoop(1), shapes, 2000, seed)).mean())
    load = Workload(OpenLoop(utilization / mean, burstiness), shapes, 120, seed)
    requests = simulate_level(load, ONE_SLOT, STEP).requests
    services, arrivals = service_seconds(load), load.arrival_times()
    assert arrivals is not None
    waits = lindley(arrivals, services)
    assert np.allclose(requests["queue_time"], waits, rtol=0, atol=1e-9)
    assert np.allclose(requests["e2el"], waits + services, rtol=0, atol=1e-9)


def test_evenly_spaced_equal_requests_wait_for_nobody_or_ever_longer() -> None:
    """D/D/1: below capacity there is no wait, above it each waits longer than the last by what a gap lacks."""
    service = float(service_seconds(Workload(ClosedLoop(1), shape(100, 5), 1))[0])
    for utilization in (0.5, 0.999, 1.25):
        load = Workload(OpenLoop(utilization / service, math.inf), shape(100, 5), 300)
        waits = simulate_level(load, ONE_SLOT, STEP).requests["queue_time"].to_numpy()
        lacking = max(0.0, service - service / utilization)
        assert np.allclose(waits, lacking * np.arange(300), rtol=1e-9, atol=1e-9)


def batch_means(values: Array, batches: int = 30) -> tuple[float, float]:
    """Mean of a correlated series and the half width of its 99.9 % interval, by Student's t over batches."""
    means = np.array([part.mean() for part in np.array_split(values, batches)])
    half = stdtrit(batches - 1, 0.9995) * means.std(ddof=1) / math.sqrt(batches)
    return float(means.mean()), float(half)


@pytest.mark.slow
@pytest.mark.parametrize("utilization", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("shapes", [shape(100, 3), MIXED], ids=["M/D/1", "M/G/1"])
def test_poisson_arrivals_wait_as_pollaczek_and_khinchine_say(shapes: Any, utilization: float) -> None:
    """Mean wait = rate * E[S^2] / (2 (1 - utilization)); the share that does not wait is 1 - utilization."""
    count, warm_up = 120_000, 6_000
    load = Workload(OpenLoop(1.0), shapes, count, seed=1)
    services = service_seconds(load)
    rate = utilization / float(services.mean())
    load = replace(load, arrivals=OpenLoop(rate))
    waits = simulate_level(load, ONE_SLOT, STEP).requests["queue_time"].to_numpy()[warm_up:]
    expected = rate * float((services**2).mean()) / (2 * (1 - utilization))
    mean, half = batch_means(waits)
    assert abs(mean - expected) < half
    assert half < 0.2 * expected  # it could have failed
    idle, half = batch_means((waits < 1e-9).astype(np.float64))
    assert abs(idle - (1 - utilization)) < half
    assert half < 0.03


# --- clients that think: the machine repairman


@pytest.mark.parametrize("clients", [1, 3, 5, 6, 12])
def test_throughput_of_thinking_clients_keeps_the_asymptotic_bounds(clients: int) -> None:
    """Between N / (N D + Z) and min(N / (D + Z), 1 / D); with even service and thinking it is the upper one."""
    service = float(service_seconds(Workload(ClosedLoop(1), shape(100, 5), 1))[0])
    think = 4.5 * service
    upper = min(clients / (service + think), 1 / service)
    lower = clients / (clients * service + think)
    for kind in ("fixed", "exponential"):
        load = Workload(ClosedLoop(clients, think_time=ThinkTime(think, kind)), shape(100, 5), 1500)
        requests = simulate_level(load, ONE_SLOT, STEP).requests
        ends = np.sort((requests["arrival"] + requests["e2el"]).to_numpy())
        start, end = 20 * clients, len(ends) - clients
        throughput = (end - start) / (ends[end] - ends[start])
        if kind == "fixed":
            assert throughput == pytest.approx(upper, rel=clients / (end - start))  # a round more or less
        chance = 4 / math.sqrt(end - start)  # standard errors of a mean of exponential thinking
        assert lower * (1 - chance) < throughput < upper * (1 + chance)
        # the response time law: clients / throughput = response + think time
        told = load.think_times()
        assert told is not None
        cycle = float(requests["e2el"].to_numpy()[start:end].mean() + told[start:end].mean())
        assert clients / throughput == pytest.approx(cycle, rel=2 * clients / (end - start) + 0.01)


# --- all at once, each the slower the more there are: processor sharing


@pytest.mark.slow
@pytest.mark.parametrize("utilization", [0.4, 0.7])
def test_steps_that_cost_by_the_sequence_are_processor_sharing(utilization: float) -> None:
    """M/G/1-PS: a request of x seconds of work stays x / (1 - utilization), whatever the others' lengths are.

    Tokens make turns of it: a request joins with the next step and is served in whole steps, which is at most a step
    more at either end. A step lasts as long as the number in the system, which is u / (1 - u) + 1 for who has arrived.
    """
    token = 1e-3
    step, flags = StepTime(constant=0.0, per_sequence=token), EngineFlags(max_num_seqs=1024, async_scheduling=False)
    lengths = {100: 0.8, 600: 0.2}
    shapes = tuple(Shape(Length.fixed(1), Length.fixed(output), weight) for output, weight in lengths.items())
    mean = token * sum(output * weight for output, weight in lengths.items())
    level = simulate_level(Workload(OpenLoop(utilization / mean), shapes, 30_000, seed=2), flags, step)
    requests = level.requests.iloc[1500:]
    turn = token * (utilization / (1 - utilization) + 1)
    for output in lengths:
        stays = requests["e2el"][requests["output_tokens"] == output].to_numpy()
        seen, half = batch_means(stays)
        expected = output * token / (1 - utilization)
        assert -half < seen - expected < half + 2 * turn
        assert half < 0.15 * expected


# --- laws that hold on every run


def play(load: Load, flags: EngineFlags, step: StepTime, host: HostTime, idle_sleep: float = IDLE_SLEEP) -> Recorder:
    """A load on one engine that sleeps for `idle_sleep` where vLLM's loop does."""
    env, recorder = simpy.Environment(), Recorder(host)
    engine = Engine(env, EngineCore(Scheduler(flags), step, recorder, idle_sleep=idle_sleep))
    Clients(env, load, engine, ApiServer(host))
    env.run()
    return recorder


@st.composite
def loads(draw: st.DrawFn) -> Workload:
    shapes = (Shape(Length(5, 120), Length(1, 40)),)
    think = draw(st.sampled_from([None, ThinkTime(0.1), ThinkTime(0.2, "exponential")]))
    arrivals = draw(
        st.one_of(
            st.builds(ClosedLoop, st.integers(1, 12), think_time=st.just(think)),
            st.builds(OpenLoop, st.floats(0.5, 40), st.sampled_from([0.5, 1.0, 3.0])),
            st.builds(OpenLoop, st.floats(2, 40), max_concurrency=st.integers(1, 5)),
        )
    )
    return Workload(arrivals, shapes, draw(st.integers(1, 40)), draw(st.integers(0, 99)))


@st.composite
def engines(draw: st.DrawFn, /, **fixed: Any) -> EngineFlags:
    """Pools from one in which requests preempt each other to one that holds all."""
    slots = draw(st.integers(1, 10))
    chosen: dict[str, Any] = {
        "max_num_seqs": slots,
        "max_num_batched_tokens": slots + draw(st.integers(4, 200)),
        "num_gpu_blocks": draw(st.sampled_from([14, 25, 60, 4000])),
        "async_scheduling": draw(st.booleans()),
    }
    return EngineFlags(**(chosen | fixed))


@examples
@given(load=loads(), flags=engines(), host=HOST_TIMES)
def test_littles_law_is_exact_on_a_whole_run(load: Workload, flags: EngineFlags, host: HostTime) -> None:
    """Requests in flight, mean over time = requests a second x their mean time, counted by hand over the run."""
    level = simulate_level(load, flags, STEP, host)
    start = level.requests["arrival"].to_numpy()
    ends = start + level.requests["e2el"].to_numpy()
    moments = np.unique(np.concatenate([start, ends]))
    there = np.searchsorted(np.sort(start), moments[:-1], "right") - np.searchsorted(
        np.sort(ends), moments[:-1], "right"
    )
    integral = float((there * np.diff(moments)).sum())
    summary = summarize(level)
    assert integral == pytest.approx(summary.requests * summary.e2el.mean, rel=1e-9, abs=1e-12)
    lasting = there[np.diff(moments) > 1e-9]  # who sends on an answer overlaps with it by rounding alone
    assert lasting.max(initial=0) == summary.peak_concurrency
    span = float(ends.max() - start.min())
    assert level.duration == pytest.approx(span, rel=1e-12, abs=1e-12)
    assert integral / span == pytest.approx(summary.mean_concurrency, rel=1e-9)
    assert integral / span == pytest.approx(summary.request_throughput * summary.e2el.mean, rel=1e-9)


def busy_seconds(requests: pd.DataFrame) -> float:
    """Length of the time in which any request is in the system."""
    spans = sorted(zip(requests["arrival"], requests["arrival"] + requests["e2el"], strict=True))
    total, reached = 0.0, -math.inf
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def step_seconds(level: Level, step: StepTime) -> float:
    """Sum of the durations of all steps; without graphs, whose cost `STEP` leaves out."""
    assert level.steps is not None
    total = 0.0
    steps = level.steps
    for number in range(len(steps["time"])):
        if steps["sequences"][number]:
            duration = step.duration(
                steps["sequences"][number],
                steps["kv_tokens"][number],
                steps["prefill_tokens"][number],
                steps["prefill_attention"][number],
            )
            total += steps["steps"][number] * duration
    return total


@examples
@given(load=loads(), flags=engines(async_scheduling=False))
def test_the_engine_works_whenever_there_is_a_request_and_no_longer(load: Workload, flags: EngineFlags) -> None:
    """Work conservation: the steps fill the time in which a request is there, and nothing else does."""
    level = simulate_level(load, flags, STEP)
    assert step_seconds(level, STEP) == pytest.approx(busy_seconds(level.requests), rel=1e-9)


@examples
@given(load=loads(), flags=engines())
def test_tokens_out_are_tokens_asked(load: Workload, flags: EngineFlags) -> None:
    level = simulate_level(load, flags, STEP)
    prompts, outputs = load.lengths()
    assert level.requests["output_tokens"].tolist() == outputs.tolist()
    assert level.requests["prompt_tokens"].tolist() == prompts.tolist()
    assert int(level.gaps["count"].sum()) == int((outputs - 1).sum())
    summary = summarize(level)
    assert summary.output_throughput * level.duration == pytest.approx(outputs.sum(), rel=1e-12)


def test_the_utilization_law() -> None:
    """Share of the time that the engine is busy = requests a second x seconds of work of each."""
    load = Workload(OpenLoop(4.0), MIXED, 400)
    level = simulate_level(load, ONE_SLOT, STEP)
    busy = step_seconds(level, STEP) / level.duration
    demand = float(service_seconds(load).mean())
    assert busy == pytest.approx(summarize(level).request_throughput * demand, rel=1e-9)


# --- no unit of time is special


def slower(step: StepTime, factor: float) -> StepTime:
    return StepTime(*(factor * term for term in astuple(step)))


def stretched(load: Workload, factor: float) -> Workload:
    arrivals = load.arrivals
    if isinstance(arrivals, OpenLoop):
        return replace(load, arrivals=replace(arrivals, request_rate=arrivals.request_rate / factor))
    think = arrivals.think_time
    return replace(load, arrivals=replace(arrivals, think_time=think and replace(think, mean=factor * think.mean)))


@examples
@given(
    load=loads(),
    flags=engines(),
    step=STEP_TIMES,
    host=HOST_TIMES,
    factor=st.sampled_from([1 / 1024, 0.5, 3.7, 1000.0]),
)
def test_all_times_scaled_scale_all_results(
    load: Workload, flags: EngineFlags, step: StepTime, host: HostTime, factor: float
) -> None:
    """Steps, host, arrivals, thinking and the loop's own sleep; counts stay."""
    host = replace(host, per_prompt_token=0.0)  # which is told by the moments of steps, as far apart as `SAME_TIME`
    slow_host = HostTime(factor * host.per_request, factor * host.per_request_serial)
    one = play(load, flags, step, host)
    other = play(stretched(load, factor), flags, slower(step, factor), slow_host, factor * IDLE_SLEEP)
    for before, after, times in (
        (one.requests(), other.requests(), ["arrival", "ttft", "tpot", "e2el", "queue_time"]),
        (one.gaps(), other.gaps(), ["time", "gap"]),
    ):
        rest = [name for name in before if name not in times]
        pd.testing.assert_frame_equal(before[rest], after[rest])
        pd.testing.assert_frame_equal(factor * before[times], after[times], rtol=1e-9, atol=1e-9 * factor)


# --- fleets


@examples
@given(
    replicas=st.integers(2, 4),
    gaps=st.lists(st.floats(0.0, 0.2), min_size=8, max_size=40),
    seed=st.integers(0, 99),
    flags=engines(),
)
def test_a_fleet_behind_round_robin_is_its_engines_each_with_every_nth_request(
    replicas: int, gaps: list[float], seed: int, flags: EngineFlags
) -> None:
    rng = np.random.default_rng(seed)
    times = np.cumsum(gaps)
    prompts, outputs = rng.integers(5, 120, len(times)), rng.integers(1, 40, len(times))
    whole = Fleet(replicas, "round-robin").simulate(Trace("all", times, prompts, outputs), flags, STEP)
    assert whole.replica_tokens is not None
    assert sum(whole.replica_tokens) == prompts.sum() + outputs.sum()  # what flows in flows out
    for number in range(replicas):
        mine = slice(number, None, replicas)
        alone = simulate_level(Trace("one", times[mine], prompts[mine], outputs[mine]), flags, STEP).requests
        there = whole.requests.iloc[mine].reset_index(drop=True)
        columns = [name for name in alone if name != "request_id"]
        pd.testing.assert_frame_equal(alone[columns], there[columns], rtol=1e-9, atol=1e-9)


def test_even_arrivals_to_a_fleet_are_even_arrivals_to_each_engine() -> None:
    """n engines behind round robin at n times the rate: every request fares as on one engine alone."""
    flags = EngineFlags(max_num_seqs=8)
    one = simulate_level(Workload(OpenLoop(2.0, math.inf), shape(100, 40), 60), flags, STEP).requests
    many = Fleet(3, "round-robin").simulate(Workload(OpenLoop(6.0, math.inf), shape(100, 40), 180), flags, STEP)
    for name in ("ttft", "tpot", "e2el", "queue_time"):
        assert np.allclose(many.requests[name], np.repeat(one[name], 3), rtol=1e-9, atol=1e-9)

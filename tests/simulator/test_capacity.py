"""Capacity searches whose answer queueing theory or arithmetic knows."""

from __future__ import annotations

import math

import pytest

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import StepTime
from simulator.loads.sessions import Sessions, Talk
from simulator.loads.workload import Arrivals, ClosedLoop, Length, OpenLoop, Shape, ThinkTime, Workload
from simulator.planning.capacity import MARGIN, MAX_REPLICATIONS, Capacity, CapacitySearch
from simulator.results.backlog import MAX_GROWTH

ROOMY = EngineFlags(max_num_seqs=256, max_num_batched_tokens=8192, num_gpu_blocks=60_000)
ONE_SLOT = EngineFlags(max_num_seqs=1, async_scheduling=False)
SERVICE = 0.01  # s
CLOSED, OPEN = ClosedLoop(1), OpenLoop(1.0)


def search(
    arrivals: Arrivals,
    output: Length,
    step_time: StepTime,
    flags: EngineFlags = ROOMY,
    prompt: int = 16,
    **options: int | bool,
) -> CapacitySearch:
    load = Workload(arrivals, (Shape(Length.fixed(prompt), output),), 1)
    return CapacitySearch(load, flags, step_time, **options)  # type: ignore[arg-type]


def single_server(**options: int) -> CapacitySearch:
    """M/D/1: one slot, one step of 10 ms for each request, Poisson arrivals."""
    return search(OPEN, Length.fixed(1), StepTime(SERVICE), ONE_SLOT, **options)


# --- a closed loop


def test_clients_that_share_every_step_slow_each_other_down() -> None:
    """A step takes 10 ms and 1 ms a sequence, so TPOT <= 30.5 ms holds 20 of them."""
    found = search(CLOSED, Length.fixed(400), StepTime(0.010, per_sequence=0.001)).find({"p95_tpot": 30.5})
    assert found.best is not None
    assert found.beyond is not None
    assert (found.best.value, found.beyond.value) == (20, 21)
    assert found.beyond.missed == ("p95_tpot",)
    assert found.best.replications == 1  # another seed makes the same load
    assert found.best.numbers["p95_tpot"] == pytest.approx(0.030, rel=1e-3)


def test_the_level_to_fall_back_to_has_a_margin() -> None:
    """27.45 ms, a tenth less, hold 17 sequences; so do 18, a tenth less than 20, not."""
    found = search(CLOSED, Length.fixed(400), StepTime(0.010, per_sequence=0.001)).find({"p95_tpot": 30.5})
    assert found.fallback is not None
    assert found.fallback.value == 17
    assert found.fallback.numbers["p95_tpot"] <= (1 - MARGIN) * 0.0305


def test_throughput_and_time_in_the_system_obey_littles_law() -> None:
    trial = search(CLOSED, Length(20, 60), StepTime(0.010, per_sequence=0.001)).trial(12, {})
    assert trial.numbers["mean_concurrency"] == pytest.approx(12, rel=1e-6)
    assert trial.numbers["request_throughput"] * trial.numbers["mean_e2el"] == pytest.approx(12, rel=0.03)


def test_what_even_a_lone_request_misses_has_no_capacity() -> None:
    found = search(CLOSED, Length.fixed(50), StepTime(0.010)).find({"p95_tpot": 5})
    assert (found.best, found.fallback) == (None, None)
    assert found.beyond is not None
    assert found.beyond.value == 1


def test_where_more_clients_only_wait_the_search_ends() -> None:
    """Four slots keep TPOT at 14 ms for any number of clients."""
    flags = ROOMY.changed(max_num_seqs=4)
    found = search(CLOSED, Length.fixed(50), StepTime(0.010, per_sequence=0.001), flags).find({"p95_tpot": 20})
    assert found.beyond is None
    assert found.best is not None
    assert found.best.value == 8
    assert found.best.numbers["p95_tpot"] == pytest.approx(0.014, rel=1e-3)


def test_what_limits_the_level_beyond() -> None:
    slots = search(CLOSED, Length.fixed(50), StepTime(0.010), ROOMY.changed(max_num_seqs=8)).find({"p95_ttft": 100})
    assert slots.best is not None
    assert slots.limits is not None
    assert (slots.best.value, slots.limits.name) == (8, "slots")


def test_a_whole_run_counts_the_start_burst() -> None:
    """All clients send their first prompt at once, and later ones when an answer ends."""
    step = StepTime(0.010, per_prefill_token=1e-4)
    arguments = (CLOSED, Length.fixed(20), step, ROOMY.changed(max_num_batched_tokens=512))
    steady = search(*arguments, prompt=256).find({"p90_ttft": 200}).best
    whole = search(*arguments, prompt=256, whole_runs=True, num_prompts=100).find({"p90_ttft": 200}).best
    assert steady is not None
    assert whole is not None
    assert whole.value < steady.value
    assert whole.load.num_prompts == 100


# --- an open loop


@pytest.mark.parametrize("utilization", [0.5, 0.8])
def test_waiting_in_front_of_a_single_server(utilization: float) -> None:
    """Pollaczek-Khinchine for M/D/1: mean wait = rho / (2 (1 - rho)) services."""
    trial = single_server(num_prompts=3000).trial(utilization / SERVICE, {})
    expected = SERVICE * (1 + utilization / (2 * (1 - utilization)))
    low, high = trial.intervals["mean_ttft"]
    assert trial.numbers["mean_ttft"] == pytest.approx(expected, rel=0.1)
    assert low - 0.05 * expected < expected < high + 0.05 * expected
    assert trial.numbers["request_throughput"] == pytest.approx(utilization / SERVICE, rel=0.05)


@pytest.mark.slow
def test_the_rate_that_a_single_server_bears() -> None:
    """Mean TTFT of three services is a utilization of 0.8: 80 requests a second."""
    found = single_server(num_prompts=600).find({"mean_ttft": 3000 * SERVICE})
    assert found.best is not None
    assert found.best.value == pytest.approx(0.8 / SERVICE, rel=0.08)
    assert found.fallback is not None
    assert found.fallback.value <= 0.9 * found.best.value


def test_a_rate_beyond_the_service_has_no_steady_state() -> None:
    trial = single_server().trial(1.5 / SERVICE, {"error_rate": 0})
    assert trial.verdict == "no steady state"
    assert trial.growth is not None
    assert sum(trial.growth) / 2 == pytest.approx(1 - 1 / 1.5, abs=0.04)
    assert trial.numbers["request_throughput"] == pytest.approx(1 / SERVICE, rel=0.02)  # what is served, not sent


@pytest.mark.slow
def test_without_a_target_of_time_the_capacity_is_what_is_served() -> None:
    found = single_server(num_prompts=300).find({"error_rate": 0})
    assert found.best is not None
    assert 0.85 / SERVICE < found.best.value < (1 + 2 * MAX_GROWTH) / SERVICE


def test_goodput_is_what_keeps_the_targets_of_a_request() -> None:
    """In M/D/1 a request waits not at all with probability 1 - rho; at rho 0.5 half of them."""
    trial = single_server(num_prompts=3000).trial(0.5 / SERVICE, {"p95_ttft": 1000 * SERVICE * 1.001})
    assert trial.goodput == pytest.approx(0.5 * 0.5 / SERVICE, rel=0.08)


# --- luck


def test_a_target_at_the_very_mean_is_undecided_and_does_not_count() -> None:
    lengths, step = Length(20, 60), StepTime(0.010, per_sequence=0.001)
    mean = search(CLOSED, lengths, step).trial(8, {"mean_e2el": 1e-9 + 1}).numbers["mean_e2el"]
    again = search(CLOSED, lengths, step).trial(8, {"mean_e2el": mean * 1000})
    assert again.verdict == "undecided"
    assert again.replications == MAX_REPLICATIONS
    assert not again.meets
    assert again.missed == ("mean_e2el",)


def test_replications_of_two_levels_draw_the_same_lengths() -> None:
    """Common random numbers: what differs between two levels is the level."""
    loads = [search(CLOSED, Length(20, 60), StepTime(0.01))._at(clients, 100, 2) for clients in (4, 8)]
    assert all((one == other).all() for one, other in zip(loads[0].lengths(), loads[1].lengths(), strict=True))


def test_the_same_question_has_the_same_answer() -> None:
    def ask() -> Capacity:
        several = search(CLOSED, Length(20, 60), StepTime(0.010, per_sequence=0.001), num_prompts=60)
        return several.find({"p95_tpot": 12.5})

    assert ask() == ask()


def test_both_gauges_come_with_the_answer() -> None:
    """Every client holds its prompt and on average half of its output."""
    found = search(CLOSED, Length.fixed(101), StepTime(0.010, per_sequence=0.001), prompt=1000).find({"p95_tpot": 20})
    assert found.best is not None
    numbers = found.best.numbers
    assert numbers["mean_active_tokens"] == pytest.approx(found.best.value * 1050, rel=0.02)
    assert numbers["peak_kv_tokens"] >= numbers["mean_active_tokens"]
    level = simulate_level(found.best.load, ROOMY, StepTime(0.010, per_sequence=0.001))
    assert level.timeline["running"].max() == found.best.value
    assert math.isclose(found.ceilings.slots, 256)


def test_more_users_talk_where_earlier_turns_are_remembered() -> None:
    """Sessions of eight turns compute every earlier turn again, unless the prefix cache finds it."""
    talk = Talk(turns=Length.fixed(8), user=Length.fixed(200), output=Length.fixed(20))
    load = Sessions(CLOSED, talk, 1, ThinkTime(0.5))
    step = StepTime(0.005, per_prefill_token=5e-5)
    forgets, remembers = (
        CapacitySearch(load, ROOMY.changed(enable_prefix_caching=caching), step, num_prompts=200)
        .find({"p90_ttft": 150})
        .best
        for caching in (False, True)
    )
    assert forgets is not None
    assert remembers is not None
    assert remembers.value > 1.5 * forgets.value
    assert remembers.load.concurrency == remembers.value

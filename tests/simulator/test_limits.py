"""What limits a level: cases built so that the answer is known."""

from __future__ import annotations

import pytest

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import Arrivals, ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.planning.limits import Limits, Phase, phase_of, what_limits
from simulator.planning.steady_state import middle, steady_part
from simulator.results.run import Level

H100 = StepTime(constant=8e-3, per_sequence=2e-5, per_kv_token=1e-8, per_prefill_token=1.5e-5)
CLIENTS = ClosedLoop(32)
ROOMY = EngineFlags(max_num_seqs=256, max_num_batched_tokens=8192, num_gpu_blocks=60_000)


def play(
    prompt: int,
    output: int,
    flags: EngineFlags,
    step_time: StepTime = H100,
    arrivals: Arrivals = CLIENTS,
    host_time: HostTime | None = None,
    single_steps: bool = False,
) -> Level:
    load = Workload(arrivals, (Shape(Length.fixed(prompt), Length.fixed(output)),), 200)
    return simulate_level(load, flags, step_time, host_time, single_steps)


def limits(
    prompt: int,
    output: int,
    flags: EngineFlags,
    phase: Phase = "ttft",
    step_time: StepTime = H100,
    host_time: HostTime | None = None,
) -> Limits:
    return what_limits(play(prompt, output, flags, step_time, host_time=host_time), flags, step_time, host_time, phase)


def steady_p95_ttft(level: Level) -> float:
    return float(steady_part(level, middle(level)).requests["ttft"].quantile(0.95))


def test_few_slots() -> None:
    found = limits(512, 64, ROOMY.changed(max_num_seqs=4))
    assert found.name == "slots"
    assert found.shares["slots"] > 0.9
    assert "--max-num-seqs" in found.sentence()


def test_a_small_pool() -> None:
    found = limits(512, 64, ROOMY.changed(num_gpu_blocks=200))
    assert found.name == "kv_pool"
    assert found.peak_kv > 0.9


def test_a_step_token_budget_too_low_while_the_engine_hardly_computes() -> None:
    """p95 TTFT breaks between 8 and 32 clients, the GPU is not full, and a larger budget repairs it."""
    low, high = ROOMY.changed(max_num_batched_tokens=512), ROOMY
    waits = {
        (clients, flags.max_num_batched_tokens): steady_p95_ttft(play(8000, 100, flags, arrivals=ClosedLoop(clients)))
        for clients in (8, 32)
        for flags in (low, high)
    }
    assert waits[32, 512] > 5 * waits[8, 512]
    found = limits(8000, 100, low)
    assert found.name == "step_token_budget"
    assert found.computing < 0.5 < found.full_steps
    assert limits(8000, 100, high).name == "compute"
    assert waits[32, 8192] < waits[32, 512] / 5


def test_a_full_budget_of_a_busy_engine_is_computing() -> None:
    """Steps are full, but a larger budget would only make them longer."""
    slow = StepTime(constant=1e-3, per_prefill_token=1e-4)
    found = limits(4000, 10, ROOMY.changed(max_num_batched_tokens=4096), step_time=slow)
    assert found.name == "compute"
    assert found.full_steps > 0.9


def test_long_contexts_are_read_from_memory() -> None:
    assert limits(4000, 400, ROOMY, "decode", StepTime(1e-3, per_kv_token=1e-6)).name == "memory_bandwidth"


@pytest.mark.parametrize(("weights", "name"), [(9e-3, "memory_bandwidth"), (1e-3, "launching"), (0.0, "step_constant")])
def test_the_constant_of_a_step_is_weights_or_launching_where_that_is_known(weights: float, name: str) -> None:
    assert limits(64, 64, ROOMY, "decode", StepTime(10e-3, weights=weights)).name == name


def test_a_step_budget_changes_the_number_of_steps_and_not_the_host() -> None:
    step_time, host = StepTime(1e-3, per_prefill_token=1e-6, per_sequence=5e-4), HostTime(per_request=0.02)

    def steps_and_host(budget: int) -> tuple[int, float]:
        flags = ROOMY.changed(max_num_batched_tokens=budget)
        level = play(2048, 128, flags, step_time, host_time=host)
        found = what_limits(level, flags, step_time, host)
        return found.steps, found.shares["host"] * float(level.requests["e2el"].sum())

    (few, host_of_few), (many, host_of_many) = steps_and_host(1024), steps_and_host(256)
    assert few < many
    assert host_of_few == pytest.approx(host_of_many, rel=0.01)
    assert host_of_few == pytest.approx(200 * 0.02, rel=0.01)  # of 200 requests


def test_a_slow_api_server_is_the_host() -> None:
    assert limits(64, 4, ROOMY, host_time=HostTime(per_request_serial=0.05)).name == "host"
    assert limits(64, 4, ROOMY, host_time=HostTime(per_request=0.5)).name == "host"


@pytest.mark.parametrize("phase", ["ttft", "decode", "e2el"])
def test_shares_divide_the_whole(phase: Phase) -> None:
    found = limits(512, 64, ROOMY.changed(num_gpu_blocks=400), phase, host_time=HostTime(0.002, 0.001))
    assert sum(found.shares.values()) == pytest.approx(1)
    assert list(found.shares.values()) == sorted(found.shares.values(), reverse=True)


def test_an_idle_engine_is_not_busy() -> None:
    level = play(64, 8, ROOMY, arrivals=OpenLoop(1.0))
    assert what_limits(level, ROOMY, H100).busy < 0.1


@pytest.mark.parametrize("asynchronous", [True, False])
def test_steps_account_for_every_token_and_every_second(asynchronous: bool) -> None:
    """Durations of the recorded steps, by the formula, add up to the time that a busy engine took."""
    flags = ROOMY.changed(num_gpu_blocks=500, async_scheduling=asynchronous)
    level = play(512, 64, flags)
    steps = level.steps
    assert steps is not None
    duration = sum(
        count * H100.duration(int(sequences), kv_tokens, int(prefill), attention)
        for count, sequences, kv_tokens, prefill, attention, tokens in zip(
            *(
                steps[name]
                for name in ("steps", "sequences", "kv_tokens", "prefill_tokens", "prefill_attention", "tokens")
            ),
            strict=True,
        )
        if tokens
    )
    assert duration == pytest.approx(level.duration, rel=1e-3)
    assert steps["prefill_tokens"].sum() >= level.requests["prompt_tokens"].sum()
    assert (steps["steps"] * steps["decodes"]).sum() == pytest.approx(200 * 63, rel=0.01)


def test_runs_of_steps_tell_what_single_steps_tell() -> None:
    flags = ROOMY.changed(num_gpu_blocks=500)
    together, apart = (what_limits(play(512, 64, flags, single_steps=single), flags, H100) for single in (False, True))
    assert together.shares == pytest.approx(apart.shares)
    assert together.mean_waiting == pytest.approx(apart.mean_waiting)


def test_a_measured_level_cannot_tell() -> None:
    level = play(64, 8, ROOMY)
    level.steps = None
    with pytest.raises(ValueError, match="just simulated"):
        what_limits(level, ROOMY, H100)


def test_the_phase_of_a_target() -> None:
    assert [phase_of(name) for name in ("p95_ttft", "mean_tpot", "p99_itl", "p50_e2el")] == [
        "ttft",
        "decode",
        "decode",
        "e2el",
    ]

"""A profile on another card or on several: each term moves by its own ratio, gets less sure, and what stays stays."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.hardware.gpus import GIB, GpuError, find_gpu
from simulator.hardware.memory import MemoryAccountError
from simulator.hardware.model_config import ModelError, find_model
from simulator.hardware.other_gpu import DOUBT, UNSPLIT_PER_LAYER, all_reduce_cost, move, ratios, with_tensor_parallel
from simulator.loads.workload import Length, OpenLoop, Shape, Workload
from simulator.profile import Coefficient, Profile
from simulator.results.summary import summarize
from simulator.uncertainty import intervals

SHIPPED = Path(__file__).resolve().parents[2] / "scenarios" / "profiles" / "rtx4090-qwen2.5-7b.yaml"
UTILIZATION = 0.9  # the report's


@pytest.fixture(scope="module")
def measured() -> Profile:
    return Profile.load(SHIPPED)


def term(profile: Profile, name: str) -> Coefficient:
    return (profile.coefficients.step_time | profile.coefficients.host_time)[name]


def with_terms(profile: Profile, **seconds: float) -> Profile:
    step = profile.coefficients.step_time | {name: Coefficient(value=value) for name, value in seconds.items()}
    return profile.model_copy(update={"coefficients": profile.coefficients.model_copy(update={"step_time": step})})


def test_every_term_has_a_stated_doubt() -> None:
    names = {field.name for kind in (StepTime, HostTime) for field in fields(kind)} - {"gap_noise"}
    assert names <= set(DOUBT)


def test_each_term_moves_by_what_bounds_it(measured: Profile) -> None:
    moved = move(measured, "A100-SXM4-80GB", gpu_memory_utilization=UTILIZATION)
    before, after = measured.step_time, moved.step_time
    assert after.per_kv_token / before.per_kv_token == pytest.approx(1008 / 2039)
    compute = 165.2 * 0.93 / (312 * 0.70)
    assert after.per_prefill_token / before.per_prefill_token == pytest.approx(compute)
    assert after.per_prefill_attention / before.per_prefill_attention == pytest.approx(compute)
    assert after.per_sequence / before.per_sequence == pytest.approx(math.sqrt(compute))
    assert moved.host_time == measured.host_time


def test_of_the_constant_only_the_reading_of_weights_moves(measured: Profile) -> None:
    """A server that is bound by its host gains nothing from a faster card."""
    read = 2 * (7_615_616_512 - 152_064 * 3584) / (1008e9 * 0.89)
    slow = with_terms(measured, constant=read + 0.05)
    moved = move(slow, "H100", gpu_memory_utilization=UTILIZATION)
    ratio = ratios(find_gpu("4090"), find_gpu("H100")).weights
    assert moved.step_time.constant == pytest.approx(0.05 + read * ratio)


def test_a_fitted_weights_term_moves_with_the_bandwidth(measured: Profile) -> None:
    moved = move(with_terms(measured, weights=0.012), "H100", gpu_memory_utilization=UTILIZATION)
    assert moved.step_time.weights == pytest.approx(0.012 * ratios(find_gpu("4090"), find_gpu("H100")).weights)
    assert moved.step_time.weights < moved.step_time.constant


def test_to_the_same_card_nothing_moves_but_the_doubt(measured: Profile) -> None:
    moved = move(measured, "RTX 4090", gpu_memory_utilization=UTILIZATION)
    assert moved.step_time == measured.step_time
    assert moved.engine_flags == measured.engine_flags
    for name, coefficient in moved.coefficients.step_time.items():
        old = term(measured, name)
        relative = math.hypot((old.stderr or 0) / old.value, DOUBT[name])
        assert coefficient.stderr == pytest.approx(coefficient.value * relative)
        assert coefficient.low is not None
        assert coefficient.high is not None
        assert coefficient.low < coefficient.value < coefficient.high
        assert coefficient.origin == "assumed"


def test_there_and_back_is_where_it_was(measured: Profile) -> None:
    there = move(measured, "H100", gpu_memory_utilization=UTILIZATION)
    back = move(there, "RTX 4090", gpu_memory_utilization=UTILIZATION)
    for name in measured.coefficients.step_time:
        assert getattr(back.step_time, name) == pytest.approx(getattr(measured.step_time, name), rel=1e-9)
    assert back.engine_flags.num_gpu_blocks == pytest.approx(measured.engine_flags.num_gpu_blocks, abs=1)


def test_the_pool_grows_by_the_cards_memory(measured: Profile) -> None:
    moved = move(measured, "A100-SXM4-80GB", gpu_memory_utilization=UTILIZATION)
    more = UTILIZATION * (79.25 - 23.52) * GIB / 917_504
    assert moved.engine_flags.num_gpu_blocks == pytest.approx(5431 + more, abs=1)


def test_fp8_weights_compute_at_the_rate_for_fp8(measured: Profile) -> None:
    fp8 = measured.model_copy(update={"model": "Qwen/Qwen2.5-7B-FP8"})
    to_a100 = move(fp8, "A100", gpu_memory_utilization=UTILIZATION)  # which has no fp8 units
    ratio = 330.3 * 0.93 / (312 * 0.70)
    assert to_a100.step_time.per_prefill_token / fp8.step_time.per_prefill_token == pytest.approx(ratio)


def test_a_cache_of_eight_bits_stays_one(measured: Profile) -> None:
    half = measured.model_copy(
        update={"kv_bytes_per_token": 28_672, "engine_flags": replace(measured.engine_flags, num_gpu_blocks=10_862)}
    )
    moved = move(half, "RTX 4090", gpu_memory_utilization=UTILIZATION)
    assert moved.engine_flags.num_gpu_blocks == 10_862


def test_a_moved_profile_says_so_and_can_be_saved(measured: Profile, tmp_path: Path) -> None:
    moved = move(measured, "h100", gpu_memory_utilization=UTILIZATION)
    assert (moved.gpu, moved.name) == ("H100 SXM", "rtx4090-qwen2.5-7b-on-h100-sxm")
    assert "moved from RTX 4090 to H100 SXM" in moved.provenance.source
    assert any("data sheets" in sentence for sentence in moved.assumed)
    assert all("on NVIDIA GeForce RTX 4090" in level.level for level in moved.fit + moved.hold_out)
    moved.save(tmp_path / "moved.yaml")
    assert Profile.load(tmp_path / "moved.yaml") == moved


@pytest.mark.parametrize(
    ("changes", "gpu", "error", "message"),
    [
        ({"gpu": None}, "H100", GpuError, "does not tell its GPU"),
        ({"gpu": "GPU of mine"}, "H100", GpuError, "no GPU is called 'GPU of mine'"),
        ({}, "H1000", GpuError, "no GPU is called 'H1000'; did you mean"),
        ({"model": "my/own"}, "H100", ModelError, "architecture of my/own is not known; give the path"),
        ({"model": "Qwen/Qwen2.5-72B"}, "L4", MemoryAccountError, "no memory is left"),
    ],
)
def test_what_is_missing_is_told(
    measured: Profile, changes: dict[str, object], gpu: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        move(measured.model_copy(update=changes), gpu, gpu_memory_utilization=UTILIZATION)


def test_an_a100_is_predicted_from_an_rtx_4090(measured: Profile) -> None:
    """Qwen2-7B on an A100, vLLM 0.10.1 (github dennislee22/vLLM-benchmarking): 20 requests at once, TPOT 14.12 ms."""
    flags = replace(measured.engine_flags, max_num_seqs=256, async_scheduling=False, engine_version="0.10.1")
    moved = move(measured, "A100 80GB SXM", flags=flags, gpu_memory_utilization=UTILIZATION)
    load = Workload(OpenLoop(math.inf), (Shape(Length.fixed(1024), Length.fixed(1024)),), 20)
    level = simulate_level(load, moved.engine_flags, moved.step_time, moved.host_time)
    tpot = summarize(level).flat()["p50_tpot"]
    assert tpot == pytest.approx(14.12e-3, rel=0.15)
    low, high = intervals(moved, load, moved.engine_flags, level)["p50_tpot"]
    assert low < 14.12e-3 < high


# --- tensor parallelism


def test_an_all_reduce_moves_twice_the_data_but_one_share() -> None:
    model, gpu = find_model("Llama-3.1-8B"), find_gpu("A100 80GB SXM")
    latency, per_token = all_reduce_cost(model, gpu, 4)
    assert latency == pytest.approx((2 * 32 + 1) * 17e-6)
    assert per_token == pytest.approx((2 * 32 + 1) * 2 * 3 / 4 * 4096 * 2 / 300e9)
    assert all_reduce_cost(model, gpu, 1) == (0.0, 0.0)


def test_ranks_split_the_work_and_add_communication(measured: Profile) -> None:
    moved = move(measured, "A100 80GB SXM", gpu_memory_utilization=UTILIZATION)
    split = with_tensor_parallel(moved, 2)
    latency, per_token = all_reduce_cost(find_model("Qwen2.5-7B"), find_gpu("A100"), 2)
    one, two = moved.step_time, split.step_time
    assert two.per_kv_token == pytest.approx(one.per_kv_token / 2)
    assert two.per_prefill_token == pytest.approx(one.per_prefill_token / 2 + per_token)
    assert two.per_prefill_attention == pytest.approx(one.per_prefill_attention / 2)
    assert two.per_sequence == pytest.approx(one.per_sequence + per_token)
    assert one.constant / 2 + latency <= two.constant < one.constant
    assert split.kv_bytes_per_token == 57_344 // 2
    assert split.engine_flags.kv_tokens > 2 * moved.engine_flags.kv_tokens
    assert term(split, "constant").stderr / two.constant > term(moved, "constant").stderr / one.constant


def test_more_ranks_than_kv_heads_read_no_less_cache(measured: Profile) -> None:
    moved = move(measured, "A100 80GB SXM", gpu_memory_utilization=UTILIZATION)
    four, seven = with_tensor_parallel(moved, 4), with_tensor_parallel(moved, 7)
    assert four.step_time.per_kv_token == seven.step_time.per_kv_token
    with pytest.raises(ModelError, match="28 attention heads"):
        with_tensor_parallel(moved, 8)


def test_a_slow_link_costs_prompts_more_than_a_fast_one(measured: Profile) -> None:
    fast, slow = (
        with_tensor_parallel(move(measured, gpu, gpu_memory_utilization=UTILIZATION), 2)
        for gpu in ("A100 80GB SXM", "A100 80GB PCIe")
    )
    assert slow.step_time.per_prefill_token > fast.step_time.per_prefill_token
    assert slow.step_time.constant > fast.step_time.constant


def test_one_rank_is_the_profile_itself(measured: Profile) -> None:
    assert with_tensor_parallel(measured, 1) is measured


def one_gpu(measured: Profile, model: str, constant: float) -> Profile:
    """A server of that model on an A100 whose steps take `constant`."""
    flags = replace(measured.engine_flags, num_gpu_blocks=100_000, max_model_len=2048)
    changes = {"model": model, "gpu": "A100 80GB SXM", "engine_flags": flags, "kv_bytes_per_token": None}
    return with_terms(measured, constant=constant).model_copy(update=changes)


def test_more_gpus_are_as_fast_as_they_were_measured(measured: Profile) -> None:
    """Mistral-7B on A100, two requests at a time, per token, vLLM 0.6 (github LambdaLabsML/vllm-benchmark)."""
    single = one_gpu(measured, "mistralai/Mistral-7B-Instruct-v0.3", 10.8e-3)
    for ranks, seconds in ((2, 7.09e-3), (4, 4.67e-3), (8, 3.62e-3)):
        assert with_tensor_parallel(single, ranks).step_time.constant == pytest.approx(seconds, rel=0.06)


def test_a_model_that_nothing_was_fitted_to_gains_as_it_was_measured(measured: Profile) -> None:
    """Llama-3-70B, likewise: 48.7 ms on two, 28.2 on four, 17.5 on eight. It fits no single card: two decide."""
    model, gpu = find_model("Llama-3-70B"), find_gpu("A100 80GB SXM")
    latency, _ = all_reduce_cost(model, gpu, 2)
    unsplit = UNSPLIT_PER_LAYER * 80
    single = unsplit + 2 * (48.7e-3 - latency - unsplit)
    for ranks, seconds in ((4, 28.2e-3), (8, 17.5e-3)):
        assert unsplit + (single - unsplit) / ranks + latency == pytest.approx(seconds, rel=0.10)

"""A measured server started in another way: its pool, its steps, what is assumed, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from simulator.engine.engine_flags import FlagError
from simulator.engine.fleet import Fleet
from simulator.flags.serve_line import read_line
from simulator.hardware.gpus import GIB, GpuError
from simulator.hardware.memory import MemoryAccount, MemoryAccountError
from simulator.planning.alternative import Alternative, MeasuredMemory, alternative
from simulator.planning.unmodelled import AlternativeError
from simulator.profile import Coefficient, Profile

SHIPPED = Path(__file__).resolve().parents[2] / "scenarios" / "profiles" / "rtx4090-qwen2.5-7b.yaml"


@pytest.fixture(scope="module")
def measured() -> Profile:
    return Profile.load(SHIPPED)


def started(profile: Profile, text: str, memory: MeasuredMemory | None = None) -> Alternative:
    return alternative(profile, read_line(text), memory)


def refusal(profile: Profile, text: str, kind: type[ValueError] = AlternativeError) -> str:
    with pytest.raises(kind) as caught:
        started(profile, text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_term(profile: Profile, name: str, value: float) -> Profile:
    step = profile.coefficients.step_time | {name: Coefficient(value=value)}
    return profile.model_copy(update={"coefficients": profile.coefficients.model_copy(update={"step_time": step})})


# --- the KV pool


def test_the_published_report_gains_27_648_tokens_by_the_flag_that_its_log_suggests(measured: Profile) -> None:
    assert measured.engine_flags.kv_tokens == 86_896
    changed = started(measured, "--kv-cache-memory=6569114112")
    assert changed.flags.kv_tokens == 114_544
    assert changed.assumed == ()


def test_units_blocks_and_block_sizes_make_the_pool(measured: Profile) -> None:
    assert started(measured, "--kv-cache-memory-bytes 4.64GiB").flags.kv_tokens == pytest.approx(86_896, abs=32)
    assert started(measured, "--num-gpu-blocks-override 9k").flags.num_gpu_blocks == 9000
    other = started(measured, "--block-size 32").flags
    assert (other.block_size, other.num_gpu_blocks) == (32, 5431 // 2)


def test_more_utilization_leaves_that_share_of_the_card_more(measured: Profile) -> None:
    more = started(measured, "--gpu-memory-utilization 0.95")
    assert measured.gpu_memory_utilization == 0.9  # as the published report says
    gained = (more.flags.kv_tokens - 86_896) * 57_344
    assert gained == pytest.approx(0.05 * 23.52 * GIB, rel=0.01)
    assert not any("its version's default" in sentence for sentence in more.assumed)
    assert started(measured, "--gpu-memory-utilization 0.9").flags.kv_tokens == 86_896
    stated = started(measured, "--gpu-memory-utilization 0.95", MeasuredMemory(utilization=0.94))
    assert 86_896 < stated.flags.kv_tokens < more.flags.kv_tokens  # what a user states wins


def test_a_utilization_that_nobody_told_is_assumed_and_said(measured: Profile) -> None:
    silent = measured.model_copy(update={"gpu_memory_utilization": None})
    for text in ("--gpu-memory-utilization 0.95", "--gpu A100"):
        (said,) = [sentence for sentence in started(silent, text).assumed if "its version's default" in sentence]
        assert "at --gpu-memory-utilization 0.92" in said
        assert "the profile does not tell" in said
    assert not any("utilization" in sentence for sentence in started(silent, "--max-num-seqs 64").assumed)


def test_the_measured_card_by_its_name_is_the_measured_server(measured: Profile) -> None:
    same = started(measured, "--gpu 4090")
    assert (same.profile, same.assumed, same.notes) == (measured, (), ())
    assert started(measured, "--gpu 4090 --max-num-seqs 64").profile == started(measured, "--max-num-seqs 64").profile


def test_a_larger_step_takes_memory_from_the_pool_unless_the_pool_is_given(measured: Profile) -> None:
    larger = started(measured, "--max-num-batched-tokens 16384")
    assert larger.flags.kv_tokens < 86_896
    assert any("the KV pool of" in sentence for sentence in larger.assumed)
    assert started(measured, "--max-num-batched-tokens 16384 --num-gpu-blocks-override 5431").flags.kv_tokens == 86_896


def test_the_account_of_the_servers_log_is_better_than_an_estimate(measured: Profile) -> None:
    kv_cache = 86_896 * 57_344
    account = MemoryAccount(
        total=24 * GIB, free=24 * GIB, utilization=0.8, consumed=round(24 * GIB * 0.8) - kv_cache - GIB, activation=GIB,
        graphs=0, kv_cache=kv_cache,
    )  # fmt: skip
    memory = MeasuredMemory(utilization=0.8, account=account)
    more = started(measured, "--gpu-memory-utilization 0.85", memory)
    assert (more.flags.kv_tokens - 86_896) * 57_344 == pytest.approx(0.05 * 24 * GIB, rel=0.001)
    with pytest.raises(MemoryAccountError, match="leaves the GPU"):
        started(measured, "--kv-cache-memory 20GiB", memory)


def test_where_the_memory_is_not_known_a_pool_cannot_be_sized(profile: Profile) -> None:
    assert "needs the GPU's memory" in refusal(profile, "--gpu-memory-utilization 0.95", MemoryAccountError)
    larger = started(profile, "--max-num-batched-tokens 4096 --max-num-seqs 64")
    assert larger.flags.kv_tokens == profile.engine_flags.kv_tokens
    assert any("the KV pool stays as measured" in note for note in larger.notes)
    assert started(profile, "--kv-cache-memory 1GiB").flags.num_gpu_blocks == 1024


def test_half_the_bytes_per_token_are_twice_the_pool_and_half_the_reading(measured: Profile) -> None:
    half = started(measured, "--kv-cache-dtype fp8")
    assert half.flags.kv_tokens == 2 * 86_896
    assert half.profile.kv_bytes_per_token == 57_344 / 2
    before, after = (one.coefficients.step_time["per_kv_token"] for one in (measured, half.profile))
    assert after.value == before.value / 2
    assert before.stderr is not None
    assert after.stderr is not None
    assert after.stderr / after.value == pytest.approx(math.hypot(before.stderr / before.value, 0.2))
    assert any("KV cache as fp8" in sentence for sentence in half.assumed)
    assert started(measured, "--kv-cache-dtype bfloat16 --max-num-seqs 100").profile.step_time == measured.step_time


# --- other cards


def test_another_gpu_moves_the_steps_and_the_pool(measured: Profile) -> None:
    moved = started(measured, "--gpu H100-SXM")
    assert moved.profile.step_time.constant < measured.step_time.constant
    assert moved.flags.kv_tokens > 5 * 86_896
    assert moved.profile.gpu == "H100 SXM"
    assert any("the step time on H100 SXM" in sentence for sentence in moved.assumed)
    given = started(measured, "--gpu H100-SXM --num-gpu-blocks-override 4000 --max-num-seqs 16")
    assert (given.flags.num_gpu_blocks, given.flags.max_num_seqs) == (4000, 16)
    assert not any("KV pool" in sentence for sentence in given.assumed)


def test_two_cards_split_the_weights_and_leave_more_than_twice_the_pool(measured: Profile) -> None:
    two = started(measured, "-tp 2")
    assert two.flags.kv_tokens > 2 * 86_896
    assert measured.step_time.constant / 2 < two.profile.step_time.constant < measured.step_time.constant
    assert sum("--tensor-parallel-size 2" in sentence for sentence in two.assumed) == 1
    assert sum(sentence.startswith("the KV pool of") for sentence in two.assumed) == 1
    assert refusal(measured, "-tp 1.5").startswith("--tensor-parallel-size: ")


def test_several_engines_are_a_fleet_of_the_same_server(measured: Profile) -> None:
    two = started(measured, "-dp 2 --max-num-seqs 64 --num-gpu-blocks-override 5431")
    assert two.fleet == Fleet(data_parallel_size=2)
    assert (two.flags.max_num_seqs, two.flags.num_gpu_blocks) == (64, 5431)
    assert any("--data-parallel-size has GPUs of its own" in sentence for sentence in two.assumed)
    assert started(measured, "--replicas 3 --router round-robin").fleet == Fleet(3, "round-robin")
    mixture = measured.model_copy(update={"model": "mistralai/Mixtral-8x7B-v0.1"})
    assert "mixture-of-experts" in refusal(mixture, "-dp 2")


# --- what is noted and what is refused


def test_what_has_no_effect_is_noted_without_its_value(measured: Profile) -> None:
    changed = started(measured, "vllm serve Qwen/Qwen2.5-7B --api-key s3cret --port 1 --dtype auto --max-num-seqs 64")
    assert changed.notes == (
        "without effect on the result: --api-key, --port",
        "taken to be as on the measured server: --dtype auto",
    )
    local = started(measured, "numactl -N0 vllm serve /models/mine --max-num-seqs 64").notes
    assert local == ("left out of account: numactl -N0", "/models/mine is taken to be Qwen/Qwen2.5-7B")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("--enable-lora", "--enable-lora would change the result and is not modelled (LoRA)"),
        ("--speculative-config '{}'", "--speculative-config would change the result and is not modelled (speculative"),
        ("-q awq", "--quantization would change"),
        ("-pp 2", "--pipeline-parallel-size would change"),
        ("-ep", "--enable-expert-parallel would change"),
        ("--cpu-offload-gb 4", "--cpu-offload-gb would change"),
        ("--swap-space 4", "--swap-space would change"),
        ("-dpl 2", "--data-parallel-size-local would change"),
        ("--kv-transfer-config '{}'", "(KV transfer and disaggregation)"),
        ("VLLM_ATTENTION_BACKEND=X --max-num-seqs 4", "VLLM_ATTENTION_BACKEND may change the result"),
        ("vllm serve Qwen/Qwen2.5-14B --max-num-seqs 4", "the line serves Qwen/Qwen2.5-14B"),
        ("--port 8000", "it changes nothing"),
        ("--max-model-len auto", "--max-model-len auto is not modelled"),
        ("--max-model-len 200k", "beyond the model's 131072"),
        ("--enforce-eager", "does not know what a step without CUDA graphs takes"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(measured: Profile, text: str, told: str) -> None:
    assert told in refusal(measured, text)


def test_values_that_vllm_refuses_are_refused(measured: Profile) -> None:
    assert "must not be smaller than" in refusal(measured, "--max-num-seqs 4096", FlagError)
    assert "no GPU is called" in refusal(measured, "--gpu 9999", GpuError)
    assert "does not fit into the KV pool" in refusal(measured, "--num-gpu-blocks-override 100", MemoryAccountError)
    assert "--max-num-seqs: 'many' is not a size" in refusal(measured, "--max-num-seqs many", FlagError)


def test_eager_execution_costs_what_was_measured(measured: Profile) -> None:
    knows = with_term(measured, "without_graph", 0.004)
    eager = started(knows, "--enforce-eager")
    assert eager.flags.enforce_eager
    assert eager.flags.kv_tokens > 86_896  # no graphs in memory
    was_eager = knows.model_copy(update={"engine_flags": knows.engine_flags.changed(enforce_eager=True)})
    assert "what they would save is not known" in refusal(was_eager, "--no-enforce-eager")


def test_flags_that_the_line_does_not_name_stay_as_measured(measured: Profile) -> None:
    changed = started(measured, "--long-prefill-token-threshold 256 --no-async-scheduling").flags
    expected = measured.engine_flags.changed(long_prefill_token_threshold=256, async_scheduling=False)
    assert changed == expected

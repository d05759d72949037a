"""Memory to KV pool: vLLM's own numbers, published logs, and what must hold whatever the flags."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.engine_flags import EngineFlags
from simulator.hardware.gpus import GIB, find_gpu
from simulator.hardware.kv_layout import KvLayout, kv_layout, plain_layout
from simulator.hardware.memory import (
    GRAPHS,
    MemoryAccount,
    MemoryAccountError,
    MemoryFlags,
    account_under,
    activation_bytes,
    estimated_account,
    kv_layout_of,
    kv_pool,
    pool_of,
)
from simulator.hardware.model_config import KvLayers, ModelError, find_model

QWEN, LLAMA = find_model("Qwen2.5-7B"), find_model("Llama-3.1-8B")
# the report's RTX 4090: 5,431 blocks of 16 tokens, vLLM 0.27.1
FLAGS = EngineFlags(max_num_seqs=128, num_gpu_blocks=5431, max_model_len=32768, engine_version="0.27.1")
MEMORY_FLAGS = MemoryFlags.of(FLAGS, gpu_memory_utilization=0.9)
ACCOUNT = MemoryAccount(
    total=round(23.52 * GIB),
    free=round(23.13 * GIB),
    utilization=0.9,
    consumed=round(0.9 * 23.52 * GIB) - round(1.04 * GIB) - 5431 * 917504,
    activation=round(1.04 * GIB),
    graphs=round(0.34 * GIB),
    kv_cache=5431 * 917504,
)


# --- layout: bytes, blocks and tokens


@pytest.mark.parametrize(
    ("model", "block_size", "dtype", "ranks", "block_bytes"),
    [
        ("Llama-3.1-8B", 16, "auto", 1, 2 << 20),  # vLLM 0.32.0
        ("Llama-3.1-8B", 16, "fp8", 1, 1 << 20),
        ("Llama-3.1-8B", 16, "auto", 8, (2 << 20) // 8),
        ("Llama-3.1-8B", 16, "auto", 16, (2 << 20) // 8),  # 8 KV heads: replicated from there on
        ("Qwen2.5-7B", 16, "auto", 1, 16 * 57_344),
        ("gemma-2b", 16, "auto", 2, 16 * 18 * 2 * 256 * 2),  # one KV head for all
        ("DeepSeek-V3", 64, "auto", 1, 61 * 73_728),  # MLA: 73,728 bytes a layer
        ("DeepSeek-V3", 64, "auto", 8, 61 * 73_728),  # on every rank
        ("DeepSeek-V3", 64, "fp8_ds_mla", 1, 61 * 41_984),
        ("gemma-3-27b", 16, "auto", 1, 10 * 131_072),  # groups of ten layers
        ("gpt-oss-20b", 16, "auto", 1, 12 * 32_768),
    ],
)
def test_a_block_has_vllms_bytes(model: str, block_size: int, dtype: str, ranks: int, block_bytes: int) -> None:
    assert kv_layout(find_model(model), block_size, dtype, ranks).block_bytes == block_bytes


@pytest.mark.parametrize(
    ("full", "windowed", "groups", "layers"),
    [(10, 52, 7, 10), (21, 21, 2, 21), (4, 22, 7, 4), (5, 29, 7, 5), (13, 12, 2, 13), (32, 0, 1, 32), (0, 32, 1, 32)],
)
def test_layers_are_grouped_as_vllm_does(full: int, windowed: int, groups: int, layers: int) -> None:
    kinds = [KvLayers(full, 8, 128, 128), KvLayers(windowed, 8, 128, 128, window=1024)]
    layout = kv_layout(replace(LLAMA, kv=tuple(kind for kind in kinds if kind.layers)))
    assert layout.full_groups + layout.window_groups == groups
    assert layout.block_bytes == layers * 16 * 8 * 256 * 2


@pytest.mark.parametrize(("in_flight", "concurrency"), [(8192, 33.2), (2 * 8192, 21.9)])
def test_a_hybrid_model_has_the_concurrency_that_vllm_computes(in_flight: int, concurrency: float) -> None:
    """vLLM 0.32.0: 25 layers of a window of 1,024 and 5 of full attention, 50 GiB, max_model_len 32,768."""
    model = replace(LLAMA, kv=(KvLayers(5, 8, 128, 128), KvLayers(25, 8, 128, 128, window=1024)))
    pool = kv_layout(model).pool(50 * GIB, 32768, in_flight)
    assert pool.num_gpu_blocks == 163_840
    assert pool.max_concurrency == pytest.approx(concurrency, abs=0.05)
    assert pool.simulated_blocks * 16 == pytest.approx(pool.tokens, abs=16)


def test_tokens_are_those_of_whole_requests() -> None:
    """vLLM 0.32.0: 25,600 blocks, max_model_len 8,190."""
    layout = plain_layout(131_072, 16)
    assert layout.pool(25_600 * layout.block_bytes, 8190, 2048).tokens == 409_500


def test_the_longest_request_leaves_the_null_block() -> None:
    """vLLM 0.32.0: "estimated maximum model length is 4144" with 260 blocks."""
    layout = plain_layout(1024, 16)
    assert layout.pool(260 * layout.block_bytes, 8192, 2048).longest_request == 4144


@given(
    full=st.integers(0, 3), windowed=st.integers(0, 6), window=st.integers(1, 4096),
    tokens=st.integers(1, 20_000), flight=st.integers(1, 16_384),
)  # fmt: skip
def test_a_window_never_holds_more_than_full_attention_but_a_block(
    full: int, windowed: int, window: int, tokens: int, flight: int
) -> None:
    hybrid = KvLayout(16, 1, full, windowed, window).blocks_per_request(tokens, flight)
    dense = KvLayout(16, 1, full + windowed).blocks_per_request(tokens, flight)
    assert hybrid <= dense + windowed


def test_a_type_that_is_not_modelled_is_refused() -> None:
    with pytest.raises(ModelError, match=r"--kv-cache-dtype nvfp4 is not modelled; known are auto, .*fp8"):
        kv_layout(QWEN, kv_cache_dtype="nvfp4")


# --- the report on an RTX 4090


def test_the_reports_pool_is_what_its_memory_makes() -> None:
    pool = pool_of(ACCOUNT, MEMORY_FLAGS, kv_layout_of(QWEN, MEMORY_FLAGS))
    assert ACCOUNT.kv_cache / GIB == pytest.approx(4.64, abs=0.005)
    assert (pool.tokens, pool.requests(1280)) == (86_896, 67)


def test_vllms_advice_on_the_reports_server_fills_the_gpu() -> None:
    assert ACCOUNT.kv_bytes_to_fill == pytest.approx(6_569_114_112, rel=0.002)
    changed = MEMORY_FLAGS.changed({"--kv-cache-memory": "6569114112"})
    layout = kv_layout_of(QWEN, changed)
    account = account_under(ACCOUNT, MEMORY_FLAGS, changed, None, layout)
    pool = pool_of(account, changed, layout)
    assert pool.tokens == pytest.approx(114_600, abs=100)
    assert pool.requests(1280) == 89
    assert account.unused == pytest.approx(150 << 20, rel=0.1)  # vLLM's buffer


def test_more_memory_than_there_is_is_refused() -> None:
    for given_flags, message in (
        ({"gpu_memory_utilization": 0.99}, r"23.28 GiB and 23.13 GiB are free.*at most 0.983"),
        ({"kv_cache_memory_bytes": "8GiB"}, r"GiB short; at most 65\d+ fit"),
    ):
        changed = MEMORY_FLAGS.changed(given_flags)
        with pytest.raises(MemoryAccountError, match=message):
            account_under(ACCOUNT, MEMORY_FLAGS, changed, None, kv_layout_of(QWEN, changed))


def test_utilization_moves_the_pool_by_its_share_of_the_gpu() -> None:
    changed = MEMORY_FLAGS.changed({"gpu_memory_utilization": "0.95"})
    account = account_under(ACCOUNT, MEMORY_FLAGS, changed, None, kv_layout_of(QWEN, changed))
    assert account.kv_cache - ACCOUNT.kv_cache == pytest.approx(0.05 * 23.52 * GIB, abs=2)
    assert not account.estimated


def test_what_the_model_decides_is_estimated_and_needs_the_model() -> None:
    changed = MEMORY_FLAGS.changed({"max_num_batched_tokens": "16k"})
    layout = kv_layout_of(QWEN, changed)
    with pytest.raises(MemoryAccountError, match=r"need the model's architecture; name a known model"):
        account_under(ACCOUNT, MEMORY_FLAGS, changed, None, layout)
    account = account_under(ACCOUNT, MEMORY_FLAGS, changed, QWEN, layout)
    assert account.estimated == {"activation", "kv_cache"}
    lost = ACCOUNT.kv_cache - account.kv_cache
    assert lost == account.activation - ACCOUNT.activation
    assert 0.5 * GIB < lost < 2 * GIB  # 16,000 tokens of three times 18,944 values and four times 3,584


@given(tokens=st.integers(1, 65_536), more=st.integers(0, 65_536), seqs=st.integers(1, 2048))
def test_a_larger_step_never_needs_less_memory(tokens: int, more: int, seqs: int) -> None:
    small = MemoryFlags(max_num_batched_tokens=tokens, max_num_seqs=seqs)
    large = replace(small, max_num_batched_tokens=tokens + more)
    assert activation_bytes(QWEN, small) <= activation_bytes(QWEN, large)


def test_eager_execution_frees_what_graphs_held() -> None:
    changed = replace(MEMORY_FLAGS, enforce_eager=True)
    account = account_under(ACCOUNT, MEMORY_FLAGS, changed, None, kv_layout_of(QWEN, changed))
    assert account.graphs == 0
    assert account.kv_cache == ACCOUNT.kv_cache + ACCOUNT.graphs  # 0.27 makes room for them beforehand
    again = account_under(account, changed, MEMORY_FLAGS, None, kv_layout_of(QWEN, MEMORY_FLAGS))
    assert again.graphs == GRAPHS


# --- published pools, estimated from the model and the card alone


@pytest.mark.parametrize(
    ("model", "gpu", "flags", "tokens", "within"),
    [
        # a published log of vLLM 0.31.0 with the defaults
        ("Llama-3.1-8B", "A100", MemoryFlags(max_model_len=131_072, engine_version="0.31.0"), 460_496, 0.01),
        # github techbromoho; vLLM 0.10.2
        ("Qwen3-8B", "L40S", MemoryFlags(0.9, engine_version="0.10.2"), 170_944, 0.03),
        # github casys-kaist/LLMServingSim; vLLM 0.19.0: 0.2 GiB of 5
        ("Llama-3.1-8B", "RTX 4090", MemoryFlags(0.9, engine_version="0.19.0"), 41_408, 0.05),
        # github llm-inferno/model-trainer, between 404,000 and 418,000 by its saturated runs; vLLM 0.11
        (
            "Llama-3.1-8B",
            "H100",
            MemoryFlags(0.9, max_num_batched_tokens=8192, max_num_seqs=1024, engine_version="0.11.0"),
            411_000,
            0.05,
        ),
    ],
)
def test_an_estimated_pool_is_near_the_published_one(
    model: str, gpu: str, flags: MemoryFlags, tokens: int, within: float
) -> None:
    architecture = find_model(model)
    account = estimated_account(architecture, find_gpu(gpu), flags)
    pool = pool_of(account, flags, kv_layout_of(architecture, flags))
    assert pool.tokens == pytest.approx(tokens, rel=within)
    assert account.requested == pytest.approx(account.consumed + account.activation + account.kv_cache, abs=1)


def test_a_model_that_does_not_fit_is_refused_with_the_remedy() -> None:
    with pytest.raises(MemoryAccountError, match=r"no memory is left for the KV cache.*--tensor-parallel-size"):
        estimated_account(find_model("Llama-3.1-70B"), find_gpu("H100"), MemoryFlags())
    split = MemoryFlags(tensor_parallel_size=4)
    account = estimated_account(find_model("Llama-3.1-70B"), find_gpu("H100"), split)
    assert account.weights == pytest.approx(70.55e9 * 2 / 4, rel=0.001)


# --- a profile's pool under other flags, for what-if


def test_another_type_or_block_size_keeps_the_memory() -> None:
    half = kv_pool(FLAGS, {"kv_cache_dtype": "fp8"}, 57_344)
    assert half.num_gpu_blocks == 2 * 5431
    large = kv_pool(FLAGS, {"block_size": 32}, 57_344)
    assert (large.num_gpu_blocks, large.layout.block_size) == (5431 // 2, 32)


def test_a_size_in_bytes_or_blocks_is_taken_as_it_is() -> None:
    assert kv_pool(FLAGS, {"--kv-cache-memory": "6569114112"}, 57_344).num_gpu_blocks == 7159
    assert kv_pool(FLAGS, {"--num-gpu-blocks-override": "3000"}, 57_344).num_gpu_blocks == 3000


def test_utilization_needs_the_gpu_and_no_more() -> None:
    with pytest.raises(MemoryAccountError, match="needs the GPU's memory; name the GPU, or give the server's log"):
        kv_pool(FLAGS, {"gpu_memory_utilization": 0.95}, 57_344, gpu_memory_utilization=0.9)
    pool = kv_pool(FLAGS, {"gpu_memory_utilization": 0.95}, 57_344, gpu=find_gpu("4090"), gpu_memory_utilization=0.9)
    assert pool.num_gpu_blocks == pytest.approx(5431 + 0.05 * 23.52 * GIB / 917_504, abs=1)


def test_the_servers_own_account_beats_the_card() -> None:
    pool = kv_pool(FLAGS, {"max_num_seqs": 256}, 57_344, QWEN, account=ACCOUNT, gpu_memory_utilization=0.9)
    more = activation_bytes(QWEN, replace(MEMORY_FLAGS, max_num_seqs=256)) - activation_bytes(QWEN, MEMORY_FLAGS)
    assert pool.num_gpu_blocks == pytest.approx(5431 - more / 917_504, abs=1)


def test_more_ranks_leave_more_than_their_number_for_the_cache() -> None:
    known = {"model": QWEN, "gpu": find_gpu("4090"), "gpu_memory_utilization": 0.9}
    one, two = (kv_pool(FLAGS, {"tensor_parallel_size": ranks}, 57_344, **known) for ranks in (1, 2))
    assert one.num_gpu_blocks == 5431
    assert two.layout.block_bytes == one.layout.block_bytes // 2
    assert two.num_gpu_blocks > 4 * one.num_gpu_blocks  # half of the weights are gone from each card


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": "200k"}, r"max-model-len 200000 does not fit.*give at most 86880"),
        ({"tensor_parallel_size": 2}, "needs the model's architecture"),
        ({"gpu_memory_utilization": 1.5}, r"must be in \(0, 1\]"),
        ({"gpu_memory_utilization": "much"}, "gpu_memory_utilization: must be a number, got 'much'"),
        ({"kv_cache_memory_bytes": "lots"}, "'lots' is not a size"),
        ({"block_size": 0}, "--block-size must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(MemoryAccountError, match=message):
        kv_pool(FLAGS, changes, 57_344)


def test_without_bytes_per_token_or_model_there_is_no_pool() -> None:
    with pytest.raises(MemoryAccountError, match="needs the model's KV bytes per token"):
        kv_pool(FLAGS, {"kv_cache_memory_bytes": "6GiB"}, None)
    assert kv_pool(FLAGS, {"kv_cache_memory_bytes": "6569114112"}, None, QWEN).num_gpu_blocks == 7159


def test_a_utilization_that_cannot_have_made_the_pool_is_told() -> None:
    with pytest.raises(MemoryAccountError, match="no room for the weights on a RTX 4090; state the utilization"):
        kv_pool(
            FLAGS, {"gpu_memory_utilization": 0.9}, None, QWEN, find_gpu("4090"), gpu_memory_utilization=0.5
        )  # fmt: skip

"""Flags come from the server, from its owner, or from vLLM's defaults; what is assumed is said."""

from __future__ import annotations

import pytest

from calibration.discovery import discover_flags
from calibration.endpoint import Endpoint
from calibration.server_flags import Found, blocks_of, resolve_flags, told
from simulator.engine.engine_flags import EngineFlags, FlagError

TALKATIVE = Endpoint(
    "http://host",
    "demo",
    engine_version="0.32.0",
    max_model_len=4096,
    kv_tokens=16_000,
    num_gpu_blocks=1000,
    block_size=16,
    max_num_seqs=64,
    max_num_batched_tokens=1024,
    enable_prefix_caching=True,
)
SILENT = Endpoint("http://host", "demo")


def server_flags(endpoint: Endpoint, given: dict[str, object]) -> tuple[EngineFlags, list[str]]:
    """The flags of a server of which nothing but its endpoint and its owner is asked, and what of them is assumed."""
    known = discover_flags(endpoint, given)
    return known.flags, known.assumed


def test_what_the_server_tells_is_taken() -> None:
    flags, assumed = server_flags(TALKATIVE, {"--async-scheduling": True})
    assert (flags.max_num_seqs, flags.max_num_batched_tokens, flags.num_gpu_blocks) == (64, 1024, 1000)
    assert assumed == []


def test_what_its_owner_says_wins() -> None:
    flags, _ = server_flags(TALKATIVE, {"--max-num-seqs": "8", "--num-gpu-blocks-override": "50"})
    assert (flags.max_num_seqs, flags.num_gpu_blocks) == (8, 50)


def test_the_rest_is_assumed_and_said() -> None:
    flags, assumed = server_flags(SILENT, {})
    assert (flags.max_num_seqs, flags.max_num_batched_tokens, flags.block_size) == (256, 2048, 16)
    names = [sentence.partition(" = ")[0] for sentence in assumed]
    assert names == [
        "engine_version",
        "max_model_len",
        "async_scheduling",
        "enable_prefix_caching",
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "num_gpu_blocks",
    ]


def test_assumed_flags_fit_those_that_are_known() -> None:
    assert server_flags(SILENT, {"max_num_batched_tokens": 128})[0].max_num_seqs == 128
    assert server_flags(SILENT, {"max_num_seqs": 4096})[0].max_num_batched_tokens == 4096


@pytest.mark.parametrize(
    ("version", "asynchronous"), [("0.11.0", False), ("0.27.1", True), ("0.32.0", True), ("0.32.0+cpu", False)]
)
def test_asynchronous_scheduling_is_the_default_of_the_version(version: str, asynchronous: bool) -> None:
    endpoint = Endpoint("http://host", "demo", engine_version=version)
    assert server_flags(endpoint, {})[0].async_scheduling == asynchronous


def test_one_of_several_engines_counts() -> None:
    several = Endpoint("http://host", "demo", num_gpu_blocks=2000, block_size=16, engines=2)
    assert server_flags(several, {})[0].num_gpu_blocks == 1000


def test_memory_is_not_taken_from_its_owner() -> None:
    with pytest.raises(FlagError, match="taken from the server"):
        server_flags(TALKATIVE, {"--kv-cache-memory-bytes": "1G"})


def batch(version: str = "0.32.0", **facts: object) -> tuple[int, int]:
    """The batch sizes that a server has of which this much is known."""
    flags = resolve_flags(told("server", {"engine_version": version, **facts})).flags
    return flags.max_num_batched_tokens, flags.max_num_seqs


@pytest.mark.parametrize(
    ("version", "memory", "name", "sizes"),
    [
        ("0.32.0", 178.4, None, (16384, 1024)),
        ("0.27.1", 178.4, None, (8192, 1024)),
        ("0.11.0", 191.7, None, (8192, 1024)),
        ("0.32.0", 139.8, None, (8192, 1024)),
        ("0.32.0", 79.2, "NVIDIA H100 80GB HBM3", (8192, 1024)),
        ("0.32.0", 79.2, "NVIDIA A100-SXM4-80GB", (2048, 256)),
        ("0.32.0", 79.2, None, (8192, 1024)),
        ("0.32.0", 23.5, None, (2048, 256)),
        ("0.32.0", None, "NVIDIA GeForce RTX 4090", (2048, 256)),
    ],
)
def test_the_gpu_decides_the_defaults(
    version: str, memory: float | None, name: str | None, sizes: tuple[int, int]
) -> None:
    assert batch(version, gpu_memory=memory, gpu=name) == sizes


def test_where_the_gpu_is_in_doubt_the_assumption_says_so() -> None:
    doubtful = resolve_flags(told("log", {"gpu_memory": 79.2})).assumed
    assert any("unless it is an A100 (2048 and 256)" in sentence for sentence in doubtful)
    certain = resolve_flags(told("log", {"gpu_memory": 94.9})).assumed
    assert not any("A100" in sentence for sentence in certain)


def test_defaults_are_processed_as_vllm_does() -> None:
    assert batch(device="cpu") == (2048, 128)
    assert batch(device="cpu", tensor_parallel_size=2, pipeline_parallel_size=2) == (8192, 512)
    assert batch(performance_mode="throughput") == (4096, 512)
    assert batch(performance_mode="throughput", max_num_seqs=100) == (4096, 100)
    assert batch(enable_chunked_prefill=False, max_model_len=8192) == (8192, 256)
    assert batch(max_num_seqs=4, max_model_len=448) == (4 * 448, 4)
    assert batch(max_model_len=4) == (1024, 256)


def test_a_pool_in_tokens_becomes_blocks() -> None:
    assert blocks_of(409_600, 16, 8192) == 25_600
    assert blocks_of(409_500, 16, 8190) == 25_600  # vLLM counts whole requests of 8190 tokens, in 512 blocks each
    flags = resolve_flags(told("log", {"kv_tokens": 86_896})).flags
    assert (flags.num_gpu_blocks, flags.block_size) == (5431, 16)


def test_a_cpu_has_larger_blocks() -> None:
    assert resolve_flags(told("log", {"device": "cpu"})).flags.block_size == 128
    assert resolve_flags(told("log", {"device": "cpu", "engine_version": "0.11.0"})).flags.block_size == 16


def test_a_version_without_number_is_replaced() -> None:
    known = resolve_flags(told("server", {"engine_version": "dev"}))
    assert known.found["engine_version"] == Found("0.32.0", "assumed", "the server calls its version 'dev'")


def test_old_versions_admit_prompts_that_their_pool_cannot_hold() -> None:
    assert not resolve_flags(told("server", {"engine_version": "0.11.0"})).flags.scheduler_reserve_full_isl
    assert resolve_flags(told("server", {"engine_version": "0.27.1"})).flags.scheduler_reserve_full_isl


def test_values_that_cannot_hold_together_are_refused() -> None:
    with pytest.raises(FlagError, match="must not be smaller"):
        resolve_flags(told("stated", {"max_num_seqs": 512, "max_num_batched_tokens": 256}))

"""Flags come from the server, from its owner, or from vLLM's defaults; what is assumed is said."""

from __future__ import annotations

import pytest

from calibration.endpoint import Endpoint
from calibration.server_flags import server_flags
from simulator.engine_flags import FlagError

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
)
SILENT = Endpoint("http://host", "demo")


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
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "block_size",
        "num_gpu_blocks",
        "async_scheduling",
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

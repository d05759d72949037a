"""Engine flags as people write them: vLLM's names, sizes with units, numbers as text from a command line."""

from __future__ import annotations

import pytest

from simulator.engine.engine_flags import EngineFlags, FlagError
from simulator.flags.vllm_flags import BadFlag, change_flags, parse_flags, parse_size


def test_names_with_dashes_underscores_and_vllms_synonyms_mean_the_same() -> None:
    written = {"--max-num-seqs": "64", "num_gpu_blocks_override": 900, "kv-cache-memory": "1GiB"}
    assert parse_flags(written) == {"max_num_seqs": 64, "num_gpu_blocks": 900, "kv_cache_memory_bytes": 1 << 30}


@pytest.mark.parametrize(("text", "size"), [("1k", 1000), ("1K", 1024), ("25.6k", 25_600), ("10G", 10 << 30)])
def test_sizes_are_what_vllm_reads(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_numbers_may_be_text() -> None:
    assert parse_flags({"watermark": "0.01"}) == {"watermark": 0.01}
    with pytest.raises(BadFlag, match="watermark: must be a number, got 'much'"):
        parse_flags({"watermark": "much"})
    with pytest.raises(BadFlag, match="watermark: must be a number, got True"):
        parse_flags({"watermark": True})


def test_a_pool_in_bytes_becomes_whole_blocks() -> None:
    changed = change_flags(EngineFlags(), {"kv_cache_memory_bytes": 6_569_114_112}, kv_bytes_per_token=57_344)
    assert changed.kv_tokens == 114_544  # the published report's "about 114,600"


def test_another_block_size_keeps_the_tokens() -> None:
    changed = change_flags(EngineFlags(num_gpu_blocks=1001), {"block_size": "32"})
    assert (changed.num_gpu_blocks, changed.block_size) == (500, 32)


@pytest.mark.parametrize(
    "value", ["9" * 5000, "1" + "0" * 18, "9999999999TiB", "-1", "nan", "1e308", "", "\0", "\u0661", "2_147_483_648"]
)
@pytest.mark.parametrize("name", ["max_num_seqs", "max_model_len", "num_gpu_blocks", "block_size"])
def test_a_size_beyond_all_bounds_is_refused(name: str, value: str) -> None:
    with pytest.raises(FlagError, match=r"^(?!.*(could not convert|Exceeds the limit))"):
        change_flags(EngineFlags(), {name: value})


@pytest.mark.parametrize("value", [10**400, -(10**400), 2.5, float("nan"), None, [], "1e400", "nan"])
def test_a_value_of_any_type_is_refused_in_a_line(value: object) -> None:
    for name in ("max_num_seqs", "watermark"):
        with pytest.raises(FlagError) as caught:
            change_flags(EngineFlags(), {name: value, "enable_prefix_caching": 2.5})
        assert "\n" not in str(caught.value)


def test_a_pool_too_large_to_be_simulated_block_by_block_is_refused() -> None:
    assert change_flags(EngineFlags(), {"num_gpu_blocks": "100M"}).num_gpu_blocks == 100 << 20
    with pytest.raises(FlagError, match="with prefix caching may have up to 4,194,304 blocks"):
        change_flags(EngineFlags(), {"num_gpu_blocks": "100M", "enable_prefix_caching": True})

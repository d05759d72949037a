"""The memory of a server from its log: the report's RTX 4090, a published A100, and logs that tell less."""

from __future__ import annotations

from pathlib import Path

import pytest

from calibration.server_log import read_server_log
from calibration.server_memory import ServerMemoryError, default_flags, server_memory
from simulator.hardware.gpus import GIB, find_gpu
from simulator.hardware.memory import pool_of

# Values of the report on an RTX 4090, in the wording of vLLM 0.27
REPORT = """\
INFO 07-06 10:00:00 [api_server.py:1] vLLM API server version 0.27.1
INFO 07-06 10:00:00 [utils.py:1] non-default args: {'model': 'MODEL', 'max_num_seqs': 128, 'max_model_len': 32768, \
'gpu_memory_utilization': 0.9}
INFO 07-06 10:00:00 [core.py:76] Initializing a V1 LLM engine (v0.27.1) with config: model='MODEL', \
dtype=torch.bfloat16, max_seq_len=32768, tensor_parallel_size=1, kv_cache_dtype=auto, enforce_eager=False
INFO 07-06 10:00:00 [scheduler.py:1] Chunked prefill is enabled with max_num_batched_tokens=2048.
INFO 07-06 10:00:33 [gpu_worker.py:1] Available KV cache memory: 4.64 GiB
INFO 07-06 10:00:33 [kv_cache_utils.py:1] GPU KV cache size: 86,896 tokens
INFO 07-06 10:00:33 [kv_cache_utils.py:2] Maximum concurrency for 32,768 tokens per request: 2.65x
INFO 07-06 10:00:41 [gpu_worker.py:2] Free memory on device (23.13/23.52 GiB) on startup. Desired GPU memory \
utilization is (0.9, 21.17 GiB). Actual usage is 15.49 GiB for consumed memory (weights + non-torch), 1.04 GiB for \
peak activation, and 0.34 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with \
`--kv-cache-memory=4465688576` (4.16 GiB) to fit into requested memory, or `--kv-cache-memory=6569114112` (6.12 GiB) \
to fully utilize gpu memory. Current kv cache memory in use is 4.64 GiB.
"""


def log_of(folder: Path, model: str, text: str = REPORT) -> Path:
    path = folder / "server.log"
    path.write_text(text.replace("MODEL", model))
    return path


def test_the_log_gives_the_reports_account(tmp_path: Path) -> None:
    server = server_memory(read_server_log(log_of(tmp_path, "Qwen/Qwen2.5-7B")))
    account = server.account
    assert account.kv_cache == 5431 * 917_504
    assert account.kv_bytes_to_fill == 6_569_114_112  # to the byte
    assert account.requested == account.consumed + account.activation + account.kv_cache
    for name, gib in (("total", 23.52), ("free", 23.13), ("consumed", 15.49), ("activation", 1.04), ("graphs", 0.34)):
        assert getattr(account, name) / GIB == pytest.approx(gib, abs=0.015)
    assert not account.estimated
    pool = pool_of(account, server.flags, server.layout)
    assert (pool.tokens, pool.requests(1280)) == (86_896, 67)
    assert pool.max_concurrency == pytest.approx(2.65, abs=0.005)


def test_an_unknown_model_has_a_pool_to_two_decimals(tmp_path: Path) -> None:
    server = server_memory(read_server_log(log_of(tmp_path, "my/own")))
    assert server.model is None
    assert server.layout.bytes_per_token == pytest.approx(57_344, rel=0.002)
    assert "architecture of my/own is not known" in server.notes[-1]


def test_flags_that_the_log_lacks_are_assumed_in_words(tmp_path: Path) -> None:
    text = REPORT.replace("'max_num_seqs': 128, ", "").replace("max_num_batched_tokens", "something")
    server = server_memory(read_server_log(log_of(tmp_path, "Qwen/Qwen2.5-7B", text)))
    assert (server.flags.max_num_seqs, server.flags.max_num_batched_tokens) == (256, 2048)
    assert any("max_num_seqs = 256" in note for note in server.notes)


def test_a_log_without_the_account_is_refused_with_the_remedy(tmp_path: Path) -> None:
    text = "".join(line for line in REPORT.splitlines(keepends=True) if "Free memory" not in line)
    with pytest.raises(ServerMemoryError, match=r"lacks vLLM's account of memory.*not with --kv-cache-memory-bytes"):
        server_memory(read_server_log(log_of(tmp_path, "Qwen/Qwen2.5-7B", text)))


def test_a_hybrid_models_blocks_come_from_its_tokens(tmp_path: Path) -> None:
    """gemma-3-27b: groups of ten layers; the log tells tokens of whole requests."""
    from simulator.hardware.kv_layout import kv_layout
    from simulator.hardware.model_config import find_model

    pool = kv_layout(find_model("gemma-3-27b")).pool(4000 * 1_310_720, 32_768, 2 * 2048)
    text = REPORT.replace("86,896", f"{pool.tokens:,}").replace("4.64", f"{4000 * 1_310_720 / GIB:.2f}")
    server = server_memory(read_server_log(log_of(tmp_path, "google/gemma-3-27b-it", text)))
    assert server.account.kv_cache == 4000 * 1_310_720


@pytest.mark.parametrize(("gpu", "tokens", "seqs"), [("4090", 2048, 256), ("A100", 2048, 256), ("H100", 8192, 1024)])
def test_the_defaults_are_vllms_for_the_card(gpu: str, tokens: int, seqs: int) -> None:
    flags, assumed = default_flags(find_gpu(gpu), max_model_len=8192)
    assert (flags.max_num_batched_tokens, flags.max_num_seqs, flags.max_model_len) == (tokens, seqs, 8192)
    assert len(assumed) == 2

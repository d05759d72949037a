"""``capsim memory``: the account in a table, in JSON and CSV, measured and estimated."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from capsim.cli import app

REPORT = """\
INFO 07-06 10:00:00 [utils.py:1] non-default args: {'model': 'Qwen/Qwen2.5-7B', 'max_num_seqs': 128}
INFO 07-06 10:00:00 [core.py:76] Initializing a V1 LLM engine (v0.27.1) with config: model='Qwen/Qwen2.5-7B', \
max_seq_len=32768, tensor_parallel_size=1, kv_cache_dtype=auto, enforce_eager=False
INFO 07-06 10:00:33 [kv_cache_utils.py:1] GPU KV cache size: 86,896 tokens
INFO 07-06 10:00:41 [gpu_worker.py:2] Free memory on device (23.13/23.52 GiB) on startup. Desired GPU memory \
utilization is (0.9, 21.17 GiB). Actual usage is 15.49 GiB for consumed memory (weights + non-torch), 1.04 GiB for \
peak activation, and 0.34 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with \
`--kv-cache-memory=4465688576` (4.16 GiB) to fit into requested memory, or `--kv-cache-memory=6569114112` (6.12 GiB) \
to fully utilize gpu memory. Current kv cache memory in use is 4.64 GiB.
"""


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text(REPORT)
    return path


def memory(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["memory", *(str(argument) for argument in arguments)])


def test_the_report_and_what_its_advice_would_change(log_file: Path) -> None:
    result = memory("--server-log", log_file, "--kv-cache-memory=6569114112", "--tokens", 1280)
    assert result.exit_code == 0, result.output
    rows = {line.strip().split("  ")[0]: line.split()[-2:] for line in result.output.splitlines()}
    assert rows["GPU KV cache size, tokens"] == ["86,896", "114,544"]
    assert rows["requests of 1,280 tokens that fit"] == ["67", "89"]
    assert "4.64 GiB" in result.output
    assert "--kv-cache-memory=6569114112 would use what is unused: 6.12 GiB" in result.output
    assert "~" not in result.output  # nothing of this is estimated
    assert max(len(line) for line in result.output.splitlines()) <= 80


def test_an_estimate_is_marked_as_one() -> None:
    result = memory("--model", "Llama-3.1-8B", "--gpu", "A100", "--max-model-len", "32k")
    assert result.exit_code == 0, result.output
    assert "~ is estimated" in result.output
    assert "max_num_seqs = 256: the default on an A100" in result.output
    assert "nothing of this is measured" in " ".join(result.output.split())
    assert "Start the server once and give what it prints with --server-log" in " ".join(result.output.split())
    assert max(len(line) for line in result.output.splitlines()) <= 80


def test_an_estimate_advises_no_size_that_may_run_out_of_memory() -> None:
    words = ("--model", "Llama-3.1-8B", "--gpu", "A100", "--max-model-len", "32k")
    assert "--kv-cache-memory=" not in memory(*words).output
    (case,) = json.loads(memory(*words, "--json").output)["cases"]
    assert case["pool"]["kv_bytes_to_fill"] is None
    assert case["pool"]["kv_tokens"] > 0


def test_json_gives_bytes_and_says_what_is_estimated(log_file: Path) -> None:
    result = memory("--server-log", log_file, "--max-num-seqs", 256, "--json")
    logged, changed = json.loads(result.output)["cases"]
    assert logged["estimated"] == []
    assert logged["pool"]["num_gpu_blocks"] == 5431
    assert changed["estimated"] == ["activation", "kv_cache"]
    assert changed["bytes"]["kv_cache"] < logged["bytes"]["kv_cache"]
    assert changed["flags"]["max_num_seqs"] == 256


def test_csv_has_a_row_a_quantity(log_file: Path) -> None:
    table = pd.read_csv(StringIO(memory("--server-log", log_file, "--csv").output)).set_index("quantity")
    assert table.loc["kv_bytes_to_fill", "value"] == 6_569_114_112
    assert table.loc["kv_cache", "origin"] == "measured"
    assert set(table["case"]) == {"as logged"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --server-log FILE, or --model and --gpu to estimate"),
        (("--model", "Llama-3.1-8B"), "give --server-log FILE, or --model and --gpu"),
        (("--model", "my/own", "--gpu", "H100"), "my/own: no such model or file"),
        (("--model", "Qwen3-8B", "--gpu", "H1000"), "no GPU is called 'H1000'; did you mean"),
        (("--model", "Llama-3.1-70B", "--gpu", "H100"), "no memory is left for the KV cache"),
        (("--model", "Qwen3-8B", "--gpu", "4090", "--kv-cache-dtype", "nvfp4"), "nvfp4 is not modelled"),
        (("--model", "Qwen3-8B", "--gpu", "4090", "--gpu-memory-utilization", "90"), "must be in (0, 1], got 90"),
        (("--model", "Qwen3-8B", "--gpu", "4090", "--json", "--csv"), "either --json or --csv"),
    ],
)
def test_what_cannot_be_told_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = memory(*arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_log_and_a_gpu_contradict(log_file: Path) -> None:
    assert "either --server-log or --gpu" in memory("--server-log", log_file, "--gpu", "4090").output

"""A100, Qwen2-7B, vLLM 0.10.1: bursts of 1024/1024 requests (github dennislee22/vLLM-benchmarking).

Fitted on 1 and 20 requests, where half of each prompt came from the prefix cache, so that the cost of prompts is the
data sheet's; 100 requests are predicted.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.measured.loads import QWEN_2_7B, burst, priors_of
from benchmarks.accuracy.measured.table import DataRow, Report, compare, read
from calibration.aggregate_fit import fit_figures
from calibration.roofline import GpuFacts
from calibration.trial import Figure
from simulator.engine.engine_flags import EngineFlags

FILE = "dennislee-a100-qwen2-7b.csv"
GPU = GpuFacts("A100 80 GB", memory_bandwidth=2.039e12, dense_operations=312e12)
FLAGS = EngineFlags(
    max_num_seqs=256, max_num_batched_tokens=2048, num_gpu_blocks=464_848 // 16, async_scheduling=False,
    scheduler_reserve_full_isl=False, engine_version="0.10.1",
)  # fmt: skip
FITTED = ("1", "20")
METRICS = {
    "p50_tpot": ("Median TPOT (ms)", 1e-3),
    "p50_itl": ("Median ITL (ms)", 1e-3),
    "p99_itl": ("P99 ITL (ms)", 1e-3),
    "p50_ttft": ("Median TTFT (ms)", 1e-3),
    "p99_ttft": ("P99 TTFT (ms)", 1e-3),
    "output_throughput": ("Output token throughput (tok/s)", 1.0),
}
CACHED = (
    "p50_ttft",
    "p99_ttft",
    "p99_itl",
    "p50_tpot",
    "output_throughput",
)  # what the prefix cache changes in the small bursts


def figures(row: DataRow) -> list[Figure]:
    load = burst(1024, 1024, int(row["num-prompts"]))
    return [
        Figure(load, metric, float(row[column]) * unit, 0.01)
        for metric, (column, unit) in METRICS.items()
        if row["num-prompts"] not in FITTED or metric not in CACHED
    ]


def report(data: Path) -> Report:
    rows = read(data, FILE)
    known = [figure for row in rows if row["num-prompts"] in FITTED for figure in figures(row)]
    fit = fit_figures(known, FLAGS, priors_of(QWEN_2_7B, GPU), tolerance=1e-2)
    made = [
        found
        for row in rows
        for found in compare(f"N={row['num-prompts']}", figures(row), FLAGS, fit, row["num-prompts"] in FITTED)
    ]
    return Report("dennislee: A100, Qwen2-7B", made, {"": fit})

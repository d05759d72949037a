"""RTX PRO 4500, Qwen3-4B FP8, vLLM 0.29: a closed loop of ShareGPT chats (github akamaslabs/vllm-benchmark).

Fitted on 16 and 64 clients, gap quantiles included, since a step that also carries a prompt of 70 tokens costs almost
twice a pure decode step here; 256 clients are predicted. Output lengths follow the published quantiles; of prompts only
the mean is known.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.accuracy.measured.loads import QWEN_3_4B, ClosedRequests, priors_of
from benchmarks.accuracy.measured.table import DataRow, Report, compare, read
from calibration.aggregate_fit import fit_figures
from calibration.roofline import GpuFacts, Prior
from calibration.trial import Figure
from simulator.engine.engine_flags import EngineFlags

FILE = "akamas-rtxpro4500-qwen3-4b-fp8.csv"
GPU = GpuFacts("RTX PRO 4500", memory_bandwidth=896e9, dense_operations=400e12)  # FP8 with FP32 accumulation
MODEL = replace(QWEN_3_4B, bytes_per_value=1.0)
KV_CACHE = Prior(2 * MODEL.kv_bytes_per_token / (896e9 * 0.85), 0.3, "a KV cache of bfloat16 at 85% of the bandwidth")
FLAGS = EngineFlags(
    max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=4096, num_gpu_blocks=159_000 // 16,
    engine_version="0.29.0",
)  # fmt: skip
PROMPT_MEAN, PROMPT_SIGMA = 71, 1.3  # tokens; ShareGPT's first turns are about log-normal, this wide
OUTPUT_QUANTILES = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
OUTPUT_TOKENS = (1, 11, 30, 57, 123, 242, 360, 522, 647, 782, 1237)
FITTED = ("16", "64")
ROUNDS = 20  # requests a client
METRICS = {
    "output_throughput": ("output_tok_s", 1.0, 0.01),
    "p50_ttft": ("ttft_p50_ms", 1e-3, 0.05),
    "p50_itl": ("gap_p50_ms", 1e-3, 0.02),
    "p90_itl": ("gap_p90_ms", 1e-3, 0.03),
    "p95_itl": ("gap_p95_ms", 1e-3, 0.05),
    "p99_itl": ("gap_p99_ms", 1e-3, 0.1),
}
UNFITTED = ("p99_itl",)  # made by the longest prompts, whose lengths are not known


def load_of(clients: int) -> ClosedRequests:
    """`ROUNDS` requests a client, from the same chats."""
    rng = np.random.default_rng(0)
    count = clients * ROUNDS
    outputs = np.interp((np.arange(count) + 0.5) / count, OUTPUT_QUANTILES, OUTPUT_TOKENS).round().astype(np.int64)
    prompts = rng.lognormal(np.log(PROMPT_MEAN) - PROMPT_SIGMA**2 / 2, PROMPT_SIGMA, count)
    return ClosedRequests(
        f"C={clients}", clients, np.clip(prompts, 4, 1024).round().astype(np.int64), rng.permutation(outputs)
    )


def figures(row: DataRow) -> list[Figure]:
    load = load_of(int(row["concurrency"]))
    return [
        Figure(load, metric, float(row[column]) * unit, uncertainty)
        for metric, (column, unit, uncertainty) in METRICS.items()
    ]


def report(data: Path) -> Report:
    rows = read(data, FILE)
    known = [
        figure
        for row in rows
        if row["concurrency"] in FITTED
        for figure in figures(row)
        if figure.metric not in UNFITTED
    ]
    priors = priors_of(MODEL, GPU, {"per_kv_token": KV_CACHE})
    fit = fit_figures(known, FLAGS, priors, tolerance=1e-2)
    made = [
        found
        for row in rows
        for found in compare(f"C={row['concurrency']}", figures(row), FLAGS, fit, row["concurrency"] in FITTED)
    ]
    return Report(
        "akamas: RTX PRO 4500, Qwen3-4B FP8",
        made,
        {"": fit},
        notes=("prompts: only their mean is known; taken as log-normal, sigma 1.3",),
    )

"""A100 PCIe, Qwen2.5-1.5B, vLLM 0.28: a model so small that the host matters (github llm-serving-systems-lab, MIT).

Closed loop of 512/128, five repeats a level: fitted on the medians of 1 and 128 clients, 32 are predicted. With the
same coefficients, a long prompt is put among 64 decoding requests, with chunks of 2,048 tokens and in one piece: the
longest gap that the others see, and the prompt's TTFT.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.accuracy.measured.loads import QWEN_2_5_1_5B, closed, priors_of
from benchmarks.accuracy.measured.table import DataRow, Report, Row, compare, read
from calibration.aggregate_fit import AggregateFit, fit_figures
from calibration.roofline import GpuFacts
from calibration.trial import Figure, play_load
from simulator.engine.engine_flags import EngineFlags
from simulator.loads.trace import Trace

LEVELS, CHUNKS = "xianghaokong-a100-qwen25-15b.csv", "xianghaokong-a100-chunk-budget.csv"
GPU = GpuFacts("A100 PCIe 80 GB", memory_bandwidth=1.935e12, dense_operations=312e12)
FLAGS = EngineFlags(
    max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=32_768, num_gpu_blocks=100_000, engine_version="0.28.0"
)
FITTED = ("1", "128")
METRICS = {
    "p50_tpot": ("median_tpot_ms", 1e-3, 0.02),
    "p50_ttft": ("median_ttft_ms", 1e-3, 0.05),
    "p50_itl": ("median_itl_ms", 1e-3, 0.02),
    "p90_itl": ("p90_itl_ms", 1e-3, 0.05),
    "p95_itl": ("p95_itl_ms", 1e-3, 0.05),
    "output_throughput": ("output_throughput_tps", 1.0, 0.01),
}
DECODES, DECODE_PROMPT, DECODE_OUTPUT = 63, 256, 3000  # outputs of 8,192, of which only so many could matter
INJECTED_AT, INJECTED_OUTPUT = 5.0, 16  # s after the decodes, and tokens; neither is stated


def figures(clients: str, repeats: list[DataRow]) -> list[Figure]:
    load = closed(512, 128, int(clients), 10 if clients == "1" else 5 * int(clients))
    return [
        Figure(load, metric, float(np.median([float(row[column]) for row in repeats])) * unit, uncertainty)
        for metric, (column, unit, uncertainty) in METRICS.items()
    ]


def inject(row: DataRow, fit: AggregateFit) -> list[Row]:
    """One long prompt among decoding requests."""
    prompt = int(row["injected_prompt_tokens"])
    times = np.append(np.zeros(DECODES), INJECTED_AT)
    prompts = np.append(np.full(DECODES, DECODE_PROMPT), prompt)
    outputs = np.append(np.full(DECODES, DECODE_OUTPUT), INJECTED_OUTPUT)
    flags = replace(FLAGS, max_num_seqs=64, max_num_batched_tokens=int(row["max_num_batched_tokens"]))
    level = play_load(Trace(row["kind"], times, prompts, outputs), flags, fit.step_time, fit.host_time)
    late = level.gaps[level.gaps["time"] > INJECTED_AT]
    name = f"{prompt} among {DECODES}, budget {row['max_num_batched_tokens']}"
    return [
        Row(name, "longest gap ms", float(row["max_gap_ms_med"]) / 1e3, float(late["gap"].max())),
        Row(name, "injected ttft ms", float(row["long_ttft_ms_med"]) / 1e3, float(level.requests["ttft"].iloc[-1])),
    ]


def report(data: Path) -> Report:
    rows = read(data, LEVELS)
    levels = dict.fromkeys(row["concurrency"] for row in rows)
    by_clients = {clients: [row for row in rows if row["concurrency"] == clients] for clients in levels}
    known = [figure for clients in FITTED for figure in figures(clients, by_clients[clients])]
    fit = fit_figures(known, FLAGS, priors_of(QWEN_2_5_1_5B, GPU), tolerance=1e-2)
    made = []
    for clients, repeats in by_clients.items():
        made += compare(f"C={clients}", figures(clients, repeats), FLAGS, fit, clients in FITTED)
    for row in read(data, CHUNKS):
        if row["kind"] == "inject":
            made += inject(row, fit)
    return Report("xianghaokong: A100, Qwen2.5-1.5B", made, {"": fit})

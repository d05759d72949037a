"""RTX 5090, Qwen3-4B, vLLM 0.22: cold TTFT by prompt length, and Poisson arrivals of 1024/128 (github openinfer).

Fitted on TTFT of 256, 1,024 and 8,192 tokens and on 1 request/s; the other lengths and 8 requests/s are predicted.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.measured.loads import QWEN_3_4B, closed, poisson, priors_of
from benchmarks.accuracy.measured.table import DataRow, Report, Row, compare, read
from calibration.aggregate_fit import fit_figures
from calibration.roofline import GpuFacts
from calibration.trial import Figure
from simulator.engine.engine_flags import EngineFlags

COLD, POISSON = "openinfer-rtx5090-cold-ttft.csv", "openinfer-rtx5090-poisson.csv"
GPU = GpuFacts("RTX 5090", memory_bandwidth=1792e9, dense_operations=209.5e12)  # bfloat16 with FP32 accumulation
FLAGS = EngineFlags(
    max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=32_768, num_gpu_blocks=130_000 // 16,
    engine_version="0.22.1",
)  # fmt: skip
FITTED_LENGTHS, FITTED_RATES = ("256", "1024", "8192"), ("1",)
METRICS = {
    "p50_tpot": ("tpot_p50_ms", 1e-3),
    "p99_tpot": ("tpot_p99_ms", 1e-3),
    "p50_ttft": ("ttft_p50_ms", 1e-3),
    "output_throughput": ("out_tok_s", 1.0),
}


def cold(row: DataRow) -> Figure:
    """One prompt on an idle engine."""
    return Figure(closed(int(row["input_len"]), 2, 1, 3), "mean_ttft", float(row["cold_ttft_ms"]) / 1e3, 0.02)


def figures(row: DataRow) -> list[Figure]:
    load = poisson(1024, 128, float(row["qps"]), 150 * int(row["qps"]))
    return [Figure(load, metric, float(row[column]) * unit, 0.02) for metric, (column, unit) in METRICS.items()]


def report(data: Path) -> Report:
    lengths, rates = read(data, COLD), read(data, POISSON)
    known = [cold(row) for row in lengths if row["input_len"] in FITTED_LENGTHS]
    known += [figure for row in rates if row["qps"] in FITTED_RATES for figure in figures(row)[:-1]]
    fit = fit_figures(known, FLAGS, priors_of(QWEN_3_4B, GPU), tolerance=1e-2)
    made: list[Row] = []
    for row in lengths:
        made += compare(f"cold, {row['input_len']} tokens", [cold(row)], FLAGS, fit, row["input_len"] in FITTED_LENGTHS)
    for row in rates:
        made += compare(f"{row['qps']}/s", figures(row), FLAGS, fit, row["qps"] in FITTED_RATES)
    return Report("openinfer: RTX 5090, Qwen3-4B", made, {"": fit})

"""H100 64 GB, Llama-3.1-8B and Qwen2.5-7B, vLLM 0.8.5: full decode batches (github GPULLMAdapterOptimization).

A burst of 4,096 requests of about 5 prompt tokens, `max_num_seqs` of them at a time. Fitted on 50 and 400 sequences
with 100 output tokens and 400 with 400, the rest predicted. Beyond 512 sequences vLLM has no CUDA graphs; these rows
cannot show what that costs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.accuracy.measured.loads import LLAMA_3_1_8B, QWEN_2_7B, burst, priors_of
from benchmarks.accuracy.measured.table import DataRow, Report, Row, compare, read
from calibration.aggregate_fit import AggregateFit, fit_figures
from calibration.roofline import GpuFacts
from calibration.trial import Figure
from simulator.engine.engine_flags import EngineFlags

FILE = "gpullm-h100-decode.csv"
GPU = GpuFacts("H100 64 GB", memory_bandwidth=2.0e12, dense_operations=989e12)  # HBM2e of a custom card
MODELS = {"llama-3.1-8b-instruct": LLAMA_3_1_8B, "qwen-2.5-7b-instruct": QWEN_2_7B}
FLAGS = EngineFlags(
    max_num_batched_tokens=2048, num_gpu_blocks=333_248 // 16, async_scheduling=False,
    scheduler_reserve_full_isl=False, engine_version="0.8.5",
)  # fmt: skip
FITTED = (("50", "100"), ("400", "100"), ("400", "400"))
METRICS = {
    "p50_itl": ("median_itl_ms", 1e-3),
    "p50_tpot": ("median_tpot_ms", 1e-3),
    "output_throughput": ("output_throughput", 1.0),
}


def is_fitted(row: DataRow) -> bool:
    return (row["max_num_seqs"], row["out_req"]) in FITTED


def figures(row: DataRow) -> list[Figure]:
    prompt = round(int(row["total_input_tokens"]) / int(row["num_prompts"]))
    load = burst(prompt, int(row["out_req"]), int(row["num_prompts"]))
    flags = replace(FLAGS, max_num_seqs=int(row["max_num_seqs"]))
    return [Figure(load, metric, float(row[column]) * unit, 0.01, flags) for metric, (column, unit) in METRICS.items()]


def report(data: Path) -> Report:
    rows, made, fits = read(data, FILE), [], {}
    for model in MODELS:
        of_model = [row for row in rows if row["model"] == model]
        fits[model] = fit_model(model, of_model)
        made += [found for row in of_model for found in predict(row, fits[model])]
    return Report("gpullm: H100 64 GB, pure decode", made, fits)


def fit_model(model: str, rows: list[DataRow]) -> AggregateFit:
    known = [figure for row in rows if is_fitted(row) for figure in figures(row)]
    return fit_figures(known, FLAGS, priors_of(MODELS[model], GPU), tolerance=1e-2)


def predict(row: DataRow, fit: AggregateFit) -> list[Row]:
    name = f"{row['model'][:5]} {row['max_num_seqs']} sequences, {row['out_req']} out"
    return compare(name, figures(row), FLAGS, fit, is_fitted(row))

"""L40S, Qwen3-8B, vLLM 0.10.2: a closed loop of 512/256, measured in a steady window.

Fitted on 1 and 128 clients, 16 are predicted. TTFT at 128 clients is two steps long, so they are not in step with each
other as fixed lengths and a common start would have it: outputs are taken as spread by a half.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.measured.loads import QWEN_3_8B, closed, priors_of
from benchmarks.accuracy.measured.table import DataRow, Report, compare, read
from calibration.aggregate_fit import fit_figures
from calibration.roofline import GpuFacts
from calibration.trial import Figure
from simulator.engine.engine_flags import EngineFlags

FILE = "techbromoho-l40s-qwen3-8b.csv"
GPU = GpuFacts("L40S", memory_bandwidth=864e9, dense_operations=362e12)
FLAGS = EngineFlags(
    max_num_seqs=256, max_num_batched_tokens=2048, num_gpu_blocks=170_944 // 16, async_scheduling=False,
    scheduler_reserve_full_isl=False, engine_version="0.10.2",
)  # fmt: skip
FITTED = ("1", "128")
METRICS = {
    "p50_tpot": ("tpot_p50_ms", 1e-3),
    "p50_ttft": ("ttft_p50_ms", 1e-3),
    "p99_itl": ("itl_p99_ms", 1e-3),
    "p50_e2el": ("e2e_p50_s", 1.0),
    "output_throughput": ("out_tok_s", 1.0),
}


def figures(row: DataRow) -> list[Figure]:
    """Enough rounds to forget that all clients start at once."""
    clients = int(row["concurrency"])
    load = closed(512, 256, clients, 12 * clients, 0.5)
    return [Figure(load, metric, float(row[column]) * unit, 0.02) for metric, (column, unit) in METRICS.items()]


def report(data: Path) -> Report:
    rows = read(data, FILE)
    known = [figure for row in rows if row["concurrency"] in FITTED for figure in figures(row)]
    fit = fit_figures(known, FLAGS, priors_of(QWEN_3_8B, GPU), tolerance=1e-2)
    made = [
        found
        for row in rows
        for found in compare(f"C={row['concurrency']}", figures(row), FLAGS, fit, row["concurrency"] in FITTED)
    ]
    return Report("techbromoho: L40S, Qwen3-8B", made, {"": fit})

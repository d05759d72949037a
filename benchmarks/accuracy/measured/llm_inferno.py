"""H100, Llama-3.1-8B: eight mixes of lengths at ten loads each (github llm-inferno/model-trainer, Apache-2.0).

Fitted on 1024/256 at 2.96 and 17.21 requests/s and with 512 clients, and on 4096/64 at 5.10 requests/s. Measured by
GuideLLM over 360 s: only requests that finished by then count, lengths are uniform within half of the nominal, arrivals
evenly spaced. `itl` weighs a request by its gaps, as GuideLLM's mean does.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.accuracy.measured.loads import LLAMA_3_1_8B, priors_of
from benchmarks.accuracy.measured.table import DataRow, Goal, Report, Row, read
from calibration.aggregate_fit import AggregateFit, fit_figures
from calibration.roofline import GpuFacts
from calibration.trial import Figure, play_load
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.results.run import Level

FILE = "llm-inferno-llama31-8b.csv"
GPU = GpuFacts("H100 SXM", memory_bandwidth=3.35e12, dense_operations=989e12)
KV_TOKENS = (
    440_000  # Little's law on the fitted saturated row: 5,027 tokens/s x 72.0 ms = 362 running, 1,171 tokens each
)
FLAGS = EngineFlags(
    max_num_seqs=512,
    max_num_batched_tokens=8192,
    max_model_len=131_072,
    num_gpu_blocks=KV_TOKENS // 16,
    async_scheduling=False,
    scheduler_reserve_full_isl=False,
    engine_version="0.11.0",
)
CLIENTS = 512  # in flight at most in the `throughput` runs
WINDOW = 360.0  # s
FITTED = (
    ("1024", "256", "constant@2.96"),
    ("1024", "256", "constant@17.21"),
    ("1024", "256", "throughput"),
    ("4096", "64", "constant@5.10"),
)
FIT_WINDOW = 90.0  # s; evenly spaced arrivals are steady long before
# What `fit` finds, in seconds, for who cannot wait two minutes for it.
RECORDED_STEP_TIME = {
    "constant": 6.906e-3,
    "per_sequence": 20.48e-6,
    "per_kv_token": 39.59e-9,
    "per_prefill_token": 21.90e-6,
    "per_prefill_attention": 0.5282e-9,
    "mixed_per_sequence": 1.717e-6,
    "weights": 3.773e-3,
}
RECORDED_HOST_TIME = {"per_request": 11.49e-3}
GOALS = (
    Goal("itl", ("itl ms",), 0.05),
    Goal("p50 ttft", ("p50 ttft ms",), 0.15),
    Goal("saturation throughput", ("saturation tok/s",), 0.05),
)


def load_of(row: DataRow, window: float, num_prompts: int = 0) -> Workload:
    """The load of a row over `window` seconds. A closed loop needs `num_prompts`, enough to last that long."""
    shapes = (Shape(Length.jittered(int(row["in_nom"]), 0.5), Length.jittered(int(row["out_nom"]), 0.5)),)
    kind, _, rate = row["strategy"].partition("@")
    if kind == "constant":
        return Workload(OpenLoop(float(rate), math.inf), shapes, int(float(rate) * window))
    return Workload(ClosedLoop(1 if kind == "synchronous" else CLIENTS), shapes, num_prompts)


def finished(level: Level, window: float) -> pd.DataFrame:
    """The requests that ended inside the window."""
    requests = level.requests
    return requests[requests["arrival"] + requests["e2el"] <= window]


def itl(level: Level, window: float) -> float:
    done = finished(level, window)
    return float(np.average(done["tpot"], weights=done["output_tokens"] - 1))


def ttft(level: Level, window: float) -> float:
    return float(finished(level, window)["ttft"].median())


def throughput(level: Level, window: float) -> float:
    return float(finished(level, window)["output_tokens"].sum() / window)


def is_fitted(row: DataRow) -> bool:
    return (row["in_nom"], row["out_nom"], row["strategy"]) in FITTED


def figures(rows: list[DataRow]) -> list[Figure]:
    """The fitted rows. 1 and 3 %: levels of one mix differ by that much from a smooth line."""
    made = []
    for row in filter(is_fitted, rows):
        saturated = row["strategy"] == "throughput"
        window = WINDOW if saturated else FIT_WINDOW
        load = load_of(row, window, num_prompts=int(1.1 * int(row["n_ok"])) + CLIENTS)
        made.append(Figure(load, "itl", float(row["itl_ms_mean"]) / 1e3, 0.01, measure=partial(itl, window=window)))
        if saturated:
            value, measure = float(row["out_tok_s"]), partial(throughput, window=window)
            made.append(Figure(load, "throughput", value, 0.005, measure=measure))
        else:
            value, seen = float(row["ttft_ms_p50"]) / 1e3, partial(ttft, window=window)
            made.append(Figure(load, "p50 ttft", value, 0.03, measure=seen))
    return made


def fit(data: Path) -> AggregateFit:
    """The fit to four rows of eighty."""
    priors = priors_of(LLAMA_3_1_8B, GPU)
    return fit_figures(figures(read(data, FILE)), FLAGS, priors, tolerance=1e-2)


def predict(row: DataRow, step_time: StepTime, host_time: HostTime) -> list[Row]:
    """A row's latencies, and its throughput if it is a saturated one."""
    level = play_load(_whole_load(row, step_time, host_time), FLAGS, step_time, host_time)
    name, seen = f"{row['in_nom']}/{row['out_nom']} {row['strategy']}", is_fitted(row)
    rows = [
        Row(name, "itl ms", float(row["itl_ms_mean"]) / 1e3, itl(level, WINDOW), seen),
        Row(name, "p50 ttft ms", float(row["ttft_ms_p50"]) / 1e3, ttft(level, WINDOW), seen),
    ]
    if row["strategy"] == "throughput":
        rows.append(Row(name, "saturation tok/s", float(row["out_tok_s"]), throughput(level, WINDOW), seen))
    return rows


def _whole_load(row: DataRow, step_time: StepTime, host_time: HostTime) -> Workload:
    """A closed loop is played shortly first, to see how many requests the window takes."""
    if row["strategy"].startswith("constant"):
        return load_of(row, WINDOW)
    clients = 1 if row["strategy"] == "synchronous" else CLIENTS
    pilot = play_load(load_of(row, WINDOW, 3 * clients), FLAGS, step_time, host_time)
    return load_of(row, WINDOW, int(1.5 * 3 * clients * WINDOW / pilot.duration) + 2 * clients)


def report(data: Path) -> Report:
    fitted = fit(data)
    rows = [made for row in read(data, FILE) for made in predict(row, fitted.step_time, fitted.host_time)]
    notes = (f"KV pool taken as {KV_TOKENS:,} tokens, from the saturated row that is fitted",)
    return Report("llm-inferno: H100, Llama-3.1-8B", rows, {"": fitted}, GOALS, notes)

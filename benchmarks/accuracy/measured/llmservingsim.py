"""RTX 4090, Llama-3.1-8B: 300 ShareGPT requests far above capacity (github casys-kaist/LLMServingSim, MIT).

Every request is played as it arrived, with its own lengths. Fitted on what was seen in the first 30 s of 184, the
simulator in the loop. vLLM 0.19 in process: no HTTP. Prompts share no prefixes worth counting, though the cache was on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from benchmarks.accuracy.measured.loads import LLAMA_3_1_8B, priors_of
from benchmarks.accuracy.measured.table import Goal, Report, Row
from calibration.aggregate_fit import AggregateFit, fit_figures
from calibration.roofline import GpuFacts
from calibration.trial import Figure, play_load
from simulator.engine.engine_flags import EngineFlags
from simulator.loads.trace import Trace
from simulator.results.run import Level

NAME = "llmservingsim-rtx4090-llama31-8b"
GPU = GpuFacts("RTX 4090", memory_bandwidth=1008e9, dense_operations=165.2e12)
FLAGS = EngineFlags(
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    max_model_len=32_768,
    num_gpu_blocks=2588,
    async_scheduling=True,
    engine_version="0.19.0",
)
SEEN = 30.0  # s
FILLING = 5.0  # s; until then prompts fill the pool, then nothing is admitted for a while
QUANTILES = (10, 25, 50, 75, 90, 99)
LATENCY_GOALS = tuple(
    Goal(f"{name} quantiles", tuple(f"p{rank} {name}" for rank in QUANTILES), 0.05) for name in ("ttft", "tpot ms")
)
GOALS = (Goal("span", ("span",), 0.05), Goal("mean running", ("mean running",), 0.05), *LATENCY_GOALS)

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Recording:
    """The two tables of the source: a row a request, and a row a second."""

    requests: pd.DataFrame
    timeline: pd.DataFrame

    @property
    def trace(self) -> Trace:
        table = self.requests
        return Trace(NAME, table["arrival_s"].to_numpy(), table["in_tok"].to_numpy(), table["out_tok"].to_numpy())


def load(data: Path) -> Recording:
    return Recording(pd.read_csv(data / f"{NAME}.requests.csv"), pd.read_csv(data / f"{NAME}.timeseries.csv"))


def ended_early(level: Level) -> pd.DataFrame:
    """Requests that ended within the seen part."""
    table = level.requests
    return table[table["arrival"] + table["e2el"] <= SEEN]


def tpot_of_ended(level: Level) -> float:
    return float(ended_early(level)["tpot"].mean())


def generated(level: Level, start: float, end: float) -> float:
    """Decoded tokens between two moments, the first of each request left out."""
    gaps = level.gaps
    return float(gaps["count"][(gaps["time"] > start) & (gaps["time"] <= end)].sum())


def early_first_token(level: Level) -> float:
    """Mean moment of the first tokens of those who got theirs while the pool filled."""
    first = level.requests["arrival"] + level.requests["ttft"]
    return float(first.to_numpy()[:_EARLY].mean())


_EARLY = 40  # requests, in the order of arrival


def figures(recording: Recording) -> list[Figure]:
    """What the first 30 s say: time per token, tokens by phase, and how fast prompts got through."""
    table, line, trace = recording.requests, recording.timeline, recording.trace
    ended = table[table["last_s"] <= SEEN]
    made = [Figure(trace, "tpot of ended", float(ended["tpot_ms"].mean()) / 1e3, 0.01, measure=tpot_of_ended)]
    first = float(table["first_s"][:_EARLY].mean())
    made.append(Figure(trace, "early first token", first, 0.03, measure=early_first_token))
    for start, end in ((FILLING, 10.0), (10.0, 17.0), (17.0, SEEN)):
        tokens = float(line["gen_throughput"][(line["t"] > start) & (line["t"] <= end)].sum())
        made.append(
            Figure(trace, f"tokens {start:g}-{end:g} s", tokens, 0.02, measure=partial(generated, start=start, end=end))
        )
    return made


def fit(recording: Recording) -> AggregateFit:
    priors = priors_of(LLAMA_3_1_8B, GPU)
    del priors["per_request"]  # no HTTP
    return fit_figures(figures(recording), FLAGS, priors, tolerance=1e-3)


def compare(recording: Recording, level: Level) -> list[Row]:
    """What came after the first 30 s."""
    table, line = recording.requests, recording.timeline
    late = table["last_s"].to_numpy() > SEEN
    played = level.requests
    measured_ttft = table["first_s"] - table["arrival_s"]
    rows = [Row("all", "span", float(table["last_s"].max()), float((played["arrival"] + played["e2el"]).max()))]
    later = line[line["t"] > SEEN]
    for gauge in ("running", "waiting"):
        made = np.interp(later["t"], level.timeline["time"], level.timeline[gauge])
        rows.append(Row("after 30 s", f"mean {gauge}", float(later[gauge].mean()), float(made.mean())))
    for name, seen, made in (
        ("ttft", measured_ttft.to_numpy()[late], played["ttft"].to_numpy()[late]),
        ("tpot ms", table["tpot_ms"].to_numpy()[late] / 1e3, played["tpot"].to_numpy()[late]),
    ):
        rows += [_quantile(name, rank, seen, made) for rank in QUANTILES]
    return rows


def _quantile(name: str, rank: int, seen: Array, made: Array) -> Row:
    return Row(
        "ended after 30 s", f"p{rank} {name}", float(np.percentile(seen, rank)), float(np.percentile(made, rank))
    )


def running_difference(recording: Recording, level: Level) -> float:
    """Mean absolute difference of the running count over the whole time line, in requests."""
    line = recording.timeline
    made = np.interp(line["t"], level.timeline["time"], level.timeline["running"])
    return float(np.abs(made - line["running"]).mean())


def report(data: Path) -> Report:
    recording = load(data)
    fitted = fit(recording)
    level = play_load(recording.trace, FLAGS, fitted.step_time)
    notes = (
        "fitted on the first 30 s alone",
        f"running count, all 184 s: mean absolute difference {running_difference(recording, level):.2f} requests",
    )
    return Report("llmservingsim: RTX 4090, Llama-3.1-8B", compare(recording, level), {"": fitted}, GOALS, notes)

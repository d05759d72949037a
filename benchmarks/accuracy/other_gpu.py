"""Profiles moved to another GPU, against what others measured there.

    python -m benchmarks.accuracy.other_gpu --data DIR

DIR holds the CSV files of `benchmarks.accuracy.measured`. Each case takes a model's step times from one card, moves
them by `simulator.hardware.other_gpu.move` and predicts loads that were measured on another card, another host, and
often another version of vLLM. Nothing of the target is fitted; but that cards of a kind reach certain shares of their
data sheet is taken from some of the same servers (see ``simulator/hardware/gpus.yaml``): "own" marks such a target.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.accuracy.measured import dennislee, gpullm, llm_inferno, llmservingsim
from benchmarks.accuracy.measured.loads import burst
from benchmarks.accuracy.measured.table import read
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.hardware.gpus import Gpu, find_gpu
from simulator.hardware.other_gpu import move
from simulator.loads.workload import Load
from simulator.profile import Coefficient, Coefficients, MeasuredRange, Profile
from simulator.results.summary import summarize
from simulator.uncertainty import intervals

GOAL = 0.15
SHIPPED = Path(__file__).resolve().parents[2] / "scenarios" / "profiles" / "rtx4090-qwen2.5-7b.yaml"
# Llama-3.1-8B on an RTX 4090, seconds and standard errors: what `llmservingsim.fit` finds, and what the same figures
# give with the term `weights`, about as probable. A card that computes faster than it reads tells the two apart. That
# server had no HTTP, so its time on the host is the prior of all sources (`measured.loads`).
RTX4090_LLAMA = {
    "constant": (17.84e-3, 0.39e-3),
    "per_kv_token": (148.0e-9, 12.5e-9),
    "per_prefill_token": (81.2e-6, 5.3e-6),
    "per_prefill_attention": (8.88e-9, 1.95e-9),
    "per_sequence": (35.7e-6, 10.2e-6),
    "mixed_per_sequence": (10.6e-6, 10.6e-6),
    "per_request": (8e-3, 4.8e-3),
}
RTX4090_LLAMA_OVERLAPPING = {
    "constant": (17.12e-3, 0.75e-3),
    "per_kv_token": (152.5e-9, 15e-9),
    "per_prefill_token": (100.4e-6, 4.1e-6),
    "per_prefill_attention": (4.71e-9, 1.1e-9),
    "per_sequence": (18.2e-6, 1.9e-6),
    "mixed_per_sequence": (10.3e-6, 10e-6),
    "weights": (15.26e-3, 2.1e-3),
    "per_request": (8e-3, 4.8e-3),
}
H100_64GB = find_gpu("H100 SXM").model_copy(
    update={"name": "H100 64GB", "memory_gib": 63.4, "memory_bandwidth": 2.0e12}
)
LLAMA, QWEN = "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B"
INFERNO_ROWS = (("1024", "256"), ("256", "1024"), ("4096", "64"))
INFERNO_WINDOW = 60.0  # s


@dataclass(frozen=True)
class Case:
    """A load on the target card: `measured` by the names of `Summary.flat`, in seconds and tokens/s."""

    pair: str
    profile: Profile
    target: Gpu
    load_name: str
    load: Load
    flags: EngineFlags
    measured: dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """One number, and the 90 % interval of its prediction."""

    case: Case
    metric: str
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high

    def __str__(self) -> str:
        scale = 1.0 if "throughput" in self.metric else 1e3
        numbers = f"{self.measured * scale:>10.2f} {self.predicted * scale:>10.2f} {self.error:>+8.1%}"
        band = f"{self.low * scale:>10.2f} .. {self.high * scale:<10.2f}{'' if self.inside else ' OUTSIDE'}"
        return f"  {self.case.load_name:<28} {self.metric:<18} {numbers} {band}"


def profile_of(name: str, model: str, gpu: str, terms: dict[str, tuple[float, float]], flags: EngineFlags) -> Profile:
    """A profile of fitted terms, seconds and standard errors."""
    host = ("per_request",)
    made = {key: Coefficient(value=value, stderr=error) for key, (value, error) in terms.items()}
    return Profile(
        name=name,
        model=model,
        gpu=gpu,
        engine_version=flags.engine_version,
        engine_flags=flags,
        coefficients=Coefficients(
            step_time={key: term for key, term in made.items() if key not in host},
            host_time={key: term for key, term in made.items() if key in host},
        ),
        measured_range=MeasuredRange(
            concurrency=(1, 512), sequences=(1, 512), context_tokens=(1, 8192), prompt_chunk_tokens=(1, 8192)
        ),
    )


def h100_llama() -> Profile:
    terms = llm_inferno.RECORDED_STEP_TIME | llm_inferno.RECORDED_HOST_TIME
    known = {name: (value, 0.03 * value) for name, value in terms.items()}
    return profile_of("h100-llama-3.1-8b", LLAMA, "H100 SXM", known, llm_inferno.FLAGS)


def rtx4090_llama(terms: dict[str, tuple[float, float]]) -> Profile:
    name = "rtx4090-llama-3.1-8b-overlap" if "weights" in terms else "rtx4090-llama-3.1-8b"
    return profile_of(name, LLAMA, "RTX 4090", terms, llmservingsim.FLAGS)


def cases(data: Path) -> Iterator[Case]:
    qwen = Profile.load(SHIPPED)
    yield from _to_a100(data, qwen)
    yield from _to_h100_64gb(data, qwen, "qwen-2.5-7b-instruct")
    for terms in (RTX4090_LLAMA, RTX4090_LLAMA_OVERLAPPING):
        yield from _to_h100_64gb(data, rtx4090_llama(terms), "llama-3.1-8b-instruct")
        yield from _to_h100(data, rtx4090_llama(terms))
    yield from _to_rtx4090(data, h100_llama())


def _to_a100(data: Path, profile: Profile) -> Iterator[Case]:
    """Where the prefix cache helped, only what it does not change."""
    names = {
        "p50_tpot": ("Median TPOT (ms)", 1e-3),
        "p50_itl": ("Median ITL (ms)", 1e-3),
        "p50_ttft": ("Median TTFT (ms)", 1e-3),
        "output_throughput": ("Output token throughput (tok/s)", 1.0),
    }
    for row in read(data, dennislee.FILE):
        cached = row["num-prompts"] in dennislee.FITTED
        kept = [name for name in names if not cached or name in ("p50_itl", "p50_tpot")]
        measured = {name: float(row[names[name][0]]) * names[name][1] for name in kept}
        load = burst(1024, 1024, int(row["num-prompts"]))
        pair, gpu = f"{profile.name} -> A100 80GB", find_gpu("A100 80GB SXM")
        yield Case(pair, profile, gpu, f"burst of {row['num-prompts']}", load, dennislee.FLAGS, measured)


def _to_h100_64gb(data: Path, profile: Profile, model: str) -> Iterator[Case]:
    for row in read(data, gpullm.FILE):
        if row["model"] != model:
            continue
        prompt = round(int(row["total_input_tokens"]) / int(row["num_prompts"]))
        slots = int(row["max_num_seqs"])
        load = burst(prompt, int(row["out_req"]), min(int(row["num_prompts"]), 6 * slots))
        measured = {"p50_itl": float(row["median_itl_ms"]) / 1e3, "p50_tpot": float(row["median_tpot_ms"]) / 1e3}
        pair = f"{profile.name} -> H100 64GB, decode alone"
        name, flags = f"{slots} sequences, {row['out_req']} out", replace(gpullm.FLAGS, max_num_seqs=slots)
        yield Case(pair, profile, H100_64GB, name, load, flags, measured)


def _to_h100(data: Path, profile: Profile) -> Iterator[Case]:
    for row in read(data, llm_inferno.FILE):
        if (row["in_nom"], row["out_nom"]) not in INFERNO_ROWS or not row["strategy"].startswith("constant"):
            continue
        measured = {"mean_itl": float(row["itl_ms_mean"]) / 1e3, "p50_ttft": float(row["ttft_ms_p50"]) / 1e3}
        load = llm_inferno.load_of(row, INFERNO_WINDOW)
        name = f"{row['in_nom']}/{row['out_nom']} {row['strategy']}"
        yield Case(f"{profile.name} -> H100 (own)", profile, find_gpu("H100"), name, load, llm_inferno.FLAGS,
                   measured)  # fmt: skip


def _to_rtx4090(data: Path, profile: Profile) -> Iterator[Case]:
    recording = llmservingsim.load(data)
    table: pd.DataFrame = recording.requests
    measured = {
        "p50_tpot": float(table["tpot_ms"].median()) / 1e3,
        "p90_tpot": float(table["tpot_ms"].quantile(0.9)) / 1e3,
        "p50_ttft": float((table["first_s"] - table["arrival_s"]).median()),
        "output_throughput": float(table["out_tok"].sum() / table["last_s"].max()),
    }
    pair = f"{profile.name} -> RTX 4090 (own)"
    yield Case(pair, profile, find_gpu("4090"), "ShareGPT 10/s", recording.trace, llmservingsim.FLAGS, measured)


def outcomes(case: Case) -> list[Outcome]:
    """The profile moved, under the flags and with the KV pool of the target server."""
    moved = move(case.profile, case.target, flags=case.flags, gpu_memory_utilization=0.9)
    level = simulate_level(case.load, case.flags, moved.step_time, moved.host_time)
    summary, bands = summarize(level).flat(), intervals(moved, case.load, case.flags, level)
    return [
        Outcome(case, name, value, float(summary[name] or np.nan), *bands[name])
        for name, value in case.measured.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the CSV files")
    found: dict[str, list[Outcome]] = {}
    for case in cases(parser.parse_args().data):
        if case.pair not in found:
            print(f"\n{case.pair}", flush=True)
        for outcome in outcomes(case):
            found.setdefault(case.pair, []).append(outcome)
            print(outcome, flush=True)
    print()
    found["all"] = [row for rows in found.values() for row in rows]
    for pair, rows in found.items():
        errors = [abs(row.error) for row in rows]
        inside = sum(row.inside for row in rows)
        met = "met" if np.median(errors) <= GOAL else "MISSED"
        print(
            f"{pair}: {len(rows)} numbers, absolute error median {np.median(errors):.1%}, worst {max(errors):.1%}; "
            f"{inside} inside the band; goal {GOAL:.0%} {met}"
        )


if __name__ == "__main__":
    main()

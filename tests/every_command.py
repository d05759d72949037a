"""Runs every command that prints or writes something, each into files of one folder.

python tests/every_command.py OUT PROFILE MEASURED WHICH, where WHICH is "few" or "all".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from capsim.cli import app

PROFILE = ("--profile", "profile.yaml")
LENGTHS = ("--input-len", "300", "--output-len", "30", "--range-ratio", "0.5")
OPEN = ("--request-rate", "3", *LENGTHS)
CLOSED = ("--concurrency", "1,8", *LENGTHS, "--num-prompts", "24")
FLAGS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "2048", "--num-gpu-blocks-override", "1001")
OPTIMIZE = ("optimize", *PROFILE, "--slo", "p95_ttft:600", *OPEN, "--vary", "--max-num-seqs=4,16", "--replicas", "1,2",
            "--num-prompts", "60")  # fmt: skip

FEW: dict[str, Sequence[str]] = {
    "predict-json": ("predict", *PROFILE, *OPEN, "--num-prompts", "30", "--json", "--save", "run"),
    "explain": ("explain", "run", "--trace", "steps.json", "--json"),
    "calibrate": ("calibrate", "--from", "measured", "-o", "fitted.yaml", *FLAGS),
}
ALL: dict[str, Sequence[str]] = {
    **FEW,
    "validate": ("validate", "measured", *PROFILE, "--json"),
    "report": ("report", "measured", *PROFILE, "-o", "report.html", "--format", "html,svg,png,csv,md"),
    "optimize": (*OPTIMIZE, "--jobs", "1", "--results", "results.jsonl", "--json"),
    "optimize-csv": (*OPTIMIZE, "--jobs", "2", "--csv"),
    "predict-table": ("predict", *PROFILE, *CLOSED),
    "predict-csv": ("predict", *PROFILE, *CLOSED, "--csv", "--save", "closed"),
    "sessions": ("predict", *PROFILE, "--sessions", "turns=2-4,user=50-100,output=10-20,system=200", "--concurrency",
                 "4", "--num-prompts", "30", "--json", "--save", "sessions", "--no-intervals"),
    "trace": ("predict", *PROFILE, "--trace", "run", "--json", "--save", "replayed", "--no-intervals"),
    "fleet": ("predict", *PROFILE, *OPEN, "--num-prompts", "30", "--replicas", "3", "--router", "random", "--json",
              "--no-intervals"),
    "explain-svg": ("explain", "run", "--figure", "gauges.svg"),
    "explain-png": ("explain", "run", "--figure", "gauges.png"),
    "what-if-json": ("what-if", *PROFILE, *CLOSED, "--alt", "--max-num-seqs 4", "--figure", "bars.svg", "--json"),
    "what-if-csv": ("what-if", *PROFILE, *CLOSED, "--alt", "--max-num-seqs 4", "--figure", "bars.png", "--csv"),
    "what-if-table": ("what-if", *PROFILE, *CLOSED, "--alt", "--max-num-seqs 4", "--figure", "bars.pdf"),
    "capacity": ("capacity", *PROFILE, "--slo", "p95_ttft:300", "--by", "rate", *LENGTHS, "--json"),
    "memory": ("memory", "--model", "Qwen2.5-7B-Instruct", "--gpu", "4090", "--json"),
    "simulate": ("simulate", "bursts", "--csv"),
}  # fmt: skip


def run_commands(out: Path, profile: Path, measured: Path, commands: dict[str, Sequence[str]]) -> None:
    out.mkdir(parents=True)
    (out / "profile.yaml").symlink_to(profile.resolve())
    (out / "measured").symlink_to(measured.resolve())
    os.chdir(out)
    for name, arguments in commands.items():
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0, (name, result.output, result.exception)
        Path(f"{name}.printed").write_bytes(result.stdout_bytes)


if __name__ == "__main__":
    to, profile_file, measured_run, which = sys.argv[1:]
    run_commands(Path(to), Path(profile_file), Path(measured_run), ALL if which == "all" else FEW)

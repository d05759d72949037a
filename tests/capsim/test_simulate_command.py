"""``capsim simulate``: a curve, servers side by side, or a capacity, as the scenario asks."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from capsim.cli import app

SCENARIO = """\
name: demo-question
description: Is it enough?
profile: demo.yaml
alternatives:
- --max-num-seqs 4
- name=large --num-gpu-blocks-override 4000
load:
  concurrency: [2, 8]
  input_len: 256
  output_len: 32
  num_prompts: 64
slo:
  p95_ttft: 200
"""
LEVELS = "concurrency: [2, 8]"


@pytest.fixture
def scenario(profile_file: Path) -> Path:
    path = profile_file.with_name("scenario.yaml")
    path.write_text(SCENARIO)
    return path


def changed(path: Path, old: str, new: str) -> Path:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return path


def simulate(path: Path, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", str(path), *map(str, arguments)])


def told(path: Path, *arguments: object) -> str:
    result = simulate(path, *arguments)
    assert result.exit_code == 0, result.output
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    return " ".join(result.stdout.split())


def test_alternatives_are_set_beside_the_server_and_the_targets(scenario: Path) -> None:
    output = told(scenario)
    for part in (
        "demo-question: Is it enough?",
        "baseline: as measured",
        "A: --max-num-seqs 4",
        "SLO p95_ttft <= 200 ms",
        "baseline: met up to C=8",
        "A: met up to C=2; C=8 misses p95_ttft (",
        "p95 TTFT, ms",
        "Why A:",
    ):
        assert part in output, part


def test_programs_get_what_misses_which_target(scenario: Path) -> None:
    content = json.loads(simulate(scenario, "--json", "--no-intervals").stdout)
    assert content["targets_ms"] == {"p95_ttft": 200}
    few, many = content["levels"]
    assert [outcome["missed_targets"] for outcome in many["alternatives"]] == [["p95_ttft"], []]
    assert few["baseline"]["missed_targets"] == many["baseline"]["missed_targets"] == []
    rows = pd.read_csv(StringIO(simulate(scenario, "--csv", "--no-intervals").stdout))
    assert set(rows["alternative"]) == {"--max-num-seqs 4", "large"}


@pytest.mark.slow
def test_the_capacity_of_several_servers_is_compared(scenario: Path) -> None:
    changed(scenario, LEVELS, "capacity: clients")
    output = told(scenario)
    for part in (
        "Capacity of demo-7b, the most clients that meet p95_ttft <= 200 ms, 256/32 tokens",
        "large (a GPU)",
        "server capacity baseline tok/s req/s tokens peak run at",
        "A: C=4 meets p95_ttft <= 200 ms; C=5 misses p95_ttft. Why: at C=",
        "Note on A: the KV pool stays as measured",
    ):
        assert part in output, part
    servers = json.loads(simulate(scenario, "--json").stdout)["servers"]
    assert [server["name"] for server in servers] == ["as measured", "--max-num-seqs 4", "large"]
    assert servers[1]["slos"][0]["level"] == 4
    assert servers[1]["times_baseline"] == 4 / servers[0]["slos"][0]["level"]
    rows = pd.read_csv(StringIO(simulate(scenario, "--csv").stdout))
    assert list(rows["server"].unique()) == ["as measured", "--max-num-seqs 4", "large"]


@pytest.mark.slow
def test_the_capacity_of_one_server_is_answered_as_by_capacity(scenario: Path, profile_file: Path) -> None:
    changed(scenario, LEVELS, "capacity: rate")
    changed(scenario, "alternatives:\n- --max-num-seqs 4\n- name=large --num-gpu-blocks-override 4000\n", "")
    answered = json.loads(simulate(scenario, "--max-num-seqs", "4", "--json").stdout)
    asked = ["capacity", "--profile", str(profile_file), "--slo", "p95_ttft:200", "--by", "rate", "--max-num-seqs", "4"]
    asked += ["--input-len", "256", "--output-len", "32", "--num-prompts", "64", "--json"]
    direct = json.loads(CliRunner().invoke(app, asked).stdout)
    assert answered == direct


def test_a_fleet_on_another_gpu_is_a_curve_with_what_it_assumes(scenario: Path, profile_file: Path) -> None:
    changed(profile_file, "gpu: a GPU", "gpu: A100-SXM4-80GB")
    changed(profile_file, "model: demo-7b", "model: Qwen/Qwen2.5-7B")
    changed(profile_file, "kv_bytes_per_token: 65536", "kv_bytes_per_token: 57344")
    changed(
        scenario,
        "alternatives:\n- --max-num-seqs 4\n- name=large --num-gpu-blocks-override 4000\n",
        "gpu: L40S\nreplicas: 2\n",
    )
    result = simulate(scenario, "--no-intervals")
    assert result.exit_code == 0, result.output
    assert "Fleet of 2 replicas" in result.stdout
    assert "Note: assumed: the step time on L40S" in " ".join(result.stderr.split())


@pytest.mark.parametrize("load", [LEVELS, "capacity: clients"])
def test_what_is_no_run_is_not_saved(scenario: Path, tmp_path: Path, load: str) -> None:
    result = simulate(changed(scenario, LEVELS, load), "--save", tmp_path / "run")
    assert result.exit_code == 1
    assert result.stderr == "error: --save keeps one run, and this scenario compares or searches; keep its --json\n"
    assert not (tmp_path / "run").exists()


def test_an_alternative_that_is_not_modelled_is_refused_in_one_line(scenario: Path) -> None:
    result = simulate(changed(scenario, "--max-num-seqs 4", "--enable-lora"))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {scenario}: alternatives[0]: --enable-lora would change the result")
    assert result.stderr.count("\n") == 1


def test_without_a_name_the_shipped_ones_are_listed() -> None:
    result = CliRunner().invoke(app, ["simulate"])
    assert result.exit_code == 0, result.output
    listed = json.loads(CliRunner().invoke(app, ["simulate", "--json"]).stdout)
    assert {"rtx4090-qwen2.5-7b", "which-gpu"} <= {row["name"] for row in listed}
    assert all(row["name"] in result.stdout and row["description"] for row in listed)

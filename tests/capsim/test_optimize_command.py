"""``capsim optimize`` and fleets in ``capsim predict``: sentences for people, rows for programs, a line for faults."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from capsim.cli import app

LOAD = ("--input-len", 200, "--output-len", 20, "--concurrency", 16, "--num-prompts", 100)
SPACE = ("--vary", "--max-num-seqs=4,16", "--replicas", "1..3")


def run(command: str, profile: Path, *arguments: object) -> Result:
    return CliRunner().invoke(app, [command, "--profile", str(profile), *map(str, arguments)])


def optimize(profile: Path, *arguments: object) -> Result:
    return run("optimize", profile, "--jobs", 1, *LOAD, *arguments)


def test_people_get_the_cheapest_and_the_front(profile_file: Path) -> None:
    result = optimize(profile_file, *SPACE, "--slo", "p95_ttft:600", "--slo", "error_rate:0")
    assert result.exit_code == 0, result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80
    text = " ".join(result.output.split())
    for part in ("Cheapest: ", "with 90 % confidence", "6 configurations: ", "Pareto front of cost and p95_ttft"):
        assert part in text


def test_programs_get_every_configuration(profile_file: Path) -> None:
    arguments = (*SPACE, "--slo", "p95_ttft:600")
    answer = json.loads(optimize(profile_file, *arguments, "--json").output)
    table = pd.read_csv(StringIO(optimize(profile_file, *arguments, "--csv").output))
    assert len(answer["configurations"]) == len(table) == 6
    best = answer["best"]
    assert best["verdict"] == "sure"
    assert best["cost_gpus"] == table.loc[table["verdict"].isin(["meets", "sure"]), "gpus"].min()
    assert best["intervals_90"]["p95_ttft"][1] <= 600
    assert {row["configuration"] for row in answer["front"]} == set(table.loc[table["on_front"], "configuration"])
    assert set(table["max_num_seqs"]) == {4, 16}


def test_a_second_search_simulates_nothing_and_answers_the_same(profile_file: Path, tmp_path: Path) -> None:
    arguments = (*SPACE, "--slo", "p95_ttft:600", "--results", tmp_path / "results.jsonl", "--json")
    first = optimize(profile_file, *arguments).output
    kept = (tmp_path / "results.jsonl").read_bytes()
    assert kept
    assert optimize(profile_file, *arguments).output == first
    assert (tmp_path / "results.jsonl").read_bytes() == kept


def test_no_configuration_may_be_good_enough(profile_file: Path) -> None:
    text = " ".join(optimize(profile_file, *SPACE, "--slo", "p95_tpot:5").output.split())
    assert "None of 6 configurations meets p95_tpot <= 5 ms. Closest: " in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--vary", "--kv-transfer-config={}"), "prefill/decode disaggregation is not modelled"),
        (("--router", "disaggregated", "--replicas", "2"), "prefill/decode disaggregation is not modelled"),
        (("--vary", "--max-num-sequences=4"), "max-num-seqs"),
        (("--replicas", "0"), "whole numbers such as 1,2,4"),
        (("--price", "L4"), "is not a price such as L4=0.5/h"),
        (("--price", "L4=1"), "a GPU has no price"),
        (("--scheduler-address", "tcp://localhost:1"), "goes with the backend dask or ray"),
        (("--latency", "p95_tft"), "p95_ttft"),
    ],
)
def test_a_fault_is_told_in_one_line(profile_file: Path, arguments: tuple[str, ...], problem: str) -> None:
    result = optimize(profile_file, *arguments, "--slo", "p95_ttft:600")
    assert result.exit_code != 0
    assert problem in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_predict_plays_a_fleet(profile_file: Path) -> None:
    arguments = ("--concurrency", 16, "--input-len", 200, "--output-len", 20, "--num-prompts", 64, "--no-intervals")
    one, two = (
        json.loads(run("predict", profile_file, *arguments, "--replicas", count, "--json").output) for count in (1, 2)
    )
    assert two["server"]["kv_tokens"] == 2 * one["server"]["kv_tokens"]
    assert two["server"]["fleet"] == "2 replicas, least-requests"
    assert two["levels"][0]["replica_tokens"] == [32 * 220, 32 * 220]
    assert two["levels"][0]["p50_ttft"] < one["levels"][0]["p50_ttft"]
    assert one["levels"][0].get("replica_tokens") is None
    text = " ".join(run("predict", profile_file, *arguments, "--data-parallel-size", 2).output.split())
    assert "Fleet of 1 replica, --data-parallel-size 2; tokens of the busiest engine above the mean: C=16 0%" in text

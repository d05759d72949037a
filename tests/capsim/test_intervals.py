"""Predictions carry 90 % intervals unless told otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from typer.testing import CliRunner

from capsim.cli import app

LOAD = ("--concurrency", "2,16", "--input-len", "64", "--output-len", "8", "--num-prompts", "32")


def predict(profile: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["predict", "--profile", str(profile), *LOAD, *options])
    assert result.exit_code == 0, result.output
    return result.output


def without_errors(profile_file: Path) -> Path:
    """The same profile, as if nothing were known of its errors."""
    content = yaml.safe_load(profile_file.read_text())
    del content["hold_out"]
    del content["coefficients"]["step_time"]["constant"]["stderr"]
    path = profile_file.with_name("unknown.yaml")
    path.write_text(yaml.safe_dump(content))
    return path


def test_intervals_are_on_and_can_be_turned_off(profile_file: Path) -> None:
    assert "90 % intervals" in predict(profile_file)
    assert "90 % intervals" not in predict(profile_file, "--no-intervals")


def test_every_percentile_and_throughput_has_one_in_json(profile_file: Path) -> None:
    for level in json.loads(predict(profile_file, "--json"))["levels"]:
        names = ["output_throughput", "request_throughput"]
        names += [f"{part}_{latency}" for latency in ("ttft", "tpot", "itl", "e2el") for part in ("p50", "p90", "p99")]
        for name in names:
            low, high = level["intervals_90"][name]
            assert low < level[name] < high, name
    assert "intervals_90" not in json.loads(predict(profile_file, "--json", "--no-intervals"))["levels"][0]


def test_a_level_outside_the_measured_range_says_so_and_has_wider_intervals(profile_file: Path) -> None:
    inside, outside = json.loads(predict(profile_file, "--json"))["levels"]
    assert inside["notes"] == []
    assert outside["notes"][0] == "concurrency 16, measured 1 to 8"
    assert "outside" in outside["notes"][1]
    low, high = inside["intervals_90"]["p50_itl"]
    wider_low, wider_high = outside["intervals_90"]["p50_itl"]
    assert wider_high / wider_low - 1 > 1.5 * (high / low - 1)


def test_a_profile_without_errors_gives_no_intervals(profile_file: Path) -> None:
    assert "90 % intervals" not in predict(without_errors(profile_file))

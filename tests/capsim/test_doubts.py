"""No command states a percentile that it cannot know without saying so: in tables, JSON, CSV and the report."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from capsim.capacity_answer import CapacityAnswer
from capsim.cli import app
from simulator.engine.fleet import Fleet
from simulator.engine.saturation import held_rate
from simulator.loads.workload import Length, OpenLoop, Shape, Workload
from simulator.planning.capacity import Capacity, CapacitySearch
from simulator.profile import Profile

LOAD = ("--input-len", "128", "--output-len", "64")
FAST, SLOW = "2", "300"  # requests a second: the small server holds neither none nor three hundred
SLO = ("--slo", "p99_itl:1000000")


def tell(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def overload(profile_file: Path) -> tuple[object, ...]:
    return (
        "--profile",
        profile_file,
        "--request-rate",
        f"{FAST},{SLOW}",
        "--num-prompts",
        320,
        *LOAD,
        "--no-intervals",
    )


def test_predict_refuses_to_guess_above_capacity(overload: tuple[object, ...]) -> None:
    text = flat(tell("predict", *overload, *SLO))
    assert f"No steady state: {SLOW}/s (held: about " in text
    assert f"met up to {FAST}/s; {SLOW}/s misses steady state" in text
    assert "Figures are of whole levels, start and end included." in text
    calm, crowd = json.loads(tell("predict", *overload, "--json"))["levels"]
    assert (calm["state"], crowd["state"]) == ("steady", "no steady state")
    assert float(FAST) < crowd["held_rate"] < float(SLOW)
    assert calm["p99_ttft"] is not None
    for name in ("mean_ttft", "p50_ttft", "p99_ttft", "mean_e2el", "p99_e2el"):
        assert crowd[name] is None
    assert crowd["p99_itl"] is not None
    table = pd.read_csv(StringIO(tell("predict", *overload, "--csv")))
    assert table["state"].tolist() == ["steady", "no steady state"]
    assert table["p99_ttft"].notna().tolist() == [True, False]


def test_its_answer_does_not_depend_on_how_long_the_level_is(profile_file: Path) -> None:
    """Which is what a table of percentiles would do."""
    states = []
    for count in (320, 1280):
        run = ("--profile", profile_file, "--request-rate", SLOW, "--num-prompts", count, *LOAD, "--no-intervals")
        (level,) = json.loads(tell("predict", *run, "--json"))["levels"]
        states.append((level["state"], level["held_rate"], level["p50_ttft"]))
    assert states[0] == states[1]


def test_intervals_go_with_the_figures(profile_file: Path) -> None:
    run = ("--profile", profile_file, "--request-rate", SLOW, "--num-prompts", 320, *LOAD)
    (level,) = json.loads(tell("predict", *run, "--json"))["levels"]
    assert "output_throughput" in level["intervals_90"]
    assert not any(name.endswith(("ttft", "e2el")) for name in level["intervals_90"])


def test_what_if_compares_no_latency_that_grows(overload: tuple[object, ...]) -> None:
    arguments = ("what-if", *overload, "--alt", "--max-num-seqs 16", *SLO)
    text = flat(tell(*arguments))
    assert f"no steady state at {SLOW}/s: the baseline holds about " in text
    assert "met up to 2/s; 300/s misses steady state" in text
    calm, crowd = json.loads(tell(*arguments, "--json"))["levels"]
    assert calm["baseline"]["state"] == "steady"
    assert crowd["baseline"]["missed_targets"] == ["steady state"]
    assert crowd["baseline"]["p99_ttft"] is crowd["alternatives"][0]["changes"]["p99_ttft"]["relative"] is None
    assert crowd["alternatives"][0]["held_rate"] < crowd["baseline"]["held_rate"]
    rows = pd.read_csv(StringIO(tell(*arguments, "--csv")))
    assert set(rows[rows["level"] == f"{SLOW}/s"]["state"]) == {"no steady state"}


def test_capacity_says_what_is_held_beyond(profile: Profile) -> None:
    load = Workload(OpenLoop(1.0), (Shape(Length.fixed(128), Length.fixed(64)),), 1)
    search = CapacitySearch(load, profile.engine_flags, profile.step_time, profile.host_time, num_prompts=320)
    targets = {"p50_itl": 1e6}
    trial = search.trial(100.0, targets)
    found = Capacity(targets, None, trial, None, None, None, [trial], search.ceilings)
    answer = CapacityAnswer(profile, profile.engine_flags, search, [found], [])
    held = held_rate(load, profile.engine_flags, profile.step_time, profile.host_time, Fleet())
    assert "even 100/s has no steady state: its backlog grows by " in answer.verdict()
    assert f", of which about {held:.3g}/s are held." in answer.verdict()
    (row,) = answer.rows()
    assert "p50_ttft" not in row


def test_optimize_does_not_call_the_least_overloaded_the_closest(profile_file: Path) -> None:
    arguments = ("optimize", "--profile", profile_file, "--slo", "p95_ttft:600", "--request-rate", 2000, *LOAD)
    space = ("--vary", "--max-num-seqs=4,16", "--jobs", 1)
    text = flat(tell(*arguments, *space))
    assert "None has a steady state; " in text
    assert "Closest" not in text
    rows = json.loads(tell(*arguments, *space, "--json"))["configurations"]
    assert all("steady state" in row["reason"] for row in rows)
    assert all(row["p95_ttft"] is None and row["output_throughput"] > 0 for row in rows)


def test_explain_says_it_of_a_saved_prediction(overload: tuple[object, ...], tmp_path: Path) -> None:
    tell("predict", *overload, "--save", tmp_path / "run")
    assert f"No steady state: {SLOW}/s (held: about " in flat(tell("explain", tmp_path / "run"))
    states = [level["state"] for level in json.loads(tell("explain", tmp_path / "run", "--json"))["levels"]]
    assert states == ["steady", "no steady state"]


def test_percentiles_of_few_requests_are_marked_everywhere(profile_file: Path) -> None:
    load = ("--profile", profile_file, "--concurrency", 4, "--num-prompts", 40, *LOAD, "--no-intervals")
    text = tell("predict", *load)
    row = next(line for line in text.partition("Latency")[2].splitlines() if line.startswith("C=4"))
    cells = row.split()[1:]
    assert [cell.endswith("?") for cell in cells] == [False, False, True, False, True, False, False, False, False, True]
    assert "? is a percentile that needs more requests (p99 299) than: C=4 40" in flat(text)
    assert max(map(len, text.splitlines())) <= 80
    (level,) = json.loads(tell("predict", *load, "--json"))["levels"]
    assert level["too_few"] == [f"p{rank}_{name}" for name in ("ttft", "tpot", "e2el") for rank in (95, 99)]
    assert pd.read_csv(StringIO(tell("predict", *load, "--csv")))["too_few"][0] == " ".join(level["too_few"])
    (compared,) = json.loads(tell("what-if", *load, "--alt", "--max-num-seqs 2", "--json"))["levels"]
    assert compared["baseline"]["too_few"] == level["too_few"]


def test_capacity_says_that_so_few_requests_have_no_such_percentile(profile_file: Path) -> None:
    arguments = ("--profile", profile_file, *LOAD, "--slo", "p99_ttft:500", "--num-prompts", 30, "--whole-runs")
    assert "30 requests of a simulation count, too few for its percentiles: p99 needs 299" in flat(
        tell("capacity", *arguments)
    )
    assert "p99 needs 299" in json.loads(tell("capacity", *arguments, "--json"))["too_few"]


@pytest.mark.slow
def test_the_report_says_both(profile_file: Path, tmp_path: Path) -> None:
    load = ("--profile", profile_file, "--request-rate", f"{FAST},{SLOW}", "--num-prompts", 200, *LOAD)
    tell("predict", *load, "--no-intervals", "--save", tmp_path / "run")
    tell("report", tmp_path / "run", "-o", tmp_path / "report.md")
    text = flat((tmp_path / "report.md").read_text())
    assert f"No steady state: {SLOW}/s (held: about " in text
    assert f"{SLOW}/s: steady state" in text  # what the next level misses
    assert "needs more requests (p99 299)" in text
    assert "Figures are of whole levels, start and end included" in text

"""``capsim explain``: tables and sentences for people, numbers for programs, a trace, a figure, one line on errors."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from capsim.cli import app
from simulator.loads.levels import plan_levels
from simulator.loads.workload import Length, Shape
from simulator.prediction import predict
from simulator.profile import Profile
from simulator.results.run import Run
from simulator.results.run_files import load_run, save_run

SHAPE = Shape(Length.fixed(512), Length.fixed(64))


def explain(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def answer(*arguments: object) -> Any:
    result = explain(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def predicted(profile: Profile, tmp_path: Path) -> Path:
    save_run(predict(profile, plan_levels([SHAPE], concurrency=[1, 8], num_prompts=40)), tmp_path / "predicted")
    return tmp_path / "predicted"


@pytest.fixture
def measured(predicted: Path, tmp_path: Path) -> Path:
    """A run as a server would give it, that keeps no coefficients."""
    run = load_run(predicted)
    server = {name: value for name, value in run.server.items() if name not in ("step_time", "host_time", "profile")}
    save_run(Run("measured", run.levels, server), tmp_path / "measured")
    return tmp_path / "measured"


def test_the_4090_s_tail_is_prompt_chunks_and_nothing_else() -> None:
    """What the published report argues by hand from its log, and where it says that the tail splits off."""
    levels = {level["level"]: level for level in answer("rtx4090-qwen2.5-7b")["levels"]}
    for level in levels.values():
        assert level["itl"]["preemptions"] == 0
        assert level["itl"]["tail"] in ({}, {"prompts": 1.0})
    assert levels["C=4"]["itl"]["splits_at"] > 99 > levels["C=8"]["itl"]["splits_at"]
    assert levels["C=8"]["itl"]["percentiles"]["99"] == pytest.approx(99.6e-3, rel=0.05)
    assert levels["C=16"]["itl"]["at_or_above"]["99"] == {"prompts": 1.0}
    last = levels["C=64"]
    assert last["itl"]["splits_at"] < 90
    assert last["itl"]["at_or_above"]["90"] == {"prompts": 1.0}
    assert 0.1 < last["steps"]["prompt_seconds"] < 0.2  # each of them waits 100 to 200 ms for that step
    assert last["ttft"]["slots"] == last["ttft"]["kv_pool"] == 0  # the nominal 128 slots are not the ceiling


def test_people_get_tables_and_sentences(predicted: Path) -> None:
    result = explain(predicted)
    assert result.exit_code == 0, result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80
    text = " ".join(result.output.split())
    parts = (
        "Time to first token: mean",
        "From first to last token",
        "Gaps between tokens, ms",
        "At C=8:",
        "own prefill",
        "ITL splits at p",
        "of 32 slots",
    )
    for part in parts:
        assert part in text


def test_a_predicted_run_needs_no_profile_and_explains_its_own_numbers(predicted: Path) -> None:
    found = answer(predicted)["levels"]
    levels = load_run(predicted).levels
    for level, content in zip(levels, found, strict=True):
        assert sum(content["ttft"].values()) == pytest.approx(level.requests["ttft"].mean(), abs=1e-9)
        decode = (level.requests["e2el"] - level.requests["ttft"]).mean()
        assert sum(content["decode"].values()) == pytest.approx(decode, abs=1e-9)
        assert content["gauges"]["kv_tokens"]["peak"] == level.timeline["kv_tokens"].max()
        assert content["measured"] == {}


def test_csv_has_a_row_for_every_part(predicted: Path) -> None:
    table = pd.read_csv(StringIO(explain(predicted, "--csv").stdout))
    assert table.groupby(["level", "of"])["share"].sum().to_numpy() == pytest.approx([1] * 4)
    assert len(table) == 2 * (9 + 9)


def test_flags_change_what_is_explained(predicted: Path) -> None:
    (level,) = answer(predicted, "--level", "C=8", "--max-num-seqs", 2)["levels"]
    assert level["ttft"]["slots"] > 0.5 * sum(level["ttft"].values())


def test_a_measured_run_is_played_with_a_profile(measured: Path, profile_file: Path) -> None:
    found = answer(measured, "--profile", profile_file)["levels"][1]
    level = load_run(measured).levels[1]
    assert found["measured"]["p50_ttft"] == pytest.approx(level.requests["ttft"].median())
    assert sum(found["ttft"].values()) == pytest.approx(level.requests["ttft"].mean())  # it was such a server
    text = " ".join(explain(measured, "--profile", profile_file).output.split())
    assert "Measured, and as it was played here" in text


def test_a_trace_that_perfetto_reads(predicted: Path, tmp_path: Path) -> None:
    result = explain(predicted, "--trace", tmp_path / "steps.json")
    assert "C=8 is in" in result.stderr
    trace = json.loads((tmp_path / "steps.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C", "b", "e"}
    ends = max(event["ts"] + event.get("dur", 0) for event in events)
    assert ends / 1e6 == pytest.approx(load_run(predicted).levels[1].duration)


def test_a_figure_of_both_gauges(predicted: Path, tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg", "one.png"):
        assert explain(predicted, "--figure", tmp_path / name).exit_code == 0
    svg = (tmp_path / "one.svg").read_text()
    for text in ("running", "waiting", "KV tokens held", "active tokens", "C=8"):
        assert text in svg
    assert svg == (tmp_path / "two.svg").read_text()
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_a_search_is_explained_at_the_level_that_is_named() -> None:
    result = explain("short-and-long", "--level", "C=3", "--json")
    assert result.exit_code == 0, result.output
    assert [level["level"] for level in json.loads(result.stdout)["levels"]] == ["C=3"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nothing",), "no such scenario"),
        (("RUN", "--level", "C=3"), "levels are C=1, C=8"),
        (("RUN", "--figure", "line.pdf"), "a .png or an .svg"),
        (("RUN", "--json", "--csv"), "either --json or --csv"),
        (("MEASURED",), "give --profile"),
        (("rtx4090-qwen2.5-7b", "--profile", "other"), "a scenario names its own"),
        (("FLEET",), "of a fleet"),
        (("short-and-long",), "capsim explain short-and-long --level C=16"),
        (("short-and-long", "--level", "2/s"), "'2/s' is none"),
    ],
)
def test_what_goes_wrong_is_one_line(
    arguments: tuple[str, ...], says: str, predicted: Path, measured: Path, tmp_path: Path
) -> None:
    run = load_run(predicted)
    save_run(Run("simulated", run.levels, {**run.server, "fleet": "2 replicas"}), tmp_path / "fleet")
    places = {"RUN": str(predicted), "MEASURED": str(measured), "FLEET": str(tmp_path / "fleet")}
    result = explain(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 1
    assert says in result.output
    assert len(result.output.strip().splitlines()) == 1

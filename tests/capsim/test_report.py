"""``capsim report``: a page that stands alone, whose sentences, tables and figures say what the runs say."""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from capsim.cli import app
from capsim.figures.style import COLOURS
from capsim.report.content import build_report
from capsim.report.page import as_page
from capsim.report.tables import Cell, Column, DataTable
from capsim.shipped import PROFILES
from simulator.loads.workload import Arrivals, ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.planning.targets import missed_targets
from simulator.prediction import predict
from simulator.profile import Profile
from simulator.results.run import Level, Run
from simulator.results.run_files import save_run
from simulator.results.summary import summarize

SIX = ("throughput-latency", "scaling", "marginal-throughput", "token-gaps", "latency-parts", "kv-pool")
SLO = {"p99_ttft": 150.0}


def load(arrivals: Arrivals, num_prompts: int = 24, prompt: int = 512, output: int = 16, seed: int = 0) -> Workload:
    return Workload(arrivals, (Shape(Length.fixed(prompt), Length.fixed(output)),), num_prompts, seed)


CLOSED = [load(ClosedLoop(clients)) for clients in (1, 2, 4, 8)]


PLAYED: dict[str, Run] = {}  # what all tests share


@pytest.fixture
def predicted(profile: Profile) -> Run:
    run = PLAYED.setdefault(profile.name, PLAYED.get(profile.name) or predict(profile, CLOSED, with_intervals=True))
    levels = [replace(level, notes=list(level.notes)) for level in run.levels]
    return replace(run, levels=levels, server=dict(run.server))


@pytest.fixture
def measured(predicted: Run) -> Run:
    """The same levels as if a server had answered 5 % later, each level twice."""
    levels = []
    for level in predicted.levels:
        slower = level.requests.assign(ttft=level.requests["ttft"] * 1.05, preemptions=-1)
        one = replace(level, requests=slower, steps=None, intervals={}, notes=[])
        levels += [one, replace(one, workload=replace(one.workload, seed=1))]
    server = {"model": "demo-7b", "url": "http://127.0.0.1:8000", "max_num_seqs": 32, "num_gpu_blocks": 1001}
    return Run("measured", levels, server | {"block_size": 16, "kv_tokens": 16016}, "2026-01-01T00:00:00+00:00")


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


class Page(HTMLParser):
    """What a browser would make of a page: its elements, their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def values(self, attribute: str) -> list[str]:
        return [value for _, found in self.elements if (value := found.get(attribute)) is not None]

    def count(self, tag: str) -> int:
        return sum(one == tag for one, _ in self.elements)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


# --- the page


def test_a_measured_run_and_its_prediction_make_one_page_that_needs_no_network(
    tmp_path: Path, measured: Run, predicted: Run, profile_file: Path
) -> None:
    save_run(measured, tmp_path / "measured")
    save_run(predicted, tmp_path / "predicted")
    result = report(tmp_path / "measured", tmp_path / "predicted", "--profile", profile_file, "-o", tmp_path / "r.html")
    assert (result.exit_code, result.output) == (0, f"written: {tmp_path / 'r.html'}\n")
    text = (tmp_path / "r.html").read_text()
    page = Page(text)
    assert len(text) < 1.5e6
    assert page.count("svg") == page.count("figure") == len(SIX) + 1  # and the validation
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.elements}
    assert not page.values("src")
    assert all(link.startswith("#") for link in page.values("href"))
    assert not re.search(r"@import|url\((?!#)", text)
    assert "default-src 'none'" in text
    assert len(set(page.values("id"))) == len(page.values("id"))
    assert {link.removeprefix("#") for link in page.values("href")} <= set(page.values("id"))
    names = {"measured": "measured", "predicted": "predicted", "profile": str(profile_file)}
    assert text == as_page(build_report([measured, predicted], Profile.load(profile_file), names=names))  # same bytes
    for words in ("output tokens/s", "ideal linear", "p99 TTFT, measured", "p99 TTFT, predicted", "KV pool used, %"):
        assert words in page.text  # text of figures is text
    tips = page.values("data-tip")
    assert sum(tip.startswith("C=8, measured") for tip in tips) >= len(SIX)  # one in each figure
    assert any("(90 %: " in tip for tip in tips)
    errors = [tip for tip in tips if tip.startswith("C=8, p50 TTFT")]
    assert [tip.splitlines()[-1] for tip in errors] == ["error: -4.8%"]  # 1 / 1.05


def test_what_comes_from_a_server_stays_text(predicted: Run) -> None:
    evil = "<script>alert(1)</script> & $\\frac{1}{ \"'|x"
    predicted.server |= {"model": evil, evil: evil, "gpu": "</textarea></style>"}
    predicted.levels[0].notes.append(evil)
    page = Page(as_page(build_report([predicted], names={"predicted": evil})))
    assert page.count("script") == 1
    assert page.count("textarea") == 2
    assert page.text.count("<script>alert(1)</script>") >= 4


@pytest.mark.parametrize("name", COLOURS)
def test_colours_stand_out_from_both_grounds(name: str) -> None:
    """WCAG's contrast: 4.5 for text, 3 for graphics."""
    needed = {"ink": 4.5, "muted": 4.5, "grid": 1.0, "ground": 1.0}.get(name, 3.0)
    for colour, ground in zip(COLOURS[name], COLOURS["ground"], strict=True):
        one, two = sorted((luminance(colour), luminance(ground)))
        assert (two + 0.05) / (one + 0.05) >= needed


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# --- the conclusion


def test_the_level_to_run_at_is_the_highest_that_meets_the_slo(predicted: Run, profile: Profile) -> None:
    met = [level for level in predicted.levels if not missed_targets(summarize(level), SLO)]
    assert 0 < len(met) < len(predicted.levels)
    found = build_report([predicted], profile, [SLO])
    assert found.conclusion.headline == f"Run it at {met[-1].workload.concurrency} clients"
    assert dict(found.conclusion.tiles)["output tok/s"].value == summarize(met[-1]).output_throughput
    levels, slos = found.tables
    assert [levels.rows[place][0].value for place in levels.marked] == [met[-1].workload.concurrency]
    assert slos.marked == {0}
    assert slos.rows[0][1].text == met[-1].workload.label


def test_an_slo_that_no_level_meets_is_said_to_be_so(predicted: Run) -> None:
    found = build_report([predicted], slos=[{"p50_itl": 1.0}])
    assert found.conclusion.headline == "No level meets p50_itl ≤ 1 ms"
    assert not found.tables[0].marked


def test_the_ceiling_of_the_published_sweep_is_67_requests() -> None:
    profile = Profile.load(PROFILES / "rtx4090-qwen2.5-7b.yaml")
    run = predict(profile, [load(ClosedLoop(64), 64, 1024, 256)])
    assert build_report([run]).conclusion.ceiling.startswith("67 requests at once")
    more = profile.with_flags(kv_cache_memory_bytes=6569114112)
    run = predict(profile, [load(ClosedLoop(64), 64, 1024, 256)], more)
    assert build_report([run]).conclusion.ceiling.startswith("89 requests at once")


def test_the_change_it_names_brings_what_it_says(profile: Profile) -> None:
    """Steps of 64 tokens split a prompt of 2,048 into 32: a larger budget is what helps."""
    slow = profile.engine_flags.changed(max_num_batched_tokens=64, max_num_seqs=16)
    levels = [load(ClosedLoop(clients), 4, 2048, 4) for clients in (1, 2)]
    targets = {"p99_ttft": 300.0}
    run = predict(profile, levels, slow)
    assert missed_targets(summarize(run.levels[0]), targets)
    advice = build_report([run], profile, [targets]).conclusion.advice
    assert advice is not None
    budget = re.search(r"Try --max-num-batched-tokens (\d+) \(now 64\)", advice.change)
    assert budget is not None
    assert f"--max-num-batched-tokens {budget[1]}" in advice.command
    better = predict(profile, levels[1:], slow.changed(max_num_batched_tokens=int(budget[1]))).levels[0]
    told = re.search(r"p99 TTFT ms ([\d,.]+) → ([\d,.]+)", advice.change)
    assert told is not None
    before, after = (float(number.replace(",", "")) for number in told.groups())
    assert before > after
    looked_at = run.levels[1]  # no level meets the target; the one after the lowest is looked at
    assert before == pytest.approx(summarize(looked_at).ttft.p99 * 1000, rel=0.01)
    assert after == pytest.approx(summarize(better).ttft.p99 * 1000, rel=0.01)


def test_a_fleet_is_not_taken_for_one_server(predicted: Run, profile: Profile) -> None:
    predicted.server["fleet"] = {"replicas": 2}
    conclusion = build_report([predicted], profile).conclusion
    assert conclusion.ceiling.startswith("Not known")
    assert conclusion.advice is not None
    assert "fleet" in conclusion.advice.change


def test_without_a_profile_it_says_how_to_get_one(measured: Run) -> None:
    advice = build_report([measured]).conclusion.advice
    assert advice is not None
    assert "capsim calibrate --endpoint http://127.0.0.1:8000" in advice.command
    assert "At C=8" in advice.limits


# --- tables and figures


def test_the_csv_holds_the_numbers_of_every_level(predicted: Run) -> None:
    table = build_report([predicted]).tables[0]
    rows = list(csv.DictReader(io.StringIO(table.csv())))
    assert len(rows) == len(predicted.levels)
    for row, level in zip(rows, predicted.levels, strict=True):
        summary = summarize(level)
        assert float(row["level"]) == level.workload.concurrency
        assert float(row["output, tok/s"]) == summary.output_throughput
        assert float(row["TTFT p99, ms"]) == pytest.approx(summary.ttft.p99 * 1000)
        low, high = level.intervals["p99_ttft"]
        assert float(row["TTFT p99, ms, low"]) == pytest.approx(low * 1000)
        assert float(row["TTFT p99, ms, high"]) == pytest.approx(high * 1000)


def test_a_spreadsheet_takes_no_text_for_a_formula() -> None:
    table = DataTable(
        "t", "T", [Column("name")], [[Cell("=HYPERLINK(1)")], [Cell("-")], [Cell("8", 8)]], frozenset({2})
    )
    assert table.csv() == "name,recommended\n'=HYPERLINK(1),\n,\n8,yes\n"


@pytest.mark.slow
def test_files_beside_the_page(tmp_path: Path, predicted: Run) -> None:
    save_run(predicted, tmp_path / "run")
    result = report(tmp_path / "run", "-o", tmp_path / "r.html", "--format", "png,svg,csv,md")
    assert result.exit_code == 0, result.output
    made = {path.name for path in tmp_path.iterdir()} - {"run", "demo.yaml"}
    pictures = {f"r-{name}.{kind}" for name in SIX for kind in ("png", "svg")}
    assert made == pictures | {"r-levels.csv", "r-slo.csv", "r.md"}
    assert all((tmp_path / f"r-{name}.png").read_bytes().startswith(b"\x89PNG") for name in SIX)
    assert "<text" in (tmp_path / "r-scaling.svg").read_text()
    markdown = (tmp_path / "r.md").read_text()
    assert all(f"(r-{name}.svg)" in markdown for name in SIX)
    assert "| C=8" in markdown


# --- runs of other kinds


def lost(level: Level) -> Level:
    """The level as if every request had failed."""
    nothing = dict.fromkeys(("ttft", "tpot", "e2el"), float("nan"))
    return replace(level, requests=level.requests.assign(error="timeout", **nothing), gaps=level.gaps.iloc[:0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "levels",
    [
        [load(ClosedLoop(3))],
        [load(ClosedLoop(2), output=1), load(ClosedLoop(4), output=1)],
        [load(OpenLoop(2.0)), load(OpenLoop(4.0)), load(OpenLoop(math.inf)), load(OpenLoop(math.inf), 48)],
    ],
    ids=["one level", "one token", "open and at once"],
)
def test_any_run_has_a_page(profile: Profile, levels: list[Workload]) -> None:
    run = predict(profile, levels)
    page = Page(as_page(build_report([run], profile)))
    assert page.count("figure") >= len(SIX)
    assert not re.search(r"\bnan\b", page.text)


@pytest.mark.parametrize("which", [slice(None), slice(1, 2)], ids=["all", "one level"])
def test_levels_without_an_answer_have_a_page(measured: Run, which: slice) -> None:
    measured.levels[which] = [lost(level) for level in measured.levels[which]]
    page = Page(as_page(build_report([measured], slos=[{"error_rate": 0.0}])))
    assert page.count("table") == 2


def test_repeats_count_together(measured: Run) -> None:
    table = build_report([measured]).tables[0]
    assert len(table.rows) == len(CLOSED)
    one, other = (summarize(level) for level in measured.levels[:2])
    sent, throughput = table.rows[0][1].value, table.rows[0][3].value
    assert sent == one.requests + other.requests
    assert throughput == pytest.approx(one.output_throughput)  # a level that is repeated gives no more tokens a second


# --- what goes wrong


def test_errors_are_one_line(tmp_path: Path, measured: Run) -> None:
    save_run(measured, tmp_path / "one")
    save_run(measured, tmp_path / "two")
    save_run(replace(measured, levels=[]), tmp_path / "empty")
    page = tmp_path / "r.html"
    page.write_text("mine")
    cases = {
        (tmp_path / "nothing", "-o", tmp_path / "x.html"): "no such file",
        (tmp_path / "one", tmp_path / "two", "-o", tmp_path / "x.html"): "both measured",
        (tmp_path / "empty", "-o", tmp_path / "x.html"): "no finished level",
        (tmp_path / "one", "-o", page): "add --overwrite",
        (tmp_path / "one", "-o", tmp_path): "is a folder",
        (tmp_path / "one", "-o", tmp_path / "no" / "r.html"): "there is no folder",
        (tmp_path / "one", "-o", page, "--format", "pdf"): "'pdf' is none of html",
        (tmp_path / "one", "-o", tmp_path / "x.html", "--slo", "p99_tft:1"): "p99_ttft",
    }
    for arguments, message in cases.items():
        result = report(*arguments)
        assert result.exit_code in (1, 2)
        assert len(result.output.splitlines()) == 1
        assert message in result.output
    assert page.read_text() == "mine"
    assert report(tmp_path / "one", "-o", page, "--overwrite").exit_code == 0
    assert page.read_text().startswith("<!DOCTYPE html>")

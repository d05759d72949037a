"""``capsim import`` at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from result_files import vllm_bench, vllm_bench_plain, write
from typer.testing import CliRunner, Result

from calibration.imports import load_stated
from capsim.cli import OneLineErrors
from capsim.commands.import_ import import_
from simulator.results.run_files import load_run


def run(*arguments: object) -> Result:
    app = typer.Typer(cls=OneLineErrors)
    app.command("import")(import_)
    app.callback()(lambda: None)
    return CliRunner().invoke(app, ["import", *(str(argument) for argument in arguments)])


def test_a_result_becomes_a_run_and_a_table(tmp_path: Path) -> None:
    result = run(write(tmp_path, "r.json", vllm_bench()), "-o", tmp_path / "run")
    assert result.exit_code == 0
    assert f"saved in {tmp_path / 'run'}" in result.output.replace("\n", "")
    assert len(load_run(tmp_path / "run").levels) == 1


def test_json_holds_what_the_table_shows(tmp_path: Path) -> None:
    result = run(write(tmp_path, "r.json", vllm_bench()), "-o", tmp_path / "run", "--json")
    (level,) = json.loads(result.output)["levels"]
    assert level["mean_tpot"] == pytest.approx(0.01)
    assert level["requests"] == 3


def test_aggregates_become_figures_and_no_run(tmp_path: Path) -> None:
    result = run(write(tmp_path, "r.json", vllm_bench_plain()), "-o", tmp_path / "out")
    assert result.exit_code == 0
    assert "can validate and not calibrate" in result.output
    assert not (tmp_path / "out" / "run.json").exists()
    assert load_stated(tmp_path / "out" / "figures.json")[0].value("mean_tpot") == pytest.approx(0.01)


@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_figures_are_printed_for_programs(tmp_path: Path, option: str) -> None:
    result = run(write(tmp_path, "r.json", vllm_bench_plain()), "-o", tmp_path / "out", option)
    assert "mean_tpot" in result.output
    assert "saved" not in result.output


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["missing.json"], "missing.json: no such file"),
        (["plain.json", "detailed.json"], "import it apart from the files with requests"),
        (["detailed.json", "--format", "guidellm"], "not a file of GuideLLM"),
    ],
)
def test_what_cannot_be_imported_is_one_line_and_leaves_nothing(tmp_path: Path, arguments: list, what: str) -> None:
    write(tmp_path, "plain.json", vllm_bench_plain())
    write(tmp_path, "detailed.json", vllm_bench())
    given = [tmp_path / name if name.endswith(".json") else name for name in arguments]
    result = run(*given, "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert what in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()

"""A run from a stranger, or a name from a server, reaches no file but its own."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capsim.cli import app
from capsim.report.server import shipped_profile
from capsim.shipped import PROFILES, SCENARIOS, find_profile, find_scenario
from simulator.loads.levels import parse_shapes, plan_levels
from simulator.prediction import predict
from simulator.profile import Profile
from simulator.results.run import Run
from simulator.results.run_files import RunFileError, append_level, load_run, save_run

FILES = ("run.json", "levels", "levels/000", "levels/000/level.json", "levels/000/requests.csv", "levels/000/gaps.csv")


@pytest.fixture
def run(profile: Profile) -> Run:
    loads = plan_levels(parse_shapes("64/16"), concurrency=[1, 2], num_prompts=6)
    return predict(profile, loads, profile.engine_flags)


@pytest.fixture
def folder(run: Run, tmp_path: Path) -> Path:
    save_run(run, tmp_path / "run")
    return tmp_path / "run"


def moved_out(folder: Path, name: str) -> Path:
    """Put a file or folder of a run beside it, and a link in its place; returns where it went."""
    outside = folder.parent / "outside"
    shutil.move(folder / name, outside)
    (folder / name).symlink_to(outside)
    return outside


@pytest.mark.parametrize("name", FILES)
def test_a_run_is_read_from_its_own_files_alone(folder: Path, name: str) -> None:
    moved_out(folder, name)
    with pytest.raises(RunFileError, match="leads out of the run's folder"):
        load_run(folder)


def test_links_inside_a_run_and_to_it_are_followed(folder: Path) -> None:
    (folder / "levels" / "gaps.csv").write_bytes((folder / "levels/000/gaps.csv").read_bytes())
    (folder / "levels/000/gaps.csv").unlink()
    (folder / "levels/000/gaps.csv").symlink_to("../gaps.csv")
    (folder.parent / "link").symlink_to(folder)
    assert len(load_run(folder.parent / "link").levels) == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names on this system")
@pytest.mark.parametrize("name", ["run.json", "levels/000/level.json", "levels/001/requests.csv"])
def test_a_pipe_in_a_run_is_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(RunFileError, match="neither a file nor a folder"):
        load_run(folder)


@pytest.mark.parametrize("name", ["levels", "levels/002"])
def test_nothing_is_added_outside_of_a_run(folder: Path, run: Run, name: str) -> None:
    if name == "levels/002":  # what an interrupted sweep may have left
        (folder / name).mkdir()
        (folder / name / "kept.txt").write_text("kept")
    outside = moved_out(folder, name)
    before = sorted(outside.rglob("*"))
    with pytest.raises(RunFileError, match="leads out of the run's folder"):
        append_level(folder, run.levels[0])
    assert sorted(outside.rglob("*")) == before


def test_a_run_that_is_replaced_takes_nothing_else_along(folder: Path, run: Run) -> None:
    outside = moved_out(folder, "levels")
    save_run(run, folder, overwrite=True)
    assert (outside / "000" / "level.json").exists()
    assert not (folder / "levels").is_symlink()


@pytest.mark.parametrize("name", ["../profiles/rtx4090-qwen2.5-7b", "/etc/hostname", "profiles/x", "..", ".", ""])
def test_a_run_names_a_shipped_profile_and_no_path(run: Run, name: str) -> None:
    run.server["profile"] = name
    assert shipped_profile([run]) is None
    if not Path(name).is_file():
        with pytest.raises(Exception, match=r"no such (profile|scenario)"):
            find_profile(name)


def test_shipped_names_reach_their_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        f"profiles/{next(PROFILES.glob('*.yaml')).stem}",
        f"../{SCENARIOS.name}/{next(SCENARIOS.glob('*.yaml')).stem}",
    ):
        with pytest.raises(Exception, match="no such scenario"):
            find_scenario(name)


def test_names_in_a_run_open_no_file(folder: Path, tmp_path: Path) -> None:
    """A pipe is where the name points to: whoever opened it would hang."""
    trap = tmp_path / "trap"
    os.mkfifo(trap)
    content = json.loads((folder / "run.json").read_text())
    content["server"] |= dict.fromkeys(("model", "gpu", "engine_version", "profile", "url"), str(trap))
    (folder / "run.json").write_text(json.dumps(content))
    result = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "r.html"), "--format", "html,md"])
    assert result.exit_code == 0, result.output + result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"demo.yaml", "run", "trap", "r.html", "r.md"}

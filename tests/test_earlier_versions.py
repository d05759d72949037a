"""Files of earlier versions are read, those of later ones say what to do.

`files-of-earlier-versions` holds what earlier commits of this repository wrote, each in a folder of its name: runs
measured at a test's server and predicted, imports, profiles, scenarios, and a search's results.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

import capsim
from calibration.exports import save_vllm_bench
from calibration.fit import fit_profile
from calibration.imports import ImportFileError, load_stated, save_stated
from capsim.cli import app
from capsim.shipped import PROFILES, SCENARIOS
from simulator.loads.lengths import Length
from simulator.loads.levels import uniform_shape
from simulator.loads.sessions import Sessions
from simulator.loads.trace import Trace
from simulator.loads.workload import ClosedLoop, OpenLoop, Shape, Workload
from simulator.planning.optimize import Optimizer
from simulator.planning.search_log import SearchLog, SearchLogError
from simulator.planning.search_space import configurations
from simulator.prediction import predict
from simulator.profile import Profile, ProfileError
from simulator.results.run_files import RunFileError, append_level, load_run, save_run
from simulator.results.summary import summarize
from simulator.scenario import Scenario, ScenarioError

HERE = Path(__file__).parent / "files-of-earlier-versions"
COMMITS = ("c664450", "9e50b9d", "dbc1d98")
NEWEST = HERE / "dbc1d98"
any_commit = pytest.mark.parametrize("commit", COMMITS)


def runs() -> list[str]:
    return [str(path.parent.relative_to(HERE)) for path in sorted(HERE.glob("*/*/run.json"))]


# --- what earlier versions wrote


def test_the_files_are_of_versions_that_did_not_say_who_they_were() -> None:
    assert len(runs()) == 14
    for name in runs():
        assert "capsim_version" not in (HERE / name / "run.json").read_text()


@pytest.mark.parametrize("name", runs())
def test_a_run_loads_and_means_the_same_when_saved_again(name: str, tmp_path: Path) -> None:
    run = load_run(HERE / name)
    assert run.levels
    for level in run.levels:
        assert len(level.requests) == level.workload.num_prompts
        assert summarize(level).completed == len(level.requests)
        assert summarize(level).ttft.p50 > 0
    save_run(run, tmp_path / "again")
    again = load_run(tmp_path / "again")
    assert (again.source, again.server, again.started_at) == (run.source, run.server, run.started_at)
    for old, new in zip(run.levels, again.levels, strict=True):
        assert (old.workload.describe(), old.duration, old.notes) == (new.workload.describe(), new.duration, new.notes)
        pd.testing.assert_frame_equal(old.requests, new.requests, check_exact=True)
        pd.testing.assert_frame_equal(old.gaps, new.gaps, check_exact=True)


def test_loads_of_every_kind_come_back() -> None:
    (level,) = load_run(HERE / "c664450/predicted-closed").levels
    mixed = (Shape(Length(100, 200), Length(2, 4), 0.5), Shape(Length.fixed(300), Length.fixed(3), 0.5))
    assert level.workload == Workload(ClosedLoop(2), mixed, 6)
    (level,) = load_run(HERE / "9e50b9d/predicted-open").levels
    assert level.workload == Workload(OpenLoop(4.0, math.inf), (Shape(Length.fixed(64), Length.fixed(4)),), 6, 3)
    kinds = {"sessions": Sessions, "trace": Trace, "hashes": Trace}
    for name, kind in kinds.items():
        assert isinstance(load_run(NEWEST / f"predicted-{name}").levels[0].workload, kind)


def test_a_measured_run_is_fitted() -> None:
    run, fitted_then = load_run(HERE / "c664450/measured"), Profile.load(HERE / "c664450/profile.yaml")
    fitted_now = fit_profile(run, fitted_then.engine_flags)
    assert fitted_now.step_time.constant == pytest.approx(fitted_then.step_time.constant, rel=0.1)
    assert fitted_now.provenance.created == run.started_at
    written = yaml.safe_load(fitted_now.to_yaml())
    stamped(written["provenance"] | {"schema_version": written["schema_version"]})


@any_commit
def test_a_profile_and_a_scenario_load_and_predict(commit: str) -> None:
    profile = Profile.load(HERE / commit / "profile.yaml")
    (level,) = predict(profile, [load_run(HERE / commit / "measured").levels[-1].workload]).levels
    assert summarize(level).tpot.p50 == pytest.approx(0.0023, rel=0.15)  # what the test's server takes for a token
    scenario = Scenario.read(HERE / commit / "scenario.yaml")
    assert [load.concurrency for load in scenario.workloads()] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("commit", COMMITS[1:])
def test_imported_figures_load(commit: str) -> None:
    (stated,) = load_stated(HERE / commit / "stated/figures.json")
    assert stated.value("p50_ttft") > 0


# --- results of simulations are results of this simulator


def search(log: SearchLog) -> None:
    """The two searches whose results lie there, of a closed loop and an open one."""
    profile, targets = Profile.load(NEWEST / "shipped-profile.yaml"), {"p95_ttft": 500.0}
    closed = Workload(ClosedLoop(4), (Shape(Length.fixed(64), Length.fixed(4)),), 1)
    for load, slots, requests in (
        (closed, ["4", "8"], 30),
        (Workload(OpenLoop(3.0), (uniform_shape(Length.fixed(300), Length.fixed(40), 0.5),), 1), ["2", "16"], 60),
    ):
        optimizer = Optimizer(profile, load, targets, num_prompts=requests, log=log)
        optimizer.find(configurations({"max_num_seqs": slots}))


def results(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return {entry["key"]: entry["result"] for entry in entries}


def test_a_search_finds_all_results_of_an_earlier_version(tmp_path: Path) -> None:
    shutil.copy(NEWEST / "results.jsonl", tmp_path)
    with SearchLog(tmp_path / "results.jsonl") as log:
        search(log)
    assert (tmp_path / "results.jsonl").read_bytes() == (NEWEST / "results.jsonl").read_bytes()


def test_what_an_earlier_version_simulated_is_what_this_one_would(tmp_path: Path) -> None:
    """If this fails, the simulator gives other results: raise `simulator.planning.optimize.MODEL_VERSION`, so that
    nobody is told old ones, and write this file anew."""
    with SearchLog(tmp_path / "results.jsonl") as log:
        search(log)
    then, now = results(NEWEST / "results.jsonl"), results(tmp_path / "results.jsonl")
    assert now.keys() == then.keys()
    for key, result in then.items():
        for part in ("numbers", "figures"):
            same = pytest.approx(result[part], rel=1e-9, nan_ok=True)
            assert {name: now[key][part][name] for name in result[part]} == same


# --- what this version writes


def stamped(content: dict[str, object]) -> None:
    assert content["schema_version"] == 1
    assert content["capsim_version"] == capsim.__version__


def test_every_other_file_says_its_version_and_who_wrote_it(tmp_path: Path) -> None:
    run = load_run(NEWEST / "measured")
    save_run(run, tmp_path / "run")
    stamped(json.loads((tmp_path / "run/run.json").read_text()))
    stamped(json.loads((tmp_path / "run/levels/000/level.json").read_text()))

    save_stated(load_stated(NEWEST / "stated/figures.json"), tmp_path / "figures.json")
    stamped(json.loads((tmp_path / "figures.json").read_text()))

    with SearchLog(tmp_path / "results.jsonl") as log:
        log.add("key", {"refused": "no room"})
    stamped(json.loads((tmp_path / "results.jsonl").read_text()))

    save_vllm_bench(replace(run, levels=run.levels[:1]), tmp_path / "bench.json")  # vLLM's form, which has no version
    assert json.loads((tmp_path / "bench.json").read_text())["written_by"] == f"capsim {capsim.__version__}, measured"


def test_shipped_profiles_and_scenarios_say_their_version() -> None:
    shipped = [*PROFILES.glob("*.yaml"), *SCENARIOS.glob("*.yaml")]
    assert len(shipped) >= 8
    for path in shipped:
        assert yaml.safe_load(path.read_text())["schema_version"] == 1, path


def test_who_wrote_a_file_decides_nothing(tmp_path: Path) -> None:
    files = Files(tmp_path)
    for path in (files.run / "run.json", files.level, files.figures, files.profile, files.results):
        path.write_text(path.read_text().replace(capsim.__version__, "99.0.0rc1+unknown"))
        assert "99.0.0rc1+unknown" in path.read_text()
    for load in files.readers.values():
        load()


# --- other versions


class Files:
    """One file of each kind as this version writes it, and its reader."""

    def __init__(self, folder: Path) -> None:
        self.run, self.figures = folder / "run", folder / "figures.json"
        self.profile, self.scenario, self.results = (folder / name for name in ("p.yaml", "s.yaml", "r.jsonl"))
        self.level = self.run / "levels/001/level.json"
        run = load_run(NEWEST / "measured")
        save_run(replace(run, levels=run.levels[:2]), self.run)
        save_stated(load_stated(NEWEST / "stated/figures.json"), self.figures)
        profile = Profile.load(NEWEST / "profile.yaml")
        provenance = profile.provenance.model_copy(update={"capsim_version": capsim.__version__})
        profile.model_copy(update={"provenance": provenance}).save(self.profile)
        shutil.copy(SCENARIOS / "bursts.yaml", self.scenario)
        with SearchLog(self.results) as log:
            for key in ("a", "b"):
                log.add(key, {"refused": "no room"})
        self.readers: dict[Path, Callable[[], object]] = {
            self.run / "run.json": lambda: load_run(self.run),
            self.level: lambda: load_run(self.run),
            self.figures: lambda: load_stated(self.figures),
            self.profile: lambda: Profile.load(self.profile),
            self.scenario: lambda: Scenario.read(self.scenario),
            self.results: lambda: SearchLog(self.results),
        }

    def write_version(self, path: Path, version: str) -> None:
        """Into the last line that has one."""
        text = path.read_text()
        for written in ('"schema_version": ', "schema_version: "):
            before, found, after = text.rpartition(f"{written}1")
            if found:
                path.write_text(f"{before}{written}{version}{after}")
                return
        raise AssertionError(path)


ERRORS = (RunFileError, ImportFileError, ProfileError, ScenarioError, SearchLogError)
KINDS = ("run.json", "level.json", "figures.json", "p.yaml", "s.yaml", "r.jsonl")


def complaints(tmp_path: Path, kind: str, versions: Sequence[str]) -> Iterator[str]:
    files = Files(tmp_path)
    path = next(path for path in files.readers if path.name == kind)
    good = path.read_text()
    for version in versions:
        path.write_text(good)
        files.write_version(path, version)
        with pytest.raises(ERRORS) as caught:
            files.readers[path]()
        message = str(caught.value)
        assert path.name in message
        assert "\n" not in message
        yield message


@pytest.mark.parametrize("kind", KINDS)
def test_a_newer_file_says_to_upgrade(tmp_path: Path, kind: str) -> None:
    newer = ("2", "10", "99999999999999999999999")
    for version, message in zip(newer, complaints(tmp_path, kind, newer), strict=True):
        words = f"schema_version: {version} was written by a newer capsim, this one reads up to 1: upgrade capsim"
        assert words in message


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_version_is_told(tmp_path: Path, kind: str) -> None:
    for message in complaints(tmp_path, kind, ("0", "-1", '"1"', "1.5", "true", "null", "[1]")):
        told = ("is not known, the first one was 1", "must be a whole number such as 1", "'schema_version' is missing")
        assert any(words in message for words in told), message


@pytest.mark.parametrize("kind", ["p.yaml", "s.yaml"])
def test_a_newer_file_is_not_blamed_for_its_new_keys(tmp_path: Path, kind: str) -> None:
    files = Files(tmp_path)
    path = tmp_path / kind
    files.write_version(path, "2")
    path.write_text(f"a_new_key: 1\n{path.read_text()}".replace("name:", "title:", 1))
    with pytest.raises(ERRORS, match="upgrade capsim"):
        files.readers[path]()


def test_a_key_that_this_version_does_not_know_is_refused_where_it_may_matter(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.profile.write_text(f"{files.profile.read_text()}more: 1\n")
    with pytest.raises(ProfileError, match="unknown key more"):
        Profile.load(files.profile)
    for path in (files.run / "run.json", files.level, files.figures):  # what else is known of a run changes nothing
        path.write_text(path.read_text().replace("{", '{"more": 1,', 1))
        files.readers[path]()


def test_without_a_version_a_file_is_of_the_first_where_people_may_have_written_it(tmp_path: Path) -> None:
    files = Files(tmp_path)
    for path in (files.profile, files.scenario, files.level, files.results):
        text = path.read_text().replace("schema_version: 1\n", "").replace('"schema_version": 1,', "")
        assert "schema_version" not in text
        path.write_text(text)
        files.readers[path]()
    for path, words in ((files.run / "run.json", "no schema_version"), (files.figures, "schema_version")):
        path.write_text(path.read_text().replace('"schema_version": 1,', ""))
        with pytest.raises(ERRORS, match=words):
            files.readers[path]()


@any_commit
def test_a_run_that_an_earlier_version_began_goes_on_here(commit: str, tmp_path: Path) -> None:
    whole, folder = load_run(HERE / commit / "measured"), tmp_path / "run"
    shutil.copytree(HERE / commit / "measured", folder)
    last = max(path.name for path in (folder / "levels").iterdir())
    shutil.rmtree(folder / "levels" / last)
    append_level(folder, whole.levels[-1])
    assert "capsim_version" in (folder / f"levels/{int(last):03d}/level.json").read_text()
    assert "capsim_version" not in (folder / "run.json").read_text()
    for one, other in zip(load_run(folder).levels, whole.levels, strict=True):
        assert one.workload == other.workload
        pd.testing.assert_frame_equal(one.requests, other.requests, check_exact=True)


def test_a_level_that_a_newer_version_added_is_not_passed_over(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.write_version(files.level, "2")
    with pytest.raises(RunFileError, match=r"levels/001/level\.json: schema_version: 2 was written by a newer capsim"):
        load_run(files.run)


def test_the_command_line_says_it_in_one_line(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.write_version(files.profile, "2")
    result = CliRunner().invoke(app, ["predict", "--profile", str(files.profile)])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "upgrade capsim" in result.stderr

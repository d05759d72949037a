"""The same question gives the same bytes: in another process, folder and time zone, with other workers and threads."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from every_command import FEW, run_commands

from calibration.fit import fit_profile
from calibration.robust_fit import Belief, weighted
from simulator.loads.lengths import Length
from simulator.loads.workload import OpenLoop, Shape, Workload
from simulator.planning import workers as workers_module
from simulator.planning.optimize import Optimizer
from simulator.planning.search_log import SearchLog
from simulator.planning.search_space import configurations
from simulator.planning.workers import Workers
from simulator.profile import Profile
from simulator.results.run_files import append_level, load_run, start_run

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "tests" / "every_command.py")
MEASURED = Path(__file__).parent / "files-of-earlier-versions" / "dbc1d98" / "measured"
ELSEWHERE = {
    "PYTHONHASHSEED": "4242",
    "TZ": "Asia/Kolkata",
    "COLUMNS": "173",
    "LC_ALL": "C",
    "OPENBLAS_NUM_THREADS": "2",
    "OMP_NUM_THREADS": "2",
}
HERE = {"PYTHONHASHSEED": "0", "TZ": "UTC", "COLUMNS": "80", "LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}


def digests(folder: Path) -> dict[str, str]:
    """Of every file that the commands made."""
    made = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in made}


def written_backwards(folder: Path, to: Path) -> Path:
    """A copy of a run whose levels lie on the disk in the opposite order."""
    (to / "levels").mkdir(parents=True)
    for level in sorted((folder / "levels").iterdir(), reverse=True):
        shutil.copytree(level, to / "levels" / level.name)
    shutil.copy(folder / "run.json", to)
    return to


def python(*arguments: str, environment: dict[str, str], cwd: Path) -> str:
    around = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])} | environment
    done = subprocess.run(
        [sys.executable, *arguments], env=around, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def elsewhere(tmp_path: Path, profile_file: Path, which: str) -> dict[str, str]:
    """What the commands make in another process and folder, from a run whose levels lie in another order."""
    there = tmp_path / "quite" / "else where"
    there.parent.mkdir()
    backwards = written_backwards(MEASURED, tmp_path / "backwards")
    arguments = (SCRIPT, str(there), str(profile_file), str(backwards), which)
    python(*arguments, environment=ELSEWHERE, cwd=there.parent)
    return digests(there)


@pytest.mark.slow
def test_the_main_commands_give_the_same_anywhere(
    tmp_path: Path, profile_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # and back, whatever the commands do
    monkeypatch.setenv("COLUMNS", "80")
    run_commands(tmp_path / "here", profile_file, MEASURED, FEW)
    made = digests(tmp_path / "here")
    assert {"predict-json.printed", "fitted.yaml", "run/run.json", "steps.json"} <= made.keys()
    assert elsewhere(tmp_path, profile_file, "few") == made


@pytest.mark.slow
def test_every_command_gives_the_same_anywhere(tmp_path: Path, profile_file: Path) -> None:
    arguments = (SCRIPT, str(tmp_path / "here"), str(profile_file), str(MEASURED), "all")
    python(*arguments, environment=HERE, cwd=tmp_path)
    made = digests(tmp_path / "here")
    assert len(made) > 60
    assert elsewhere(tmp_path, profile_file, "all") == made


# --- who computes


def search(profile: Profile, workers: Workers, path: Path) -> tuple[str, bytes]:
    """What a search finds, and its results in the order of their lines' texts: they are kept as they come in."""
    load = Workload(OpenLoop(3.0), (Shape(Length(100, 400), Length(10, 30)),), 1)
    with SearchLog(path) as log:
        found = Optimizer(profile, load, {"p95_ttft": 600.0}, num_prompts=60, workers=workers, log=log).find(
            configurations({"max_num_seqs": ["4", "16"]}, replicas=(1, 2))
        )
    return repr(found), b"".join(sorted(path.read_bytes().splitlines(keepends=True)))


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [2, 3])
def test_any_number_of_processes_finds_the_same(profile: Profile, tmp_path: Path, jobs: int) -> None:
    alone = search(profile, Workers(jobs=1), tmp_path / "alone.jsonl")
    assert search(profile, Workers(jobs=jobs), tmp_path / "together.jsonl") == alone


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="Dask is not installed")
@pytest.mark.parametrize(("processes", "at_a_time"), [(1, 32), (2, 1), (2, 3)])
def test_a_cluster_finds_the_same_however_tasks_are_handed_out(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, at_a_time: int
) -> None:
    from distributed import LocalCluster

    monkeypatch.setattr(workers_module, "AT_A_TIME", at_a_time)
    alone = search(profile, Workers(jobs=1), tmp_path / "alone.jsonl")
    with LocalCluster(
        n_workers=processes, threads_per_worker=1, processes=False, protocol="tcp://", dashboard_address=None
    ) as cluster:
        workers = Workers("dask", scheduler_address=cluster.scheduler_address)
        assert search(profile, workers, tmp_path / "together.jsonl") == alone


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_ray_finds_the_same(profile: Profile, tmp_path: Path) -> None:
    alone = search(profile, Workers(jobs=1), tmp_path / "alone.jsonl")
    assert search(profile, Workers("ray"), tmp_path / "together.jsonl") == alone


def test_a_search_that_knows_some_results_finds_the_same(profile: Profile, tmp_path: Path) -> None:
    whole = search(profile, Workers(jobs=1), tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_bytes(b"".join(lines[::2]) + lines[1][:40])  # killed as it wrote
    assert search(profile, Workers(jobs=1), tmp_path / "cut.jsonl") == whole
    assert search(profile, Workers(jobs=1), tmp_path / "cut.jsonl") == whole


# --- fits


@pytest.mark.slow
def test_a_run_of_two_sittings_is_fitted_as_one_of_a_single_sitting(profile: Profile, tmp_path: Path) -> None:
    run, flags = load_run(MEASURED), profile.engine_flags.changed(max_num_seqs=8)
    start_run(tmp_path / "run", "measured", run.server, run.started_at)
    for level in run.levels[:3]:
        append_level(tmp_path / "run", level)
    for level in run.levels[len(load_run(tmp_path / "run").levels) :]:
        append_level(tmp_path / "run", level)
    assert fit_profile(load_run(tmp_path / "run"), flags).to_yaml() == fit_profile(run, flags).to_yaml()


def fitted_bytes() -> bytes:
    """So many rows that BLAS, which adds up the products of least squares elsewhere, would share them out."""
    rng = np.random.default_rng(3)
    matrix = rng.random((60_000, 11))
    seconds = matrix @ rng.random(11) + rng.normal(0, 0.01, len(matrix))
    belief = Belief(np.zeros(11), np.full(11, np.inf))
    values, left = weighted(matrix, seconds, rng.random(len(matrix)), belief)
    return values.tobytes() + np.float64(left).tobytes()


@pytest.mark.slow
def test_the_number_of_threads_does_not_matter_to_a_fit() -> None:
    code = "import test_same_bytes; print(test_same_bytes.fitted_bytes().hex())"
    for threads in ("1", "2", "4"):
        printed = python("-c", code, environment={"OPENBLAS_NUM_THREADS": threads}, cwd=ROOT / "tests")
        assert printed.strip() == fitted_bytes().hex()

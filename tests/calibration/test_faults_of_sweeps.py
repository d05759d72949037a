"""A sweep that something ends, at any moment and in any way, keeps every level it had finished, and can be resumed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest
from hostile_server import Exchange, HostileServer, Route, always, honest, metrics, models, response, serve
from played_levels import closed

from calibration import client_processes
from calibration.client_processes import LoadGeneratorError
from calibration.endpoint import EndpointError, discover
from calibration.resume import resumed_run
from calibration.stream import Patience
from calibration.sweep import SweepFileError, SweepProgress, run_sweep
from calibration.sweep_plan import SweepPlan
from simulator.results.run import Run
from simulator.results.run_files import append_level, load_run, start_run

PATIENCE = Patience(connect=20.0, first_token=20.0, next_token=20.0, idle=0.3)
SCRIPT = """
import sys
from calibration.endpoint import discover
from calibration.sweep import run_sweep, SweepFileError
from calibration.sweep_plan import SweepPlan
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload
{before}
shape = Shape(Length.fixed(32), Length.fixed(8))
plan = SweepPlan(tuple(Workload(ClosedLoop(clients), (shape,), 2 * clients) for clients in (1, 2, 3)))
try:
    run_sweep(discover(sys.argv[1]), plan, sys.argv[2], resume="--resume" in sys.argv)
except SweepFileError as problem:
    sys.exit(str(problem))
"""


def plan(*clients: int) -> SweepPlan:
    return SweepPlan(tuple(closed(count, 2 * count, 32, 8) for count in clients))


def swept(
    server: HostileServer, folder: Path, when: Callable[[SweepProgress], None] | None = None, resume: bool = False
) -> Run:
    return run_sweep(discover(server.url), plan(1, 2, 3), folder, when, resume=resume, patience=PATIENCE)


def at_the_start_of(level: int, do: Callable[[], object]) -> Callable[[SweepProgress], None]:
    """Do it once, when the load of `level` begins."""
    done: list[object] = []

    def tell(seen: SweepProgress) -> None:
        if seen.level == level and not done:
            done.append(do() or True)

    return tell


def at_the_end_of(level: int, requests: int, do: Callable[[], object]) -> Callable[[SweepProgress], None]:
    """Do it once, when the load of `level` has been answered."""
    done: list[object] = []

    def tell(seen: SweepProgress) -> None:
        if (seen.level, seen.requests_done) == (level, requests) and not done:
            done.append(do() or True)

    return tell


def kept_clients(folder: Path) -> list[int | None]:
    return [level.workload.concurrency for level in load_run(folder).levels]


# --- the server goes, or comes back as another


def gone(server: HostileServer) -> None:
    """All it says from now on is that it has died."""

    async def hang_up(exchange: Exchange) -> None:
        exchange.hang_up()

    server.routes |= dict.fromkeys(server.routes, hang_up)


@pytest.mark.slow
def test_a_server_that_dies_in_a_level_ends_the_sweep_and_comes_back_to_its_rest(tmp_path: Path) -> None:
    with serve() as server:
        server.token_seconds = 0.02
        routes = dict(server.routes)
        with pytest.raises(EndpointError, match=r"hung up without an answer.*; levels kept: 2; start it as before"):
            swept(server, tmp_path / "run", at_the_start_of(2, lambda: gone_after(server, 4)))
        assert kept_clients(tmp_path / "run") == [1, 2]
        broken = load_run(tmp_path / "run").levels[1]
        assert len(broken.completed) >= 1
        assert re.match(r"\d of 4 requests failed: connection lost", broken.notes[0])
        server.routes.update(routes)
        assert len(swept(server, tmp_path / "run", resume=True).levels) == 3


def gone_after(server: HostileServer, completions: int) -> None:
    """Dead once so many completions have been asked for in all."""

    async def answer(exchange: Exchange) -> None:
        if server.completions > completions:
            gone(server)
            exchange.hang_up()
        await honest(exchange)

    server.routes["/v1/completions"] = answer


OTHERS: dict[str, tuple[dict[str, Route], str]] = {
    "another model": (
        {"/v1/models": always(models({"id": "other"}))},
        "does not serve 'demo'; give --model one of: other",
    ),
    "another pool": (
        {"/metrics": lambda exchange: metrics(exchange, blocks=500)},
        "has changed: the sweep began with a KV pool of 1,001 blocks, the server now has 500",
    ),
    "another version": (
        {"/version": always(response('{"version": "0.33.0"}'))},
        "has changed: the sweep began with engine_version 0.32.0, the server now has 0.33.0",
    ),
}


@pytest.mark.parametrize(
    "name", ["another model", *(pytest.param(name, marks=pytest.mark.slow) for name in list(OTHERS)[1:])]
)
def test_a_server_that_comes_back_as_another_is_not_measured_on(name: str, tmp_path: Path) -> None:
    routes, words = OTHERS[name]
    with serve() as server, pytest.raises(EndpointError) as caught:
        swept(server, tmp_path / "run", at_the_end_of(1, 2, lambda: server.routes.update(routes)))
    assert words in str(caught.value)
    assert "; levels kept: 1" in str(caught.value)
    assert kept_clients(tmp_path / "run") == [1]


@pytest.mark.slow
def test_a_server_started_anew_as_it_was_is_measured_on_and_noted(tmp_path: Path) -> None:
    def anew() -> None:
        server.finished = server.generated = 0

    with serve() as server:
        run = swept(server, tmp_path / "run", at_the_end_of(2, 4, anew))
    # either level 2 had been over, or its counters were read only afterwards
    told = ("the server had been started anew", "the server restarted during the level")
    assert sum(note.startswith(told) for level in run.levels for note in level.notes) == 1
    assert len(run.levels) == 3


@pytest.mark.slow
def test_a_level_in_which_the_server_became_another_is_not_kept(tmp_path: Path) -> None:
    def another() -> None:
        server.finished = server.generated = 0
        server.routes["/version"] = always(response('{"version": "0.33.0"}'))

    with serve() as server:
        server.token_seconds = 0.02
        with pytest.raises(
            EndpointError, match=r"engine_version 0\.32\.0, the server now has 0\.33\.0; levels kept: 1"
        ):
            swept(server, tmp_path / "run", at_the_start_of(2, another))
    assert kept_clients(tmp_path / "run") == [1]


@pytest.mark.slow
def test_every_tenth_request_fails_and_is_counted(tmp_path: Path) -> None:
    failure = always(response('{"error": {"message": "CUDA error"}}', status="500 Oops"))

    async def answer(exchange: Exchange) -> None:
        await (honest if exchange.number % 10 else failure)(exchange)

    with serve(completions=answer) as server:
        run = run_sweep(discover(server.url), SweepPlan((closed(4, 40, 32, 8),)), tmp_path / "run", patience=PATIENCE)
        assert server.completions == 41
    assert (run.levels[0].requests["error"] == "http 500").sum() == 4
    assert len(run.levels[0].completed) == 36
    assert "4 of 40 requests failed: http 500 (4); the first said: CUDA error" in run.levels[0].notes


def test_a_server_that_dies_after_the_last_level_costs_nothing(tmp_path: Path) -> None:
    with serve() as server:
        run = run_sweep(
            discover(server.url),
            plan(1),
            tmp_path / "run",
            at_the_end_of(1, 2, lambda: gone(server)),
            patience=PATIENCE,
        )
    assert len(run.levels[0].completed) == 2
    assert kept_clients(tmp_path / "run") == [1]


# --- the load generator goes


def children() -> list[int]:
    """Our child processes."""
    tasks = Path("/proc/self/task")
    return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]


def signal_children(number: signal.Signals) -> None:
    for pid in children():
        os.kill(pid, number)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, r"the load generator's process died \(-9\): out of memory, perhaps; levels kept: 1"),
        (signal.SIGSTOP, r"a load generator's process is stuck, it has said nothing for 1 s: .*; levels kept: 1"),
    ],
)
def test_a_load_generator_that_dies_or_hangs_ends_the_sweep(
    number: signal.Signals, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_processes, "SILENCE", 1)
    monkeypatch.setattr("calibration.clients.ALIVE_EVERY", 0.2)
    with serve() as server:
        server.token_seconds = 0.05
        with pytest.raises(LoadGeneratorError, match=words):
            swept(server, tmp_path / "run", at_the_start_of(2, lambda: signal_children(number)))
    assert kept_clients(tmp_path / "run") == [1]
    assert children() == [], "none is left behind"


# --- we are ended, or the disk is


def sweep_process(server: HostileServer, folder: Path, *options: str, before: str = "") -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(before=before), server.url, str(folder), *options],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def loads_and_resumes(server: HostileServer, folder: Path) -> int:
    """How many levels had been kept; the rest is measured now, and what was kept stays as it was."""
    files = {path: path.read_bytes() for path in files_in(folder)}
    finished = [path.parent for path in files if path.name == "level.json"]
    kept = len(load_run(folder).levels) if (folder / "run.json").exists() else 0
    assert kept == len(finished)
    assert len(swept(server, folder, resume=True).levels) == 3
    assert all(path.read_bytes() == files[path] for path in files if path.parent in finished)
    assert [len(level.completed) for level in load_run(folder).levels] == [2, 4, 6]
    return kept


def kill_at(moment: int) -> None:
    """Kill this process at a given write, before it for an odd `moment`, after it for an even one."""
    left = moment

    def dying(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **more: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*arguments, **more)
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for holder, name in ((Path, "write_text"), (Path, "mkdir"), (os, "replace"), (pd.DataFrame, "to_csv")):
        setattr(holder, name, dying(getattr(holder, name)))


def killed_at(moment: int, write: Callable[[], object]) -> bool:
    """Write in a copy of this process that is killed at `moment`; whether it came to that."""
    child = os.fork()
    if child == 0:
        kill_at(moment)
        write()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_sweep_killed_before_or_after_any_write_loads_and_resumes(tmp_path: Path) -> None:
    """Of the folder, of run.json and its move into place, and for each level of its folder, tables and level.json."""
    two = plan(1, 2)
    with serve() as server:
        run = run_sweep(discover(server.url), two, tmp_path / "run", patience=PATIENCE)
    whole = {path.relative_to(tmp_path / "run"): path.read_bytes() for path in files_in(tmp_path / "run")}

    def write() -> None:
        kept = resumed_run(folder, run.server, two, False)
        if kept is None:
            start_run(folder, run.source, run.server, run.started_at)
        for level in run.levels[len(kept.levels) if kept else 0 :]:
            append_level(folder, level)

    moments = 0
    for moment in range(1, 1000):
        folder = tmp_path / str(moment)
        if not killed_at(moment, write):
            break
        finished = len(list(folder.glob("levels/*/level.json")))
        assert finished == (len(load_run(folder).levels) if (folder / "run.json").exists() else 0)
        write()
        assert {path.relative_to(folder): path.read_bytes() for path in files_in(folder)} == whole
        moments += 1
    assert moments >= 2 * (1 + 2 + 2 * (1 + 5 + 2))


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_sweep_killed_at_a_random_moment_loads_and_resumes(seed: int, tmp_path: Path) -> None:
    with serve() as server:
        server.token_seconds = 0.03
        process = sweep_process(server, tmp_path / "run")
        with suppress(subprocess.TimeoutExpired):  # a fast machine may be done before
            process.communicate(timeout=random.Random(seed).uniform(0.5, 4.0))
        process.kill()
        process.communicate(timeout=60)
        server.token_seconds = 0.0
        loads_and_resumes(server, tmp_path / "run")


LIMIT = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (5, resource.RLIM_INFINITY))
"""
NO_SPACE = """
import errno, os
import simulator.results.run_files as files
write, left = files._write_table, 7
def full(*arguments):
    global left
    left -= 1
    if left < 0:
        with open("/dev/full", "w") as disk:
            disk.write("x" * 100_000)
    write(*arguments)
files._write_table = full
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "words", "kept"),
    [(LIMIT, "(File too large)", 0), (NO_SPACE, "(No space left on device)", 1)],
    ids=["a limit on files", "no space left"],
)
def test_a_full_disk_is_said_as_such_and_costs_no_earlier_level(
    before: str, words: str, kept: int, tmp_path: Path
) -> None:
    with serve() as server:
        process = sweep_process(server, tmp_path / "run", before=before)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1
        assert errors.count("\n") == 1, errors
        said = f"level {kept + 1} could not be written to {tmp_path / 'run'} {words}; levels kept: {kept}; make room"
        assert errors.startswith(said)
        assert loads_and_resumes(server, tmp_path / "run") == kept


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with serve() as server:
        with pytest.raises(SweepFileError, match=r"run cannot be made: .*file is a file; give another folder"):
            swept(server, tmp_path / "file" / "run")
        assert server.completions == 0


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_folder_that_nobody_may_make_is_said_as_such() -> None:
    with serve() as server, pytest.raises(SweepFileError) as caught:
        swept(server, Path("/proc/capsim"))
    assert re.search(r"/proc/capsim (\(No such file or directory\)|cannot be written)", str(caught.value))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_said_as_such(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with serve() as server, pytest.raises(SweepFileError, match="is read-only; give another folder"):
        swept(server, tmp_path / "run")

"""What goes wrong while a command measures ends it with a line, an exit code, and all that was finished kept."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from capsim.exit_codes import ExitCode
from simulator.results.run_files import load_run

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "calibration"))

from hostile_server import Exchange, HostileServer, Route, always, honest, response, serve  # noqa: E402

LOAD = ("--concurrency", "1,2,3", "--requests-per-client", "4", "--input-len", "32", "--output-len", "8")

pytestmark = pytest.mark.slow


def start(*arguments: object, limit: Callable[[], None] | None = None, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "capsim", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | more
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=limit
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and the last line of its errors, which must be no traceback."""
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors, errors
    return process.returncode, errors.splitlines()[-1]


def sweep(server: HostileServer, folder: Path, limit: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    return start("sweep", "--endpoint", server.url, "-o", folder, "--no-probes", *LOAD, limit=limit)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)


def dying_after(completions: int) -> Route:
    """Hangs up on everything once so many have been answered."""

    async def answer(exchange: Exchange) -> None:
        if exchange.number > completions:
            exchange.server.routes.clear()
            exchange.hang_up()
        await honest(exchange)

    return answer


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_by_hand_or_by_a_batch_system(how: signal.Signals, tmp_path: Path) -> None:
    with serve() as server:
        server.token_seconds = 0.02
        process = sweep(server, tmp_path / "run")
        wait_for(tmp_path / "run" / "levels" / "000" / "level.json", process)
        process.send_signal(how)
        code, line = ended(process)
    assert code == ExitCode.INTERRUPTED
    assert line.startswith(
        f"interrupted: 1 finished level is kept in {tmp_path / 'run'}; to go on: capsim sweep --endp"
    )
    assert len(load_run(tmp_path / "run").levels) == 1


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
def test_an_interrupt_ends_a_question_that_nobody_answers(path: str) -> None:
    """A checkup waits ten minutes for its first token; an interrupt does not."""

    async def silent(exchange: Exchange) -> None:
        await asyncio.sleep(600)

    with serve() as server:
        server.routes[path] = silent
        process = start("doctor", "--endpoint", server.url)
        until = time.monotonic() + 60
        while not server.asked[path]:
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert ended(process) == (ExitCode.INTERRUPTED, "interrupted")


def test_a_server_that_dies_in_the_second_level(tmp_path: Path) -> None:
    """One trial, the warm-up, four requests of the first level, some of the second."""
    with serve() as server:
        process = sweep(server, tmp_path / "run")
        wait_for(tmp_path / "run" / "run.json", process)
        server.routes["/v1/completions"] = dying_after(server.completions + 6)
        code, line = ended(process)
    assert code == ExitCode.FAILED
    kept = load_run(tmp_path / "run").levels
    assert line.startswith("error: ")
    assert f"levels kept: {len(kept)}" in line
    assert len(kept) >= 1
    assert sum(len(level.completed) for level in kept) >= 4


def limited_files() -> None:
    """No file may be longer than a few bytes, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, resource.RLIM_INFINITY))


def test_a_full_disk(tmp_path: Path) -> None:
    with serve() as server:
        code, line = ended(sweep(server, tmp_path / "run", limited_files))
    assert code == ExitCode.FAILED
    assert line.startswith("error: ")
    assert "File too large" in line


def test_a_server_that_refuses_everything_leaves_no_profile(tmp_path: Path) -> None:
    refusal = always(response('{"error": {"message": "slow down"}}', status="429 Too Many Requests", Retry_After="9"))
    with serve(completions=refusal) as server:
        code, line = ended(start("calibrate", "--endpoint", server.url, "-o", tmp_path / "p.yaml", *LOAD))
    assert code == ExitCode.FAILED
    assert "limits the rate of requests (HTTP 429): measure the server itself, not its gateway" in line
    assert list(tmp_path.iterdir()) == []


def test_validate_keeps_what_it_measured_before_the_server_died(profile_file: Path, tmp_path: Path) -> None:
    """It was not asked to, and would have thrown it away had all gone well."""
    command = ("validate", "--profile", profile_file, *LOAD)
    with serve() as server:
        process = start(*command, "--endpoint", server.url, TMPDIR=str(tmp_path))
        until = time.monotonic() + 60
        while not (found := list(tmp_path.glob("capsim-*/run/levels/000/level.json"))):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        routes = dict(server.routes)
        server.routes.clear()
        _, errors = process.communicate(timeout=60)
        folder = found[0].parents[2]
        assert process.returncode == ExitCode.FAILED
        assert f"Note: what was measured is in {folder}; to go on add --output {folder} --resume" in errors
        kept = len(load_run(folder).levels)
        assert re.search(rf"^error: .*levels kept: {kept}", errors, re.MULTILINE)
        server.routes.update(routes)
        done = start(*command, "--endpoint", server.url, "--output", folder, "--resume")
        assert done.communicate(timeout=60) is not None
        assert done.returncode == ExitCode.DONE
    assert len(load_run(folder).levels) == 3

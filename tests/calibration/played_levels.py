"""Levels of load that tests play on a fake server, in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fake_server import FakeServer

from calibration.clients import Job, record
from calibration.endpoint import discover
from calibration.load import level_of
from calibration.stream import Patience
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload
from simulator.results.run import Level
from simulator.results.run_files import append_level, load_run, start_run

PATIENT = Patience(connect=20.0, first_token=20.0, next_token=20.0, idle=0.3)  # no fault is mistaken for a busy machine
SHORT = Patience(connect=1.0, first_token=0.3, next_token=0.3, idle=0.3)


def closed(clients: int, requests: int, prompt: int = 64, output: int = 16) -> Workload:
    return Workload(ClosedLoop(clients), (Shape(Length.fixed(prompt), Length.fixed(output)),), requests)


def measure(server: FakeServer, workload: Workload, patience: Patience = SHORT, seed: int = 1) -> Level:
    """Play in this process, which is quicker than `play` and does the same."""
    job = Job(discover(server.url), workload, seed, patience=patience, sample_every=0.05)
    return level_of(job, asyncio.run(record(job, lambda _: None)))


def kept(level: Level, folder: Path) -> Level:
    """The level as it is after it was saved and loaded again."""
    start_run(folder, "measured", {"model": "demo"}, "2026-01-01")
    append_level(folder, level)
    return load_run(folder).levels[0]

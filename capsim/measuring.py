"""What ``sweep`` and ``calibrate`` share: a measurement with a progress bar that can be interrupted without loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from capsim.errors import CommandError
from capsim.options import INPUT_LEN, OUTPUT_LEN
from capsim.progress import sweep_progress

if TYPE_CHECKING:
    from calibration.endpoint import Endpoint
    from calibration.server_flags import ServerFlags
    from calibration.sweep import SweepPlan
    from simulator.run import Run


def plan(
    server: Endpoint,
    clients: Sequence[int],
    input_len: int | None,
    output_len: int | None,
    num_prompts: int | None,
    probes: bool = True,
) -> SweepPlan:
    """The levels to measure. Raises `CommandError` for a load that the server cannot take."""
    from calibration.sweep import plan_sweep

    lengths = (INPUT_LEN if input_len is None else input_len, OUTPUT_LEN if output_len is None else output_len)
    try:
        return plan_sweep(*lengths, clients, server.max_model_len, num_prompts, probes)
    except ValueError as problem:
        raise CommandError(str(problem)) from None


def state_flags(server: Endpoint, flags: Mapping[str, object]) -> Endpoint:
    """The server with what its owner says of its flags, so that the run keeps it."""
    from simulator.vllm_flags import parse_flags

    stated = parse_flags(flags)
    kept = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size")
    return replace(server, **{name: stated[name] for name in kept if name in stated})


@dataclass(frozen=True)
class Sweeping:
    """What to measure, and where to keep it."""

    clients: Sequence[int]
    input_len: int | None
    output_len: int | None
    num_prompts: int | None
    folder: Path


def from_server(
    url: str,
    model: str | None,
    api_key: str | None,
    flags: Mapping[str, object],
    sweeping: Sweeping,
    *,
    server_log: Path | None,
    dcgm_url: str | None,
) -> tuple[Run, ServerFlags]:
    """Measure a live server; the run, and all that is known of the server's flags afterwards."""
    from calibration.discovery import discover_flags, server_info
    from calibration.endpoint import discover
    from calibration.gpu import read_gpus
    from calibration.server_log import read_server_log

    log = read_server_log(server_log) if server_log else None
    server = discover(url, model=model, api_key=api_key)
    info, gpus = server_info(server), read_gpus(server.url, dcgm_url)
    discover_flags(server, flags, log=log, info=info, gpus=gpus)  # what contradicts itself is refused before measuring
    levels = plan(server, sweeping.clients, sweeping.input_len, sweeping.output_len, sweeping.num_prompts)
    run = measure(state_flags(server, flags), levels, sweeping.folder)
    fingerprint = str(run.server.get("system_fingerprint", ""))
    known = discover_flags(server, flags, log=log, info=info, fingerprint=fingerprint, gpus=gpus, run=run)
    if gpu := known.found.get("gpu"):
        run.server.setdefault("gpu", gpu.value)
    return run, known


def from_files(paths: Sequence[Path], flags: Mapping[str, object], server_log: Path | None) -> tuple[Run, ServerFlags]:
    """A run measured before, by capsim or by another tool, and what is known of its server's flags."""
    from calibration.discovery import log_facts
    from calibration.imports import import_files
    from calibration.server_flags import resolve_flags, stated_flags, told
    from calibration.server_log import read_server_log
    from simulator.engine_flags import EngineFlags
    from simulator.run_files import load_run

    run = load_run(paths[0]) if len(paths) == 1 and paths[0].is_dir() else import_files(paths)
    names = [field.name for field in fields(EngineFlags)] + ["kv_tokens"]
    facts = {name: run.server[name] for name in names if name in run.server}
    log = log_facts(read_server_log(server_log)) if server_log else {}
    return run, resolve_flags(stated_flags(flags), told("server", facts), told("log", log))


def measure(server: Endpoint, levels: SweepPlan, folder: Path) -> Run:
    """Measure and keep the run in `folder`. An interrupt keeps the finished levels and says so."""
    from calibration.sweep import run_sweep

    try:
        with sweep_progress() as tell:
            return run_sweep(server, levels, folder, tell)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_kept(folder)) from None


def _kept(folder: Path) -> str:
    from simulator.run_files import RunFileError, load_run

    try:
        count = len(load_run(folder).levels)
    except RunFileError:
        count = 0
    if not count:
        return "no level was finished yet"
    return f"{count} finished {'level is' if count == 1 else 'levels are'} kept in {folder}"

"""What the commands that measure share: a server and what is known of it, and a measurement that can be resumed."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capsim.errors import CommandError
from capsim.measuring_options import LoadOptions, ServerOptions
from capsim.progress import sweep_progress

if TYPE_CHECKING:
    from calibration.endpoint import Endpoint
    from calibration.gpu import GpuReading
    from calibration.server_flags import ServerFlags
    from calibration.server_log import ServerLog
    from calibration.sweep import NextLevel
    from calibration.sweep_plan import SweepPlan
    from simulator.results.run import Run


@dataclass(frozen=True)
class KnownServer:
    """A live server and what could be learnt of it without loading it."""

    endpoint: Endpoint
    stated: Mapping[str, object]
    log: ServerLog | None
    info: Mapping[str, Any] | None
    gpus: GpuReading

    def flags(self, run: Run | None = None) -> ServerFlags:
        """Its flags and where each is from; a `run` measured on it tells more."""
        from calibration.discovery import discover_flags

        fingerprint = str(run.server.get("system_fingerprint", "")) if run else ""
        return discover_flags(
            self.endpoint, self.stated, log=self.log, info=self.info, fingerprint=fingerprint, gpus=self.gpus, run=run
        )

    def facts(self) -> dict[str, object]:
        """What a run keeps of it besides what the endpoint tells: nothing that is assumed."""
        found = self.flags().found
        return {name: fact.value for name, fact in found.items() if fact.source in ("stated", "server", "log")}


def ask_server(url: str, options: ServerOptions) -> KnownServer:
    """Ask the server at `url` and its log what it is.

    Raises where it cannot be measured, or where flags contradict each other.
    """
    from calibration.discovery import server_info
    from calibration.endpoint import discover
    from calibration.gpu import read_gpus
    from calibration.server_log import read_server_log
    from simulator.flags.vllm_flags import parse_flags

    log = read_server_log(options.server_log) if options.server_log else None
    endpoint = discover(url, model=options.model, api_key=options.api_key, insecure=options.insecure)
    info, gpus = server_info(endpoint), read_gpus(endpoint.url, options.dcgm_url)
    stated = parse_flags(options.flags)
    kept = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size")
    endpoint = replace(endpoint, **{name: stated[name] for name in kept if name in stated})
    known = KnownServer(endpoint, options.flags, log, info, gpus)
    known.flags()  # what contradicts itself is refused before anything is measured
    return known


def plan(server: KnownServer, load: LoadOptions, *, probes: bool, repeat: bool = False) -> SweepPlan:
    """The levels to measure. Raises `CommandError` for a load that the server cannot take."""
    from calibration.sweep_plan import plan_sweep

    levels = load.levels()
    try:
        return plan_sweep(levels, server.endpoint.max_model_len, paced=load.is_paced, probes=probes, repeat=repeat)
    except ValueError as problem:
        raise CommandError(str(problem)) from None


def measure(
    server: KnownServer,
    levels: SweepPlan,
    folder: Path,
    *,
    resume: bool = False,
    choose: NextLevel | None = None,
    budget: float | None = None,
    resumed_with: Sequence[str] = (),
) -> Run:
    """Measure and keep the run in `folder`. An interrupt keeps the finished levels and says how to go on.

    `choose` names further levels after the planned ones, for `budget` seconds in all. `resumed_with` are options that
    the command needs besides --resume.
    """
    from calibration.sweep import run_sweep

    try:
        with _terminated_as_interrupted(), sweep_progress(budget) as tell:
            return run_sweep(server.endpoint, levels, folder, tell, facts=server.facts(), choose=choose, resume=resume)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_kept(folder, resumed_with)) from None


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, by which batch systems end a job, is an interrupt too."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread has signals
        return

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def from_files(paths: Sequence[Path], flags: Mapping[str, object], server_log: Path | None) -> tuple[Run, ServerFlags]:
    """A run measured before, by capsim or by another tool, and what is known of its server's flags."""
    from calibration.discovery import log_facts
    from calibration.server_flags import resolve_flags, stated_flags, told
    from calibration.server_log import read_server_log
    from simulator.engine.engine_flags import EngineFlags

    run = read_measured(paths)
    names = [field.name for field in fields(EngineFlags)] + ["kv_tokens"]
    facts = {name: run.server[name] for name in names if name in run.server}
    blocks, engines = facts.get("num_gpu_blocks"), run.server.get("engines")
    if isinstance(blocks, int) and isinstance(engines, int) and engines > 1:
        facts["num_gpu_blocks"] = blocks // engines
    log = log_facts(read_server_log(server_log)) if server_log else {}
    return run, resolve_flags(stated_flags(flags), told("server", facts), told("log", log))


def read_measured(paths: Sequence[Path]) -> Run:
    """The run in a folder of capsim's, or in result files of other tools."""
    from calibration.imports import import_files
    from simulator.results.run_files import load_run

    return load_run(paths[0]) if len(paths) == 1 and paths[0].is_dir() else import_files(paths)


def _kept(folder: Path, resumed_with: Sequence[str]) -> str:
    from simulator.results.run_files import RunFileError, load_run

    try:
        count = len(load_run(folder).levels)
    except RunFileError:
        count = 0
    if not count:
        return "no level was finished yet"
    kept = f"{count} finished {'level is' if count == 1 else 'levels are'} kept in {folder}"
    return f"{kept}; to go on: {_resuming([*sys.argv[1:], *resumed_with])}"


def _resuming(arguments: Sequence[str]) -> str:
    """The command that continues what was interrupted."""
    return shlex.join(["capsim", *arguments, *([] if "--resume" in arguments else ["--resume"])])

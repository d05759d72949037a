"""What ``sweep`` and ``calibrate`` share: a measurement with a progress bar that can be interrupted without loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from capsim.errors import CommandError
from capsim.options import INPUT_LEN, OUTPUT_LEN
from capsim.progress import sweep_progress

if TYPE_CHECKING:
    from calibration.endpoint import Endpoint
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

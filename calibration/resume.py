"""An interrupted sweep goes on in its folder, if it is still the same sweep of the same server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from calibration.sweep_plan import SweepPlan
from simulator.loads.workload import Workload
from simulator.results.run import Level, Run
from simulator.results.run_files import load_run

SAME = (
    "model",
    "engine_version",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "engines",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "async_scheduling",
    "scheduling_policy",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "cache_dtype",
    "gpu",
)
UNFINISHED = "run.partial"  # all that a sweep leaves that is killed as it makes its folder
POOL_TOLERANCE = 0.02  # a server that is started again finds a little more or less memory


class ResumeError(ValueError):
    """A sweep that cannot be continued. The message is one line."""


def resumed_run(folder: str | Path, server: Mapping[str, object], plan: SweepPlan, open_ended: bool) -> Run | None:
    """The run in `folder` with its finished levels; None where nothing has been kept there yet.

    An `open_ended` sweep chooses levels as it goes, so that the folder may hold more than `plan` has. Raises
    `ResumeError` where it was another sweep or another server, and `simulator.results.run_files.RunFileError` where it
    is none.
    """
    folder = Path(folder)
    if folder.is_dir() and [path.name for path in folder.iterdir()] == [UNFINISHED]:
        (folder / UNFINISHED).unlink()
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    run = load_run(folder)
    if run.source != "measured":
        raise ResumeError(f"{folder} holds a simulated run: --resume continues an interrupted measurement")
    refuse_other_server(folder, run.server, server)
    _refuse_other_plan(folder, run.levels, plan, open_ended)
    return run


def refuse_other_server(folder: Path, was: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise `ResumeError` where two descriptions of a server contradict each other."""
    if change := changed_server(was, now):
        raise ResumeError(f"{folder} was measured {change}: start the server as before, or measure into another folder")


def changed_server(was: Mapping[str, object], now: Mapping[str, object]) -> str:
    """In what two descriptions of a server contradict each other, in words; nothing where they do not."""
    for name in SAME:
        if name in was and name in now and was[name] != now[name]:
            return f"with {name} {was[name]}, the server now has {now[name]}"
    before, after = was.get("num_gpu_blocks"), now.get("num_gpu_blocks")
    if (
        isinstance(before, int)
        and isinstance(after, int)
        and not (1 - POOL_TOLERANCE) * before <= after <= (1 + POOL_TOLERANCE) * before
    ):
        return f"with a KV pool of {before:,} blocks, the server now has {after:,}"
    return ""


def _refuse_other_plan(folder: Path, levels: Sequence[Level], plan: SweepPlan, open_ended: bool) -> None:
    if len(levels) > len(plan.levels) and not open_ended:
        raise ResumeError(f"{folder} holds {len(levels)} levels, this sweep has {len(plan.levels)}: it is another one")
    for number, (level, planned) in enumerate(zip(levels, plan.levels, strict=False)):
        wanted = planned
        if plan.level_seconds is not None and number >= plan.probes:  # the pace decided how many requests
            wanted = replace(planned, num_prompts=level.workload.num_prompts)
        if level.workload != wanted:
            raise ResumeError(
                f"{folder} is of another sweep: its level {number + 1} is {level.workload.describe()}, "
                f"here it is {wanted.describe()}; give the same options, or another folder"
            )


def with_kept_counts(levels: Sequence[Workload], kept: Sequence[Level]) -> list[Workload]:
    """`levels` with those that were kept as they were measured, and as many requests in a level that repeats one."""
    measured = [level.workload for level in kept if isinstance(level.workload, Workload)]
    counts = {replace(workload, num_prompts=1): workload.num_prompts for workload in measured}
    rest = levels[len(measured) :]
    return measured + [
        replace(level, num_prompts=counts.get(replace(level, num_prompts=1), level.num_prompts)) for level in rest
    ]

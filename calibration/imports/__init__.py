"""Result files of other load generators as runs: one module for each tool.

A file with a row for every request becomes levels of a `simulator.results.run.Run`, with definitions converted to ours
and every trap that was met noted on the level. A file of aggregates becomes figures (`import_aggregates`), never rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from calibration.imports import aiperf, guidellm, inference_perf, llmd_report, sglang, vllm_bench
from calibration.imports.format import Format
from calibration.imports.source import ImplausibleError, ImportFileError, NoRequestsError, Source, read_source, shown
from calibration.imports.stated import FIGURES, StatedLevel, is_stated, load_stated, save_stated, validate_stated
from calibration.trial import Figure
from simulator.results.run import Run
from simulator.results.run_files import load_run

FORMATS: tuple[Format, ...] = (
    vllm_bench.FORMAT,
    sglang.FORMAT,
    aiperf.REQUESTS,
    aiperf.STATED,
    guidellm.FORMAT,
    inference_perf.REQUESTS,
    inference_perf.STATED,
    llmd_report.FORMAT,
)
NAMES = tuple(dict.fromkeys(known.name for known in FORMATS))

__all__ = [
    "FIGURES",
    "FORMATS",
    "NAMES",
    "ImportFileError",
    "NoRequestsError",
    "StatedLevel",
    "import_aggregates",
    "import_files",
    "import_stated",
    "load_measured_or_stated",
    "load_stated",
    "save_stated",
    "validate_stated",
]


def import_files(paths: Iterable[str | Path], format: str | None = None) -> Run:  # noqa: A002
    """The levels of all files as one measured run, in the order given.

    A file's format is told by its content; `format`, one of `NAMES`, insists on one. Raises `NoRequestsError` for a
    file of aggregates, and `ImportFileError` for any other that is not what it should be or is of another server.
    """
    runs = []
    for source, known in _recognised(paths, format):
        if known.requests is None:
            raise NoRequestsError(
                f"{source.path}: {known.tool} holds aggregates only, no requests: it can validate, cannot calibrate"
            )
        runs.append((source, _read(known.requests, source)))
    server: dict[str, object] = {}
    for source, run in runs:
        ours, theirs = server.get("model"), run.server.get("model")
        if ours and theirs and ours != theirs:
            raise ImportFileError(f"{source.path}: measured {theirs}, the files before it {ours}; import them apart")
        server = run.server | server
    started = sorted(run.started_at for _, run in runs if run.started_at)
    return Run("measured", [level for _, run in runs for level in run.levels], server, started[0] if started else "")


def load_measured_or_stated(paths: Sequence[str | Path]) -> Run | list[StatedLevel]:
    """What was measured, wherever it lies: a run's folder, result files of other tools, or figures that were imported.

    Figures where none of the files holds requests. Raises `ImportFileError`,
    `simulator.results.run_files.RunFileError`.
    """
    if len(paths) == 1 and Path(paths[0]).is_dir() and not (Path(paths[0]) / FIGURES).exists():
        return load_run(paths[0])
    files = [Path(path) / FIGURES if (Path(path) / FIGURES).exists() else Path(path) for path in paths]
    if all(is_stated(file) for file in files):
        return [level for file in files for level in load_stated(file)]
    try:
        return import_files(files)
    except NoRequestsError:
        return import_stated(files)


def import_stated(paths: Iterable[str | Path], format: str | None = None) -> list[StatedLevel]:  # noqa: A002
    """What the files state of their levels, with the load and what must be known of it. Raises `ImportFileError`."""
    found = []
    for source, known in _recognised(paths, format):
        if known.stated is None:
            raise ImportFileError(f"{source.path}: {known.tool} holds requests and no aggregates; import it as a run")
        found += _read(known.stated, source)
    return found


def import_aggregates(paths: Iterable[str | Path], format: str | None = None) -> list[Figure]:  # noqa: A002
    """The figures that the files state, for `calibration.aggregate_fit.fit_figures`. Raises `ImportFileError`."""
    return [figure for level in import_stated(paths, format) for figure in level.figures]


_Result = TypeVar("_Result")


def _read(read: Callable[[Source], _Result], source: Source) -> _Result:
    try:
        return read(source)
    except ImplausibleError as problem:
        raise ImportFileError(f"{source.path}: {problem}") from None


def _recognised(paths: Iterable[str | Path], wanted: str | None) -> list[tuple[Source, Format]]:
    if wanted is not None and wanted not in NAMES:
        raise ImportFileError(f"{shown(wanted)} is no format; known are {', '.join(NAMES)}")
    candidates = [known for known in FORMATS if wanted in (None, known.name)]
    found = []
    for path in paths:
        source = read_source(path)
        found.append((source, _recognise(source, candidates, wanted)))
    if not found:
        raise ImportFileError("no files were given")
    return found


def _recognise(source: Source, candidates: Sequence[Format], wanted: str | None) -> Format:
    for known in candidates:
        if known.recognises(source):
            return known
    if wanted is not None:
        tools = " nor ".join(known.tool for known in candidates)
        raise ImportFileError(f"{source.path}: not a file of {tools}")
    raise ImportFileError(f"{source.path}: {_hint(source) or f'no result file of {_tools()}'}")


def _hint(source: Source) -> str:
    """What a file is that often lies beside the one to give; empty for any other."""
    first = source.first if isinstance(source.first, dict) else {}
    summary = first.get("summary")
    if "metrics_phase" in first or (isinstance(summary, dict) and "endpoints_configured" in summary):
        return "AIPerf's server metrics; give profile_export.jsonl, they are read from beside it"
    if {"schema_version", "source", "started_at"} <= first.keys():
        return "a run of capsim already; use its folder"
    if {"load", "server", "api"} <= first.keys():
        return "inference-perf's configuration; give per_request_lifecycle_metrics.json, it is read from beside it"
    return ""


def _tools() -> str:
    return "vLLM bench, SGLang bench_serving, AIPerf, GuideLLM, inference-perf or llm-d-benchmark"

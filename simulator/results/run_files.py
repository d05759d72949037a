"""Runs as folders that other tools read.

    FOLDER/run.json                  schema_version, capsim_version, source, started_at, server
    FOLDER/levels/000/requests.csv   one row a request
    FOLDER/levels/000/gaps.csv       token gaps and how often each
    FOLDER/levels/000/timeline.csv   gauges over time
    FOLDER/levels/000/tokens.csv     raw arrivals of tokens; only of a measured level
    FOLDER/levels/000/records.csv    what the client noted of every request; only of a measured level
    FOLDER/levels/000/load.csv       requests of a recorded load, see `simulator.loads.load_files`
    FOLDER/levels/000/level.json     schema_version, capsim_version, workload, duration, notes, intervals

Columns and units are those of `simulator.results.run`. A level exists once its `level.json` does: that file is written
last and in one move, so a sweep that is killed keeps every level it had finished. Floats are written with the fewest
digits that read back as the same bits; NaN is an empty field. A sweep may be resumed by another capsim than the one
that began it, so each level has a version of its own (`simulator.schema_version`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.loads.load_files import (
    RunFileError,
    integer,
    load_from_json,
    read_texts,
    real,
    workload_from_json,
    workload_to_json,
    write_recorded,
)
from simulator.results.run import (
    GAP_COLUMNS,
    RECORD_COLUMNS,
    REQUEST_COLUMNS,
    SCHEMA_VERSION,
    TIMELINE_COLUMNS,
    TOKEN_COLUMNS,
    Level,
    Run,
)
from simulator.schema_version import FIRST, readable, stamp

__all__ = [
    "RunFileError",
    "append_level",
    "check_free",
    "load_run",
    "save_run",
    "start_run",
    "workload_from_json",
    "workload_to_json",
]

ALWAYS = {"requests": REQUEST_COLUMNS, "gaps": GAP_COLUMNS, "timeline": TIMELINE_COLUMNS}
WHERE_MEASURED = {"tokens": TOKEN_COLUMNS, "records": RECORD_COLUMNS}
TABLES = ALWAYS | WHERE_MEASURED
MOST_JSON = 16 << 20  # bytes
MOST = 1e12  # of a number in a table


def save_run(run: Run, folder: str | Path, overwrite: bool = False) -> None:
    """Write `run` to `folder`, which must be absent or empty, or with `overwrite` an earlier run, which is replaced."""
    folder = Path(folder)
    if not (overwrite and folder.exists()):
        start_run(folder, run.source, run.server, run.started_at)
        for level in run.levels:
            append_level(folder, level)
        return
    _refuse_what_is_not_a_run(folder)
    new = folder.with_name(f".{folder.name}.new-{os.getpid()}")
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    try:
        save_run(run, new)  # all of it before the earlier run is touched
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old)


def start_run(
    folder: str | Path, source: Literal["measured", "simulated"], server: Mapping[str, object], started_at: str
) -> None:
    """Make `folder` a run without levels; it must be absent or empty."""
    folder = Path(folder)
    check_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = stamp(SCHEMA_VERSION) | {"source": source, "started_at": started_at, "server": dict(server)}
    _write_json(folder / "run.json", content)


def check_free(folder: str | Path) -> None:
    """Raise `RunFileError` where a new run cannot be started in `folder`."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise RunFileError(f"{folder} is a file; a run needs a folder of its own")
    if folder.is_dir() and any(folder.iterdir()):
        raise RunFileError(f"{folder} is not empty; choose another folder or remove it first")


def append_level(folder: str | Path, level: Level) -> None:
    """Add `level` after the levels that `folder` holds."""
    folder = Path(folder)
    _read_run_json(folder)
    _check_number("duration", level.duration)
    names = [path.name for path in _level_folders(folder)]
    place = folder / "levels" / f"{int(names[-1]) + 1 if names else 0:03d}"
    _refuse_ways_out(folder, place)
    shutil.rmtree(place, ignore_errors=True)  # what an interrupted sweep left of a level
    place.mkdir(parents=True)
    for name, columns in TABLES.items():
        table = getattr(level, name)
        if table is not None:
            _write_table(place / f"{name}.csv", table, columns)
    write_recorded(level.workload, place)
    content = stamp(SCHEMA_VERSION)
    content |= {"workload": workload_to_json(level.workload), "duration": float(level.duration)}
    content |= {"notes": list(level.notes), "server_means": level.server_means}
    intervals = {name: list(ends) for name, ends in level.intervals.items() if np.isfinite(ends).all()}
    if intervals:
        content["intervals"] = intervals
    if level.cached_tokens is not None:
        content["cached_tokens"] = level.cached_tokens
    if level.held_rate is not None:
        content["held_rate"] = level.held_rate
    _write_json(place / "level.json", content)


def load_run(folder: str | Path) -> Run:
    """The run in `folder`, with every level that was finished."""
    folder = Path(folder)
    content = _read_run_json(folder)
    levels = [_load_level(place) for place in _level_folders(folder)]
    return Run(
        source=content["source"], levels=levels, server=content.get("server", {}), started_at=content["started_at"]
    )


def _interval(name: str, ends: object) -> tuple[float, float]:
    if not isinstance(ends, list) or len(ends) != 2:
        raise RunFileError(f"intervals: {name} must be a pair [low, high], got {ends!r}")
    return real({name: ends[0]}, name), real({name: ends[1]}, name)


def _group(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A group of values by name; an empty one where there is none."""
    group = content.get(name, {})
    if not isinstance(group, dict):
        raise RunFileError(f"{name}: not a group of numbers by name")
    return group


def _load_level(place: Path) -> Level:
    _refuse_ways_out(place.parents[1], place, *place.iterdir())
    content = _read_json(place / "level.json")
    _check_version(content, place / "level.json")
    try:
        workload = load_from_json(content.get("workload"), place)
        duration = real(content, "duration")
        _check_number("duration", duration)
        notes = content.get("notes", [])
        if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
            raise RunFileError("notes: not a list of sentences")
        means = {name: real(_group(content, "server_means"), name) for name in _group(content, "server_means")}
        intervals = {name: _interval(name, ends) for name, ends in _group(content, "intervals").items()}
        cached = integer(content, "cached_tokens") if "cached_tokens" in content else None
        held = real(content, "held_rate") if "held_rate" in content else None
    except KeyError as error:
        raise RunFileError(f"{place / 'level.json'}: {error.args[0]!r} is missing") from None
    except ValueError as error:
        raise RunFileError(f"{place / 'level.json'}: {error}") from None
    tables = {
        name: _read_table(place / f"{name}.csv", columns)
        for name, columns in TABLES.items()
        if name in ALWAYS or (place / f"{name}.csv").exists()
    }
    return Level(
        workload,
        duration,
        requests=tables["requests"],
        gaps=tables["gaps"],
        timeline=tables["timeline"],
        tokens=tables.get("tokens"),
        records=tables.get("records"),
        notes=notes,
        server_means=means,
        intervals=intervals,
        cached_tokens=cached,
        held_rate=held,
    )


def _level_folders(folder: Path) -> list[Path]:
    """Folders of the finished levels, in the order they were run."""
    places = [place.parent for place in (folder / "levels").glob("*/level.json") if place.parent.name.isdigit()]
    return sorted(places, key=lambda place: int(place.name))


def _refuse_ways_out(folder: Path, *paths: Path) -> None:
    """Raise `RunFileError` for a path of a run, which may be a stranger's, that leads elsewhere or is no plain file."""
    for path in paths:
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise RunFileError(f"{path} leads out of the run's folder; a run is read from its own files alone")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise RunFileError(f"{path} is neither a file nor a folder")


def _refuse_what_is_not_a_run(folder: Path) -> None:
    if not folder.is_dir():
        raise RunFileError(f"{folder} is a file; a run is a folder")
    strangers = sorted(path.name for path in folder.iterdir() if path.name not in ("run.json", "levels"))
    if strangers:
        raise RunFileError(f"{folder} holds something else than a run ({strangers[0]}); choose another folder")


def _read_run_json(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    if not folder.is_dir():
        raise RunFileError(f"{folder}: no such folder")
    if not path.exists():
        raise RunFileError(f"{folder} is not a saved run: it has no run.json")
    _refuse_ways_out(folder, path, folder / "levels")
    content = _read_json(path)
    if "schema_version" not in content:
        raise RunFileError(f"{path}: not a run of capsim, it has no schema_version")
    _check_version(content, path)
    if content.get("source") not in ("measured", "simulated"):
        raise RunFileError(f"{path}: source is {content.get('source')!r}, not 'measured' or 'simulated'")
    if not isinstance(content.get("server", {}), dict) or not isinstance(content.setdefault("started_at", ""), str):
        raise RunFileError(f"{path}: server must be an object and started_at a string")
    return content


def _check_version(content: Mapping[str, object], path: Path) -> None:
    try:
        readable(content.get("schema_version", FIRST), SCHEMA_VERSION)
    except ValueError as error:
        raise RunFileError(f"{path}: schema_version: {error}") from None


def _write_table(path: Path, table: pd.DataFrame, columns: Mapping[str, str]) -> None:
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise RunFileError(f"{path.stem}: the table has no column {missing[0]!r}")
    try:
        typed = table[list(columns)].astype(cast(Any, dict(columns)))
    except (ValueError, TypeError) as error:
        raise RunFileError(f"{path.stem}: {error}") from None
    typed.to_csv(path, index=False, lineterminator="\n", encoding="utf-8")


def _read_table(path: Path, columns: Mapping[str, str]) -> pd.DataFrame:
    """The known columns of a table; others, which a later version or another tool may add, are left out."""
    texts = read_texts(path, columns)
    for name in columns:
        if name not in texts.columns:
            raise RunFileError(f"{path}: column {name!r} is missing")
    typed = {name: _typed(path, texts[name].to_numpy(object), name, kind) for name, kind in columns.items()}
    return pd.DataFrame({name: pd.Series(values, dtype=values.dtype) for name, values in typed.items()})


def _typed(path: Path, texts: npt.NDArray[np.object_], name: str, kind: str) -> npt.NDArray[Any]:
    """A column of text as int64, float64 or text."""
    if kind == "float64":
        texts = np.where(texts == "", "nan", texts)
    try:
        values = texts.astype(kind)
    except (ValueError, OverflowError):
        wanted, parse = ("an integer", int) if kind == "int64" else ("a number", float)
        line, text = next((row + 2, text) for row, text in enumerate(texts) if not _parses(parse, text))
        raise RunFileError(f"{path}, line {line}: {name} is {text!r}, not {wanted}") from None
    if kind != "object" and len(wrong := np.flatnonzero(np.abs(values) > MOST)):
        line, text = wrong[0] + 2, texts[wrong[0]]
        raise RunFileError(f"{path}, line {line}: {name} is {text!r}, and at most {MOST:g} is read")
    return values


def _parses(parse: Callable[[str], float], text: str) -> bool:
    try:
        return abs(parse(text)) < 2**63
    except ValueError:
        return False


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write in one move, so that a reader never sees half a file."""
    try:
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RunFileError(f"{path.name}: {error}") from None
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)


def _read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MOST_JSON:
        raise RunFileError(f"{path}: larger than {MOST_JSON >> 20} MiB; such a file is not read")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RunFileError(f"{path}: not JSON ({error})") from None
    except (ValueError, RecursionError):
        raise RunFileError(f"{path}: not JSON that can be read: text in UTF-8, numbers of up to 4,300 digits") from None
    if not isinstance(content, dict):
        raise RunFileError(f"{path}: a JSON object was expected")
    return content


def _check_number(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise RunFileError(f"{name} must be a number of seconds, got {value}")

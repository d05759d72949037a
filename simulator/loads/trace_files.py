"""Files of recorded traffic, read by the names of their columns and a part at a time.

| format | file | time | lengths |
| --- | --- | --- | --- |
| azure | CSV of the Azure LLM inference datasets of 2023 to 2025 | TIMESTAMP, a date | ContextTokens, GeneratedTokens |
| burstgpt | CSV of BurstGPT, any version | Timestamp, s | Request tokens, Response tokens |
| run | requests.csv of a saved run, or the run's folder | arrival, s | prompt_tokens, output_tokens |
| csv | any CSV with these columns | timestamp, s, or timestamp_ms | input_length, output_length |
| mooncake | JSON lines, hash_ids of 512 tokens | timestamp, ms | input_length, output_length |
| timed | JSON lines of vLLM's timed_trace and of Bailian, hash_ids of 16 tokens | timestamp, s | the same |
| custom | JSON lines of vLLM's custom dataset | none | prompt (text), output_tokens |

Files may be compressed (.gz, .bz2, .xz). Requests without prompt or generated tokens, which failed, are left out.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.loads.trace import HashIds, Trace, TraceError
from simulator.loads.workload import Integers, Reals

ROWS = 100_000  # of a CSV file held at a time
CHARACTERS_PER_TOKEN = 4  # of a custom dataset's prompts: an estimate, good to a third for English
CUSTOM_OUTPUT = 256  # tokens, vLLM bench's --custom-output-len


class _Columns(NamedTuple):
    """Names of a CSV format's columns. `unit` is seconds a unit of time, None for dates."""

    format: str
    time: str
    prompt: str
    output: str
    unit: float | None


CSV_FORMATS = (
    _Columns("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", None),
    _Columns("burstgpt", "Timestamp", "Request tokens", "Response tokens", 1.0),
    _Columns("run", "arrival", "prompt_tokens", "output_tokens", 1.0),
    _Columns("csv", "timestamp_ms", "input_length", "output_length", 1e-3),
    _Columns("csv", "timestamp", "input_length", "output_length", 1.0),
)
JSON_FORMATS = {"mooncake": (512, 1e-3), "timed": (16, 1.0)}  # tokens of a hashed block, seconds a unit of time
FORMATS = (*dict.fromkeys(columns.format for columns in CSV_FORMATS), *JSON_FORMATS, "custom")


@dataclass
class _Requests:
    """What has been read so far."""

    times: list[Reals] = field(default_factory=list)
    prompts: list[Integers] = field(default_factory=list)
    outputs: list[Integers] = field(default_factory=list)


def read_trace(path: str | Path, format: str | None = None) -> Trace:  # noqa: A002  # the word that users know
    """The trace in the file at `path`, or in the only level of the run in that folder.

    `format` is one of `FORMATS`; without it the file's columns or keys tell. Raises `TraceError`.
    """
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise TraceError(f"{format!r} is no trace format; known are {', '.join(FORMATS)}")
    if path.is_dir():
        path = _only_level(path)
    try:
        with _open(path) as file:
            start = file.readline()
            file.seek(0)
            if start.lstrip().startswith("{"):
                return _read_json_lines(file, path, format)
            return _read_csv(file, path, start, format)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, UnicodeDecodeError) as problem:
        raise TraceError(f"{path}: damaged, or not a text file ({problem})") from None


def _only_level(folder: Path) -> Path:
    tables = sorted(folder.glob("levels/*/requests.csv"))
    if (folder / "requests.csv").exists():
        return folder / "requests.csv"
    if not tables:
        raise TraceError(f"{folder} is not a saved run: it has no levels")
    if len(tables) > 1:
        raise TraceError(f"{folder} has {len(tables)} levels; name one of them, such as {tables[0].parent}")
    return tables[0]


def _open(path: Path) -> IO[str]:
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(path.suffix, open)
    file: IO[str] = opener(path, "rt", encoding="utf-8-sig")
    return file


def _name(path: Path) -> str:
    """What the trace is called: the file's name, or a run's and its level's."""
    if path.name != "requests.csv":
        return path.name.split(".")[0]
    level = path.resolve().parent
    return f"{level.parents[1].name}/{level.name}"


# --- CSV


def _read_csv(file: IO[str], path: Path, header: str, wanted: str | None) -> Trace:
    columns = _columns_of(header, path, wanted)
    names = {name for name in (columns.time, columns.prompt, columns.output, "error") if name in _fields(header)}
    read = _Requests()
    try:
        for chunk in pd.read_csv(
            file, dtype=str, keep_default_na=False, usecols=lambda name: name.strip() in names, chunksize=ROWS
        ):
            _take_rows(chunk.rename(columns=str.strip), columns, path, read)
    except pd.errors.ParserError as problem:
        raise TraceError(f"{path}: {' '.join(str(problem).split())}") from None
    return _trace(_name(path), path, read)


def _fields(header: str) -> list[str]:
    return [name.strip().strip('"') for name in header.split(",")]


def _columns_of(header: str, path: Path, wanted: str | None) -> _Columns:
    found = _fields(header)
    candidates = [columns for columns in CSV_FORMATS if wanted in (None, columns.format)]
    for columns in candidates:
        if {columns.time, columns.prompt, columns.output} <= set(found):
            return columns
    needed = "; or ".join(f"{', '.join(c[1:4])} ({c.format})" for c in candidates) or "JSON lines"
    raise TraceError(f"{path}, line 1: has the columns {', '.join(found)}; a trace has {needed}")


def _take_rows(chunk: pd.DataFrame, columns: _Columns, path: Path, read: _Requests) -> None:
    """Convert rows of text, leaving out those of failed requests."""
    if "error" in chunk.columns:
        chunk = chunk[chunk["error"] == ""]
    lines = chunk.index.to_numpy() + 2

    def column(name: str, wanted: str, parse: Callable[[pd.Series[str]], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return _parsed(chunk[name], lines, path, wanted, parse)

    prompts = column(columns.prompt, "a whole number of tokens", _integers)
    outputs = column(columns.output, "a whole number of tokens", _integers)
    if columns.unit is None:
        times = column(columns.time, "a date and time", _moments)
    else:
        times = column(columns.time, "a number", _numbers) * columns.unit
    kept = (prompts > 0) & (outputs > 0)
    read.times.append(times[kept])
    read.prompts.append(prompts[kept])
    read.outputs.append(outputs[kept])


def _parsed(
    texts: pd.Series[str],
    lines: Integers,
    path: Path,
    wanted: str,
    parse: Callable[[pd.Series[str]], npt.NDArray[Any]],
) -> npt.NDArray[Any]:
    try:
        return parse(texts)
    except ValueError:
        for line, text in zip(lines.tolist(), texts, strict=True):
            try:
                parse(pd.Series([text]))
            except ValueError:
                raise TraceError(f"{path}, line {line}: {texts.name} is {text!r}, not {wanted}") from None
        raise


def _integers(texts: pd.Series[str]) -> Integers:
    values = texts.to_numpy(object).astype(np.float64)
    if not (values == np.rint(values)).all():
        raise ValueError
    return values.astype(np.int64)


def _numbers(texts: pd.Series[str]) -> Reals:
    values = texts.to_numpy(object).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError
    return values


def _moments(texts: pd.Series[str]) -> Integers:
    """Nanoseconds since 1970."""
    moments = pd.to_datetime(texts, format="ISO8601", utc=True)
    if moments.isna().any():
        raise ValueError
    return moments.dt.tz_localize(None).dt.as_unit("ns").to_numpy().astype(np.int64)


# --- JSON lines


def _read_json_lines(file: IO[str], path: Path, wanted: str | None) -> Trace:
    first = _record(file.readline(), path, 1)
    file.seek(0)
    if wanted == "custom" or (wanted is None and "prompt" in first and "timestamp" not in first):
        return _read_custom(file, path)
    if wanted is not None and wanted not in JSON_FORMATS:
        raise TraceError(f"{path} holds JSON lines, and the format {wanted!r} is a CSV file")
    return _read_timed(file, path, wanted)


def _read_custom(file: IO[str], path: Path) -> Trace:
    prompts, outputs = array("q"), array("q")
    for line, record in _records(file, path):
        if not isinstance(record.get("prompt"), str):
            raise TraceError(f"{path}, line {line}: has no text under 'prompt', as vLLM's custom dataset")
        prompts.append(max(1, round(len(record["prompt"]) / CHARACTERS_PER_TOKEN)))
        outputs.append(_count(record, "output_tokens", path, line) if "output_tokens" in record else CUSTOM_OUTPUT)
    if not prompts:
        raise TraceError(f"{path} holds no request")
    name = f"{_name(path)} (prompt tokens estimated from {CHARACTERS_PER_TOKEN} characters each)"
    kept = np.array(outputs, np.int64) > 0
    lengths = np.array(prompts, np.int64)[kept], np.array(outputs, np.int64)[kept]
    return Trace(name, None, *lengths)


def _read_timed(file: IO[str], path: Path, wanted: str | None) -> Trace:
    times, prompts, outputs, ids, ends = array("d"), array("q"), array("q"), array("q"), array("q")
    for line, record in _records(file, path):
        prompt, output = (_count(record, name, path, line) for name in ("input_length", "output_length"))
        if prompt < 1 or output < 1:
            continue
        hashed = record.get("hash_ids") or []
        if not isinstance(hashed, list) or not all(type(value) is int and 0 <= value < 1 << 38 for value in hashed):
            raise TraceError(f"{path}, line {line}: hash_ids must be a list of whole numbers below 2^38")
        times.append(_time(record, path, line))
        prompts.append(prompt)
        outputs.append(output)
        ids.extend(hashed)
        ends.append(len(ids))
    if not times:
        raise TraceError(f"{path} holds no request with prompt and output tokens")
    block, unit = JSON_FORMATS[wanted or _told_by_ids(path, np.array(prompts), np.diff(np.array(ends), prepend=0))]
    hash_ids = HashIds(np.array(ids, np.int64), np.array(ends, np.int64), block) if ids else None
    read = _Requests([np.array(times) * unit], [np.array(prompts, np.int64)], [np.array(outputs, np.int64)])
    return _trace(_name(path), path, read, hash_ids)


def _told_by_ids(path: Path, prompts: Integers, counts: Integers) -> str:
    """The format whose blocks are of such a size that the prompts have so many of them."""
    hashed = counts > 0
    for name, (block, _) in JSON_FORMATS.items():
        fitting = (counts == prompts // block) | (counts == -(-prompts // block))
        if hashed.any() and fitting[hashed].mean() > 0.95:
            return name
    raise TraceError(
        f"{path} does not tell its unit of time by its hash_ids: name the format, "
        "mooncake (milliseconds, blocks of 512 tokens) or timed (seconds, blocks of 16)"
    )


def _records(file: IO[str], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every line's number and object."""
    for line, text in enumerate(file, 1):
        if text.strip():
            yield line, _record(text, path, line)


def _record(text: str, path: Path, line: int) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as problem:
        raise TraceError(f"{path}, line {line}: not JSON ({problem.msg}); every line is an object of its own") from None
    if not isinstance(record, dict):
        raise TraceError(f"{path}, line {line}: a JSON object was expected, one a line")
    return record


def _count(record: dict[str, Any], name: str, path: Path, line: int) -> int:
    value = record.get(name)
    if type(value) is not int:
        told = f"{name} is {value!r}, not a whole number of tokens" if name in record else f"has no {name!r}"
        raise TraceError(f"{path}, line {line}: {told}")
    return value


def _time(record: dict[str, Any], path: Path, line: int) -> float:
    value = record.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
        raise TraceError(f"{path}, line {line}: timestamp is {value!r}, not a number")
    return float(value)


# --- both


def _trace(name: str, path: Path, read: _Requests, hash_ids: HashIds | None = None) -> Trace:
    """The requests in the order of time, which begins with the first of them."""
    if not sum(len(part) for part in read.times):
        raise TraceError(f"{path} holds no request with prompt and output tokens")
    times: npt.NDArray[Any] = np.concatenate(read.times)
    prompts, outputs = np.concatenate(read.prompts), np.concatenate(read.outputs)
    seconds = (times - times.min()) / 1e9 if times.dtype == np.int64 else times - times.min()
    order = np.argsort(seconds, kind="stable")
    if hash_ids is not None:
        hash_ids = hash_ids.chosen(order)
    return Trace(name, seconds[order], prompts[order], outputs[order], hash_ids)

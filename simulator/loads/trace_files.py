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
import csv
import gzip
import json
import lzma
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.loads.bounds import MOST_REQUESTS, MOST_TOKENS
from simulator.loads.trace import HashIds, Trace, TraceError
from simulator.loads.workload import Integers, Reals

ROWS = 20_000  # of a CSV file held at a time
CHARACTERS_PER_TOKEN = 4  # of a custom dataset's prompts: an estimate, good to a third for English
CUSTOM_OUTPUT = 256  # tokens, vLLM bench's --custom-output-len
MOST_LINES = MOST_REQUESTS + 1  # with 24 bytes of memory each, and 8 more for a hash id
MOST_IDS = 100_000_000
LONGEST_LINE = 1 << 24  # characters; a prompt of a million tokens has a quarter
LATEST = 1e11  # s, since 1970, or since the trace began: beyond it another unit was meant


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
    try:
        if path.is_dir():
            path = _only_level(path)
        if path.exists() and not path.is_file():
            raise TraceError(f"{path}: no ordinary file; a trace is read twice, so copy it to one")
        with _open(path) as file:
            start = next(_lines(file, path), "")
            file.seek(0)
            if start.lstrip().startswith("{"):
                return _read_json_lines(file, path, start, format)
            return _read_csv(file, path, format)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not a text file in UTF-8, or damaged") from None
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error):
        raise TraceError(f"{path}: damaged, or not compressed as its name says") from None
    except OSError as problem:
        raise TraceError(f"{path}: {problem.strerror or 'damaged, or not compressed as its name says'}") from None


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


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    """The lines of a file, which has a bounded number of them, of bounded length."""
    for number in range(1, MOST_LINES + 1):
        line = file.readline(LONGEST_LINE + 1)
        if not line:
            return
        if len(line) > LONGEST_LINE:
            raise TraceError(f"{path}, line {number}: longer than {LONGEST_LINE >> 20} MiB; such a line is not read")
        yield line
    if file.readline(1):
        raise TraceError(f"{path}: has more than {MOST_LINES:,} lines; give a part of it")


def _name(path: Path) -> str:
    """What the trace is called: the file's name, or a run's and its level's."""
    if path.name != "requests.csv":
        return path.name.split(".")[0]
    level = path.resolve().parent
    return f"{level.parents[1].name}/{level.name}"


# --- CSV


class _Rows:
    """Rows of a CSV file that wait to be converted: the texts of the wanted columns, and the line of each row."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self.texts: list[tuple[str, ...]] = []

    def __len__(self) -> int:
        return len(self.lines)


def _read_csv(file: IO[str], path: Path, wanted: str | None) -> Trace:
    csv.field_size_limit(LONGEST_LINE)
    rows = csv.reader(_lines(file, path), strict=True)
    read, waiting = _Requests(), _Rows()
    try:
        header = [name.strip() for name in next(rows, [])]
        columns = _columns_of(header, path, wanted)
        picked = itemgetter(*(header.index(name) for name in (columns.time, columns.prompt, columns.output)))
        error = header.index("error") if "error" in header else None
        for row in rows:
            if len(row) != len(header) and not _fits(row, len(header)):
                told = f"has {len(row)} fields, and the first line {len(header)}; is the file whole?"
                raise TraceError(f"{path}, line {rows.line_num}: {told}")
            if row and (error is None or not row[error]):
                waiting.texts.append(picked(row))
                waiting.lines.append(rows.line_num)
            if len(waiting) == ROWS:
                _take_rows(waiting, columns, path, read)
                waiting = _Rows()
    except csv.Error as problem:
        raise TraceError(f"{path}, line {rows.line_num}: not CSV ({problem})") from None
    _take_rows(waiting, columns, path, read)
    return _trace(_name(path), path, read)


def _fits(row: Sequence[str], fields: int) -> bool:
    """Whether a row of another length is blank, or has nothing more than commas too many."""
    return not row or (len(row) > fields and not any(row[fields:]))


def _columns_of(header: Sequence[str], path: Path, wanted: str | None) -> _Columns:
    candidates = [columns for columns in CSV_FORMATS if wanted in (None, columns.format)]
    for columns in candidates:
        needed = (columns.time, columns.prompt, columns.output)
        if set(needed) <= set(header):
            twice = [name for name in (*needed, "error") if header.count(name) > 1]
            if twice:
                raise TraceError(f"{path}, line 1: has the column {twice[0]} twice; which one is meant?")
            return columns
    known = "; or ".join(f"{', '.join(c[1:4])} ({c.format})" for c in candidates) or "JSON lines"
    raise TraceError(f"{path}, line 1: has the columns {_shown_names(header)}; a trace has {known}")


def _shown_names(header: Sequence[str]) -> str:
    names = [name if name.isprintable() and len(name) <= 30 else _shown(name, 30) for name in header[:10]]
    return ", ".join([*names, f"and {len(header) - 10} more"] if len(header) > 10 else names)


def _take_rows(rows: _Rows, columns: _Columns, path: Path, read: _Requests) -> None:
    """Convert rows of text."""

    def column(place: int, wanted: str, parse: Callable[[Sequence[str]], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        texts = [row[place] for row in rows.texts]
        try:
            return parse(texts)
        except ValueError:
            bad = _first_bad(texts, parse)
            told = f"{columns[1 + place]} is {_shown(texts[bad])}, not {wanted}"
            raise TraceError(f"{path}, line {rows.lines[bad]}: {told}") from None

    prompts = column(1, f"a whole number of tokens up to {MOST_TOKENS:,}", _integers)
    outputs = column(2, f"a whole number of tokens up to {MOST_TOKENS:,}", _integers)
    if columns.unit is None:
        times = column(0, "a date and time since 1970", _moments)
    else:
        most = LATEST / columns.unit
        times = column(0, f"a number up to {most:g}", lambda texts: _numbers(texts, most)) * columns.unit
    kept = (prompts > 0) & (outputs > 0)
    read.times.append(times[kept])
    read.prompts.append(prompts[kept])
    read.outputs.append(outputs[kept])


def _first_bad(texts: Sequence[str], parse: Callable[[Sequence[str]], npt.NDArray[Any]]) -> int:
    """The place of the first text that cannot be parsed, where one of them cannot."""
    good, bad = 0, len(texts)  # texts up to `good` can be parsed, those up to `bad` cannot
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            parse(texts[good:middle])
            good = middle
        except ValueError:
            bad = middle
    return good


def _integers(texts: Sequence[str]) -> Integers:
    values = np.array(texts, object).astype(np.float64)
    if not ((values == np.rint(values)) & (values >= 0) & (values <= MOST_TOKENS)).all():
        raise ValueError
    return values.astype(np.int64)


def _numbers(texts: Sequence[str], most: float) -> Reals:
    values = np.array(texts, object).astype(np.float64)
    if not (np.abs(values) <= most).all():
        raise ValueError
    return values


def _moments(texts: Sequence[str]) -> Integers:
    """Nanoseconds since 1970."""
    moments = pd.Series(pd.to_datetime(pd.Series(texts, dtype=object), format="ISO8601", utc=True))
    if moments.isna().any():
        raise ValueError
    values = moments.dt.tz_localize(None).dt.as_unit("ns").to_numpy().astype(np.int64)
    if (values < 0).any():
        raise ValueError
    return values


# --- JSON lines


def _read_json_lines(file: IO[str], path: Path, start: str, wanted: str | None) -> Trace:
    first = _record(start, path, 1)
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
        if len(ids) > MOST_IDS:
            raise TraceError(f"{path}, line {line}: has more than {MOST_IDS:,} hash_ids up to here; give a part of it")
    if not times:
        raise TraceError(f"{path} holds no request with prompt and output tokens")
    name = wanted or _told_by_ids(path, _integers_of(prompts), np.diff(_integers_of(ends), prepend=0))
    block, unit = JSON_FORMATS[name]
    seconds = np.frombuffer(times, np.float64) * unit
    if np.abs(seconds).max() > LATEST:
        raise TraceError(
            f"{path}: has a timestamp of {np.abs(seconds).max():.3g} s as the format {name}; is it another?"
        )
    hash_ids = HashIds(_integers_of(ids), _integers_of(ends), block) if ids else None
    read = _Requests([seconds], [_integers_of(prompts)], [_integers_of(outputs)])
    return _trace(_name(path), path, read, hash_ids)


def _integers_of(values: array[int]) -> Integers:
    """The same memory: a trace may have a hundred million hash ids."""
    return np.frombuffer(values, np.int64)


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
    for line, text in enumerate(_lines(file, path), 1):
        if text.strip():
            yield line, _record(text, path, line)


def _record(text: str, path: Path, line: int) -> dict[str, Any]:
    try:
        record = _DECODER.decode(text)
    except json.JSONDecodeError as problem:
        raise TraceError(f"{path}, line {line}: not JSON ({problem.msg}); every line is an object of its own") from None
    except ValueError as problem:
        raise TraceError(f"{path}, line {line}: {_told(problem)}") from None
    except RecursionError:
        raise TraceError(f"{path}, line {line}: nested too deeply for a request") from None
    if not isinstance(record, dict):
        raise TraceError(f"{path}, line {line}: a JSON object was expected, one a line")
    return record


class _TwiceError(ValueError):
    """A key that an object gives twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _told(problem: ValueError) -> str:
    if isinstance(problem, _TwiceError):
        return f"has {_shown(problem.args[0])} twice; which one is meant?"
    return "holds a number with thousands of digits"


def _count(record: dict[str, Any], name: str, path: Path, line: int) -> int:
    value = record.get(name)
    if type(value) is not int or not 0 <= value <= MOST_TOKENS:
        told = f"{name} is {_shown(value)}, not a whole number of tokens up to {MOST_TOKENS:,}"
        raise TraceError(f"{path}, line {line}: {told if name in record else f'has no {name!r}'}")
    return value


def _time(record: dict[str, Any], path: Path, line: int) -> float:
    value, most = record.get("timestamp"), LATEST * 1e3  # in milliseconds, or too much in seconds
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -most <= value <= most:
        raise TraceError(f"{path}, line {line}: timestamp is {_shown(value)}, not a number up to {most:g}")
    return float(value)


# --- both


def _shown(value: object, most: int = 40) -> str:
    """A value as an error names it."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value[: 2 * most] if isinstance(value, str) else value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _trace(name: str, path: Path, read: _Requests, hash_ids: HashIds | None = None) -> Trace:
    """The requests in the order of time, which begins with the first of them."""
    if not sum(len(part) for part in read.times):
        raise TraceError(f"{path} holds no request with prompt and output tokens")
    times: npt.NDArray[Any] = np.concatenate(read.times)
    prompts, outputs = np.concatenate(read.prompts), np.concatenate(read.outputs)
    seconds = (times - times.min()) / 1e9 if times.dtype == np.int64 else times - times.min()
    if (seconds[1:] >= seconds[:-1]).all():
        return Trace(name, seconds, prompts, outputs, hash_ids)
    order = np.argsort(seconds, kind="stable")
    if hash_ids is not None:
        hash_ids = hash_ids.chosen(order)
    return Trace(name, seconds[order], prompts[order], outputs[order], hash_ids)

"""What a vLLM server wrote about itself: its log file as a `ServerLog`.

Read as it comes: with colours, with the prefixes of processes, containers and journals, as JSON lines, cut off at
either end. Of several starts in one file the last counts.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calibration.log_lines import WORTH_A_LOOK, MemoryUse, argument, facts_in, iteration_in, status_in

MAX_BYTES = 1 << 30  # of a log; a line for every step fills 12 MB an hour at 20 steps a second
MAX_LINE = 1 << 20  # bytes; a longer line is read in pieces

STATUS_COLUMNS = {
    "time": "float64",  # s since the first dated line, in whole seconds; NaN without a date
    "engine": "int64",  # data-parallel rank, -1 for all of them together
    "prompt_throughput": "float64",  # tokens/s since the line before
    "generation_throughput": "float64",  # tokens/s since the line before
    "running": "int64",
    "waiting": "int64",
    "preemptions": "int64",  # since the line before
    "kv_usage": "float64",  # 0 to 1
    "prefix_hit_rate": "float64",  # 0 to 1; NaN where it is not told
}
ITERATION_COLUMNS = {
    "time": "float64",  # as above
    "engine": "int64",
    "iteration": "int64",
    "context_requests": "int64",  # that have no output yet
    "context_tokens": "int64",  # prompt tokens computed
    "generation_requests": "int64",
    "generation_tokens": "int64",
    "elapsed": "float64",  # s, see below
    "kv_usage": "float64",  # 0 to 1; NaN where it is not told
    "dummy": "bool",  # an empty step that keeps a data-parallel rank in line with the others
}


class ServerLogError(ValueError):
    """A file that is no vLLM log or cannot be read. The message is one line."""


def _empty(columns: Mapping[str, str]) -> pd.DataFrame:
    return pd.DataFrame(columns=list(columns)).astype(columns)


@dataclass(frozen=True)
class ServerLog:
    """What the log tells; None is what it does not. Memory is in GiB, as vLLM prints it.

    Of several workers the smallest KV pool and the largest model count, since they bound the server.

    `iterations` has a row for every step where the server was started with --enable-logging-iteration-details. What a
    step computed is exact there. `elapsed` is not the step's duration: vLLM's clock runs only while the engine waits
    for the result. It misses the time since the step was given to the device: about a millisecond or, with
    asynchronous scheduling, as long as the engine was busy with the step before.
    """

    engine_version: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)  # those that are no default, secrets left out
    model: str | None = None
    dtype: str | None = None  # "bfloat16"
    device: str | None = None  # "cuda", "cpu", "xpu"
    max_model_len: int | None = None  # tokens
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None  # where it was given, or the log is of level DEBUG
    block_size: int | None = None  # tokens, where it was given or had to change
    async_scheduling: bool | None = None
    kv_tokens: int | None = None  # KV pool of one engine
    max_concurrency: float | None = None  # requests of max_model_len that the pool holds
    kv_memory: float | None = None  # GiB of KV cache in one worker
    model_memory: float | None = None  # GiB of weights in one worker
    graph_memory: float | None = None  # GiB
    memory: MemoryUse | None = None
    status: pd.DataFrame = field(default_factory=lambda: _empty(STATUS_COLUMNS))  # columns of STATUS_COLUMNS
    iterations: pd.DataFrame = field(default_factory=lambda: _empty(ITERATION_COLUMNS))  # of ITERATION_COLUMNS
    notes: tuple[str, ...] = ()  # sentences a reader must know

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names under which the model is served, as far as told."""
        names = self.arguments.get("served_model_name") or self.model or self.arguments.get("model") or ()
        names = [names] if isinstance(names, str) else names if isinstance(names, (list, tuple)) else []
        return tuple(name for name in names if isinstance(name, str))


def read_server_log(path: str | Path) -> ServerLog:
    """The log at `path`. Raises `ServerLogError` where there is none."""
    path, reading = Path(path), _Reading()
    try:
        for line in _lines(path):
            reading.take(line)
        cut = path.stat().st_size > MAX_BYTES
    except OSError as problem:
        raise ServerLogError(f"{path} cannot be read ({problem.strerror})") from None
    if not (reading.facts or reading.status or reading.iterations):
        raise ServerLogError(f"{path} is no log of vLLM: give the file that takes what vllm serve prints")
    return reading.result(cut)


_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TIME = re.compile(r"(?:DEBUG|INFO|WARNING|ERROR) (?:\d{4}-)?(\d\d-\d\d \d\d:\d\d:\d\d)")


def _lines(path: Path) -> Iterator[str]:
    """The lines that may tell something, without colours."""
    left = MAX_BYTES
    with path.open("rb") as file:
        while left > 0 and (line := file.readline(MAX_LINE)):
            left -= len(line)
            if WORTH_A_LOOK.search(line):
                yield _printable(_COLOUR.sub("", _unwrapped(line.decode(errors="replace").strip())))


def _printable(line: str) -> str:
    return line if line.isprintable() else "".join(letter if letter.isprintable() else " " for letter in line)


def _unwrapped(line: str) -> str:
    """The message in a line of JSON: of Docker's log driver, or of a vLLM that logs in JSON."""
    if line.startswith("{"):
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            told = [record.get(name) for name in ("levelname", "asctime", "message", "log")]
            return " ".join(text for text in told if isinstance(text, str))
    return line


class _Reading:
    """A log that is being read."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.status, self.iterations = _Rows(STATUS_COLUMNS), _Rows(ITERATION_COLUMNS)
        self.first_time: datetime | None = None
        self.starts = 1

    def take(self, line: str) -> None:
        """Keep what a line tells."""
        if iteration := iteration_in(line):
            self.iterations.add(iteration | {"time": self._time(line)})
        elif status := status_in(line):
            self.status.add(status | {"time": self._time(line)})
        else:
            self._take_facts(facts_in(line))
            self._time(line)

    def _take_facts(self, facts: dict[str, Any]) -> None:
        if "arguments" in facts and "kv_tokens" in self.facts:  # another start
            self.facts, self.starts = {}, self.starts + 1
            self.status, self.iterations = _Rows(STATUS_COLUMNS), _Rows(ITERATION_COLUMNS)
        for name, value in facts.items():
            self.facts[name] = _merged(name, self.facts[name], value) if name in self.facts else value

    def _time(self, line: str) -> float:
        """Seconds since the first line with a date; NaN for a line without."""
        match = _TIME.search(line)
        time = _date(match[1]) if match else None
        if time is None:
            return math.nan
        self.first_time = self.first_time or time
        return (time - self.first_time).total_seconds()

    def result(self, cut: bool) -> ServerLog:
        facts = dict(self.facts)
        given = facts.get("arguments", {})
        for name in ("max_num_batched_tokens", "max_num_seqs", "block_size", "async_scheduling"):
            facts.setdefault(name, argument(given, name))
        notes = []
        if self.starts > 1:
            notes.append(f"the log holds {self.starts} starts of the server: the last one counts")
        if cut:
            notes.append(f"the log is larger than {MAX_BYTES >> 30} GiB: only its beginning was read")
        return ServerLog(**facts, status=self.status.table(), iterations=self.iterations.table(), notes=tuple(notes))


class _Rows:
    """Rows of numbers in little memory: a log may have one for every step of days."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._columns, self._numbers = columns, array("d")

    def __len__(self) -> int:
        return len(self._numbers) // len(self._columns)

    def add(self, row: Mapping[str, float]) -> None:
        self._numbers.extend(row[name] for name in self._columns)

    def table(self) -> pd.DataFrame:
        numbers = np.array(self._numbers).reshape(-1, len(self._columns))
        return pd.DataFrame(numbers, columns=list(self._columns)).astype(self._columns)


@lru_cache(maxsize=1)  # many lines are written within a second
def _date(text: str) -> datetime | None:
    """A date of the log, which names no year: put into a leap year, which has all days."""
    try:
        return datetime.strptime(f"2000-{text}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        return None


def _merged(name: str, had: Any, value: Any) -> Any:
    """Of two workers' words the one that bounds the server, of two lines' words the last."""
    if name in ("kv_tokens", "max_concurrency", "kv_memory"):
        return min(had, value)
    if name in ("model_memory", "graph_memory"):
        return max(had, value)
    if name == "memory":
        return value if (value.kv_cache or math.inf) < (had.kv_cache or math.inf) else had
    return value

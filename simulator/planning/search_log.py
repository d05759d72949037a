"""Results of simulations in a file, one line of JSON each, so that an interrupted search goes on where it was.

A line is found again by what was simulated and not by its place, so any search may use the file of any other, and each
line has a version of its own (`simulator.schema_version`). Lines are in the order in which simulations ended.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from simulator.loads.bounds import MOST_REQUESTS
from simulator.planning.targets import ERROR_RATE, TARGET_NAMES
from simulator.results.summary import Summary
from simulator.schema_version import FIRST, readable, stamp

SCHEMA_VERSION = 1

START = b'{"key"'  # of a line
MOST_BYTES = 1 << 20  # of a line
MOST = 1e15  # of a number in it
# of numbers that every result has, by `simulator.results.summary.Summary.flat`
NAMES = frozenset(TARGET_NAMES) - {ERROR_RATE}
NAMES |= {field.name for field in fields(Summary) if field.type in ("int", "float")} - {"held_rate"}

Result = dict[str, Any]


class SearchLogError(ValueError):
    """A file that is no such log. The message is one line."""


def _is_result(value: object) -> bool:
    """Whether it is a result as `simulator.planning.optimize.play` makes it."""
    if not isinstance(value, dict) or isinstance(value.get("refused"), str):
        return isinstance(value, dict)
    names, peak = value.get("numbers"), value.get("peak")
    return (
        _are_numbers(names, NAMES)
        and _are_numbers(value.get("figures"), frozenset(TARGET_NAMES))
        and "growth" in value
        and _is_number(value["growth"])
        and type(peak) is int
        and 0 <= peak <= MOST_REQUESTS
    )


def _are_numbers(values: object, names: frozenset[str]) -> bool:
    """Whether it is a group of numbers, some of which may be unknown, that has all the `names`."""
    return isinstance(values, dict) and names <= values.keys() and all(_is_number(value) for value in values.values())


def _is_number(value: object) -> bool:
    return value is None or (type(value) in (int, float) and not abs(cast(float, value)) > MOST)


class SearchLog:
    """What has been simulated, by key; in `path`, or only in memory without one."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises `SearchLogError`."""
        self._path = path
        self._known: dict[str, Result] = {}
        self._file = None
        if path is None:
            return
        whole = self._read(path) if path.exists() else 0
        self._file = path.open("ab")
        self._file.truncate(whole)  # a line that was cut off when its search was killed

    def _read(self, path: Path) -> int:
        """Bytes up to the end of the last whole line."""
        whole = 0
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES), b""), 1):
                place = f"{path}:{number}"
                if line.endswith(b"\n"):
                    self._take(line, place)
                    whole += len(line)
                elif len(line) == MOST_BYTES or line[: len(START)] != START[: len(line)]:
                    raise SearchLogError(f"{place}: not a result of a search; name another file")
        return whole

    def _take(self, line: bytes, place: str) -> None:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict) or not isinstance(key := entry.get("key"), str):
            raise SearchLogError(f"{place}: not a result of a search; name another file")
        try:
            readable(entry.get("schema_version", FIRST), SCHEMA_VERSION)
        except ValueError as error:
            raise SearchLogError(f"{place}: schema_version: {error}, or name another file") from None
        if not _is_result(entry.get("result")):
            raise SearchLogError(f"{place}: not a result of a search; name another file")
        self._known[key] = entry["result"]

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Result | None:
        return self._known.get(key)

    def add(self, key: str, result: Result) -> None:
        self._known[key] = result
        if self._file is not None:
            line = {"key": key} | stamp(SCHEMA_VERSION) | {"result": result}
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

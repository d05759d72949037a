"""Files of other tools as the values that they hold, and their fields read with one clear line for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from calibration.imports.stated import StatedLevel
    from simulator.results.run import Run

LARGEST = 512 << 20  # bytes; JSON takes about five times as much memory
MOST = 10_000_000  # tokens of a request, requests of a level: more is a slip
GREATEST = 1e19  # of any number; nanoseconds since 1970 are 2e18
LARGEST_YAML = 8 << 20  # bytes; reports are small, and reading YAML takes a minute for this much


class ImportFileError(ValueError):
    """A file that cannot be imported. The message is one line: the file, and what it is not."""


class NoRequestsError(ImportFileError):
    """A result file that holds aggregates and no requests: `calibration.imports.import_aggregates` reads it."""


@dataclass(frozen=True)
class Source:
    """A file and the JSON values or YAML documents that it holds, in order."""

    path: Path
    values: tuple[Any, ...]

    @property
    def first(self) -> Any:
        return self.values[0] if self.values else None

    def objects(self) -> list[Fields]:
        """Every object of the file: one after the other, one a line, or in a list."""
        found = self.first if len(self.values) == 1 and isinstance(self.first, list) else self.values
        numbered = len(found) > 1
        return [
            Fields(self.path, value, f"result {number}" if numbered else "")
            for number, value in enumerate(found, start=1)
            if isinstance(value, dict)
        ]

    def beside(self, name: str) -> Fields | None:
        """The first object of the file `name` in the same folder, None where there is none."""
        path = self.path.with_name(name)
        if not path.is_file():
            return None
        objects = read_source(path).objects()
        return objects[0] if objects else None


@dataclass(frozen=True)
class Format:
    """A tool's result files.

    Attributes
        name: what ``--format`` calls it
        tool: the tool and the file, in words
        recognises: whether a file is one, by its content
        requests: reads levels with a row for every request; None where such files never have them
        stated: reads what the file states of its levels without their requests
    """

    name: str
    tool: str
    recognises: Callable[[Source], bool]
    requests: Callable[[Source], Run] | None
    stated: Callable[[Source], list[StatedLevel]] | None


@dataclass(frozen=True)
class Fields:
    """An object in a file. Numbers must be finite and not negative; whatever is not raises `ImportFileError`."""

    path: Path
    data: Mapping[str, Any]
    place: str = ""  # where in the file

    def problem(self, name: str, what: str) -> ImportFileError:
        place = f"{self.place}, " if self.place else ""
        return ImportFileError(f"{self.path}: {place}{name!r} {what}")

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def get(self, name: str) -> Any:
        if name not in self:
            raise self.problem(name, "is missing")
        return self.data[name]

    def real(self, name: str) -> float:
        return self._number(name, self.get(name))

    def real_or(self, name: str, otherwise: float) -> float:
        return self.real(name) if name in self else otherwise

    def count(self, name: str) -> int:
        return self._count(name, self.real(name))

    def positive(self, name: str) -> float:
        value = self.real(name)
        if not value:
            raise self.problem(name, "must not be 0")
        return value

    def one_or_more(self, name: str) -> int:
        value = self.count(name)
        if not value:
            raise self.problem(name, "must be at least 1, got 0")
        return value

    def counts(self, name: str) -> list[int]:
        return [self._count(f"{name}[{number}]", value) for number, value in enumerate(self.reals(name))]

    def text(self, name: str) -> str:
        """A text, empty where it is not given."""
        value = self.data.get(name)
        return value if isinstance(value, str) else ""

    def reals(self, name: str) -> list[float]:
        return [self._number(f"{name}[{number}]", value) for number, value in enumerate(self._list(name))]

    def lists(self, name: str) -> list[list[float]]:
        """A list of lists of numbers."""
        inner = [Fields(self.path, {name: values}, self.place) for values in self._list(name)]
        return [fields.reals(name) for fields in inner]

    def texts(self, name: str) -> list[str]:
        return ["" if value is None else str(value) for value in self._list(name)]

    def section(self, name: str) -> Fields:
        value = self.get(name)
        if not isinstance(value, dict):
            raise self.problem(name, "must be an object")
        return Fields(self.path, value, f"{self.place}.{name}" if self.place else name)

    def section_or_empty(self, *names: str) -> Fields:
        """The section down a path of names, empty where it is not there."""
        found = self
        for name in names:
            value = found.data.get(name)
            found = Fields(self.path, value if isinstance(value, dict) else {}, name)
        return found

    def sections(self, name: str) -> list[Fields]:
        """The objects of a list, none where it is not given."""
        values = self._list(name) if name in self else []
        return [
            Fields(self.path, value, f"{self.place + '.' if self.place else ''}{name}[{number}]")
            for number, value in enumerate(values)
            if isinstance(value, dict)
        ]

    def _list(self, name: str) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list):
            raise self.problem(name, "must be a list")
        return value

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.problem(name, f"must be a number, got {str(value)[:40]!r}")
        if not 0 <= value <= GREATEST:
            raise self.problem(name, f"must be a finite number that is not negative, got {value}")
        return float(value)

    def _count(self, name: str, value: float) -> int:
        if value != int(value) or value > MOST:
            raise self.problem(name, f"must be a whole number up to {MOST:,}, got {value:g}")
        return int(value)


def read_source(path: str | Path) -> Source:
    """Read a file of JSON values (one, several in a row, one a line) or YAML. Raises `ImportFileError`."""
    path = Path(path)
    if path.is_dir():
        raise ImportFileError(f"{path}: a folder; give the result files in it")
    if not path.exists():
        raise ImportFileError(f"{path}: no such file")
    size = path.stat().st_size
    if size > LARGEST:
        raise ImportFileError(f"{path}: {size >> 20} MiB; files up to {LARGEST >> 20} MiB are read")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ImportFileError(f"{path}: not a text file in UTF-8") from None
    if not text.strip():
        raise ImportFileError(f"{path}: empty")
    try:
        return Source(path, tuple(_json_values(path, text) if text.lstrip()[0] in "{[" else _yaml_values(path, text)))
    except RecursionError:
        raise ImportFileError(f"{path}: nested too deeply for a result file") from None


def _json_values(path: Path, text: str) -> Iterator[Any]:
    """JSON values one after the other; NaN and Infinity are read, as some tools write them."""
    decoder, position = json.JSONDecoder(), 0
    while True:
        while position < len(text) and text[position].isspace():
            position += 1
        if position == len(text):
            return
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ImportFileError(f"{path}, line {error.lineno}: not JSON ({error.msg}); is the file whole?") from None
        yield value


def _yaml_values(path: Path, text: str) -> list[Any]:
    if len(text) > LARGEST_YAML:
        raise ImportFileError(
            f"{path}: {len(text) >> 20} MiB and not JSON; YAML is read up to {LARGEST_YAML >> 20} MiB"
        )
    try:
        return list(yaml.safe_load_all(text))
    except (yaml.YAMLError, ValueError):
        raise ImportFileError(f"{path}: neither JSON nor YAML") from None

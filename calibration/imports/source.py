"""Files of other tools as the values that they hold, and their fields read with one clear line for what is wrong."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from calibration.foreign_text import one_line
from simulator.loads.bounds import LEAST_BURSTINESS, LEAST_RATE, MOST_RATE, MOST_TOKENS

if TYPE_CHECKING:
    pass

LARGEST = 512 << 20  # bytes
LARGEST_YAML = 8 << 20  # bytes; reports are small, and reading YAML takes a minute for this much
MOST_MEMORY = 2 << 30  # bytes that the values of a file may take
MOST_SHARED = 1_000_000  # values of a YAML file with every alias written out
MOST = MOST_TOKENS  # of a request, and requests of a level: more is a slip
GREATEST = 1e19  # of any number; nanoseconds since 1970 are 2e18


class ImportFileError(ValueError):
    """A file that cannot be imported. The message is one line: the file, and what it is not."""


class NoRequestsError(ImportFileError):
    """A result file that holds aggregates and no requests: `calibration.imports.import_aggregates` reads it."""


class ImplausibleError(ValueError):
    """What no load can have done. The message is the end of a line that begins with the file."""


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

    def rate(self, name: str) -> float:
        """Requests a second, such as an open loop may have."""
        return self._within(name, LEAST_RATE, MOST_RATE)

    def burstiness(self, name: str) -> float:
        return self._within(name, LEAST_BURSTINESS, 1e9)

    def _within(self, name: str, low: float, high: float) -> float:
        value = self.real(name)
        if not low <= value <= high:
            raise self.problem(name, f"must be between {low:g} and {high:g}, got {value:g}")
        return value

    def counts(self, name: str) -> list[int]:
        return [self._count(f"{name}[{number}]", value) for number, value in enumerate(self.reals(name))]

    def text(self, name: str) -> str:
        """A text on one line, empty where it is not given."""
        return one_line(self.words(name))

    def words(self, name: str) -> str:
        """A text as it is, of any length and many lines."""
        value = self.data.get(name)
        return value if isinstance(value, str) else ""

    def size(self, name: str) -> int | None:
        """A whole number from 1 on, also one written as text; None for anything else."""
        return size_in(self.data.get(name))

    def reals(self, name: str) -> list[float]:
        return [self._number(f"{name}[{number}]", value) for number, value in enumerate(self._list(name))]

    def lists(self, name: str) -> list[list[float]]:
        """A list of lists of numbers."""
        inner = [Fields(self.path, {name: values}, self.place) for values in self._list(name)]
        return [fields.reals(name) for fields in inner]

    def texts(self, name: str) -> list[str]:
        """A list of texts, null as an empty one."""
        return [
            value if isinstance(value, str) else "" if value is None else shown(value) for value in self._list(name)
        ]

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
            raise self.problem(name, f"must be a number, got {shown(value)}")
        if not 0 <= value <= GREATEST:
            raise self.problem(name, f"must be a finite number that is not negative, got {shown(value)}")
        return float(value)

    def _count(self, name: str, value: float) -> int:
        if value != int(value) or value > MOST:
            raise self.problem(name, f"must be a whole number up to {MOST:,}, got {value:g}")
        return int(value)


def shown(value: object) -> str:
    """A value as an error names it."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return one_line(repr(value[:80] if isinstance(value, str) else value), 60)


def size_in(value: object) -> int | None:
    """A whole number from 1 on, also one written as text; None for anything else."""
    if isinstance(value, str):
        value = int(value) if re.fullmatch("[0-9]{1,15}", value) else None
    return value if type(value) is int and 1 <= value < 10**15 else None


def iso_time(seconds: float) -> str:
    """Seconds since 1970 as a date in UTC; empty for what is none."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return ""


def read_source(path: str | Path) -> Source:
    """Read a file of JSON values (one, several in a row, one a line) or YAML. Raises `ImportFileError`."""
    path = Path(path)
    content = _content(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ImportFileError(f"{path}: not a text file in UTF-8") from None
    if not text.strip():
        raise ImportFileError(f"{path}: empty")
    try:
        if text.lstrip()[0] not in "{[":
            return Source(path, tuple(_yaml_values(path, text)))
        _check_memory(path, content)
        del content
        return Source(path, tuple(_json_values(path, text)))
    except RecursionError:
        raise ImportFileError(f"{path}: nested too deeply for a result file") from None


def _content(path: Path) -> bytearray:
    """All bytes of a file, of a pipe too."""
    content = bytearray()
    try:
        if path.is_dir():
            raise ImportFileError(f"{path}: a folder; give the result files in it")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while size <= LARGEST and (piece := file.read(1 << 20)):
                content += piece
                size = max(size, len(content))
    except FileNotFoundError:
        raise ImportFileError(f"{path}: no such file") from None
    except OSError as problem:
        raise ImportFileError(f"{path}: cannot be read ({problem.strerror})") from None
    if size > LARGEST:
        raise ImportFileError(f"{path}: {size >> 20} MiB; files up to {LARGEST >> 20} MiB are read")
    return content


def _check_memory(path: Path, content: bytearray) -> None:
    """Refuse JSON whose values would fill the memory: a small file can hold very many empty lists."""
    needed = 48 * content.count(b",") + 64 * content.count(b"[") + 240 * content.count(b"{")
    if needed > MOST_MEMORY:
        raise ImportFileError(
            f"{path}: its values may take {needed >> 20} MiB of memory; up to {MOST_MEMORY >> 20} MiB are read"
        )


class _TwiceError(ValueError):
    """A key that an object gives twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(shown(next(name for name in names if names.count(name) > 1)))
    return found


def _json_values(path: Path, text: str) -> Iterator[Any]:
    """JSON values one after the other; NaN and Infinity are read, as some tools write them."""
    decoder, position = json.JSONDecoder(object_pairs_hook=_object), 0
    while True:
        while position < len(text) and text[position].isspace():
            position += 1
        if position == len(text):
            return
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ImportFileError(f"{path}, line {error.lineno}: not JSON ({error.msg}); is the file whole?") from None
        except _TwiceError as error:
            raise ImportFileError(f"{path}: an object has {error} twice; which one is meant?") from None
        except ValueError:
            raise ImportFileError(f"{path}: holds a number with thousands of digits") from None
        yield value


class _Loader(yaml.SafeLoader):
    """Dates stay text, and nothing is merged into a mapping, which could double it again and again."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.constructor.ConstructorError(None, None, "merge keys are not read", node.start_mark)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _yaml_values(path: Path, text: str) -> list[Any]:
    if len(text) > LARGEST_YAML:
        raise ImportFileError(
            f"{path}: {len(text) >> 20} MiB and not JSON; YAML is read up to {LARGEST_YAML >> 20} MiB"
        )
    try:
        values = list(yaml.load_all(text, _Loader))  # a loader of plain values
    # PyYAML's own constructors raise all of these for a value that does not fit its tag
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError):
        raise ImportFileError(f"{path}: neither JSON nor YAML") from None
    if _written_out(values, {}) > MOST_SHARED:
        raise ImportFileError(f"{path}: its aliases stand for more than {MOST_SHARED:,} values")
    return values


def _written_out(value: Any, known: dict[int, float]) -> float:
    """How many values a tree has where each alias is written out; infinitely many where one lies within itself."""
    if not isinstance(value, (dict, list, set, tuple)):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf
        parts = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_written_out(part, known) for part in parts)
    return known[id(value)]

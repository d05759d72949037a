"""Results of simulations in a file, one line of JSON each, so that an interrupted search goes on where it was.

A line is found again by what was simulated and not by its place, so any search may use the file of any other.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Result = dict[str, Any]


class SearchLogError(ValueError):
    """A file that is no such log. The message is one line."""


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
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                entry = json.loads(line)
                self._known[entry["key"]] = entry["result"]
            except (ValueError, KeyError, TypeError):
                raise SearchLogError(f"{path}:{number}: not a result of a search; name another file") from None
        if content and not whole and not content.startswith(b'{"key"'):
            raise SearchLogError(f"{path}: not a file of search results; name another file")
        return whole

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Result | None:
        return self._known.get(key)

    def add(self, key: str, result: Result) -> None:
        self._known[key] = result
        if self._file is not None:
            self._file.write(json.dumps({"key": key, "result": result}).encode() + b"\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

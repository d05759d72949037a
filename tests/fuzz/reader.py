"""What a fuzzed reader is: seeds that it reads, how it is asked, and the errors that it may answer with."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Reader:
    """A reader of the project that anyone's bytes may reach.

    Attributes
        name: what reports call it
        seeds: makes inputs that are in order, or nearly so; mutations start from these
        read: reads one input and takes it one step on, so that what was accepted is used too
        errors: what it may raise; the message must be one printable line
        slow: reads that take over some milliseconds; fewer inputs are tried where time is short
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    slow: bool = False


def of_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Reads bytes as the content of a file called `name`."""

    def read_bytes(content: bytes) -> object:
        path = scratch() / name
        path.write_bytes(content)
        return read(path)

    return read_bytes


def of_text(read: Callable[[str], object]) -> Callable[[bytes], object]:
    """Reads bytes as Python gives what was typed: undecodable bytes become lone surrogates, and there is no NUL."""
    return lambda content: read(content.replace(b"\0", b"").decode("utf-8", "surrogateescape"))


@cache
def scratch() -> Path:
    """A folder of this process, gone at its end."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder

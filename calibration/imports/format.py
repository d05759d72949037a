"""A kind of result file: how to tell it, and how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from calibration.imports.source import Source
from calibration.imports.stated import StatedLevel
from simulator.results.run import Run


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

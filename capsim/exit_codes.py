"""How ``capsim`` ends: the one place for its exit codes."""

from __future__ import annotations

from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """A code for scripts, and what it means."""

    DONE = 0, "done"
    FAILED = 1, "failed; one line on stderr, `error: ...`, says why and what to do"
    USAGE = 2, "wrong usage, likewise"
    DRIFTED = 3, "`validate --drift`: the server has drifted away from its profile"
    UNCLEAR = 4, "`validate --drift`: the measurement was too disturbed to tell"
    INTERRUPTED = 130, "interrupted, by Ctrl-C or SIGTERM; what was measured is kept"

    meaning: str

    def __new__(cls, value: int, meaning: str) -> Self:
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code

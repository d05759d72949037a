"""One input read under bounds of time and memory, and what is wrong with how it went."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from capsim.errors import user_message
from tests.fuzz.mutations import mutate
from tests.fuzz.reader import Reader

MOST_SECONDS = 2.0  # of CPU time
LONGEST_WAIT = 60.0  # seconds by the clock, for what waits instead of computing
MOST_MEMORY = 1 << 30  # bytes of address space beyond what the process has
LONGEST_MESSAGE = 500  # characters

Verdict = Literal["accepted", "rejected", "found"]


@dataclass(frozen=True)
class Outcome:
    """What came of an input. `told` is the reader's message, or what is wrong; `place` the innermost line of ours."""

    verdict: Verdict
    told: str
    place: str
    seconds: float


class TooLong(BaseException):
    """The reader took longer than it may. No `except Exception` of the reader can hold it."""


def inputs(reader: Reader, run: str, numbers: range) -> Iterator[tuple[int, bytes]]:
    """Inputs by number. The first ones are the seeds themselves; the same run makes the same inputs."""
    seeds = list(reader.seeds())
    for number in numbers:
        rng = random.Random(f"{run}/{reader.name}/{number}")
        yield number, seeds[number] if number < len(seeds) else mutate(rng, rng.choice(seeds), seeds)


def check(reader: Reader, content: bytes) -> Outcome:
    """Read `content`, and judge how it went."""
    began = time.process_time()
    verdict, told, place = _judged(reader, content)
    return Outcome(verdict, told, place, time.process_time() - began)


def _judged(reader: Reader, content: bytes) -> tuple[Verdict, str, str]:
    try:
        with _bounds(), warnings.catch_warnings():
            warnings.simplefilter("error")  # a user would see it on the screen
            reader.read(content)
    except reader.errors as error:
        return _judged_message(error)
    except TooLong as error:
        return "found", f"takes over {MOST_SECONDS:g} s", _place(error)
    except MemoryError as error:
        return "found", f"takes over {MOST_MEMORY >> 20} MiB", _place(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "found", f"{type(error).__name__}: {error}"[:300], _place(error)
    return "accepted", "", ""


def _judged_message(error: Exception) -> tuple[Verdict, str, str]:
    """What the user is told, which must be his language."""
    message = user_message(error)
    if message is None:
        return "found", f"{type(error).__name__} is no error of ours: {error}"[:300], _place(error)
    for wrong, reason in (
        (not message.strip(), "an empty message"),
        (len(message) > LONGEST_MESSAGE, f"a message of {len(message)} characters"),
        ("\n" in message, "a message of several lines"),
        (_PYTHONIC.search(message), "a message in Python's words"),
    ):
        if wrong:
            return "found", f"{reason}: {message[:300]!r}", _place(error)
    return "rejected", message, ""


# what Python, NumPy and pydantic say to programmers
_PYTHONIC = re.compile(
    r"Traceback| object at 0x|NoneType|unhashable|indices must be|Input should be (?!a valid|greater|less)|recursion|"
    r"could not convert|invalid literal|math domain|not subscriptable|unsupported operand|has no attribute|"
    r"not iterable|unpack|digits\) for integer|positional argument|keyword argument|<class '|codec can't|out of bounds|"
    r"inhomogeneous|Python int|must be real number"
)


def _place(error: BaseException) -> str:
    """The innermost line of the project's own that the error came through."""
    root = Path(__file__).parents[2]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if any(f"{root / name}/" in frame.filename for name in _PACKAGES)]
    frame = (ours or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"


_PACKAGES = ("simulator", "calibration", "capsim", "tests/fuzz")


@contextlib.contextmanager
def _bounds() -> Iterator[None]:
    """Raises `TooLong` or `MemoryError` inside where time or memory run out."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = [(number, signal.signal(number, stop)) for number in (signal.SIGPROF, signal.SIGALRM)]
    with _memory():
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, LONGEST_WAIT)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before:
                signal.signal(number, handler)


@contextlib.contextmanager
def _memory() -> Iterator[None]:
    """Bounds the address space where the system tells how much is in use (Linux)."""
    in_use = Path("/proc/self/statm")
    if not in_use.exists():
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    most = int(in_use.read_text().split()[0]) * resource.getpagesize() + MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

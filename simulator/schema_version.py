"""What every file of capsim says of itself: the version of its form, and which capsim wrote it.

`schema_version` alone decides how a file is read. Each kind of file counts its own, and it goes up when an older capsim
would refuse the new form or take it for something else; what it may leave out, such as a further column of a run,
changes nothing. `capsim_version` tells people where a file comes from and decides nothing.
"""

from __future__ import annotations

from simulator import __version__

FIRST = 1  # what a file is that does not say


def stamp(version: int) -> dict[str, object]:
    """What a file of JSON begins with."""
    return {"schema_version": version, "capsim_version": __version__}


def readable(version: object, newest: int) -> int:
    """The `schema_version` that a file states, where it is one of 1 to `newest`. Raises `ValueError`, in one line."""
    shown = str(version)[:40]
    if type(version) is not int:
        raise ValueError(f"must be a whole number such as {newest}, got {shown!r}")
    if version > newest:
        raise ValueError(f"{shown} was written by a newer capsim, this one reads up to {newest}: upgrade capsim")
    if version < FIRST:
        raise ValueError(f"{shown} is not known, the first one was {FIRST}")
    return version

"""Which errors are messages to the user, and how they read: one line."""

from __future__ import annotations

from capsim.terminal import printable

OURS = ("capsim", "calibration", "simulator")
LONGEST = 400  # characters of a message: what it quotes may be a whole file


class CommandError(Exception):
    """A command that cannot do what it was asked to. The message is one line."""


def user_message(error: Exception) -> str | None:
    """The line to tell the user, None for an error that is a bug and needs its traceback.

    Every exception class of our own says in one line what is wrong and what to do. Those of the command-line parser
    have a `format_message`.
    """
    if hasattr(error, "format_message"):
        text = str(error.format_message())
    elif type(error).__module__.partition(".")[0] in OURS:
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        return None
    return _shortened(printable(" ".join(text.split())))


def _shortened(text: str) -> str:
    """A message with the middle left out where it is very long: what is wrong comes first, what to do last."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 155]} ... {text[-150:]}"

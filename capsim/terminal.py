"""Text for a screen. Names come from servers and files: what would move a cursor or turn text around is written out."""

from __future__ import annotations

import re

import typer

# Control characters but for tab and newline, those that change the direction of text or break a line, and halves of a
# pair, which no file can hold.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
# What a spreadsheet takes for a formula; flags such as --max-num-seqs=64 are none, and neither is a number.
_FORMULA = re.compile(r"(?!-?-[a-z][a-z-]*([ =][\w.-]+)*$|[-+][\d.]+(e[-+]?\d+)?$)[=+\-@\t\r]", re.IGNORECASE)


def printable(text: str) -> str:
    r"""`text` with each such character as its escape: ``\x1b`` for that which begins a terminal's commands."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_json(text: str) -> str:
    """JSON with each such character, which can stand in a string only, as JSON's escape: the values are the same."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def harmless_cell(value: object) -> object:
    """The cell of a table of comma-separated values: a quote before what a spreadsheet would take for a formula."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print `text` to standard output or, with `err`, to standard error."""
    typer.echo(printable(text), err=err, nl=nl)

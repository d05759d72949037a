"""Words of servers and files, as they may be kept and shown."""

from __future__ import annotations

LONGEST = 200  # characters of a text that is kept


def one_line(text: str, most: int = LONGEST) -> str:
    """`text` on one line that any terminal and file can hold, cut after `most` characters."""
    text = text[: 20 * most]
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else " " for letter in text)
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."

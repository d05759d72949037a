"""Keys and passwords stay out of all that is shown or kept, also where a server repeats them."""

from __future__ import annotations

import os
import re
from itertools import takewhile
from typing import Any

SHORTEST = 8  # characters of a key that is looked for: a shorter one would be found inside ordinary words
HIDDEN = "***"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)


def without_key(text: str, key: str | None) -> str:
    """`text` without `key`, and without the beginnings of it that are left where a text was cut off."""
    if not key or len(key) < SHORTEST:
        return text
    kept, at = "", 0
    while (found := text.find(key[:SHORTEST], at)) >= 0:
        kept += text[at:found] + HIDDEN
        at = found + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(key, text[found:], strict=False)))
    return kept + text[at:]


def keepable(value: Any, key: str | None) -> Any:
    """A JSON value from a server with texts that may be kept: without `key`, and such that a file can hold them."""
    if isinstance(value, str):
        return without_key(value.encode(errors="replace").decode(), key)  # half a pair of UTF-16 becomes "?"
    if isinstance(value, list):
        return [keepable(one, key) for one in value]
    if isinstance(value, dict):
        return {keepable(name, key): keepable(one, key) for name, one in value.items()}
    return value


def shown_url(url: str) -> str:
    """An address as it may be shown: without user, password, query and fragment."""
    return re.sub(r"^((?:[\w+.-]*:)?//)?.*@", r"\1", re.split("[?#]", url, maxsplit=1)[0])


def environment_without_secrets() -> dict[str, str]:
    """Our environment for a process that needs no secret of it."""
    return {name: value for name, value in os.environ.items() if not _SECRET_NAME.search(name)}

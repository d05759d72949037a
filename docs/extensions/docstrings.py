"""Reads capsim's docstrings for the API reference: a paragraph ``Attributes`` becomes a section."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

SECTION = re.compile(r"^Attributes$", re.MULTILINE)


class Docstrings(Extension):
    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = SECTION.sub("Attributes:", obj.docstring.value).replace("``", "`")

"""A report as one self-contained page. Whatever comes from a server or a file is escaped by the template."""

from __future__ import annotations

import base64
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from capsim.figures.style import COLOURS, Drawing, as_inline_svg
from capsim.report.content import Report
from capsim.terminal import printable

HERE = Path(__file__).resolve().parent


def as_page(report: Report) -> str:
    """The page; the same report gives the same bytes."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        finalize=_literal,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    page = environment.get_template("page.html.j2")
    script = _own("page.js")
    return page.render(
        report=report,
        style=_own("page.css"),
        script=script,
        script_hash=base64.b64encode(sha256(f"\n{script}\n".encode()).digest()).decode(),
        colours=COLOURS,
        svg=_inline,
    )


def _literal(value: object) -> object:
    """A text of the page that shows every character of it; what is markup of ours stays as it is."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _own(name: str) -> Markup:
    """A file of this package, which needs no escaping."""
    return Markup((HERE / name).read_text(encoding="utf-8"))  # noqa: S704 - nothing of it comes from outside


def _inline(drawing: Drawing, section: int) -> Markup:
    """A figure as an element; matplotlib and ElementTree have escaped its texts."""
    return Markup(as_inline_svg(drawing, f"s{section}-{drawing.name}"))  # noqa: S704

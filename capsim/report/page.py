"""A report as one self-contained page. Whatever comes from a server or a file is escaped by the template."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from capsim.figures.style import COLOURS, Drawing, as_inline_svg
from capsim.report.content import Report

HERE = Path(__file__).resolve().parent


def as_page(report: Report) -> str:
    """The page; the same report gives the same bytes."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    page = environment.get_template("page.html.j2")
    return page.render(report=report, style=_own("page.css"), script=_own("page.js"), colours=COLOURS, svg=_inline)


def _own(name: str) -> Markup:
    """A file of this package, which needs no escaping."""
    return Markup((HERE / name).read_text(encoding="utf-8"))  # noqa: S704 - nothing of it comes from outside


def _inline(drawing: Drawing, section: int) -> Markup:
    """A figure as an element; matplotlib and ElementTree have escaped its texts."""
    return Markup(as_inline_svg(drawing, f"s{section}-{drawing.name}"))  # noqa: S704

"""A report as files: the page, and beside it figures, tables and Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from capsim.figures.style import Drawing, as_png, as_svg
from capsim.report.content import Report
from capsim.report.page import as_page
from capsim.report.tables import Cell, DataTable
from capsim.terminal import printable

FORMATS = ("html", "png", "svg", "csv", "md")


class ReportFileError(ValueError):
    """A place where a report cannot be written. The message is one line."""


def check_page(page: Path, formats: Sequence[str], overwrite: bool = False) -> None:
    """Raise `ReportFileError` where the page cannot be written."""
    if page.is_dir():
        raise ReportFileError(f"{page} is a folder; name a file for the report, such as {page}/report.html")
    if not page.parent.is_dir():
        raise ReportFileError(f"{page} cannot be written: there is no folder {page.parent}")
    if "html" in formats and page.exists() and not overwrite:
        raise ReportFileError(f"{page} is there already; choose another file or add --overwrite")


def write_report(report: Report, page: Path, formats: Sequence[str], overwrite: bool = False) -> list[Path]:
    """Write `report` in some of `FORMATS`, and say which files were written.

    The page goes to `page`; other files lie beside it and begin with its name. Raises `ReportFileError` before
    anything is written.
    """
    check_page(page, formats, overwrite)
    content = dict(_files(report, page, formats))
    there = [path for path in content if path.exists()]
    if there and not overwrite:
        raise ReportFileError(f"{there[0]} is there already; choose another file or add --overwrite")
    for path, data in content.items():
        path.write_bytes(data)
    return list(content)


def _files(report: Report, page: Path, formats: Sequence[str]) -> Iterator[tuple[Path, bytes]]:
    if "html" in formats:
        yield page, as_page(report).encode()
    for name, drawing in _named(report):
        if "svg" in formats:
            yield _beside(page, f"{name}.svg"), as_svg(drawing).encode()
        if "png" in formats:
            yield _beside(page, f"{name}.png"), as_png(drawing)
    if "csv" in formats:
        for table in report.tables:
            yield _beside(page, f"{table.name}.csv"), table.csv().encode()
    if "md" in formats:
        picture = next((kind for kind in ("svg", "png") if kind in formats), None)
        yield _beside(page, "md", "."), as_markdown(report, page.stem, picture).encode()


def _named(report: Report) -> Iterator[tuple[str, Drawing]]:
    """The figures with names that differ: those of a second kind of load have its number."""
    for number, section in enumerate(report.sections, start=1):
        for drawing in section.drawings:
            yield f"{drawing.name}{f'-{number}' if number > 1 else ''}", drawing


def _beside(page: Path, name: str, joint: str = "-") -> Path:
    return page.with_name(f"{page.stem}{joint}{name}")


def as_markdown(report: Report, stem: str, picture: str | None) -> str:
    """The report as Markdown; its figures are linked where they are written as `picture`, "svg" or "png"."""
    conclusion = report.conclusion
    tiles = "; ".join(f"{label} {_with_interval(cell)}" for label, cell in conclusion.tiles)
    lines = [f"# {_plain(report.title)}", _plain(report.subtitle), f"**{_plain(conclusion.headline)}.** "
             f"{_plain(conclusion.reason)} {_plain(tiles)}.", f"**Ceiling.** {_plain(conclusion.ceiling)}"]  # fmt: skip
    if conclusion.advice:
        lines.append(f"**What limits.** {_plain(conclusion.advice.limits)}")
        lines.append(f"**What to change next.** {_plain(conclusion.advice.change)}")
        lines += [_code(conclusion.advice.command)] if conclusion.advice.command else []
    if picture:
        for name, drawing in _named(report):
            lines.append(f"![{_plain(drawing.title)}]({stem}-{name}.{picture})\n\n{_plain(drawing.caption)}")
    lines += [f"## {table.title}\n\n{_markdown_table(table)}" for table in report.tables]
    for title, facts in report.facts.items():
        lines.append(f"## {title}\n\n" + "\n".join(f"- {_plain(fact.name)}: {_plain(fact.text)}" for fact in facts))
    lines.append("## Provenance and trust\n\n" + "\n".join(f"- {_plain(sentence)}" for sentence in report.trust))
    lines.append(
        "## Definitions\n\n" + "\n".join(f"- {_plain(name)}: {_plain(text)}" for name, text in report.definitions)
    )
    return "\n\n".join(lines) + "\n"


def _markdown_table(table: DataTable) -> str:
    heads = [_plain(column.head) for column in table.columns]
    rules = ["---:" if column.is_number else "---" for column in table.columns]
    lines = [_row(heads), _row(rules)]
    for number, row in enumerate(table.rows):
        cells = [_plain(_with_interval(cell)) for cell in row]
        lines.append(_row([f"**{cell}**" for cell in cells] if number in table.marked else cells))
    return "\n".join(lines)


def _code(command: str) -> str:
    """A command as a block, behind a fence that nothing in it can close."""
    longest = max(map(len, re.findall("`+", command)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}sh\n{printable(command)}\n{fence}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _with_interval(cell: Cell) -> str:
    return f"{cell.text} ({cell.between})" if cell.between else cell.text


def _plain(text: str) -> str:
    """Text that Markdown and HTML take for nothing else."""
    for sign in "\\`*_[]<>|#!$&~":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(printable(text).split())

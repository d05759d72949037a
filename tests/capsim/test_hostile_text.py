"""What comes from a server or a file stays text: in a report of any form, and on a terminal."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from hostile_run import FILE_NAME, HOSTILE, SEEN, write_hostile
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from typer.testing import CliRunner, Result

from capsim.cli import app
from capsim.errors import CommandError, user_message
from capsim.figures.style import as_inline_svg, as_png, as_svg, new_drawing, styled
from capsim.report.files import _code
from capsim.tables import console
from capsim.terminal import harmless_cell, printable, printable_json
from simulator.profile import Profile

# control characters but for newline, what turns text around, and halves of pairs
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
ANYTHING = st.text(st.characters(codec=None), max_size=60)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert not result.exception or isinstance(result.exception, SystemExit), repr(result.exception)
    return result


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A hostile run and its profile."""
    from conftest import PROFILE

    folder = tmp_path_factory.mktemp("hostile")
    (folder / "plain.yaml").write_text(PROFILE)
    return write_hostile(folder, Profile.load(folder / "plain.yaml"))


@pytest.fixture(scope="module")
def reported(written: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a report on it, in every form."""
    folder = tmp_path_factory.mktemp("report")
    saved, profile = written
    result = run("report", saved, "--profile", profile, "-o", folder / "r.html", "--format", "html,png,svg,csv,md")
    assert result.exit_code == 0, result.output + result.stderr
    return folder


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text outside of styles and scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


# --- the report


def test_a_page_has_no_element_and_no_attribute_but_ours(reported: Path) -> None:
    page = (reported / "r.html").read_text()
    elements = Elements(page)
    tags = [tag for tag, _ in elements.found]
    assert (tags.count("script"), tags.count("title")) == (1, 1)
    assert tags.count("style") == 1 + tags.count("svg"), "of the page, and one that matplotlib writes into a figure"
    assert not {"img", "iframe", "object", "embed", "base", "form", "link", "a"} & set(tags)
    names = {name for _, attributes in elements.found for name in attributes}
    assert not [name for name in names if name.startswith("on")]
    links = [attributes[name] or "" for _, attributes in elements.found for name in attributes if "href" in name]
    assert all(link.startswith("#") for link in links)
    assert elements.text.count(SEEN) > 5, "it is there to be read, to the letter"


def test_a_page_may_run_its_own_script_alone_and_ask_nothing(reported: Path) -> None:
    page = (reported / "r.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    directives = dict(part.strip().split(" ", 1) for part in policy[1].split(";"))
    assert directives["default-src"] == directives["base-uri"] == directives["form-action"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", directives["script-src"])


def test_no_file_of_a_report_holds_what_a_terminal_obeys(reported: Path) -> None:
    texts = {path.name: path.read_text() for path in reported.iterdir() if path.suffix != ".png"}
    assert {Path(name).suffix for name in texts} == {".html", ".svg", ".csv", ".md"}
    assert {name: OBEYED.findall(text) for name, text in texts.items() if OBEYED.search(text)} == {}


def test_figures_are_well_formed_and_hold_nothing_but_shapes_and_text(reported: Path) -> None:
    for path in reported.glob("*.svg"):
        tags = {element.tag.rpartition("}")[2] for element in ET.parse(path).iter()}
        assert not tags & {"script", "foreignObject", "image", "a", "animate", "set"}


def test_cells_are_no_formulas(reported: Path) -> None:
    for path in reported.glob("*.csv"):
        rows = list(csv.reader(io.StringIO(path.read_text())))
        assert len({len(row) for row in rows}) == 1
        assert [cell for row in rows for cell in row if cell[:1] in ("=", "+", "@", "\t")] == []


def test_markdown_holds_no_html_and_its_tables_keep_their_columns(reported: Path) -> None:
    text = (reported / "r.md").read_text()
    plain = re.sub(r"^(`{3,})sh\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"(?<!\\)<", plain)
    assert not re.search(r"(?<!\\)\]\((?!r-)", plain), "no links but those to its figures"
    for table in re.findall(r"(?:^\|.*\n)+", plain, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


@pytest.mark.parametrize("command", ["x", "a ``` b", "a\n```\n<script>", "`````"])
def test_a_block_of_code_ends_where_its_command_does(command: str) -> None:
    fence = _code(command).partition("sh\n")[0]
    assert re.findall(f"^{fence}`*$", _code(command), re.MULTILINE) == [fence]


@pytest.mark.parametrize("title", [HOSTILE, "half \ud800 a pair", "$x$ \\frac{1}{2} %s {}", ""])
def test_any_text_can_stand_in_a_figure(title: str) -> None:
    tip = title
    with styled():
        drawing = new_drawing("figure", title)
        drawing.axes.plot([1, 2], [1, 2], label=tip or "x")
        drawing.legend()
        drawing.caption = tip
    inline = as_inline_svg(drawing, "one")
    for text in (inline, as_svg(drawing)):
        assert "script" not in {element.tag for element in ET.fromstring(text.encode()).iter()}
        assert not OBEYED.search(text)
    assert as_png(drawing).startswith(b"\x89PNG")


# --- the terminal


FEW = ("--num-prompts", "4", "--input-len", "64", "--output-len", "8", "--no-intervals")
DATA = ("validate", "predict", "what-if")
COMMANDS: list[tuple[str, ...]] = [
    ("report", "RUN", "-o", "nowhere/x.html"),
    ("validate", "RUN", "--profile", "PROFILE"),
    ("explain", "RUN", "--profile", "PROFILE", "--level", "C=1"),
    ("calibrate", "--from", "RUN", "-o", "OUT/p.yaml", "--hold-out", "0"),
    ("predict", "--profile", "PROFILE", "--concurrency", "1", *FEW),
    ("what-if", "--profile", "PROFILE", "--alt", f"name={FILE_NAME!r} --max-num-seqs 2", "--concurrency", "1", *FEW),
    ("import", "RUN", "-o", "OUT/i"),
    ("simulate", FILE_NAME),
    ("simulate", "SCENARIO"),
    ("doctor", "--endpoint", f"http://{FILE_NAME}:1"),
]


def in_folder(command: tuple[str, ...], written: tuple[Path, Path], folder: Path) -> Iterator[str]:
    places = {"RUN": str(written[0]), "PROFILE": str(written[1]), "SCENARIO": str(folder / "s.yaml")}
    for word in command:
        yield places.get(word, word.replace("OUT", str(folder)))


@pytest.mark.parametrize(
    ("command", "form"),
    [
        *((command, ()) for command in COMMANDS),
        *((command, (form,)) for command in COMMANDS for form in ("--json", "--csv") if command[0] in DATA),
    ],
    ids=lambda words: " ".join(words[:1]),
)
def test_no_command_prints_what_a_terminal_obeys(
    command: tuple[str, ...], form: tuple[str, ...], written: tuple[Path, Path], tmp_path: Path
) -> None:
    load = {"concurrency": [1], "input_len": 64, "output_len": 8, "num_prompts": 4}
    named = {"name": HOSTILE, "description": HOSTILE, "profile": str(written[1]), "load": load}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"schema_version": 1} | named))
    result = run(*in_folder(command, written, tmp_path), *form)
    assert not OBEYED.search(result.stdout + result.stderr)
    if form == ("--json",):
        json.loads(result.stdout)


def test_names_are_no_markup() -> None:
    screen = console()
    screen.begin_capture()
    table = Table("[red]head[/red]", title="[bold]title[/bold]")
    table.add_row("[link=http://x]a[/link] :smile: \x1b[31m")
    screen.print(table)
    screen.print("[blink]b[/blink] \u202e")
    shown = screen.end_capture()
    for text in ("[red]head[/red]", "[bold]title[/bold]", "[link=http://x]a[/link] :smile: \\x1b[31m", "\\u202e"):
        assert text in shown


def test_errors_are_printable() -> None:
    assert user_message(CommandError("a\x1b[31m\u202e b")) == "a\\x1b[31m\\u202e b"


@given(ANYTHING)
def test_printable_text_says_all_of_it(text: str) -> None:
    shown = printable(text)
    assert not OBEYED.search(shown.replace("\t", ""))
    assert printable(shown) == shown
    assert OBEYED.search(text.replace("\t", "")) or "\\" in shown or shown == text
    shown.encode()


@given(st.lists(ANYTHING) | st.dictionaries(ANYTHING, ANYTHING))
def test_printable_json_has_the_same_values(value: object) -> None:
    text = printable_json(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value
    assert not OBEYED.search(text)


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("=1+1", False),
        ("+cmd|' /C calc'!A0", False),
        ("-2+3+cmd|' /C calc'!A0", False),
        ("@SUM(A1)", False),
        ("\t=1", False),
        ("--x|' /C calc'!A0", False),
        ("-5", True),
        ("+1.5e-3", True),
        ("--max-num-seqs 16 --block-size 32", True),
        ("--max-num-seqs=16 --block-size=32", True),
        ("C=4", True),
        ("", True),
    ],
)
def test_formulas_are_told_from_numbers_and_flags(text: str, harmless: bool) -> None:
    assert harmless_cell(text) == (text if harmless else f"'{text}")
    assert harmless_cell(-5) == -5

"""The report as a person meets it: in a real browser, on a desk and on a phone, by day and by night, and on paper."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from capsim.cli import app
from simulator.profile import Profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "capsim"))

from hostile_run import SEEN, write_hostile

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report on the published RTX 4090 sweep."""
    folder = tmp_path_factory.mktemp("report")
    page = folder / "report.html"
    for arguments in (
        ("simulate", "rtx4090-qwen2.5-7b", "--save", folder / "run"),
        ("report", folder / "run", "--slo", "p99_ttft:2000,p99_itl:200", "-o", page),
    ):
        result = CliRunner().invoke(app, list(map(str, arguments)))
        assert result.exit_code == 0, result.output
    return page.as_uri()


@pytest.fixture
def opened(chromium: Browser, report: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The report in a window; nothing may be said on the console, and nothing asked of a network."""
    width, scheme = getattr(request, "param", (WIDTHS[0], SCHEMES[0]))
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: complaints.append(asked.url) if asked.url != report else None)
    page.goto(report)
    yield page
    context.close()
    assert complaints == []


everywhere = pytest.mark.parametrize("opened", [(w, s) for w in WIDTHS for s in SCHEMES], indirect=True, ids=str)


@everywhere
def test_every_figure_and_table_is_there_to_be_read(opened: Page) -> None:
    width = opened.evaluate("innerWidth")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width  # nothing makes the page scroll sideways
    figures = opened.locator("figure svg")
    assert figures.count() == 6
    for number in range(6):
        figure = figures.nth(number)
        figure.scroll_into_view_if_needed()
        box = figure.bounding_box()
        assert box is not None
        assert box["width"] > 300
        assert box["height"] > 200
        assert 0 <= box["x"] <= width - box["width"]
        heights = figure.locator("text").evaluate_all("texts => texts.map(text => text.getBoundingClientRect().height)")
        assert min(heights) >= 9  # a phone's reader can read it
    assert opened.locator("table:visible").count() == 2


@everywhere
def test_axe_finds_nothing_serious(opened: Page, axe: str) -> None:
    opened.evaluate(axe)
    found = opened.evaluate("axe.run().then(result => result.violations.map(one => [one.id, one.impact, one.help]))")
    assert [one for one in found if one[1] in ("serious", "critical")] == []


def test_tables_sort_by_their_heads(opened: Page) -> None:
    table = opened.locator("#table-levels")
    head = table.locator("thead button", has_text="output")

    def column() -> list[float]:
        cells = table.locator("tbody tr td:nth-child(4)").all()
        return [float(cell.get_attribute("data-value") or "nan") for cell in cells]

    ascending = column()
    assert ascending == sorted(ascending)
    head.click()
    head.click()
    assert column() == ascending[::-1]
    assert table.locator("th[aria-sort=descending]").count() == 1
    assert table.locator("tr.recommended th").inner_text().startswith("C=16")
    head.press("Enter")  # from the keyboard as well
    assert column() == ascending


def test_a_table_is_copied_as_csv_and_the_command_as_it_stands(opened: Page) -> None:
    opened.locator("button[data-copy=csv-levels]").click()
    opened.locator("button", has_text="Copied").wait_for()
    lines = opened.evaluate("navigator.clipboard.readText()").splitlines()
    assert len(lines) == 8
    assert lines[0].startswith('level,sent,failed,"output, tok/s"')
    opened.locator("button[data-copy=command]").click()
    opened.wait_for_function("navigator.clipboard.readText().then(text => text.startsWith('capsim capacity'))")


def test_pointing_at_a_figure_tells_its_values(opened: Page) -> None:
    opened.locator("circle.value[data-tip^='C=16']").first.hover()
    tip = opened.locator("#tip")
    assert tip.is_visible()
    assert "tok/s" in tip.inner_text()
    opened.mouse.move(2, 2)
    assert not tip.is_visible()


def test_markers_and_intervals_are_drawn(opened: Page) -> None:
    """Shapes that a figure refers to must be found, else its markers and shades are not there."""
    shown = opened.evaluate(
        "[...document.querySelectorAll('figure use')].every(one => document.querySelector(one.getAttribute('href')))"
    )
    assert shown
    boxes = opened.evaluate(
        "[...document.querySelectorAll('figure use')].map(one => one.getBoundingClientRect().width)"
    )
    assert sum(size > 0 for size in boxes) > 50


def test_it_prints(opened: Page, tmp_path: Path) -> None:
    opened.pdf(path=tmp_path / "report.pdf", prefer_css_page_size=True)
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    opened.emulate_media(media="print", color_scheme="dark")
    assert opened.evaluate("getComputedStyle(document.body).color") == "rgb(31, 35, 41)"  # dark ink on white paper
    assert opened.locator("button[data-copy]:visible").count() == 0


def test_hostile_names_run_nothing_and_are_shown_to_the_letter(
    chromium: Browser, profile: Profile, tmp_path: Path
) -> None:
    """Every text that a server or a file can name holds markup, scripts and signs that turn text around."""
    saved, known = write_hostile(tmp_path, profile)
    page_file = tmp_path / "report.html"
    command = ("report", saved, "--profile", known, "--slo", "p99_ttft:2000", "-o", page_file)
    assert CliRunner().invoke(app, list(map(str, command))).exit_code == 0
    page, alarms = chromium.new_page(), []
    for event in ("dialog", "pageerror", "console"):
        page.on(event, lambda what: alarms.append(str(what)))  # type: ignore[call-overload]
    page.on("request", lambda asked: alarms.append(asked.url) if asked.url != page_file.as_uri() else None)
    page.goto(page_file.as_uri())
    value = page.locator("circle.value").last
    value.scroll_into_view_if_needed()
    page.wait_for_timeout(500)  # a page that still scrolls hides what it told
    value.hover()
    page.locator("#tip").wait_for(state="visible", timeout=5000)  # the page's own script runs under its policy
    page.locator("th button").first.click()
    assert page.title().startswith(SEEN[:40])
    assert SEEN in page.locator("h1").inner_text()
    assert page.locator("body").inner_text().count(SEEN) > 5
    assert page.locator("img, iframe, a, form, object, [onerror], script:not(:last-of-type)").count() == 0
    assert alarms == []


def test_the_policy_of_the_page_stops_what_would_get_in_all_the_same(
    chromium: Browser, report: str, tmp_path: Path
) -> None:
    page_file = tmp_path / "report.html"
    text = Path(report.removeprefix("file://")).read_text(encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.setblocking(False)
        take = "document.title = 'taken'"
        image = f'<img src="http://127.0.0.1:{stranger.getsockname()[1]}/x" onerror="{take}">'
        page_file.write_text(text.replace("<main>", f"<main><script>{take}</script>{image}"), encoding="utf-8")
        page = chromium.new_page()
        page.goto(page_file.as_uri())
        page.wait_for_timeout(300)
        assert page.title() != "taken"
        with pytest.raises(BlockingIOError):
            stranger.accept()

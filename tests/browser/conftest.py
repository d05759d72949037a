"""Tests of this folder look at pages in a real headless Chromium; like those of tests/live they run with -m live.

They need Chromium (Debian's package `chromium`, or CAPSIM_CHROMIUM names another), playwright from PyPI, and for the
check of accessibility axe-core from npm: CAPSIM_AXE names its axe.min.js, else it is looked for in node_modules of the
repository's root. CAPSIM_REQUIRE_BROWSER=1 makes them fail, not skip, where something is missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; pytest hands over those of the whole run."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("live")


def missing(what: str) -> NoReturn:
    if os.environ.get("CAPSIM_REQUIRE_BROWSER") == "1":
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("no playwright: pip install playwright")
    path = os.environ.get("CAPSIM_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        missing("no chromium: on Debian, apt-get install chromium, or set CAPSIM_CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # root may not have one
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core."""
    path = Path(os.environ.get("CAPSIM_AXE") or ROOT / "node_modules" / "axe-core" / "axe.min.js")
    if not path.is_file():
        missing("no axe-core: npm install axe-core, or set CAPSIM_AXE to its axe.min.js")
    return path.read_text(encoding="utf-8")

"""The notebooks run from top to bottom, and say what their stored outputs say."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra: pip install -e '.[notebooks]'")
nbclient = pytest.importorskip("nbclient", reason="needs the extra: pip install -e '.[notebooks]'")
pytest.importorskip("ipykernel", reason="needs the extra: pip install -e '.[notebooks]'")

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
ALL = sorted(NOTEBOOKS.glob("*.ipynb"))
AGAIN = "run it again: python notebooks/refresh.py"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
CLOSE = {"rel_tol": 0.05, "abs_tol": 0.5}  # another processor's last digits may move a fit a little


def outputs(notebook: Any) -> Iterator[dict[str, Any]]:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            yield from cell.outputs


def texts(notebook: Any) -> str:
    """What the code printed and returned; objects without words of their own have an address, which is left out."""
    found = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs(notebook)]
    return "\n".join(text for text in found if " object at 0x" not in text)


def pictures(notebook: Any) -> list[str]:
    return [output["data"]["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]


def test_there_are_five():
    assert [path.name[0] for path in ALL] == list("12345")


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_stored_outputs_come_from_one_run_from_top_to_bottom(path):
    stored = nbformat.read(path, as_version=4)
    nbformat.validate(stored)
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), AGAIN
    assert pictures(stored)
    assert not [output for output in outputs(stored) if output.output_type == "error" or output.get("name") == "stderr"]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_new_run_says_the_same(path):
    stored = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        fresh, timeout=300, kernel_name="python3", resources={"metadata": {"path": NOTEBOOKS}}
    ).execute()

    assert not [output.text for output in outputs(fresh) if output.get("name") == "stderr"]
    assert len(pictures(fresh)) == len(pictures(stored)), AGAIN
    old, new = texts(stored), texts(fresh)
    assert NUMBER.sub("#", new).split() == NUMBER.sub("#", old).split(), AGAIN
    for before, after in zip(NUMBER.findall(old), NUMBER.findall(new), strict=True):
        one, other = (float(text.replace(",", "")) for text in (before, after))
        assert math.isclose(one, other, **CLOSE), f"{before} became {after}; {AGAIN}"

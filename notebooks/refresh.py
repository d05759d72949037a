"""Run the notebooks from top to bottom and store what they say: ``python notebooks/refresh.py [NAME...]``."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent


def refresh(path: Path) -> None:
    """Without times of execution: the same notebook gives the same bytes."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    place = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False, resources=place).execute()
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not sys.argv[1:] or path.stem in sys.argv[1:]:
            refresh(path)

"""Predictions against real GPUs that others measured.

    python -m benchmarks.accuracy.measured --data DIR [source ...]

DIR holds the sources' CSV files; none is a part of capsim. Each source is fitted on few of its rows, and the rest is
predicted; tables show signed errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.accuracy.measured import (
    akamas,
    dennislee,
    gpullm,
    llm_inferno,
    llmservingsim,
    openinfer,
    techbromoho,
    xianghaokong,
)
from benchmarks.accuracy.measured.table import Report

SOURCES: dict[str, Callable[[Path], Report]] = {
    "llm-inferno": llm_inferno.report,
    "llmservingsim": llmservingsim.report,
    "akamas": akamas.report,
    "dennislee": dennislee.report,
    "xianghaokong": xianghaokong.report,
    "openinfer": openinfer.report,
    "gpullm": gpullm.report,
    "techbromoho": techbromoho.report,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", metavar="source", help=f"of {', '.join(SOURCES)}; all by default")
    parser.add_argument("--data", type=Path, required=True, help="folder with the CSV files")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.sources if name not in SOURCES]:
        parser.error(f"unknown source {unknown[0]!r}; known are {', '.join(SOURCES)}")
    for name in arguments.sources or SOURCES:
        for line in SOURCES[name](arguments.data).lines():
            print(line, flush=True)


if __name__ == "__main__":
    main()

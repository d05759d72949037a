"""Figures in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

from capsim.figures.style import Drawing, as_png, styled

SHOWN_WIDTH = 560  # pixels; the picture has more, for sharp screens

Given = ParamSpec("Given")


@dataclass(frozen=True)
class Picture:
    """A figure as Jupyter shows it: a cell that ends in one displays it. `caption` says what it shows."""

    caption: str
    png: bytes

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        return self.png, {"width": SHOWN_WIDTH}

    def __repr__(self) -> str:
        return self.caption or "a figure"


def picture(draw: Callable[Given, Drawing | None], *given: Given.args, **named: Given.kwargs) -> Picture:
    """Draw a figure of `capsim.figures`, such as ``picture(token_gaps, family)``.

    Raises `ValueError` where there is nothing to draw.
    """
    with styled():
        drawing = draw(*given, **named)
    if drawing is None:
        raise ValueError(f"{draw.__name__.replace('_', ' ')}: the runs hold nothing to draw")
    return Picture(drawing.caption, as_png(drawing))

"""How figures look, and what they are written as.

Colours are Okabe and Ito's, which people with colour-blindness tell apart, darkened or lightened for contrast; a
measured curve and a predicted one differ in their lines and markers too. The same figure gives the same bytes.
"""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from capsim.terminal import printable

COLOURS = {  # on a light ground and on a dark one
    "ink": ("#1f2329", "#e6e9ee"),
    "muted": ("#57606b", "#a9b2bd"),
    "grid": ("#dde2e7", "#353d47"),
    "ground": ("#ffffff", "#171c22"),
    "blue": ("#0069a6", "#56b4e9"),
    "orange": ("#c24e00", "#f5a05a"),
    "green": ("#00765a", "#35c79a"),
    "purple": ("#a1508c", "#e09fcd"),
    "good": ("#2f9e78", "#2fa37c"),
}
INK, MUTED, GRID, GROUND = (COLOURS[name][0] for name in ("ink", "muted", "grid", "ground"))
BLUE, ORANGE, GREEN, PURPLE, GOOD = (COLOURS[name][0] for name in ("blue", "orange", "green", "purple", "good"))

WIDTH, HEIGHT = 5.2, 3.75  # inches: readable on a phone's 360 pixels as on half a screen
LEFT, RIGHT, BOTTOM, LEGEND_ROW, TITLE = 0.78, 0.14, 0.52, 0.2, 0.28  # inches
POINTS = 72  # an inch in SVG's units
PNG_DPI = 200
CLOSE = 5  # times the low end of an axis: within this range ticks are closer
MARKS = {"measured": "o", "predicted": "D"}

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same widths everywhere
    "font.size": 10,
    "axes.labelsize": 10,
    "axes.titlesize": 11,
    "legend.fontsize": 9.5,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": GROUND,
    "hatch.color": MUTED,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "text.parse_math": False,  # a name with a dollar sign stays a name
    "svg.fonttype": "none",
}

_SVG = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"  # as matplotlib writes it; a page takes href alone


@dataclass(frozen=True)
class Value:
    """What a reader sees when pointing at a place of a figure."""

    axes: Axes
    x: float
    y: float
    text: str


@dataclass
class Drawing:
    """A figure. `caption` says in one sentence what it shows; `values` are told at their places by a page."""

    name: str
    title: str
    figure: Figure
    caption: str = ""
    values: list[Value] = field(default_factory=list)
    height: float = HEIGHT  # inches, without the title
    left: float = LEFT  # inches for the labels of the y-axis

    @property
    def axes(self) -> Axes:
        return self.figure.axes[0]

    def legend(self, columns: int = 2) -> None:
        """The legend over the axes, so that it hides nothing."""
        handles, labels = self.axes.get_legend_handles_labels()
        look: Any = {
            "loc": "upper left",
            "ncols": columns,
            "borderaxespad": 0.0,
            "columnspacing": 1.2,
            "labelspacing": 0.3,
        }
        self.figure.legend(handles, labels, **look)
        self.arrange(titled=False)

    def arrange(self, titled: bool) -> None:
        """Put the axes below the legend and, when `titled`, both below the title."""
        figure, (legend,) = self.figure, self.figure.legends
        rows = math.ceil(len(legend.get_texts()) / legend._ncols)  # type: ignore[attr-defined]
        height = self.height + (TITLE if titled else 0.0)
        top = height - (TITLE if titled else 0.0) - 0.04
        figure.set_size_inches(WIDTH, height)
        legend.set_bbox_to_anchor((0.04, top / height), transform=figure.transFigure)
        left, right = self.left / WIDTH, 1 - RIGHT / WIDTH
        top -= rows * LEGEND_ROW + 0.12
        figure.subplots_adjust(left=left, right=right, bottom=BOTTOM / height, top=top / height)


@contextmanager
def styled() -> Iterator[None]:
    """Draw and write figures within this."""
    with mpl.rc_context():
        mpl.rcParams.update(_STYLE)
        yield


def new_drawing(name: str, title: str, height: float = HEIGHT, left: float = LEFT) -> Drawing:
    """An empty figure with one pair of axes; within `styled`."""
    figure = Figure(figsize=(WIDTH, height), dpi=POINTS)
    figure.subplots()
    return Drawing(name, title, figure, height=height, left=left)


def log_ticks(axes: Axes) -> None:
    """A logarithmic y-axis with plain numbers, at 1, 2 and 5 of each decade or closer; its range must be set."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps = (1.0, 2.0, 5.0) if high > CLOSE * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _place: f"{value:,.0f}" if value >= 10 else f"{value:g}")
    )
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())


def level_ticks(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic x-axis with a tick at every level, as far as they do not touch."""
    axes.set_xscale("log", base=2)
    shown: list[float] = []
    for value in values:
        if not shown or value / shown[-1] >= (values[-1] / values[0]) ** 0.09:
            shown.append(value)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))


def bar_ticks(axes: Axes, names: Sequence[str], crowded: int = 10) -> None:
    """Names of places 0, 1, ... below bars, slanted where they are many; few bars do not fill the whole width."""
    axes.set_xticks(range(len(names)), names, rotation=0 if len(names) < crowded else 30)
    spare = max(3 - len(names), 0) / 2 + 0.1
    axes.set_xlim(-0.5 - spare, len(names) - 0.5 + spare)


def as_png(drawing: Drawing) -> bytes:
    """The figure with its title, as a picture."""
    with styled(), _titled(drawing):
        FigureCanvasAgg(drawing.figure)
        make_printable(drawing.figure)
        stream = io.BytesIO()
        drawing.figure.savefig(stream, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return stream.getvalue()


def as_svg(drawing: Drawing) -> str:
    """The figure with its title, as a file of its own, on a light ground."""
    with styled(), _titled(drawing):
        return _svg(drawing)


def as_inline_svg(drawing: Drawing, name: str) -> str:
    """The figure as an element of a page, without its title.

    Its colours are the page's variables, ``--ink`` and so on by `COLOURS`; its ids begin with `name`; the places that
    have values are circles of the class ``value`` with a ``data-tip``.
    """
    with styled():
        text = _svg(drawing)
        tips = _tips(drawing)
    ET.register_namespace("", _SVG)
    root = ET.fromstring(text)  # noqa: S314 - matplotlib wrote it, just now
    for unwanted in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(unwanted)
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    variables = {light: f"var(--{key})" for key, (light, _) in COLOURS.items()}
    for element in root.iter():
        _adapt(element, name, variables)
    root.set("role", "img")
    root.set("aria-label", printable(f"{drawing.title}. {drawing.caption}".strip()))
    for x, y, tip in tips:
        circle = {"class": "value", "cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "9", "data-tip": tip}
        ET.SubElement(root, f"{{{_SVG}}}circle", circle)
    return ET.tostring(root, encoding="unicode")


def make_printable(figure: Figure) -> None:
    """Write out what no font has and no SVG may hold in the texts of a figure, which may come from a server."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if (shown := printable(text.get_text())) != text.get_text():
            text.set_text(shown)


@contextmanager
def _titled(drawing: Drawing) -> Iterator[None]:
    """With its title over it for as long as this lasts."""
    title = drawing.figure.text(0.015, 0.995, drawing.title, va="top", fontweight="bold", fontsize=11)
    drawing.arrange(titled=True)
    try:
        yield
    finally:
        title.remove()
        drawing.arrange(titled=False)


def _svg(drawing: Drawing) -> str:
    stream = io.StringIO()
    FigureCanvasSVG(drawing.figure)
    make_printable(drawing.figure)
    with mpl.rc_context({"svg.hashsalt": drawing.name}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        drawing.figure.savefig(stream, format="svg", metadata=nothing)
    return stream.getvalue()


def _tips(drawing: Drawing) -> list[tuple[float, float, str]]:
    """Places in SVG's coordinates, whose y runs down."""
    bottom = drawing.figure.bbox.height
    found = []
    for value in drawing.values:
        x, y = value.axes.transData.transform((value.x, value.y))
        found.append((float(x), bottom - float(y), printable(value.text)))
    return found


def _adapt(element: ET.Element, name: str, variables: Mapping[str, str]) -> None:
    """Give an element ids of its own and the page's colours."""
    for key, value in list(element.attrib.items()):
        if key == "id":
            element.set(key, f"{name}-{value}")
        elif key == _LINK:
            del element.attrib[key]
            element.set("href", f"#{name}-{value.removeprefix('#')}")
        elif key == "clip-path":
            element.set(key, value.replace("url(#", f"url(#{name}-"))
    style = element.attrib.pop("style", "").replace("url(#", f"url(#{name}-")
    for key in ("fill", "stroke"):  # a hatch has attributes, in which variables are not known everywhere
        if element.get(key, "").startswith("#"):
            style += f"; {key}: {element.attrib.pop(key)}"
    if style:
        element.set("style", re.sub(r"#[0-9a-f]{6}", lambda found: variables.get(found[0], found[0]), style))

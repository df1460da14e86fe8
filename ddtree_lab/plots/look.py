"""How charts look, whatever draws them: sizes in pixels, and each mode's colour, line and sign."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_lab.plots.chart import Chart
from ddtree_lab.viz.plotly_card import HEAD_HEIGHT, LEGEND_LINE
from ddtree_lab.viz.stylesheet import StyleSheet, read_style

WIDTH, AXES_HEIGHT = 760, 300
LEFT, BOTTOM = 64, 60  # margins of the axes
RIGHT, RIGHT_WITH_AXIS = 28, 72
LINE_WIDTH, MARKER_SIZE = 2.4, 8


@dataclass(frozen=True)
class Marker:
    """The sign of a series in the words of both libraries."""

    plotly: str
    matplotlib: str


MARKERS = {
    "ar": Marker("diamond", "D"),
    "chain": Marker("square", "s"),
    "eagle_linear": Marker("triangle-up", "^"),
    "tree_walk": Marker("circle", "o"),
}
ANY_MARKER = Marker("circle", "o")


@dataclass(frozen=True)
class Frame:
    """Where the axes of a chart stand in its picture."""

    width: int
    height: int
    top: int
    right: int


def chart_style() -> StyleSheet:
    """The colours of trees for the card, those of modes and stages for the series."""
    return read_style("tree", "chart")


def frame_of(chart: Chart) -> Frame:
    """Room for the titles and a legend line a series above the axes."""
    top = HEAD_HEIGHT + LEGEND_LINE * (len(chart.series) + 1) + 8
    return Frame(WIDTH, top + AXES_HEIGHT + BOTTOM, top, RIGHT_WITH_AXIS if chart.right else RIGHT)


def dash_of(style: StyleSheet, name: str) -> tuple[float, ...]:
    """The dashes of a mode's line, in pixels; empty for a solid one."""
    return tuple(map(float, style.declarations(f".chart .{name} .line").get("stroke-dasharray", "").split()))

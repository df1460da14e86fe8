"""Chart -> standalone SVG by matplotlib: the same bytes for the same chart, in the reader's light or dark scheme."""

from __future__ import annotations

import io
import math
import re
import warnings
from typing import TYPE_CHECKING

from ddtree_lab.optional import lab_module
from ddtree_lab.plots.chart import Axis, Chart
from ddtree_lab.plots.look import (
    ANY_MARKER,
    AXES_HEIGHT,
    BOTTOM,
    LEFT,
    LINE_WIDTH,
    MARKER_SIZE,
    MARKERS,
    Frame,
    chart_style,
    dash_of,
    frame_of,
)
from ddtree_lab.viz.plotly_card import HEAD_HEIGHT, INSET, LEGEND_LINE
from ddtree_lab.viz.stylesheet import StyleSheet
from ddtree_lab.viz.tokens import escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PER_INCH = 72  # so that a point of matplotlib is a pixel of the picture
SETTINGS = {"svg.hashsalt": "ddtree_lab", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 12}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def chart_svg(chart: Chart) -> str:
    """The chart as one SVG document. Series i is the group ``series-i``, its bar or dot j ``series-i-j``; a None is
    a gap in a line, no bar, no dot."""
    matplotlib = lab_module("matplotlib")
    style, frame, written = chart_style(), frame_of(chart), io.StringIO()
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        # Fonts only measure here: the reader's own draw.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        _draw(chart, style, frame).savefig(written, format="svg", metadata=NO_METADATA)
    return _themed(written.getvalue(), chart, style, frame)


def _draw(chart: Chart, style: StyleSheet, frame: Frame) -> Figure:
    ink, muted, paper, grid = (style.light[f"dd-{name}"] for name in ("ink", "muted", "bg", "line"))
    figure = lab_module("matplotlib.figure").Figure(
        (frame.width / PER_INCH, frame.height / PER_INCH), dpi=PER_INCH, facecolor=paper
    )
    across = frame.width - LEFT - frame.right
    axes = figure.add_axes(
        (LEFT / frame.width, BOTTOM / frame.height, across / frame.width, AXES_HEIGHT / frame.height)
    )
    axes.set_facecolor(paper)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(grid)
    axes.tick_params(colors=ink, length=0, pad=6)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=grid, linewidth=0.5)
    if chart.diagonal:
        axes.grid(axis="x", color=grid, linewidth=0.5)
        axes.plot([0, 1], [0, 1], color=muted, linewidth=1, linestyle=(0, (1, 3)), gid="diagonal")
    artists = [_series(axes, chart, index, style) for index in range(len(chart.series))]
    _scale(axes, "x", chart.x)
    _scale(axes, "y", chart.y)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=ink, parse_math=False)
    if chart.right:
        title, factor = chart.right
        other = axes.secondary_yaxis("right", functions=(lambda y: y * factor, lambda y: y / factor))
        other.set_ylabel(title, color=ink, labelpad=10)
        other.tick_params(colors=ink, length=0)
        other.spines["right"].set_visible(False)

    def write(text: str, below: float, **font: object) -> None:
        figure.text(INSET / frame.width, 1 - below / frame.height, text, parse_math=False, va="top", **font)

    write(chart.title, INSET, color=ink, size=14, weight="bold")
    write(chart.subtitle, INSET + LEGEND_LINE, color=muted)
    legend = figure.legend(
        artists,
        [series.name for series in chart.series],
        loc="upper left",
        bbox_to_anchor=(INSET / frame.width, 1 - (HEAD_HEIGHT + 10) / frame.height),
        borderaxespad=0,
        borderpad=0,
        frameon=False,
        labelcolor=muted,
        handlelength=2.6,
        labelspacing=0.55,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _series(axes: Axes, chart: Chart, index: int, style: StyleSheet) -> object:
    series, gid, paper = chart.series[index], f"series-{index}", style.light["dd-bg"]
    colour, marker = style.light[series.style], MARKERS.get(series.style, ANY_MARKER).matplotlib
    y = [math.nan if value is None else value for value in series.y]
    if chart.kind == "dots":
        look = {"color": colour, "marker": marker, "linestyle": "none", "alpha": 0.7, "markeredgecolor": paper}
        for point, (x, value, size) in enumerate(zip(series.x, y, series.sizes, strict=True)):
            axes.plot([x], [value], **look, markersize=size, markeredgewidth=0.8, gid=f"{gid}-{point}")
        return axes.plot([], [], **look, markersize=MARKER_SIZE)[0]
    if chart.kind == "lines":
        dash = tuple(length / LINE_WIDTH for length in dash_of(style, series.style))
        (line,) = axes.plot(
            series.x,
            y,
            color=colour,
            linewidth=LINE_WIDTH,
            linestyle=(0, dash) if dash else "solid",
            marker=marker,
            markersize=MARKER_SIZE,
            markerfacecolor=paper,
            markeredgewidth=2,
            gid=gid,
        )
        return line
    left, width = chart.bar_place(index)
    bars = axes.bar(
        [x + left for x in series.x],
        y,
        width,
        bottom=chart.bar_base(index),
        align="edge",
        color=colour,
        edgecolor=paper,
        linewidth=0.8,
    )
    for point, bar in enumerate(bars):
        bar.set_gid(f"{gid}-{point}")
    return bars


def _scale(axes: Axes, name: str, axis: Axis) -> None:
    if axis.logarithmic:
        axes.set(**{f"{name}scale": "log"})
    axes.set(**{f"{name}lim": axis.limits, f"{name}label": axis.title})
    if axis.ticks:
        ticks = getattr(axes, f"{name}axis")
        ticks.set_ticks(axis.ticks, labels=axis.labels)
        ticks.set_ticks([], minor=True)
        for label in ticks.get_ticklabels():
            label.set_parse_math(False)


def _themed(svg: str, chart: Chart, style: StyleSheet, frame: Frame) -> str:
    """The SVG element alone, in pixels, with custom properties for the colours and the reader's own fonts."""
    names = ["dd-ink", "dd-muted", "dd-bg", "dd-line", *dict.fromkeys(series.style for series in chart.series)]
    head, body = svg[svg.index("<svg") :].split(">", 1)
    used = {style.light[name]: f"var(--{name})" for name in names}
    colour = re.compile("|".join(used))
    body = re.sub(r"<[^>]*>", lambda tag: colour.sub(lambda found: used[found[0]], tag[0]), body)
    light, dark = ("".join(f"--{name}:{colours[name]};" for name in names) for colours in (style.light, style.dark))
    sheet = (
        f".ddtree-chart{{{light}}}@media (prefers-color-scheme: dark){{.ddtree-chart{{{dark}}}}}"
        f".ddtree-chart text{{font-family:{style.family('.ddtree')} !important}}"
    )
    head = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', head)
    return f'{head} class="ddtree-chart" role="img"><title>{escape(chart.title)}</title><style>{sheet}</style>{body}'

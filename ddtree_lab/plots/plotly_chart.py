"""Chart -> plotly figure, a light card like that of a tree."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ddtree_lab.optional import lab_module
from ddtree_lab.plots.chart import Axis, Chart, Series
from ddtree_lab.plots.look import (
    ANY_MARKER,
    BOTTOM,
    LEFT,
    LINE_WIDTH,
    MARKER_SIZE,
    MARKERS,
    chart_style,
    dash_of,
    frame_of,
)
from ddtree_lab.viz.plotly_card import card
from ddtree_lab.viz.stylesheet import Stroke, StyleSheet
from ddtree_lab.viz.tokens import escape_plotly

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def chart_figure(chart: Chart) -> Figure:
    """A trace a series, in their order; a None of a series is a None of its trace, which plotly leaves out."""
    style, frame = chart_style(), frame_of(chart)
    margin = {"l": LEFT, "r": frame.right, "t": frame.top, "b": BOTTOM}
    layout = card(
        style, chart.title, subtitle=chart.subtitle, width=frame.width, height=frame.height, margin=margin
    ) | {
        "xaxis": _axis(chart.x, style) | {"showgrid": chart.diagonal},
        "yaxis": _axis(chart.y, style),
        "barmode": "overlay",
        "hovermode": "closest",
        "showlegend": True,
    }
    traces = [_trace(chart, index, style) for index in range(len(chart.series))]
    if chart.right:
        title, factor = chart.right
        layout["yaxis"]["fixedrange"] = True
        layout["yaxis2"] = {
            "title": {"text": escape_plotly(title), "font": {"size": 12}},
            "range": [factor * limit for limit in chart.y.limits],
            "overlaying": "y",
            "tickmode": "auto",
            "side": "right",
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
        }
        traces.append({"x": [None], "y": [None], "yaxis": "y2", "showlegend": False, "hoverinfo": "skip"})
    if chart.kind == "dots":
        layout["legend"]["itemsizing"] = "constant"
    if chart.diagonal:
        line = {"color": style.light["dd-muted"], "width": 1, "dash": "dot"}
        layout["shapes"] = [{"type": "line", "x0": 0, "y0": 0, "x1": 1, "y1": 1, "layer": "below", "line": line}]
    return lab_module("plotly.graph_objects").Figure(data=traces, layout=layout)


def _trace(chart: Chart, index: int, style: StyleSheet) -> dict[str, Any]:
    series = chart.series[index]
    name = escape_plotly(series.name)
    trace = {
        "name": name,
        "x": list(series.x),
        "y": list(series.y),
        "hovertext": [f"<b>{name}</b><br>{escape_plotly(note)}" for note in series.notes],
        "hoverinfo": "text",
    }
    if chart.kind in ("bars", "stack"):
        return trace | _bars(chart, index, style)
    return trace | (_dots(series, style) if chart.kind == "dots" else _line(series, style))


def _bars(chart: Chart, index: int, style: StyleSheet) -> dict[str, Any]:
    left, width = chart.bar_place(index)
    edge = {"color": style.light["dd-bg"], "width": 0.8}
    return {
        "type": "bar",
        "offset": left,
        "width": width,
        "base": list(chart.bar_base(index)),
        "marker": {"color": style.light[chart.series[index].style], "line": edge},
    }


def _dots(series: Series, style: StyleSheet) -> dict[str, Any]:
    return {
        "mode": "markers",
        "marker": {
            "symbol": MARKERS.get(series.style, ANY_MARKER).plotly,
            "size": list(series.sizes),
            "color": style.light[series.style],
            "opacity": 0.7,
            "line": {"color": style.light["dd-bg"], "width": 0.8},
        },
    }


def _line(series: Series, style: StyleSheet) -> dict[str, Any]:
    colour = style.light[series.style]
    return {
        "mode": "lines+markers",
        "connectgaps": False,
        "line": Stroke(colour, None, LINE_WIDTH, dash_of(style, series.style)).plotly_line,
        "marker": {
            "symbol": MARKERS.get(series.style, ANY_MARKER).plotly,
            "size": MARKER_SIZE,
            "color": style.light["dd-bg"],
            "line": {"color": colour, "width": 2},
        },
    }


def _axis(axis: Axis, style: StyleSheet) -> dict[str, Any]:
    limits = [math.log10(limit) for limit in axis.limits] if axis.logarithmic else list(axis.limits)
    drawn = {
        "title": {"text": escape_plotly(axis.title), "font": {"size": 12}},
        "range": limits,
        "type": "log" if axis.logarithmic else "linear",
        "gridcolor": style.light["dd-line"],
        "gridwidth": 0.5,
        "zeroline": False,
    }
    if axis.ticks:
        labels = [escape_plotly(label).replace("\n", "<br>") for label in axis.labels]
        drawn |= {"tickvals": list(axis.ticks), "ticktext": labels}
    return drawn

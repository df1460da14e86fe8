"""What all plotly figures have in common: a light card with the title, and below it the legend, a line an entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddtree_lab.viz.stylesheet import StyleSheet
from ddtree_lab.viz.tokens import escape_plotly

HEAD_HEIGHT = 48  # pixels above the legend, for the title
LEGEND_LINE = 19  # pixels of one entry
INSET = 14  # of the texts from the edges, in pixels


def card(
    style: StyleSheet, title: str, *, width: int, height: int, margin: Mapping[str, int], subtitle: str = ""
) -> dict[str, Any]:
    """The layout of a figure of this size in pixels, in the colours of the sheet ``tree``.

    Title and subtitle may hold anything and are shown as text. ``margin["t"]`` has to hold ``HEAD_HEIGHT`` and a
    ``LEGEND_LINE`` for each entry and for the subtitle.
    """
    ink, muted, paper = (style.light[f"dd-{name}"] for name in ("ink", "muted", "bg"))
    head = HEAD_HEIGHT + (LEGEND_LINE if subtitle else 0)
    return {
        "template": {},
        "width": width,
        "height": height,
        "margin": {**margin, "autoexpand": False},
        "font": {"family": style.family(".ddtree"), "size": 12, "color": ink},
        "paper_bgcolor": paper,
        "plot_bgcolor": paper,
        "title": {
            "text": escape_plotly(title),
            "font": {"size": 14, "weight": 600},
            "subtitle": {"text": escape_plotly(subtitle), "font": {"size": 12, "color": muted}},
            "x": INSET / width,
            "xanchor": "left",
            "y": 1 - INSET / height,
            "yanchor": "top",
        },
        "legend": {
            "x": (INSET - margin["l"]) / (width - margin["l"] - margin["r"]),
            "xanchor": "left",
            "y": 1 - (head - 8) / height,
            "yref": "container",
            "yanchor": "top",
            "traceorder": "normal",
            "itemclick": False,
            "itemdoubleclick": False,
            "font": {"color": muted},
        },
        "hoverlabel": {"align": "left", "bgcolor": paper, "bordercolor": muted, "font": {"color": ink}},
    }

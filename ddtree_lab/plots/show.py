"""Chart -> the figure and its static twin, drawn from the same values."""

from __future__ import annotations

from ddtree_lab.plots.chart import Chart
from ddtree_lab.plots.plotly_chart import chart_figure
from ddtree_lab.plots.svg_chart import chart_svg
from ddtree_lab.viz.interactive import Interactive
from ddtree_lab.viz.picture import Picture


def show(chart: Chart) -> Interactive:
    """Both pictures of a chart. Raises ImportError when plotly or matplotlib is not installed."""
    return Interactive(chart_figure(chart), Picture(chart_svg(chart), chart.in_words()))

"""A chart as plain values: what is drawn, the same for plotly and SVG. No library that draws is needed here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GROUP_WIDTH = 0.8  # of the room that a group of bars has on the axis


@dataclass(frozen=True)
class Axis:
    """An axis, with places along it where a label stands."""

    title: str  # with the unit
    limits: tuple[float, float]  # in the axis' units, also where it is logarithmic
    ticks: tuple[float, ...] = ()  # none: wherever the drawing library sees fit
    labels: tuple[str, ...] = ()  # one a tick; lines end in "\n"
    logarithmic: bool = False


@dataclass(frozen=True)
class Series:
    """Points of one kind. A value that is None is a gap."""

    name: str  # in the legend
    style: str  # a custom property of static/chart.css
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    notes: tuple[str, ...]  # a point's words when it is pointed at
    sizes: tuple[float, ...] = ()  # of "dots", diameters in pixels


@dataclass(frozen=True)
class Chart:
    """One chart. Texts may hold anything: who draws them escapes them."""

    kind: Literal["lines", "dots", "bars", "stack"]
    title: str
    subtitle: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    diagonal: bool = False  # the line y = x
    right: tuple[str, float] | None = None  # title of a second axis, and its units for one of y

    def bar_place(self, index: int) -> tuple[float, float]:
        """(left edge from the tick, width) of the bars of series ``index``, in units of x."""
        if self.kind == "stack":
            return -GROUP_WIDTH / 2, GROUP_WIDTH
        width = GROUP_WIDTH / len(self.series)
        return -GROUP_WIDTH / 2 + index * width, width

    def bar_base(self, index: int) -> tuple[float, ...]:
        """Where each bar of series ``index`` starts: at 0, in a stack on the values of the series before."""
        before = self.series[:index] if self.kind == "stack" else ()
        return tuple(sum(series.y[point] or 0.0 for series in before) for point in range(len(self.series[index].y)))

    def in_words(self) -> str:
        """Titles, then a line a series with its values after their places along x; gaps are dashes."""
        names = dict(zip(self.x.ticks, (label.replace("\n", " ") for label in self.x.labels), strict=True))
        lines = [self.title, self.subtitle]
        for series in self.series:
            points = (
                f"{names.get(x, f'{x:.4g}')}: {'–' if y is None else f'{y:.4g}'}"
                for x, y in zip(series.x, series.y, strict=True)
            )
            lines.append(f"{series.name} – {', '.join(points)}")
        return "\n".join(lines)

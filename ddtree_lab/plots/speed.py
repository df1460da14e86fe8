"""Plots of what a round costs and yields: traces or summary.json -> charts by budget and by stage."""

from __future__ import annotations

from collections.abc import Callable

from ddtree_lab.metrics import speed_ratio
from ddtree_lab.plots.chart import Axis, Chart, Series
from ddtree_lab.plots.show import show
from ddtree_lab.plots.source import Entry, Runs, Source, read_source
from ddtree_lab.viz.interactive import Interactive
from ddtree_lab.wording import counted

STAGES = ("draft", "tree_build", "verify", "accept", "commit")


def tau_by_budget(runs: Runs) -> Interactive:
    """Tokens per round by budget (tau), a line a tree mode; modes without a budget are level lines.

    Raises TypeError or ValueError naming ``runs`` when they are no records or hold no round of a tree mode, ImportError
    without the lab extra.
    """
    source = _with_trees(runs)
    return show(
        Chart(
            kind="lines",
            title="Tokens per round by budget",
            subtitle=source.subtitle,
            x=_budget_axis(source),
            y=Axis("tau (tokens per round)", (0.0, 1.1 * max(entry.figures["tau"] for entry in source.entries))),
            series=_by_budget(source, "tau", lambda entry: ""),
        )
    )


def speed_by_budget(runs: Runs) -> Interactive:
    """Tokens/s of the rounds by budget, and on the right their ratio to plain decoding of the same source.

    A line a tree mode; modes without a budget are level lines. Entries without recorded times are gaps.

    Raises as ``tau_by_budget``, and ValueError naming ``runs`` when no entry has a time.
    """
    source = _with_trees(runs)
    speeds = [entry.figures.get("tokens_per_second") for entry in source.entries]
    if not any(speeds):
        raise ValueError("runs must hold runs with 'decode_seconds', got none with a time")
    plain = next((entry.figures.get("tokens_per_second") for entry in source.entries if entry.mode == "ar"), None)

    def ratio(entry: Entry) -> str:
        times = speed_ratio(entry.figures.get("tokens_per_second"), plain)
        return "" if times is None else f", {times:.2f} x ar"

    return show(
        Chart(
            kind="lines",
            title="Speed by budget",
            subtitle=source.subtitle,
            x=_budget_axis(source),
            y=Axis("tokens/s of the rounds", (0.0, 1.1 * max(speed or 0.0 for speed in speeds))),
            series=_by_budget(source, "tokens_per_second", ratio),
            right=("ratio to ar (times)", 1 / plain) if plain else None,
        )
    )


def stage_times(runs: Runs, *, budget: int | None = None) -> Interactive:
    """The median milliseconds of each stage of a round, stacked, a bar a mode (``metrics.stage_milliseconds``).

    A stage that a mode does not have is missing from its bar; the recording of traces is left out. ``budget`` chooses
    among the tree modes' budgets, by default the largest.

    Raises as ``tau_by_budget``, ValueError naming ``budget`` when it was not run, and naming ``runs`` when no round
    has the time of a stage.
    """
    source = read_source(runs).at_budget(budget)
    places = tuple(map(float, range(len(source.entries))))
    stages = [stage for stage in STAGES if any(stage in entry.figures["stage_ms"] for entry in source.entries)]
    if not stages:
        raise ValueError("runs must hold rounds with 'stage_seconds', got none with a time")
    series = []
    for stage in stages:
        times = tuple(entry.figures["stage_ms"].get(stage, {}).get("median") for entry in source.entries)
        notes = tuple(
            f"{entry.name}: " + ("not recorded" if time is None else f"{time:.3g} ms")
            for entry, time in zip(source.entries, times, strict=True)
        )
        series.append(Series(stage.replace("_", " "), stage, places, times, notes))
    highest = max(sum(time or 0.0 for time in bar) for bar in zip(*(part.y for part in series), strict=True))
    return show(
        Chart(
            kind="stack",
            title="Time of a round by stage",
            subtitle=source.subtitle,
            x=Axis("", (-0.6, len(places) - 0.4), places, tuple(map(_lines, source.entries))),
            y=Axis("median time of the stage per round (ms)", (0.0, 1.08 * highest or 1.0)),
            series=tuple(series),
        )
    )


def _lines(entry: Entry) -> str:
    budget = f"budget {entry.budget}, " if entry.in_trees else ""
    return f"{entry.mode_name}\n{budget}{counted(entry.figures['rounds'], 'round')}"


def _with_trees(runs: Runs) -> Source:
    source = read_source(runs)
    if not any(entry.in_trees for entry in source.entries):
        raise ValueError("runs must hold a run of eagle_linear or tree_walk, got none with a budget")
    return source


def _budget_axis(source: Source) -> Axis:
    budgets = sorted({entry.budget for entry in source.entries if entry.in_trees})
    logarithmic = len(budgets) > 1 and budgets[0] > 0
    limits = (budgets[0] / 1.15, budgets[-1] * 1.15) if logarithmic else (budgets[0] - 1.0, budgets[-1] + 1.0)
    return Axis(
        "budget (drafted nodes of a tree at most)",
        limits,
        tuple(map(float, budgets)),
        tuple(map(str, budgets)),
        logarithmic,
    )


def _by_budget(source: Source, key: str, more: Callable[[Entry], str]) -> tuple[Series, ...]:
    """A series a mode and label: tree modes over their budgets, the others level over all budgets."""
    ticks = _budget_axis(source).ticks
    lines: dict[tuple[str | None, str | None], list[Entry]] = {}
    for entry in source.entries:
        lines.setdefault((entry.mode, entry.label), []).append(entry)
    series = []
    for entries in lines.values():
        x = tuple(float(entry.budget) for entry in entries) if entries[0].in_trees else ticks
        points = entries if entries[0].in_trees else entries * len(ticks)
        notes = tuple(f"{entry.name}: " + _value(entry.figures.get(key)) + more(entry) for entry in points)
        rounds = sum(entry.figures["rounds"] for entry in entries)
        name = f"{entries[0].mode_name}, {counted(rounds, 'round')}"
        series.append(Series(name, entries[0].style, x, tuple(entry.figures.get(key) for entry in points), notes))
    return tuple(series)


def _value(value: float | None) -> str:
    return "no time recorded" if value is None else f"{value:.2f}"

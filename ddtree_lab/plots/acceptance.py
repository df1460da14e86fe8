"""Plots of what was accepted: traces or summary.json -> charts by depth, round, rank and stated probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from ddtree_lab.plots.chart import Axis, Chart, Series
from ddtree_lab.plots.show import show
from ddtree_lab.plots.source import Entry, Runs, read_source
from ddtree_lab.viz.interactive import Interactive
from ddtree_lab.wording import counted

SMALLEST_DOT, LARGEST_DOT = 5.0, 22.0  # pixels, in whole ones
MAX_TICKS = 16
APART = {"beyond_k": "beyond\ntop K", "full_horizon": "no miss:\nall depths", "cut": "no miss:\nend of text"}


def acceptance_by_depth(runs: Runs, *, budget: int | None = None, conditional: bool = False) -> Interactive:
    """The share of all rounds that accepted and kept each depth (``metrics.per_depth``), a line a mode.

    ``conditional`` takes the share of the rounds that accepted the depth before (``metrics.per_depth_conditional``),
    with a gap where there were none. ``budget`` chooses among the tree modes' budgets, by default the largest.

    Raises TypeError or ValueError naming ``runs`` when they are no records or hold no round with a draft, ValueError
    naming ``budget`` when it was not run, ImportError without the lab extra. So do the other plots.
    """
    source = read_source(runs).at_budget(budget).drafted()
    key = "per_depth_conditional" if conditional else "per_depth"
    series = []
    for entry in source.entries:
        shares = tuple(entry.figures[key])
        notes = tuple(f"depth {depth}: {_percent(share)}" for depth, share in enumerate(shares, start=1))
        series.append(_series(entry, tuple(map(float, range(1, len(shares) + 1))), shares, notes))
    deepest = max(len(line.x) for line in series)
    of = "given the depth before" if conditional else "of all rounds"
    return show(
        Chart(
            kind="lines",
            title="Acceptance per depth",
            subtitle=source.subtitle,
            x=_counting("depth (tokens after the root)", deepest),
            y=Axis(f"share accepted, {of} (0 to 1)", (-0.03, 1.05)),
            series=tuple(series),
        )
    )


def tokens_per_round(runs: Runs, *, budget: int | None = None) -> Interactive:
    """How many rounds emitted how many tokens (``metrics.tokens_per_round``), bars a mode; plain decoding, with one
    token every round, is left out. ``budget`` and errors as in ``acceptance_by_depth``."""
    source = read_source(runs).at_budget(budget).drafted()
    series = []
    for entry in source.entries:
        counts = tuple(entry.figures["tokens_per_round"])
        notes = tuple(f"{counted(tokens, 'token')}: {counted(rounds, 'round')}" for tokens, rounds in enumerate(counts))
        series.append(_series(entry, tuple(map(float, range(1, len(counts)))), counts[1:], notes[1:]))
    most = max(len(bars.x) for bars in series)
    return show(
        Chart(
            kind="bars",
            title="Tokens per round",
            subtitle=source.subtitle,
            x=_counting("tokens emitted by a round", most),
            y=_rounds(series),
            series=tuple(series),
        )
    )


def missed_ranks(runs: Runs, *, budget: int | None = None) -> Interactive:
    """Where the target's token stood in the drafter's distribution when acceptance ended (``metrics.first_miss``).

    Bars a mode: rounds by the token's rank at the depth after the accepted path, then the rounds whose token is not
    among the recorded ones, and apart the rounds that missed nothing. ``budget`` and errors as in
    ``acceptance_by_depth``.
    """
    source = read_source(runs).at_budget(budget).drafted()
    misses = [entry.figures["first_miss"] for entry in source.entries]
    last = max((int(rank) for miss in misses for rank in miss["ranks"]), default=0)
    step = max(2, math.ceil((last + 2) / 6))  # apart, and wide enough for the words
    apart = [last + step * index for index in range(1, len(APART) + 1)]
    places, ticks = [*range(1, last + 1), *apart], [*_spread(last), *apart]
    labels = [*map(str, _spread(last)), *APART.values()]
    series = []
    for entry, miss in zip(source.entries, misses, strict=True):
        counts = [miss["ranks"].get(str(rank), 0) for rank in range(1, last + 1)] + [miss[name] for name in APART]
        said = [f"rank {rank}" for rank in range(1, last + 1)] + [words.replace("\n", " ") for words in APART.values()]
        notes = tuple(f"{words}: {counted(rounds, 'round')}" for words, rounds in zip(said, counts, strict=True))
        series.append(_series(entry, tuple(map(float, places)), tuple(counts), notes))
    return show(
        Chart(
            kind="bars",
            title="Rank of the missed token",
            subtitle=source.subtitle,
            x=Axis(
                "rank of the target's token in the drafter's distribution, 1 the most probable",
                (0.0, places[-1] + step / 2),
                tuple(map(float, ticks)),
                tuple(labels),
            ),
            y=_rounds(series),
            series=tuple(series),
        )
    )


def calibration(runs: Runs, *, budget: int | None = None) -> Interactive:
    """The drafter's path probability against the share of nodes that were accepted (``metrics.calibration``).

    A dot is the nodes of one depth and rank, its area grows with their number; on the line a drafter knows what it
    does not know. ``budget`` and errors as in ``acceptance_by_depth``.
    """
    source = read_source(runs).at_budget(budget).drafted()
    most = max(row["nodes"] for entry in source.entries for row in entry.figures["calibration"])
    series = []
    for entry in source.entries:
        rows = entry.figures["calibration"]
        notes = tuple(
            f"depth {row['depth']}, rank {row['rank']}, {counted(row['nodes'], 'node')}: "
            f"stated {row['stated']:.3f}, observed {row['observed']:.3f}"
            for row in rows
        )
        dots = _series(entry, tuple(row["stated"] for row in rows), tuple(row["observed"] for row in rows), notes)
        sizes = tuple(max(SMALLEST_DOT, round(LARGEST_DOT * math.sqrt(row["nodes"] / most), 0)) for row in rows)
        series.append(replace(dots, sizes=sizes))
    return show(
        Chart(
            kind="dots",
            title="Calibration of the drafter",
            subtitle=source.subtitle,
            x=Axis("stated: mean path probability by the drafter (0 to 1)", (-0.02, 1.04)),
            y=Axis("observed: share of nodes accepted (0 to 1)", (-0.04, 1.06)),
            series=tuple(series),
            diagonal=True,
        )
    )


def _series(entry: Entry, x: tuple[float, ...], y: tuple[float | None, ...], notes: tuple[str, ...]) -> Series:
    return Series(entry.name, entry.style, x, y, notes)


def _counting(title: str, last: int) -> Axis:
    """An axis from 1 to ``last``."""
    numbers = _spread(last)
    return Axis(title, (0.5, last + 0.5), tuple(map(float, numbers)), tuple(map(str, numbers)))


def _rounds(bars: Sequence[Series]) -> Axis:
    """The axis of counts of rounds, from 0."""
    most = max(1, *(value for series in bars for value in series.y))
    steps = (digit * 10**power for power in count() for digit in (1, 2, 5))
    numbers = range(0, most + 1, next(step for step in steps if 6 * step >= most))
    return Axis("rounds", (0.0, 1.08 * most), tuple(map(float, numbers)), tuple(map(str, numbers)))


def _spread(last: int) -> range:
    """Numbers from 1 to ``last``, few enough to stand side by side."""
    return range(1, last + 1, math.ceil(last / MAX_TICKS) or 1)


def _percent(share: float | None) -> str:
    return "no round" if share is None else f"{share:.1%}"

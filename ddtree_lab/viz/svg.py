"""A tree or a round as a picture: DraftTree or Round -> one standalone SVG document.

Every state has a line style and a sign besides its colour, and the picture follows the reader's light or dark scheme.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from ddtree_lab.types import DraftTree, Round
from ddtree_lab.viz.layout import TreeLayout, layout_tree
from ddtree_lab.viz.tokens import escape, label, visible
from ddtree_lab.viz.verdicts import describe_verdicts, view_round

LABEL_COLUMNS = 14  # character cells of a node's token
MIN_WIDTH = 720  # room for the legend
DRAFT_NOTE = "d: the drafter's probability of the token given its parent"
ODDS_NOTE = f"{DRAFT_NOTE}; t: the target's"


@dataclass(frozen=True)
class Geometry:
    """Pixels of the drawing; the report's page draws with the same numbers."""

    step_x: int = 172
    step_y: int = 44
    node_width: int = 132
    node_height: int = 36
    margin: int = 14


GEOMETRY = Geometry()


@dataclass(frozen=True)
class Mark:
    """How one kind of node is drawn and explained."""

    name: str  # the CSS class
    sign: str  # drawn in the node's corner
    meaning: str  # the legend's words


MARKS = {
    mark.name: mark
    for mark in (
        Mark("root", "●", "root: the last committed token"),
        Mark("kept", "✓", "accepted"),
        Mark("beyond", "»", "accepted by walking the tree, lost by EAGLE-linear"),
        Mark("stop", "×", "EAGLE-linear stopped: the next node of its sequence"),
        Mark("bonus", "+", "bonus token, from the target"),
        Mark("plain", "", "drafted, not accepted"),
    )
}


def round_svg(round: Round, decode_token: Callable[[int], str], *, title: str | None = None) -> str:
    """One round as a standalone SVG document.

    A node shows its token, the drafter's probability of it given its parent (d) and the target's (t). The accepted
    path, the bonus token, the nodes that only walking the tree accepts, and EAGLE-linear's stop are marked.

    ``decode_token`` maps a token id to its text, which may hold anything: it is made visible and escaped here.
    """
    tree, view = round.tree, view_round(round)
    path = round.acceptance.path
    bonus = decode_token(round.acceptance.bonus_token)
    heading = title or f"Round: {round.acceptance.num_accepted} of {tree.budget_used} drafted nodes accepted"
    odds = [
        f"d {probability(d)} · t {probability(t)}"
        for d, t in zip(conditional_log_probs(tree), round.target.node_log_probs.tolist(), strict=True)
    ]
    odds[0] = "root"
    texts = [decode_token(token) for token in tree.token_ids.tolist()] + [bonus]
    return _document(
        parents=[*tree.parents.tolist(), path[-1]],
        layout=layout_tree(tree, extra_child_of=path[-1]),
        marks=[*view.marks, "bonus"],
        texts=texts,
        odds=[*odds, f"t {probability(float(round.target.log_probs[path[-1]]))}"],
        heading=heading,
        description=describe_verdicts(round, decode_token),
    )


def tree_svg(tree: DraftTree, decode_token: Callable[[int], str], *, title: str | None = None) -> str:
    """A draft tree that no target has seen as a standalone SVG document; otherwise like ``round_svg``."""
    odds = [f"d {probability(value)}" for value in conditional_log_probs(tree)]
    odds[0] = "root"
    return _document(
        parents=tree.parents.tolist(),
        layout=layout_tree(tree),
        marks=["root"] + ["plain"] * tree.budget_used,
        texts=[decode_token(token) for token in tree.token_ids.tolist()],
        odds=odds,
        heading=title or f"Draft tree of {tree.budget_used} nodes",
        description=f"A tree of {tree.budget_used} drafted nodes, {int(tree.depths.max())} deep.",
        kinds=MARKS | {"plain": Mark("plain", "", "drafted")},
        note=DRAFT_NOTE,
    )


def conditional_log_probs(tree: DraftTree) -> list[float]:
    """[N] the drafter's log-probability of each node given its parent; the root's is 0."""
    path = tree.log_probs.tolist()
    return [0.0] + [path[node] - path[parent] for node, parent in enumerate(tree.parents.tolist()[1:], start=1)]


def probability(log_prob: float) -> str:
    """A log-probability as a short probability."""
    if math.isnan(log_prob):
        return "–"
    value = math.exp(min(log_prob, 0.0))
    if value < 0.001:
        return "<0.001"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def tree_style() -> str:
    """The style sheet of the pictures, every rule under ``.ddtree``."""
    return static_text("tree.css")


def themed_style() -> str:
    """The light and the dark palette of ``tree_style`` once more, each for JupyterLab's themes of its kind."""
    light, dark = (
        " ".join(re.findall(r"--dd-[\w-]+: [^;]+;", rules))
        for rules in re.findall(r"\.ddtree \{(.*?)\}", tree_style(), re.DOTALL)
    )
    return (
        f'[data-jp-theme-light="true"] .ddtree {{{light} color-scheme: light;}}\n'
        f'[data-jp-theme-light="false"] .ddtree {{{dark} color-scheme: dark;}}\n'
    )


def static_text(name: str) -> str:
    """The text of a file in ``static/``."""
    return (files("ddtree_lab.viz") / "static" / name).read_text(encoding="utf-8")


def _document(
    *,
    parents: Sequence[int],
    layout: TreeLayout,
    marks: Sequence[str],
    texts: Sequence[str],
    odds: Sequence[str],
    heading: str,
    description: str,
    kinds: Mapping[str, Mark] = MARKS,
    note: str = ODDS_NOTE,
) -> str:
    size = GEOMETRY
    legend = [kinds[name] for name in kinds if name in marks]
    top = size.margin + 24 + 18 * (len(legend) + 1) + 12
    width = max(MIN_WIDTH, 2 * size.margin + layout.columns * size.step_x + size.node_width)
    height = top + layout.rows * size.step_y + size.node_height + size.margin
    left = [size.margin + x * size.step_x for x in layout.x]
    middle = [top + size.node_height / 2 + y * size.step_y for y in layout.y]
    edges = [
        _edge(left[parent] + size.node_width, middle[parent], left[node], middle[node], marks[node])
        for node, parent in enumerate(parents)
        if parent >= 0
    ]
    nodes = [
        _node(left[node], middle[node] - size.node_height / 2, kinds[marks[node]], texts[node], odds[node])
        for node in range(len(parents))
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ddtree" role="img" aria-labelledby="ddtree-t ddtree-d" '
        f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}">',
        f'<title id="ddtree-t">{escape(heading)}</title>',
        f'<desc id="ddtree-d">{escape(description)}</desc>',
        f"<style>{tree_style()}</style>",
        f'<clipPath id="ddtree-clip"><rect x="8" y="0" width="{size.node_width - 28}" height="{size.node_height}"/>'
        "</clipPath>",
        f'<rect class="paper" width="{width:g}" height="{height:g}"/>',
        f'<text class="title" x="{size.margin}" y="{size.margin + 14}">{escape(heading)}</text>',
        *(_legend_line(mark, size.margin, size.margin + 38 + 18 * line) for line, mark in enumerate(legend)),
        f'<text class="note" x="{size.margin}" y="{size.margin + 39 + 18 * len(legend)}">{note}</text>',
        "<g>",
        *edges,
        "</g>",
        *nodes,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _edge(x0: float, y0: float, x1: float, y1: float, mark: str) -> str:
    bend = (x0 + x1) / 2
    return f'<path class="edge {mark}" d="M{x0:g} {y0:g}C{bend:g} {y0:g} {bend:g} {y1:g} {x1:g} {y1:g}"/>'


def _node(x: float, y: float, mark: Mark, text: str, odds: str) -> str:
    width, height = GEOMETRY.node_width, GEOMETRY.node_height
    shown, full = label(text, columns=LABEL_COLUMNS), visible(text)
    inner = (
        f'<rect class="inner" x="3" y="3" width="{width - 6}" height="{height - 6}" rx="4"/>'
        if mark.name == "beyond"
        else ""
    )
    return (
        f'<g class="node {mark.name}" transform="translate({x:g} {y:g})"><title>{escape(full)}: {mark.meaning}</title>'
        f'<rect class="box" width="{width}" height="{height}" rx="6"/>{inner}'
        f'<text class="token" x="9" y="16" clip-path="url(#ddtree-clip)">{escape(shown)}</text>'
        f'<text class="odds" x="9" y="29">{escape(odds)}</text>'
        f'<text class="sign" x="{width - 13}" y="17">{mark.sign}</text></g>'
    )


def _legend_line(mark: Mark, x: float, y: float) -> str:
    return (
        f'<g class="node {mark.name}" transform="translate({x:g} {y - 11:g})">'
        f'<rect class="box" width="22" height="14" rx="4"/><text class="sign" x="11" y="12">{mark.sign}</text>'
        f'<text class="note" x="30" y="12">{mark.meaning}</text></g>'
    )

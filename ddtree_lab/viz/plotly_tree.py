"""A tree or a round as a plotly figure: the drawing of ``ddtree_lab.viz.drawing`` to point at and move about in.

Places, marks, texts and legend are the SVG's, and its style sheet gives the colours. A figure has one scheme, the light
one: on a dark page it is a light card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddtree_lab.optional import lab_module
from ddtree_lab.types import DraftTree, Round
from ddtree_lab.viz.drawing import (
    GEOMETRY,
    LABEL_COLUMNS,
    Drawing,
    Mark,
    Node,
    conditional_log_probs,
    draw_round,
    draw_tree,
    probability,
)
from ddtree_lab.viz.plotly_card import HEAD_HEIGHT, LEGEND_LINE, card
from ddtree_lab.viz.stylesheet import Stroke, StyleSheet, read_style
from ddtree_lab.viz.tokens import escape_plotly, label, token_decoder

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ddtree_lab.target.protocol import Target

VIEW_WIDTH = 940  # pixels: a larger tree is seen through a window that fits a notebook's page
VIEW_HEIGHT = 760
LEGEND_WIDTH = 560  # room for its longest line
EDGE = 4  # room for the line of the outermost boxes
HOVER_COLUMNS = 60  # character cells of a token's text in the hover label
VIEW_NOTE = "drag to see more, double click to come back"


@dataclass(frozen=True)
class View:
    """The part of the drawing that a figure opens with, at the size of the SVG."""

    width: int  # pixels of the figure
    height: int
    x: tuple[float, float]  # axis ranges, in steps
    y: tuple[float, float]  # from the bottom up, so the larger first
    cropped: bool


def round_figure(round: Round, target: Target | None = None, *, title: str | None = None) -> Figure:
    """The tree of a round with both verdicts, as ``viz.show_round`` draws it; pointing at a node shows its figures.

    x is the depth and y the row of ``viz.layout_tree``. The trace ``nodes`` holds the tree's N nodes in their order and
    then the bonus token. A tree beyond 940 x 760 pixels opens at the root with the accepted path in the middle: drag
    to move, double click to come back. Tokens are texts of ``target``'s tokenizer, ids when there is none; whatever
    they hold is shown as text.

    Raises ImportError when plotly is not installed.
    """
    decode, seen, end = token_decoder(target), round.target, round.acceptance.path[-1]
    next_odds = [probability(value) for value in seen.log_probs.tolist()]
    details = _drafted(round.tree)
    for node in range(1, len(round.tree)):
        odds, rank = probability(float(seen.node_log_probs[node])), int(seen.node_ranks[node]) + 1
        details[node].append(f"target, given its parent: {odds}, rank {rank}")
    for node, token in enumerate(seen.token_ids.tolist()):
        details[node].append(f"target goes on with “{_shortened(decode(token))}”, {next_odds[node]}")
    details.append([f"token {round.acceptance.bonus_token}", f"target: {next_odds[end]}"])
    return _figure(draw_round(round, decode, title=title), details, path=(*round.acceptance.path, len(round.tree)))


def tree_figure(tree: DraftTree, target: Target | None = None, *, title: str | None = None) -> Figure:
    """A draft tree that no target has seen, otherwise like ``round_figure``; its trace ``nodes`` has N points."""
    return _figure(draw_tree(tree, token_decoder(target), title=title), _drafted(tree), path=(0,))


def _drafted(tree: DraftTree) -> list[list[str]]:
    """For each node the lines that the drafter alone gives."""
    details = []
    fields = (tree.token_ids, tree.depths, tree.ranks, tree.log_probs)
    columns = zip(*(field.tolist() for field in fields), conditional_log_probs(tree), strict=True)
    for node, (token, depth, rank, path, given) in enumerate(columns):
        details.append([f"token {token}, node {node}, depth {depth}"])
        if node:
            odds = f"path {probability(path)}, given its parent {probability(given)}, rank {rank + 1}"
            details[node].append(f"drafter: {odds}")
    return details


def _figure(drawing: Drawing, details: Sequence[Sequence[str]], *, path: Sequence[int]) -> Figure:
    style, size, nodes = read_style("tree"), GEOMETRY, drawing.nodes
    top = HEAD_HEIGHT + LEGEND_LINE * (len(drawing.legend) + 1)
    view = _view(nodes, path, top=top)
    note = drawing.note + (f"; {VIEW_NOTE}" if view.cropped else "")
    return lab_module("plotly.graph_objects").Figure(
        data=[
            *(_legend_entry(mark, style) for mark in drawing.legend),
            *_texts(nodes, style),
            _points(nodes, details),
        ],
        layout={
            **card(
                style,
                drawing.heading,
                width=view.width,
                height=view.height,
                margin={"l": size.margin, "r": size.margin, "t": top, "b": size.margin},
            ),
            "annotations": [
                {
                    "text": escape_plotly(note),
                    "showarrow": False,
                    "x": 0,
                    "xref": "paper",
                    "y": 1,
                    "yref": "paper",
                    "yanchor": "bottom",
                    "yshift": 4,
                    "font": {"color": style.light["dd-muted"]},
                }
            ],
            "shapes": [*_edges(nodes, style), *_boxes(nodes, style)],
            "xaxis": {"visible": False, "range": view.x},
            "yaxis": {"visible": False, "range": view.y},
            "dragmode": "pan",
            "hovermode": "closest",
            "hoverdistance": size.node_width // 2,
        },
    )


def _view(nodes: Sequence[Node], path: Sequence[int], *, top: int) -> View:
    """The root at the left, the part of ``path`` that fits in the middle; the root is always in sight."""
    size, frame = GEOMETRY, 2 * GEOMETRY.margin
    across = max(LEGEND_WIDTH, max(node.x for node in nodes) * size.step_x + size.node_width + EDGE)
    down = max(node.y for node in nodes) * size.step_y + size.node_height + EDGE
    width, height = min(VIEW_WIDTH, round(across) + frame), min(VIEW_HEIGHT, round(down) + top + size.margin)
    columns, rows = (width - frame) / size.step_x, (height - top - size.margin) / size.step_y
    left, half = -(size.node_width + EDGE) / 2 / size.step_x, (size.node_height + EDGE) / 2 / size.step_y
    along = [nodes[node].y for node in path if nodes[node].x < columns]
    first = (min(along) + max(along) - rows) / 2
    first = min(max(first, nodes[0].y + half - rows, -half), nodes[0].y - half, down / size.step_y - half - rows)
    return View(
        width=width,
        height=height,
        x=(left, left + columns),
        y=(first + rows, first),
        cropped=across > width - frame or down > height - top - size.margin,
    )


def _points(nodes: Sequence[Node], details: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What the pointer finds: an unseen marker in the middle of every node."""
    hover = [
        f"<b>{escape_plotly(_shortened(node.text))}</b><br>"
        + "<br>".join(map(escape_plotly, (node.mark.meaning, *lines)))
        for node, lines in zip(nodes, details, strict=True)
    ]
    return {
        "name": "nodes",
        "x": [node.x for node in nodes],
        "y": [node.y for node in nodes],
        "mode": "markers",
        "marker": {"size": GEOMETRY.node_height, "opacity": 0},
        "hovertext": hover,
        "hoverinfo": "text",
        "showlegend": False,
    }


def _texts(nodes: Sequence[Node], style: StyleSheet) -> list[dict[str, Any]]:
    """Tokens, odds and signs, each at the SVG's place in the box."""
    left, corner = 6 - GEOMETRY.node_width / 2, GEOMETRY.node_width / 2 - 13
    ink, muted = style.light["dd-ink"], style.light["dd-muted"]
    signs = [style.colour("fill", f".ddtree .{node.mark.name} .sign") or ink for node in nodes]
    tokens = {"family": style.family(".ddtree .token"), "size": 12}
    return [
        _text("tokens", nodes, [label(node.text, columns=LABEL_COLUMNS) for node in nodes], left, -6, tokens),
        _text("odds", nodes, [node.odds for node in nodes], left, 8, {"size": 10, "color": muted}),
        _text("signs", nodes, [node.mark.sign for node in nodes], corner, -6, {"size": 13, "color": signs}),
    ]


def _text(
    name: str, nodes: Sequence[Node], texts: Sequence[str], right: float, below: float, font: dict[str, Any]
) -> dict[str, Any]:
    """A text trace ``right`` and ``below`` of the nodes' middles, in pixels of the drawing."""
    return {
        "name": name,
        "x": [node.x + right / GEOMETRY.step_x for node in nodes],
        "y": [node.y + below / GEOMETRY.step_y for node in nodes],
        "text": [escape_plotly(text) for text in texts],
        "mode": "text",
        "textposition": "middle center" if name == "signs" else "middle right",
        "textfont": font,
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _legend_entry(mark: Mark, style: StyleSheet) -> dict[str, Any]:
    box = style.stroke(".ddtree .box", f".ddtree .{mark.name} .box")
    return {
        "name": f"{mark.sign} {mark.meaning}".strip(),
        "x": [None],
        "y": [None],
        "mode": "markers",
        "marker": {"symbol": "square", "size": 12, "color": box.fill, "line": {"color": box.colour, "width": 2}},
    }


def _edges(nodes: Sequence[Node], style: StyleSheet) -> list[dict[str, Any]]:
    """The SVG's curves from the right side of the parent to the left side of the node."""
    half = GEOMETRY.node_width / 2 / GEOMETRY.step_x
    shapes = []
    for node in nodes[1:]:
        parent, line = nodes[node.parent], style.stroke(".ddtree .edge", f".ddtree .edge.{node.mark.name}")
        x0, x1 = parent.x + half, node.x - half
        bend = (x0 + x1) / 2
        path = f"M{x0:g},{parent.y:g}C{bend:g},{parent.y:g} {bend:g},{node.y:g} {x1:g},{node.y:g}"
        shapes.append({"type": "path", "path": path, "layer": "below", "line": line.plotly_line})
    return shapes


def _boxes(nodes: Sequence[Node], style: StyleSheet) -> list[dict[str, Any]]:
    shapes = []
    for node in nodes:
        box = style.stroke(".ddtree .box", f".ddtree .{node.mark.name} .box")
        shapes.append(_rectangle(node, box, inset=0))
        if node.mark.name == "beyond":
            shapes.append(_rectangle(node, style.stroke(".ddtree .inner"), inset=3))
    return shapes


def _rectangle(node: Node, box: Stroke, *, inset: int) -> dict[str, Any]:
    half_x = (GEOMETRY.node_width / 2 - inset) / GEOMETRY.step_x
    half_y = (GEOMETRY.node_height / 2 - inset) / GEOMETRY.step_y
    return {
        "type": "rect",
        "x0": node.x - half_x,
        "x1": node.x + half_x,
        "y0": node.y - half_y,
        "y1": node.y + half_y,
        "layer": "below",
        "fillcolor": box.fill,
        "line": box.plotly_line,
    }


def _shortened(text: str) -> str:
    return label(text, columns=HOVER_COLUMNS)

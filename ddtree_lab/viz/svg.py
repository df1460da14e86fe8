"""A tree or a round as a picture: DraftTree or Round -> one standalone SVG document.

Every state has a line style and a sign besides its colour, and the picture follows the reader's light or dark scheme.
"""

from __future__ import annotations

from collections.abc import Callable

from ddtree_lab.types import DraftTree, Round
from ddtree_lab.viz.drawing import GEOMETRY, LABEL_COLUMNS, Drawing, Mark, Node, draw_round, draw_tree
from ddtree_lab.viz.stylesheet import tree_style
from ddtree_lab.viz.tokens import escape, label, visible

MIN_WIDTH = 720  # room for the legend


def round_svg(round: Round, decode_token: Callable[[int], str], *, title: str | None = None) -> str:
    """One round as a standalone SVG document.

    A node shows its token, the drafter's probability of it given its parent (d) and the target's (t). The accepted
    path, the bonus token, the nodes that only walking the tree accepts, and EAGLE-linear's stop are marked.

    ``decode_token`` maps a token id to its text, which may hold anything: it is made visible and escaped here.
    """
    return _document(draw_round(round, decode_token, title=title))


def tree_svg(tree: DraftTree, decode_token: Callable[[int], str], *, title: str | None = None) -> str:
    """A draft tree that no target has seen as a standalone SVG document; otherwise like ``round_svg``."""
    return _document(draw_tree(tree, decode_token, title=title))


def _document(drawing: Drawing) -> str:
    size = GEOMETRY
    nodes, legend = drawing.nodes, drawing.legend
    top = size.margin + 24 + 18 * (len(legend) + 1) + 12
    width = max(MIN_WIDTH, 2 * size.margin + max(node.x for node in nodes) * size.step_x + size.node_width)
    height = top + max(node.y for node in nodes) * size.step_y + size.node_height + size.margin
    left = [size.margin + node.x * size.step_x for node in nodes]
    middle = [top + size.node_height / 2 + node.y * size.step_y for node in nodes]
    edges = [
        _edge(left[node.parent] + size.node_width, middle[node.parent], left[index], middle[index], node.mark.name)
        for index, node in enumerate(nodes)
        if node.parent >= 0
    ]
    boxes = [_node(x, y - size.node_height / 2, node) for x, y, node in zip(left, middle, nodes, strict=True)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ddtree" role="img" aria-labelledby="ddtree-t ddtree-d" '
        f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}">',
        f'<title id="ddtree-t">{escape(drawing.heading)}</title>',
        f'<desc id="ddtree-d">{escape(drawing.description)}</desc>',
        f"<style>{tree_style()}</style>",
        f'<clipPath id="ddtree-clip"><rect x="8" y="0" width="{size.node_width - 28}" height="{size.node_height}"/>'
        "</clipPath>",
        f'<rect class="paper" width="{width:g}" height="{height:g}"/>',
        f'<text class="title" x="{size.margin}" y="{size.margin + 14}">{escape(drawing.heading)}</text>',
        *(legend_line(mark, size.margin, size.margin + 38 + 18 * line) for line, mark in enumerate(legend)),
        f'<text class="note" x="{size.margin}" y="{size.margin + 39 + 18 * len(legend)}">{drawing.note}</text>',
        "<g>",
        *edges,
        "</g>",
        *boxes,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _edge(x0: float, y0: float, x1: float, y1: float, mark: str) -> str:
    bend = (x0 + x1) / 2
    return f'<path class="edge {mark}" d="M{x0:g} {y0:g}C{bend:g} {y0:g} {bend:g} {y1:g} {x1:g} {y1:g}"/>'


def _node(x: float, y: float, node: Node) -> str:
    width, height, mark = GEOMETRY.node_width, GEOMETRY.node_height, node.mark
    shown, full = label(node.text, columns=LABEL_COLUMNS), visible(node.text)
    inner = (
        f'<rect class="inner" x="3" y="3" width="{width - 6}" height="{height - 6}" rx="4"/>'
        if mark.name == "beyond"
        else ""
    )
    return (
        f'<g class="node {mark.name}" transform="translate({x:g} {y:g})"><title>{escape(full)}: {mark.meaning}</title>'
        f'<rect class="box" width="{width}" height="{height}" rx="6"/>{inner}'
        f'<text class="token" x="9" y="16" clip-path="url(#ddtree-clip)">{escape(shown)}</text>'
        f'<text class="odds" x="9" y="29">{escape(node.odds)}</text>'
        f'<text class="sign" x="{width - 13}" y="17">{mark.sign}</text></g>'
    )


def legend_line(mark: Mark, x: float, y: float) -> str:
    """A mark with its meaning, the words' foot at ``y``."""
    return (
        f'<g class="node {mark.name}" transform="translate({x:g} {y - 11:g})">'
        f'<rect class="box" width="22" height="14" rx="4"/><text class="sign" x="11" y="12">{mark.sign}</text>'
        f'<text class="note" x="30" y="12">{mark.meaning}</text></g>'
    )

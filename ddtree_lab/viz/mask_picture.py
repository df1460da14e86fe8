"""Who sees whom as a picture: a draft tree and a bool mask -> SVG with a row a node and a column a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddtree_lab.attention import ancestor_mask
from ddtree_lab.types import DraftTree
from ddtree_lab.viz.drawing import LABEL_COLUMNS, Mark
from ddtree_lab.viz.picture import Picture
from ddtree_lab.viz.stylesheet import tree_style
from ddtree_lab.viz.svg import MIN_WIDTH, legend_line
from ddtree_lab.viz.tokens import escape, label, token_decoder
from ddtree_lab.wording import counted

if TYPE_CHECKING:
    from ddtree_lab.target.protocol import Target

CELL, GAP, INDENT, LABEL_WIDTH, MARGIN, LINE = 22, 10, 10, 140, 14, 18  # pixels
MARKS = (
    Mark("kept", "", "seen: context, an ancestor, or (●) the node itself"),
    Mark("stop", "×", "seen, but no ancestor"),
    Mark("plain", "", "not seen"),
)
SEEN, WRONG, HIDDEN = MARKS


def show_mask(
    tree: DraftTree, mask: Tensor | None = None, *, target: Target | None = None, title: str | None = None
) -> Picture:
    """What each node of ``tree`` sees under the bool ``mask`` [N, M], by default its ancestor mask [N, N].

    The last N of the M >= N keys are the tree's nodes, those before them the context, as in ``attention.full_mask``.
    Nodes that are seen from where they are no ancestor are marked. Tokens are shown as ``show_tree`` does.

    Raises ValueError for a mask of another shape, TypeError for one that is not bool.
    """
    ancestors = ancestor_mask(tree)
    mask = ancestors if mask is None else mask.cpu()
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, True where visible; got {mask.dtype}")
    if mask.ndim != 2 or mask.shape[0] != len(tree) or mask.shape[1] < len(tree):
        raise ValueError(f"mask must be [N, M] with N = {len(tree)} nodes and M >= N, got {tuple(mask.shape)}")
    past = mask.shape[1] - len(tree)
    cells = [
        [
            HIDDEN if not seen else SEEN if key < past or ancestors[node, key - past] else WRONG
            for key, seen in enumerate(row)
        ]
        for node, row in enumerate(mask.tolist())
    ]
    heading = title or f"Attention mask of {counted(len(tree), 'node')}"
    return Picture(_svg(tree, cells, past, heading, target), f"{heading}\n{_in_words(cells, past)}")


def _svg(tree: DraftTree, cells: list[list[Mark]], past: int, heading: str, target: Target | None) -> str:
    decode, depths = token_decoder(target), tree.depths.tolist()
    used = [mark for mark in MARKS if any(mark in row for row in cells)]
    left = MARGIN + INDENT * max(depths) + LABEL_WIDTH
    top = MARGIN + 24 + LINE * len(used) + 34
    x = [left + CELL * key + GAP * (key >= past > 0) for key in range(len(cells[0]))]
    end = x[-1] + CELL
    width, height = max(MIN_WIDTH, end + 60), top + CELL * len(cells) + MARGIN
    heads = [key if key < past else key - past for key in range(len(x))]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ddtree" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">',
        f"<title>{escape(heading)}</title>",
        f"<style>{tree_style()}.ddtree .head {{ text-anchor: middle; }}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text class="title" x="{MARGIN}" y="{MARGIN + 14}">{escape(heading)}</text>',
        *(legend_line(mark, MARGIN, MARGIN + 38 + LINE * line) for line, mark in enumerate(used)),
        *([f'<text class="note" x="{x[0]}" y="{top - 20}">context</text>'] if past else []),
        f'<text class="note" x="{x[past]}" y="{top - 20}">tree</text>',
        f'<text class="note" x="{end + 8}" y="{top - 6}">depth</text>',
        *(
            f'<text class="odds head" x="{at + CELL / 2:g}" y="{top - 6}">{head}</text>'
            for at, head in zip(x, heads, strict=True)
        ),
    ]
    for node, (row, depth, token) in enumerate(zip(cells, depths, tree.token_ids.tolist(), strict=True)):
        y = top + CELL * node
        text = escape(label(decode(token), columns=LABEL_COLUMNS))
        parts += [
            f'<text class="odds" x="{MARGIN}" y="{y + 15}">{node}</text>',
            f'<text class="token" x="{MARGIN + 24 + INDENT * depth}" y="{y + 15}">{text}</text>',
            *(_cell(mark, at, y, own=key == past + node) for key, (mark, at) in enumerate(zip(row, x, strict=True))),
            f'<text class="odds" x="{end + 8}" y="{y + 15}">{depth}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _cell(mark: Mark, x: int, y: int, *, own: bool) -> str:
    sign = "●" if own and mark is SEEN else mark.sign
    drawn = f'<text class="sign" x="{CELL / 2:g}" y="16">{sign}</text>' if sign else ""
    size = CELL - 2
    return (
        f'<g class="node {mark.name}" transform="translate({x} {y})">'
        f'<rect class="box" x="1" y="1" width="{size}" height="{size}" rx="3"/>{drawn}</g>'
    )


def _in_words(cells: list[list[Mark]], past: int) -> str:
    """A line a node: how much of the context and which nodes it sees, those that are no ancestors apart."""
    lines = []
    for node, row in enumerate(cells):
        seen, wrong = (
            ", ".join(str(key) for key, mark in enumerate(row[past:]) if mark is kind) for kind in (SEEN, WRONG)
        )
        context = f"{row[:past].count(SEEN)} of {past} of the context and " if past else ""
        more = f"; no ancestors of it: {wrong}" if wrong else ""
        lines.append(f"Node {node} sees {context}{seen or 'no node'}{more}.")
    return "\n".join(lines)

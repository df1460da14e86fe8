"""Where the nodes of a tree stand: DraftTree -> coordinates, the one source for SVG, plotly and widgets.

The root is at the left, depth grows to the right, and siblings stand from top to bottom by rank (Reingold-Tilford).
"""

from __future__ import annotations

from dataclasses import dataclass

import igraph

from ddtree_lab.types import DraftTree


@dataclass(frozen=True)
class TreeLayout:
    """Centres of the nodes in steps: x is the depth, y the row; neighbours in a column are at least one row apart."""

    x: tuple[float, ...]  # [N], or [N + 1] with an extra node
    y: tuple[float, ...]  # same length; the smallest is 0
    columns: float  # largest x
    rows: float  # largest y


def layout_tree(tree: DraftTree, *, extra_child_of: int | None = None) -> TreeLayout:
    """Coordinates of every node of ``tree``, in node order; y is a multiple of 1/4.

    ``extra_child_of`` names a node that gets one more child, placed after its own children and returned as the last
    entry: room for a bonus token. Raises ValueError when it is no node of the tree.
    """
    parents = tree.parents.tolist()
    sibling_ranks = tree.ranks.tolist()
    if extra_child_of is not None:
        if not 0 <= extra_child_of < len(tree):
            raise ValueError(f"extra_child_of must be a node index from 0 to {len(tree) - 1}, got {extra_child_of}")
        parents.append(extra_child_of)
        sibling_ranks.append(max(sibling_ranks) + 1)
    depths = [0] * len(parents)
    for node, parent in enumerate(parents[1:], start=1):
        depths[node] = depths[parent] + 1

    # igraph places siblings by vertex id, so the vertices are numbered by rank.
    order = sorted(range(len(parents)), key=lambda node: (depths[node], sibling_ranks[node], node))
    vertex = {node: number for number, node in enumerate(order)}
    edges = [(vertex[parent], vertex[node]) for node, parent in enumerate(parents) if parent >= 0]
    graph = igraph.Graph(len(parents), edges, directed=True)
    across = [point[0] for point in graph.layout_reingold_tilford(mode="out", root=[0]).coords]
    top = min(across)
    y = tuple(round((across[vertex[node]] - top) * 4) / 4 for node in range(len(parents)))
    return TreeLayout(x=tuple(map(float, depths)), y=y, columns=float(max(depths)), rows=max(y))

"""Trees from an edge list: (parent, child) pairs and token ids -> DraftTree, for trees that come from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ddtree_lab.tree.validate import as_count
from ddtree_lab.types import DraftTree


def tree_from_edges(
    edges: Iterable[tuple[int, int]],
    token_ids: Tensor | Sequence[int],
    *,
    ranks: Tensor | Sequence[int] | None = None,
    log_probs: Tensor | Sequence[float] | None = None,
) -> DraftTree:
    """The tree of N = len(token_ids) nodes, node 0 the root, that ``edges`` connect; parents precede children.

    Without ``ranks`` a node's rank is its place among its siblings; without ``log_probs`` every path has probability 1.

    Raises ValueError naming the node when an edge touches a node that does not exist, when a node has two parents or
    none, stands on a cycle, or precedes its parent, and for every fault that ``check_tree`` finds.
    """
    count = len(token_ids)
    parents = [-1] * count
    for parent, child in edges:
        parent, child = as_count("parent in edges", parent), as_count("child in edges", child)
        if child >= count:
            raise ValueError(f"edge ({parent}, {child}): no node {child}; token_ids has nodes 0 to {count - 1}")
        if parent >= count:
            raise ValueError(f"node {child}: missing parent {parent}; token_ids has nodes 0 to {count - 1}")
        if child == 0:
            raise ValueError(f"edge ({parent}, 0): node 0 is the root and has no parent")
        if parents[child] != -1:
            raise ValueError(f"node {child} has two parents: {parents[child]} and {parent}")
        parents[child] = parent
    for node in range(1, count):
        if parents[node] == -1:
            raise ValueError(f"node {node} has no parent; only node 0 is a root")

    depths = _depths(parents)
    siblings = [0] * count
    places = [0] * count
    for node in range(1, count):
        places[node] = siblings[parents[node]]
        siblings[parents[node]] += 1
    return DraftTree(
        token_ids=token_ids,
        parents=parents,
        depths=depths,
        ranks=places if ranks is None else ranks,
        log_probs=[0.0] * count if log_probs is None else log_probs,
    )


def _depths(parents: list[int]) -> list[int]:
    """Depth of every node; each is visited once, so a cycle is found in O(N)."""
    depths = [0] + [-1] * (len(parents) - 1)
    for node in range(1, len(parents)):
        trail: dict[int, None] = {}
        while depths[node] < 0:
            if node in trail:
                raise ValueError(f"node {node} stands on a cycle: following parents from it never reaches the root")
            trail[node] = None
            node = parents[node]
        for step, above in enumerate(reversed(trail), start=1):
            depths[above] = depths[node] + step
    return depths

"""EAGLE-linear verification: the same tree flattened to a sequence and cut at the first mismatch -> accepted path."""

from __future__ import annotations

from itertools import pairwise

from numpy.typing import ArrayLike
from torch import Tensor

from ddtree_lab.accept.walk import target_list
from ddtree_lab.types import Acceptance, DraftTree


def flatten_dfs(tree: DraftTree) -> list[int]:
    """All N node indices depth-first, the most probable child first, so that the sequence starts with the greedy path.

    Equal children go by rank, then by node index.
    """
    log_probs, ranks = tree.log_probs.tolist(), tree.ranks.tolist()
    children = tree.children()
    sequence: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        sequence.append(node)
        # The stack pops the last pushed first.
        stack += sorted(children[node], key=lambda child: (-log_probs[child], ranks[child], child), reverse=True)
    return sequence


def verify_linear(tree: DraftTree, target_ids: Tensor | ArrayLike, order: str = "dfs") -> Acceptance:
    """Verify the tree as a linear sampler does, with the target's token after each node ``target_ids`` [N].

    Each position of the sequence is accepted iff every earlier one was and its token is the target's after the
    *previous position*; the scan stops at the first mismatch. A match whose previous position is not its parent is a
    false continuation: its KV was computed under another parent. The path ends before the first of them, which keeps it
    lossless; the scan goes on only to count them. ``order`` is "dfs" (``flatten_dfs``) or "index" (order of building).

    Raises ValueError for another ``order``; for ``target_ids`` as ``walk`` does.
    """
    if order not in ("dfs", "index"):
        raise ValueError(f'order must be "dfs" or "index", got {order!r}')
    targets = target_list(tree, target_ids)
    sequence = flatten_dfs(tree) if order == "dfs" else list(range(len(tree)))
    token_ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
    path = [0]
    false_continuations = 0
    for previous, node in pairwise(sequence):
        if token_ids[node] != targets[previous]:
            break
        if parents[node] != previous:
            false_continuations += 1
        elif not false_continuations:
            path.append(node)
    return Acceptance(path=tuple(path), bonus_token=targets[path[-1]], false_continuations=false_continuations)

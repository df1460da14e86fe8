"""Ancestor mask and positions: the parents of a tree -> who sees whom, and where each node stands in the sequence."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ddtree_lab.tree.validate import as_count, check_parents
from ddtree_lab.types import DraftTree


def ancestor_mask(tree_or_parents: DraftTree | Tensor | ArrayLike) -> Tensor:
    """Bool [N, N] on the CPU: row i is True at column j iff j is i or an ancestor of i.

    Takes a DraftTree or its parents [N]. All nodes climb one parent a step, so the work is the sum of their depths.
    Raises ValueError/TypeError as ``check_parents`` does.
    """
    parents = _parents_of(tree_or_parents)
    mask = np.zeros((parents.size, parents.size), dtype=np.bool_)
    nodes = ancestors = np.arange(parents.size)
    while nodes.size:
        mask[nodes, ancestors] = True
        ancestors = parents[ancestors]
        below_root = ancestors >= 0
        nodes, ancestors = nodes[below_root], ancestors[below_root]
    return torch.from_numpy(mask)


def positions(tree: DraftTree | Tensor | ArrayLike, past_length: int) -> Tensor:
    """Int64 [N]: ``past_length`` (committed tokens before the root) plus each node's depth.

    Takes a DraftTree or its parents [N]. Raises ValueError when ``past_length`` is negative.
    """
    depths = tree.depths if isinstance(tree, DraftTree) else ancestor_mask(tree).sum(-1) - 1
    return depths + as_count("past_length", past_length)


def _parents_of(tree_or_parents: DraftTree | Tensor | ArrayLike) -> np.ndarray:
    if isinstance(tree_or_parents, DraftTree):
        return tree_or_parents.parents.numpy()
    return check_parents(tree_or_parents)

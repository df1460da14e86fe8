"""Tree-walk verification: a tree and the target's token after each node -> the accepted path and the bonus token."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ddtree_lab.types import Acceptance, DraftTree


def walk(tree: DraftTree, target_ids: Tensor | ArrayLike) -> Acceptance:
    """Follow the target's own tokens ``target_ids`` [N] from the root for as long as the tree holds them.

    The bonus token is the target's after the last node reached (DDTree, arXiv 2604.12989, verification).
    Raises ValueError when ``target_ids`` has not one entry a node, TypeError when they are not integers.
    """
    targets = target_list(tree, target_ids)
    path = [0]
    # One pass is enough: children stand after their parent, and no two children of a node hold the same token.
    nodes = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
    for node, (parent, token) in enumerate(nodes):
        if parent == path[-1] and token == targets[parent]:
            path.append(node)
    return Acceptance(path=tuple(path), bonus_token=targets[path[-1]])


def target_list(tree: DraftTree, target_ids: Tensor | ArrayLike) -> list[int]:
    """``target_ids`` [N] as a list of ints, checked against the tree's number of nodes."""
    if isinstance(target_ids, Tensor):
        target_ids = target_ids.detach().cpu().to(torch.float32 if target_ids.is_floating_point() else target_ids.dtype)
    targets = np.asarray(target_ids)
    if targets.shape != (len(tree),):
        raise ValueError(f"target_ids must have shape ({len(tree)},), one token a node; got {targets.shape}")
    if targets.dtype.kind not in "iu":
        raise TypeError(f"target_ids must hold integers, got {targets.dtype}")
    return targets.tolist()

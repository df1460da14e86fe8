"""Twins of the masks by their definition: parents walked one node at a time, bits set one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree_lab.types import DraftTree


def naive_ancestor_mask(parents: list[int]) -> Tensor:
    """Bool [N, N] by walking the parents of every node."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        ancestor = node
        while ancestor != -1:
            mask[node, ancestor] = True
            ancestor = parents[ancestor]
    return mask


def naive_full_mask(tree: DraftTree, past_length: int, *, sliding_window: int | None = None) -> Tensor:
    """Bool [N, past_length + N], one entry at a time; see ``formats.full_mask``."""
    ancestors = naive_ancestor_mask(tree.parents.tolist())
    depths = tree.depths.tolist()
    mask = torch.zeros(len(tree), past_length + len(tree), dtype=torch.bool)
    for node in range(len(tree)):
        for key in range(past_length + len(tree)):
            in_context = key < past_length
            key_position = key if in_context else past_length + depths[key - past_length]
            visible = in_context or bool(ancestors[node, key - past_length])
            near = sliding_window is None or past_length + depths[node] - key_position < sliding_window
            mask[node, key] = visible and near
    return mask


def naive_pack_bits(mask: Tensor) -> list[list[int]]:
    """Unsigned 32-bit words of a bool mask [N, M], one bit at a time; see ``formats.pack_bits``."""
    words = []
    for row in mask.tolist():
        packed = [0] * -(-len(row) // 32)
        for column, visible in enumerate(row):
            packed[column // 32] |= visible << (column % 32)
        words.append(packed)
    return words

"""Attention stage: a draft tree and the committed length -> positions and masks in the formats kernels take."""

from ddtree_lab.attention.ancestors import ancestor_mask, positions
from ddtree_lab.attention.formats import (
    PackedMasks,
    full_mask,
    pack_bits,
    pack_masks,
    pad_mask,
    to_additive,
    to_mask_mod,
    unpack_bits,
    unpack_masks,
)

__all__ = [
    "PackedMasks",
    "ancestor_mask",
    "full_mask",
    "pack_bits",
    "pack_masks",
    "pad_mask",
    "positions",
    "to_additive",
    "to_mask_mod",
    "unpack_bits",
    "unpack_masks",
]

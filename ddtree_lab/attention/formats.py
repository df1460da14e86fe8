"""Mask formats: a tree's visibility -> bool over context and tree, additive, packed bits, FlexAttention mask_mod."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddtree_lab.attention.ancestors import ancestor_mask, positions
from ddtree_lab.tree.validate import as_count
from ddtree_lab.types import DraftTree

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def full_mask(tree: DraftTree, past_length: int, *, sliding_window: int | None = None) -> Tensor:
    """Bool [N, past_length + N]: the keys each node sees, context first, then the tree's nodes.

    A node sees all of the context, its ancestors and itself. With ``sliding_window`` w, only keys less than w positions
    back; positions are by depth, so siblings share one.
    """
    past_length = as_count("past_length", past_length)
    mask = torch.cat((torch.ones(len(tree), past_length, dtype=torch.bool), ancestor_mask(tree)), dim=-1)
    if sliding_window is None:
        return mask
    window = as_count("sliding_window", sliding_window, minimum=1)
    queries = positions(tree, past_length)
    keys = torch.cat((torch.arange(past_length), queries))
    return mask & (queries[:, None] - keys < window)


def to_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask of any shape in a floating ``dtype``: 0 where visible, the dtype's smallest finite value elsewhere."""
    _check_bool(mask)
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating dtype, got {dtype}")
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def pad_mask(mask: Tensor, size: int) -> Tensor:
    """Grow a bool mask [N, M] to [size, M + size - N], for kernels that want a fixed number of nodes.

    Padded row i sees its own column M + i - N alone, so its softmax is finite; no real row sees a padded column.
    """
    _check_matrix(mask)
    size = as_count("size", size, minimum=mask.shape[0])
    extra = size - mask.shape[0]
    return torch.block_diag(mask, torch.eye(extra, dtype=torch.bool, device=mask.device)) if extra else mask


def pack_bits(mask: Tensor) -> Tensor:
    """Int32 words [N, ceil(M / 32)] on the CPU of a bool mask [N, M].

    Column j is bit j % 32, counted from the least significant, of word j // 32. Bits beyond M are 0.
    """
    _check_matrix(mask)
    rows, columns = mask.shape
    words = -(-columns // 32)
    padded = np.zeros((rows, words * 32), dtype=np.bool_)
    padded[:, :columns] = mask.cpu().numpy()
    packed = np.packbits(padded, axis=-1, bitorder="little").view("<i4").reshape(rows, words)
    return torch.from_numpy(packed.astype(np.int32))


def unpack_bits(words: Tensor, num_columns: int) -> Tensor:
    """The bool mask [N, num_columns] on the CPU that ``pack_bits`` made ``words`` [N, W] of."""
    if words.ndim != 2 or words.dtype not in (torch.int32, torch.uint32):
        raise ValueError(f"words must be int32 or uint32 [N, W], got {words.dtype} {tuple(words.shape)}")
    num_columns = as_count("num_columns", num_columns)
    if num_columns > 32 * words.shape[1]:
        raise ValueError(f"num_columns must be at most 32 * {words.shape[1]} for words [N, W], got {num_columns}")
    octets = words.cpu().contiguous().numpy().astype("<u4").view(np.uint8)
    bits = np.unpackbits(octets, axis=-1, count=num_columns, bitorder="little")
    return torch.from_numpy(bits.astype(np.bool_))


@dataclass(frozen=True, eq=False)
class PackedMasks:
    """Packed bits of a batch of masks of different sizes, zero beyond each one's own."""

    words: Tensor  # [B, N, W] int32, N and W the largest of the batch; bits as in pack_bits
    num_rows: Tensor  # [B] int64
    num_columns: Tensor  # [B] int64


def pack_masks(masks: Sequence[Tensor]) -> PackedMasks:
    """Pack bool masks [N_b, M_b] of any sizes into one padded tensor."""
    packed = [pack_bits(mask) for mask in masks]
    rows = max((words.shape[0] for words in packed), default=0)
    width = max((words.shape[1] for words in packed), default=0)
    padded = torch.zeros(len(packed), rows, width, dtype=torch.int32)
    for request, words in enumerate(packed):
        padded[request, : words.shape[0], : words.shape[1]] = words
    sizes = torch.tensor([mask.shape for mask in masks], dtype=torch.int64).reshape(-1, 2)
    return PackedMasks(words=padded, num_rows=sizes[:, 0], num_columns=sizes[:, 1])


def unpack_masks(packed: PackedMasks) -> list[Tensor]:
    """The bool masks that ``pack_masks`` took, on the CPU."""
    sizes = zip(packed.num_rows.tolist(), packed.num_columns.tolist(), strict=True)
    return [unpack_bits(packed.words[request, :rows], columns) for request, (rows, columns) in enumerate(sizes)]


def to_mask_mod(mask: Tensor) -> MaskMod:
    """FlexAttention ``mask_mod(b, h, q_idx, kv_idx)`` that reads a bool mask [N, M], or [B, N, M] by batch entry."""
    _check_bool(mask)
    if mask.ndim == 2:
        return lambda b, h, q_idx, kv_idx: mask[q_idx, kv_idx]
    if mask.ndim == 3:
        return lambda b, h, q_idx, kv_idx: mask[b, q_idx, kv_idx]
    raise ValueError(f"mask must be [N, M] or [B, N, M], got shape {tuple(mask.shape)}")


def _check_bool(mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, True where visible; got {mask.dtype}")


def _check_matrix(mask: Tensor) -> None:
    _check_bool(mask)
    if mask.ndim != 2:
        raise ValueError(f"mask must be [N, M], got shape {tuple(mask.shape)}")

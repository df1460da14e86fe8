"""Training blocks: conversations in, random anchors with their block inputs, labels and masks out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree_lab.draft.dflash_model import DFlashConfig


@dataclass(frozen=True, eq=False)
class Blocks:
    """A anchors in each of B conversations of T tokens; an anchor is the root of a block."""

    anchors: Tensor  # [B, A] int64: position of the root
    inputs: Tensor  # [B, A * b] int64: root, mask, mask, ...
    positions: Tensor  # [B, A * b] int64
    labels: Tensor  # [B, A, D] int64: the tokens that followed
    valid: Tensor  # [B, A, D] bool: the label and all before it, from the root on, are the target's own answer


def sample_anchors(written: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[B, T] bool -> [B, min(count, T)] int64: random positions, all different, with their next token the target's own.

    A row with fewer such positions ends in zeros: no answer begins there, so their labels are not valid.
    """
    eligible = torch.zeros_like(written)
    eligible[:, 1:-1] = written[:, 1:-1] & written[:, 2:]
    noise = torch.rand(written.shape, generator=generator, device=written.device)
    picked = torch.where(eligible, noise, -1.0).argsort(dim=1, descending=True)[:, :count]
    return torch.where(eligible.gather(1, picked), picked, 0)


def make_blocks(token_ids: Tensor, written: Tensor, anchors: Tensor, config: DFlashConfig) -> Blocks:
    """token_ids [B, T] int64, written [B, T] bool, anchors [B, A] int64."""
    length = token_ids.shape[1]
    positions = anchors[..., None] + torch.arange(config.block_size, device=token_ids.device)
    inside = positions < length
    clamped = positions.clamp(max=length - 1).flatten(1)
    following = token_ids.gather(1, clamped).view_as(positions)
    own = written.gather(1, clamped).view_as(positions) & inside
    inputs = torch.full_like(following, config.mask_token_id)
    inputs[..., 0] = following[..., 0]
    valid = own.cumprod(dim=-1).bool()
    return Blocks(anchors, inputs.flatten(1), positions.flatten(1), following[..., 1:], valid[..., 1:])


def block_masks(anchors: Tensor, length: int, config: DFlashConfig) -> list[Tensor]:
    """For each layer bool [B, 1, A * b, T + A * b]: a block sees the context before its anchor, and itself."""
    (rows, count), size, device = anchors.shape, config.block_size, anchors.device
    roots = anchors.repeat_interleave(size, dim=1)[:, None, :, None]
    offsets = torch.arange(size, device=device).repeat(count)
    columns = torch.arange(length, device=device)
    block = torch.arange(count, device=device).repeat_interleave(size)
    before, same = columns < roots, block[:, None] == block
    masks: dict[str, Tensor] = {}
    for layer, kind in enumerate(config.qwen3.layer_types):
        if kind not in masks:
            context = before & config.visible(layer, roots + offsets[:, None] - columns)
            within = same & config.visible(layer, offsets[:, None] - offsets)
            masks[kind] = torch.cat([context, within.expand(rows, 1, -1, -1)], dim=-1)
    return [masks[kind] for kind in config.qwen3.layer_types]

"""One target forward over whole conversations: token ids in, the drafter's context features and final states out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree_lab.target.dense import DenseTarget


@dataclass(frozen=True, eq=False)
class Features:
    context: Tensor  # [B, T, len(layer_ids) * hidden]: block outputs, concatenated
    final: Tensor  # [B, T, hidden]: what the head reads


@torch.no_grad()
def target_features(target: DenseTarget, token_ids: Tensor, layer_ids: Sequence[int]) -> Features:
    """token_ids [B, T] int64 on the target's device."""
    output = target.model.base_model(input_ids=token_ids, output_hidden_states=True, use_cache=False)
    context = torch.cat([output.hidden_states[i + 1] for i in layer_ids], dim=-1)
    return Features(context, output.last_hidden_state)

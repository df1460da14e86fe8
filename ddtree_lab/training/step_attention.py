"""Attention for writing many rows together, one token a step: fixed buffers, so that a step can be captured once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

_NAME = "ddtree_grouped"


class ColumnCache(Cache):
    """KV buffers [R, K, capacity, head_dim] a layer, filled at one column that all rows share.

    ``column`` [1] int64 lies on the device and is read at each update; attention gets the first ``visible`` columns.
    """

    def __init__(self, column: Tensor, *, capacity: int) -> None:
        super().__init__(layers=[])
        self.visible = capacity
        self._column = column
        self._capacity = capacity
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [R, K, 1, head_dim] of a layer; returns views [R, K, visible, head_dim]."""
        if layer_idx == len(self._buffers):
            rows, heads, _one, size = key_states.shape
            shape = (rows, heads, self._capacity, size)
            self._buffers.append((key_states.new_zeros(shape), value_states.new_zeros(shape)))
        keys, values = self._buffers[layer_idx]
        keys.index_copy_(2, self._column, key_states)
        values.index_copy_(2, self._column, value_states)
        return keys[:, :, : self.visible], values[:, :, : self.visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Masks and positions are given with each step, so nothing depends on it."""
        return 0


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention that does not repeat keys and values for every query head of their group.

    query [R, H, n, d], key and value [R, K, m, d], additive attention_mask [R or 1, 1, 1, m]; returns [R, n, H, d].
    """
    rows, heads, count, size = query.shape
    groups = key.shape[1]
    scaling = size**-0.5 if scaling is None else scaling
    grouped = query.reshape(rows, groups, heads // groups * count, size) * scaling
    scores = grouped @ key.transpose(-1, -2) + attention_mask
    out = scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    return out.reshape(rows, heads, count, size).transpose(1, 2), None


@contextmanager
def using_grouped_attention(model: Any) -> Iterator[None]:
    """``model``, of transformers, attends with ``grouped_attention`` inside."""
    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, grouped_attention)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)

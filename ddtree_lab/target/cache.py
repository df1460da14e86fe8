"""KV cache of one sequence: keys and values of a forward -> all cached so far; an accepted path -> its rows kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FIRST_CAPACITY = 256


class TreeCache:
    """Keys and values of one sequence: ``length`` committed rows, then those of the forward that ran last.

    It answers the calls that transformers' attention layers and mask builders make on a cache (``update``,
    ``get_seq_length``, ``get_query_offset``, ``get_mask_sizes``). Every forward writes behind the committed rows, so a
    forward that was not committed is overwritten by the next one, and nothing beyond the rows of the running forward is
    ever read. Buffers are [1, K, capacity, d] for each layer and double when full.

    Layers with a sliding window keep every row too; the mask alone enforces the window. That is what makes
    compaction and rollback right for them, and it costs the rows outside the window:
    2 * K * d * (length - window) numbers a layer.
    """

    def __init__(self) -> None:
        self.length = 0
        self.keys: list[Tensor] = []  # one [1, K, capacity, d] a layer
        self.values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write keys and values [1, K, n, d] of layer ``layer_idx`` behind the committed rows.

        Returns views [1, K, length + n, d] of the layer's keys and values.
        """
        if layer_idx == len(self.keys):
            self.keys.append(_empty_like(keys))
            self.values.append(_empty_like(values))
        return self._write(self.keys, layer_idx, keys), self._write(self.values, layer_idx, values)

    def _write(self, buffers: list[Tensor], layer_idx: int, rows: Tensor) -> Tensor:
        buffer, end = buffers[layer_idx], self.length + rows.shape[2]
        if end > buffer.shape[2]:
            capacity = max(end, 2 * buffer.shape[2])
            grown = buffer.new_empty(*buffer.shape[:2], capacity, buffer.shape[3])
            grown[:, :, : self.length] = buffer[:, :, : self.length]
            buffers[layer_idx] = buffer = grown
        buffer[:, :, self.length : end] = rows
        return buffer[:, :, :end]

    def compact(self, base: int, path: Sequence[int]) -> None:
        """Move rows ``base + path[i]`` to ``base + i`` and end the committed part there: length = base + len(path).

        All rows of a layer are read before one is written, so the order of ``path`` does not matter.
        """
        stay = next((i for i, node in enumerate(path) if node != i), len(path))
        if stay < len(path):
            source = torch.tensor(path[stay:], device=self.keys[0].device) + base
            for buffer in (*self.keys, *self.values):
                buffer[:, :, base + stay : base + len(path)] = buffer.index_select(2, source)
        self.length = base + len(path)

    def append(self, rows: int) -> None:
        """Commit the first ``rows`` of the forward that ran last."""
        room = self.keys[0].shape[2] - self.length if self.keys else 0
        if not 0 <= rows <= room:
            raise ValueError(f"rows must be from 0 to {room}, the room behind the committed ones, got {rows}")
        self.length += rows

    def crop(self, length: int) -> None:
        """Keep the first ``length`` committed rows."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be from 0 to the {self.length} committed rows, got {length}")
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed rows: transformers asks before a forward."""
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Index of the first row that the next forward writes."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(number of key rows, index of the first one) that a forward over ``query_length`` tokens sees."""
        return self.length + query_length, 0


def _empty_like(rows: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], rows.shape[1], _FIRST_CAPACITY, rows.shape[3])

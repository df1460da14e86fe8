"""The DFlash drafter: committed tokens and the target's hidden states in, logits for a whole block out.

It keeps the keys and values of the context in a cache of its own, from round to round. A block's keys and values are
written behind the context and overwritten by what is observed next: that crops the cache to the committed tokens in
every round, without a step of its own.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ddtree_lab.draft.checkpoint import load_model
from ddtree_lab.draft.dflash_model import DFlashConfig, DFlashModel
from ddtree_lab.target.protocol import Target


class DFlashState:
    """Context keys and values per layer, [1, H_kv, capacity, K]; the first ``length`` rows are committed."""

    def __init__(self, config: DFlashConfig, *, device: torch.device, dtype: torch.dtype, position_offset: int) -> None:
        self.length = 0
        self.position_offset = position_offset
        qwen3 = config.qwen3
        shape = (1, qwen3.num_key_value_heads, 0, qwen3.head_dim)
        self._block_size = config.block_size
        self.keys = [torch.empty(shape, device=device, dtype=dtype) for _ in range(qwen3.num_hidden_layers)]
        self.values = [torch.empty_like(k) for k in self.keys]

    def reserve(self, rows: int) -> None:
        """Room for ``rows`` more context rows and a block behind them; the buffers at least double when they grow."""
        needed = self.length + rows + self._block_size
        capacity = self.keys[0].shape[2]
        if needed <= capacity:
            return
        grown = max(needed, 2 * capacity, 256)
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                new = old.new_empty((*old.shape[:2], grown, old.shape[3]))
                new[:, :, : self.length] = old[:, :, : self.length]
                buffers[layer] = new


class DFlashDrafter:
    """A DFlash network beside ``target``, whose embedding and head it borrows: it drafts for no other."""

    label = None

    def __init__(self, model: DFlashModel, target: Target, *, name: str = "dflash") -> None:
        """Raises ValueError when the drafter was made for another target."""
        config = model.config
        if config.qwen3.hidden_size != target.hidden_size:
            raise ValueError(
                f"drafter {name}: its hidden size is {config.qwen3.hidden_size}, the target {target.name} has "
                f"{target.hidden_size}; it was made for another target"
            )
        if config.qwen3.vocab_size != target.vocab_size:
            raise ValueError(
                f"drafter {name}: its vocabulary size is {config.qwen3.vocab_size}, the target {target.name} has "
                f"{target.vocab_size}; it was made for another target"
            )
        bad = [i for i in config.target_layer_ids if not 0 <= i < target.num_layers]
        if bad:
            raise ValueError(
                f"drafter {name}: target_layer_ids has {bad[0]}, the target {target.name} has layers 0 to "
                f"{target.num_layers - 1}"
            )
        self.name = name
        self.config = config
        self.block_size = config.block_size
        self.target_layer_ids = config.target_layer_ids
        self.model = model.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        self.target = target

    @property
    def horizon(self) -> int:
        return self.config.horizon

    @classmethod
    def from_folder(cls, folder: str | Path, target: Target) -> DFlashDrafter:
        """Load config.json and model.safetensors (or sharded *.safetensors) of the published layout.

        Raises ValueError with one line when a file, a field or a weight is missing or has another shape.
        """
        folder = Path(folder)
        return cls(load_model(folder), target, name=folder.name)

    def new_state(self, *, position_offset: int = 0) -> DFlashState:
        """An empty context whose first token stands at position ``position_offset``."""
        return DFlashState(
            self.config, device=self.target.device, dtype=self.target.dtype, position_offset=position_offset
        )

    @torch.inference_mode()
    def observe(self, state: DFlashState, token_ids: Tensor, hidden: Tensor) -> None:
        """Append the target's hidden states [n, F] of n committed tokens (their ids are not needed)."""
        rows = token_ids.shape[0]
        if hidden.shape != (rows, self.model.fc.in_features):
            raise ValueError(
                f"hidden has shape {list(hidden.shape)}; it must be {[rows, self.model.fc.in_features]} for {rows} "
                f"token_ids and layers {list(self.target_layer_ids)}"
            )
        state.reserve(rows)
        start, end = state.length, state.length + rows
        context = self.model.context(hidden.to(self.target.dtype)[None])
        cos, sin = self._rotary(context, state.position_offset + start, rows)
        for layer, keys, values in zip(self.model.layers, state.keys, state.values, strict=True):
            keys[:, :, start:end], values[:, :, start:end] = layer.self_attn.keys_values(context, cos, sin)
        state.length = end

    @torch.inference_mode()
    def draft(self, state: DFlashState, root_token: int) -> Tensor:
        """Logits [D, V] from the block [root, mask x D]: row d is for the token d + 1 after the root."""
        ids = torch.full((self.block_size,), self.config.mask_token_id, device=self.target.device)
        ids[0] = root_token
        if self.horizon == 0:
            return self.target.lm_head(self.target.embed(ids[:0]))
        state.reserve(0)
        start, end = state.length, state.length + self.block_size
        block = self.target.embed(ids)[None]
        cos, sin = self._rotary(block, state.position_offset + start, self.block_size)
        for index, (layer, keys, values) in enumerate(zip(self.model.layers, state.keys, state.values, strict=True)):
            normed = layer.input_layernorm(block)
            attention = layer.self_attn
            keys[:, :, start:end], values[:, :, start:end] = attention.keys_values(normed, cos, sin)
            first, mask = self._window(index, start, end)
            attended = attention.attend(
                attention.queries(normed, cos, sin), keys[:, :, first:end], values[:, :, first:end], mask
            )
            block = layer.feed_forward(block + attended)
        return self.target.lm_head(self.model.norm(block[0, 1:]))

    def _rotary(self, x: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
        return self.model.rotary_emb(x, torch.arange(first, first + count, device=x.device)[None])

    def _window(self, layer: int, start: int, end: int) -> tuple[int, Tensor | None]:
        """First key row that any query of the block at rows start..end sees, and the mask over rows first..end."""
        window = self.config.sliding_window(layer)
        if not self.config.is_causal(layer) and (window is None or end <= window):
            return 0, None
        first = 0 if window is None else max(0, start - window + 1)
        rows = torch.arange(first, end, device=self.target.device)
        return first, self.config.visible(layer, rows[start - first :, None] - rows)

"""What a target model must offer: token ids in, logits and hidden states out, one committed sequence per state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ddtree_lab.types import DraftTree


@dataclass(frozen=True, eq=False)
class TargetOutput:
    """One target forward over n tokens (a prompt, or the N nodes of a tree)."""

    logits: Tensor  # [n, V] in the target's dtype; after a prefill [1, V], the last position's
    hidden: Tensor  # [n, len(layer_ids) * hidden_size]: block outputs of the layers asked for, concatenated


class TargetState(Protocol):
    """The committed sequence of one request, and what a verified tree leaves behind until its commit."""

    length: int  # L: committed tokens whose KV is in the cache


class Target(Protocol):
    """A causal language model that verifies trees. ``ddtree_lab.target.dense.DenseTarget`` is the first one."""

    name: str
    config: Any  # the transformers text config
    tokenizer: Any | None
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    num_layers: int
    context_length: int
    stop_token_ids: tuple[int, ...]  # the checkpoint's end-of-sequence ids, may be empty

    def new_state(self, layer_ids: Sequence[int] = ()) -> TargetState:
        """An empty state. ``layer_ids`` name the decoder blocks whose *outputs* forwards hand out (id i is
        ``hidden_states[i + 1]`` of transformers). A negative or too large id is a ValueError."""

    def prefill(self, state: TargetState, input_ids: Tensor) -> TargetOutput:
        """Append input_ids [n] int64 to an empty or a committed state; logits of the last position, hidden of all."""

    def verify(self, state: TargetState, tree: DraftTree) -> TargetOutput:
        """One forward over the tree on top of the state: ancestor mask, positions L + depth. ``state.length`` stays."""

    def commit(self, state: TargetState, path: Sequence[int]) -> None:
        """Keep the nodes of ``path`` (path[0] == 0) of the tree verified last, in order; drop the others."""

    def rollback(self, state: TargetState, length: int) -> None:
        """Forget everything after the first ``length`` committed tokens, and any uncommitted tree."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings [..., hidden_size] of token_ids [...]."""

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of final hidden states [..., hidden_size] (already normed)."""

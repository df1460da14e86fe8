"""A drafter that knows the answer: a given continuation in, logits with its tokens at chosen ranks out.

For tests and demonstrations of verification: its label is shown beside every figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class ReplayState:
    length: int = 0  # committed tokens
    prompt_length: int | None = None  # None before the first observation


class ReplayDrafter:
    """Drafts ``continuation``, the tokens after the prompt (the prefill's token, the first root, comes first).

    What is observed first is the prompt; from there on the length of the context alone tells the place in the
    continuation, whatever was committed. Behind its end the smallest token ids are drafted.

    ``ranks`` says where in its distribution a token stands, 0 being the top: one rank a depth, or a function of the
    token's index in the continuation and its depth (1 to D); None puts every token on top.
    """

    name = "replay"
    label = "replay"
    target_layer_ids: tuple[int, ...] = ()
    target: None = None

    def __init__(
        self,
        continuation: Sequence[int],
        vocab_size: int,
        *,
        block_size: int = 8,
        ranks: Sequence[int] | Callable[[int, int], int] | None = None,
    ) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}; it must be at least 1")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        bad = [token for token in continuation if not 0 <= token < vocab_size]
        if bad:
            raise ValueError(f"continuation has token {bad[0]}; the vocabulary has {vocab_size}")
        if ranks is not None and not callable(ranks) and len(ranks) != block_size - 1:
            raise ValueError(f"ranks has {len(ranks)} entries; it must have {block_size - 1}, one a depth")
        self.continuation = tuple(continuation)
        self.vocab_size = vocab_size
        self.block_size = block_size
        self._ranks = ranks

    @property
    def horizon(self) -> int:
        return self.block_size - 1

    def new_state(self) -> ReplayState:
        return ReplayState()

    def observe(self, state: ReplayState, token_ids: Tensor, hidden: Tensor | None = None) -> None:
        """Count committed tokens [n]; hidden states are not used."""
        state.length += token_ids.shape[0]
        if state.prompt_length is None:
            state.prompt_length = state.length

    def draft(self, state: ReplayState, root_token: int) -> Tensor:
        """Logits float32 [D, V], a Zipf law of exponent 2 over the ranks; raises ValueError for a rank out of range."""
        root = state.length - (state.prompt_length or 0)
        zipf = -2 * torch.arange(1, self.vocab_size + 1, dtype=torch.float32).log()
        logits = zipf.repeat(self.horizon, 1)
        ids = torch.arange(self.vocab_size)
        for depth, row in enumerate(logits, start=1):
            index = root + depth
            if index < len(self.continuation):
                token, rank = self.continuation[index], self._rank(index, depth)
                others = ids[ids != token]
                row[torch.cat([others[:rank], ids[token : token + 1], others[rank:]])] = zipf
        return logits

    def _rank(self, index: int, depth: int) -> int:
        if self._ranks is None:
            return 0
        rank = self._ranks(index, depth) if callable(self._ranks) else self._ranks[depth - 1]
        if not 0 <= rank < self.vocab_size:
            raise ValueError(f"ranks gives {rank} at depth {depth}; it must be between 0 and {self.vocab_size - 1}")
        return rank

"""A drafter that looks the context up in itself: committed tokens in, counts of what followed the same suffix out.

Prompt lookup, with one distribution a depth in place of one copied continuation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

_MAX_MATCHES = 64


@dataclass(eq=False)
class NGramState:
    tokens: list[int] = field(default_factory=list)  # the committed tokens
    followers: dict[tuple[int, ...], list[int]] = field(default_factory=lambda: defaultdict(list))
    """For every run of at most n committed tokens, the positions right after it, in order."""


class NGramDrafter:
    """Depth d counts the tokens found d places after the latest 64 earlier occurrences of the longest known suffix.

    The suffix ends in the root and has at most ``n`` tokens. One more count is spread evenly over the vocabulary, so
    every logit (a log-probability) is finite, and a depth that nothing is known about is uniform.
    """

    name = "ngram"
    label = None
    target_layer_ids: tuple[int, ...] = ()
    target: None = None

    def __init__(self, vocab_size: int, block_size: int = 8, *, n: int = 3) -> None:
        for name, value in (("vocab_size", vocab_size), ("block_size", block_size), ("n", n)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.n = n

    @property
    def horizon(self) -> int:
        return self.block_size - 1

    def new_state(self) -> NGramState:
        return NGramState()

    def observe(self, state: NGramState, token_ids: Tensor, hidden: Tensor | None = None) -> None:
        """Append committed tokens [n]; hidden states are not used."""
        for token in token_ids.tolist():
            state.tokens.append(token)
            end = len(state.tokens)
            for length in range(1, min(self.n, end) + 1):
                state.followers[tuple(state.tokens[end - length :])].append(end)

    def draft(self, state: NGramState, root_token: int) -> Tensor:
        """Log-probabilities float32 [D, V]."""
        counts = torch.zeros(self.horizon, self.vocab_size)
        for start in self._matches(state, root_token):
            found = [*state.tokens[start : start + self.horizon], root_token][: self.horizon]
            counts[torch.arange(len(found)), torch.tensor(found, dtype=torch.int64)] += 1
        return torch.log((counts + 1 / self.vocab_size) / (counts.sum(1, keepdim=True) + 1))

    def _matches(self, state: NGramState, root_token: int) -> list[int]:
        suffix = (*state.tokens[max(0, len(state.tokens) - self.n + 1) :], root_token)
        for first in range(len(suffix)):
            starts = state.followers.get(suffix[first:])
            if starts:
                return starts[-_MAX_MATCHES:]
        return []

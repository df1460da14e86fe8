"""A drafter without a model: the context's tokens in, seeded pseudo-random logits out. For tests and demonstrations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MODULUS = 2**61 - 1


def mix(digest: int, value: int) -> int:
    """The next digest of a sequence of integers."""
    return (digest * 6_364_136_223_846_793_005 + value + 1) % _MODULUS


@dataclass(eq=False)
class ToyState:
    digest: int  # of the committed tokens


class ToyDrafter:
    """Every depth has a Zipf distribution over a shuffled vocabulary, peaked or flat by chance.

    The logits depend on nothing but the seed, the context's tokens, the root and the depth.
    """

    name = "toy"
    label = "toy"
    target_layer_ids: tuple[int, ...] = ()
    target: None = None

    def __init__(self, vocab_size: int, block_size: int = 8, *, seed: int = 0) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}; it must be at least 1")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.seed = seed

    @property
    def horizon(self) -> int:
        return self.block_size - 1

    def new_state(self) -> ToyState:
        return ToyState(mix(0, self.seed))

    def observe(self, state: ToyState, token_ids: Tensor, hidden: Tensor | None = None) -> None:
        """Append committed tokens [n]; hidden states are not used."""
        for token in token_ids.tolist():
            state.digest = mix(state.digest, token)

    def draft(self, state: ToyState, root_token: int) -> Tensor:
        """Logits float32 [D, V]: the exponent of a depth's Zipf law lies between 1 and 4."""
        generator = torch.Generator().manual_seed(mix(state.digest, root_token))
        log_rank = torch.arange(1, self.vocab_size + 1, dtype=torch.float32).log()
        logits = torch.empty(self.horizon, self.vocab_size)
        for row in logits:
            exponent = 1 + 3 * torch.rand((), generator=generator)
            row[torch.randperm(self.vocab_size, generator=generator)] = -exponent * log_rank
        return logits

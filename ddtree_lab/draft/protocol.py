"""What a drafter must offer: committed tokens and the target's hidden states in, per-depth logits out."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from ddtree_lab.target.protocol import Target


class Drafter(Protocol):
    """Proposes the next D = block_size - 1 tokens as D independent distributions, whatever the tree's budget."""

    name: str
    block_size: int
    target_layer_ids: tuple[int, ...]  # blocks whose hidden states ``observe`` wants; empty for none
    label: str | None  # None for a real drafter; a word shown beside every figure otherwise ("replay", "toy")
    target: Target | None  # the one target it drafts for, whose weights it borrows; None if it serves any

    @property
    def horizon(self) -> int:
        """D = block_size - 1."""

    def new_state(self) -> Any:
        """An empty state for one sequence."""

    def observe(self, state: Any, token_ids: Tensor, hidden: Tensor) -> None:
        """Append committed tokens [n] int64 and the target's hidden states for them [n, F] to the context.

        Called with the prompt after prefill and with each round's accepted path (root first), so the context always
        holds exactly the tokens whose KV the target holds.
        """

    def draft(self, state: Any, root_token: int) -> Tensor:
        """Logits [D, V] for the D positions after ``root_token``, which stands at position len(context)."""

"""Held-out acceptance: how far a block is right at each root -> the rounds that a chain would take over the answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeldOut:
    """Chain decoding of answers that are known: greedy answers come out of it as they are."""

    tau: float  # tokens per round; an answer's first token is the prefill's and is not counted
    acceptance: tuple[float, ...]  # for each depth d the share of rounds that accepted d or more


def accepted_depths(correct: Tensor, valid: Tensor) -> Tensor:
    """correct, valid [..., D] bool -> [...] int64: depths from the root on that are right without a gap."""
    return (correct & valid).cumprod(dim=-1).sum(-1)


def chain_rounds(accepted: Tensor, written: Tensor) -> tuple[Tensor, int]:
    """accepted [B, T] int64 at each root, written [B, T] bool (one answer a row) -> accepted [rounds], tokens emitted.

    The first round's root is the answer's first token, the next round's the token after what was accepted.
    """
    rounds: list[int] = []
    emitted = 0
    for row, own in zip(accepted.tolist(), written, strict=True):
        positions = own.nonzero().flatten().tolist()
        root, last = (positions[0], positions[-1]) if positions else (0, 0)
        emitted += last - root
        while root < last:
            rounds.append(row[root])
            root += row[root] + 1
    return torch.tensor(rounds, dtype=torch.int64), emitted


def held_out(accepted: Tensor, emitted: int, *, horizon: int) -> HeldOut:
    """Figures of at least one round: accepted [rounds] int64."""
    shares = (accepted[:, None] >= torch.arange(1, horizon + 1)).double().mean(0)
    return HeldOut(emitted / len(accepted), tuple(shares.tolist()))

"""The drafter's loss: hidden states of blocks and what followed in, the loss and its gradient out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, eq=False)
class HeadLoss:
    """Loss of a batch of rows under a frozen head."""

    loss: Tensor  # [] float32: the weighted sum divided by ``total``
    gradient: Tensor  # [M, hidden] of the loss by the hidden states


def position_weights(horizon: int, decay: float, device: torch.device) -> Tensor:
    """[D] float32: exp(-(d - 1) / decay) for depth d, as DFlash weighs its block (arXiv 2602.06036, training)."""
    return torch.exp(-torch.arange(horizon, device=device, dtype=torch.float32) / decay)


def head_loss(
    hidden: Tensor,
    labels: Tensor,
    *,
    weights: Tensor,
    total: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    teacher: Tensor,
    teacher_share: float,
    rows_at_once: int = 8192,
) -> HeadLoss:
    """Cross-entropy against the labels and, for ``teacher_share`` of it, against the target's own distribution.

    hidden [M, hidden] of the drafter, labels [M] int64, weights [M] float32, total [] the sum that they are divided by;
    teacher [M, hidden]: the target's final hidden state where it predicted the label. The head is frozen, so the
    gradient by ``hidden`` is all there is to backpropagate; it is computed in pieces of ``rows_at_once`` rows, which
    bounds the memory for logits.
    """
    gradient = torch.empty_like(hidden)
    loss = torch.zeros((), device=hidden.device)
    for start in range(0, len(labels), rows_at_once):
        rows = slice(start, start + rows_at_once)
        piece = hidden[rows].detach().requires_grad_()
        with torch.enable_grad():
            log_probs = lm_head(piece).float().log_softmax(-1)
            row_loss = F.nll_loss(log_probs, labels[rows], reduction="none")
            if teacher_share > 0:
                with torch.no_grad():
                    probs = lm_head(teacher[rows]).float().softmax(-1)
                row_loss = (1 - teacher_share) * row_loss - teacher_share * (probs * log_probs).sum(-1)
            piece_loss = (row_loss * weights[rows]).sum() / total
        piece_loss.backward()
        gradient[rows] = piece.grad
        loss += piece_loss.detach()
    return HeadLoss(loss, gradient)

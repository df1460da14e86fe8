"""Rounding: a target and prompts in, how far its own logit gaps move when the same sums run in another order out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree_lab.target.protocol import Target

PROMPTS, POSITIONS, LONGEST = 3, 8, 64


@torch.no_grad()
def measure_tolerance(target: Target, prompts: Sequence[Tensor]) -> float:
    """The top-1/top-2 logit gap up to which two right runs may choose differently, in units of logits.

    At the last 8 positions of up to 3 prompts (input_ids [1, L] each, its first 64 tokens) the gap of one causal pass
    over the whole prefix is compared with that of one token on top of the cached rest: the same numbers, summed in
    another order. No tree, mask or draft takes part, so a fault in those cannot widen it. The tolerance is twice the
    largest difference, and at least one rounding of the largest logit after a prompt's beginning.
    """
    largest, scale = 0.0, 0.0
    for input_ids in prompts[:PROMPTS]:
        tokens = input_ids[0, :LONGEST]
        first = max(1, len(tokens) - POSITIONS)
        stepped = target.new_state()
        scale = max(scale, float(target.prefill(stepped, tokens[:first]).logits.float().abs().max()))
        for length in range(first + 1, len(tokens) + 1):
            whole = target.prefill(target.new_state(), tokens[:length]).logits[0].float()
            step = target.prefill(stepped, tokens[length - 1 : length]).logits[0].float()
            top = whole.topk(2).indices
            gaps = [float(logits[top[0]] - logits[top[1]]) for logits in (whole, step)]
            largest = max(largest, abs(gaps[0] - gaps[1]))
    return max(2 * largest, torch.finfo(target.dtype).eps * scale)

"""Reading the target: logits [N, V] at the nodes of a tree -> the target's token after each node, and what it thought.

Top-k and top-p shape the target's distribution alone; the tree is deterministic, so one independent draw per node under
its own ancestors, followed by the walk, emits exact samples of that distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ddtree_lab.tree.ranking import stable_top_k
from ddtree_lab.tree.validate import as_count
from ddtree_lab.types import DraftTree, TargetView

_BLOCK = 128  # tokens per block of the two-step draw
_FIRST_NUCLEUS = 256  # tokens ranked before a top-p cut looks further
_ROUNDING = 4 * torch.finfo(torch.float32).eps  # of a float32 cumulative probability


@dataclass(frozen=True)
class SamplingParams:
    """How the target draws: temperature first, then top-k, then top-p. Temperature 0 is the argmax.

    Raises ValueError unless temperature is finite and >= 0, top_k None or >= 1, top_p None or in (0, 1].
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= _real("temperature", self.temperature) < math.inf:
            raise ValueError(f"temperature must be finite and >= 0, got {self.temperature}")
        if self.top_k is not None:
            as_count("top_k", self.top_k, minimum=1)
        if self.top_p is not None and not 0 < _real("top_p", self.top_p) <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


def filtered_log_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Float32 log-probabilities [N, V] of the distribution drawn from; -inf for what the filters drop.

    Top-k keeps the k most probable tokens. Of what it left, renormalised, top-p keeps the smallest set of most probable
    tokens whose probability reaches p (up to float32 rounding), at least one. Equal probabilities keep the smaller id.
    At temperature 0 it is the plain softmax, unfiltered.

    Raises ValueError naming the first row without a distribution: NaN, +inf, or all -inf.
    """
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be [N, V] with V >= 1, got shape {tuple(logits.shape)}")
    logits = logits.detach().to(torch.float32)
    if params.temperature not in (0, 1):
        # From the maximum down, so that a small temperature cannot overflow.
        logits = (logits - logits.amax(-1, keepdim=True)) / max(params.temperature, torch.finfo(torch.float32).tiny)
    log_probs = logits.log_softmax(-1)
    undefined = log_probs[:, 0].isnan()
    if undefined.any():
        raise ValueError(f"logits row {int(undefined.nonzero()[0])} is no distribution: NaN, +inf, or -inf throughout")
    top_k = min(params.top_k or logits.shape[1], logits.shape[1])
    top_p = params.top_p or 1.0
    if params.temperature == 0 or (top_k == logits.shape[1] and top_p == 1):
        return log_probs
    ids, kept = _shortlist(log_probs, top_k, top_p)
    return torch.full_like(log_probs, -torch.inf).scatter_(-1, ids, _cut_nucleus(kept, top_p).log_softmax(-1))


def sample(log_probs: Tensor, generator: torch.Generator) -> Tensor:
    """One independent draw per row of log_probs [N, V], int64 [N]: by inverse CDF, a block first, then within it.

    A token of probability 0 is never drawn. The generator may be on another device.
    """
    rows, width = log_probs.shape
    uniform = torch.rand(2, rows, generator=generator, device=generator.device, dtype=torch.float64)
    uniform = uniform.to(log_probs.device)
    blocks = F.pad(log_probs.exp(), (0, -width % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    block = _invert_cdf(blocks.sum(-1), uniform[0])
    within = _invert_cdf(blocks[torch.arange(rows, device=block.device), block], uniform[1])
    return block * _BLOCK + within


def draw_tokens(logits: Tensor, *, params: SamplingParams, generator: torch.Generator | None = None) -> Tensor:
    """The target's token for each row of logits [N, V], int64 [N] on the CPU.

    At temperature 0 the argmax, the smallest id among equals; else one independent draw per row from ``generator``,
    which is then needed. Raises ValueError without it, or when a row is no distribution.
    """
    if params.temperature > 0:
        if generator is None:
            raise ValueError(f"generator is needed at temperature {params.temperature} > 0")
        return sample(filtered_log_probs(logits, params), generator).cpu()
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be [N, V] with V >= 1, got shape {tuple(logits.shape)}")
    logits = logits.detach().to(torch.float32)
    best = logits.amax(-1)
    undefined = ~best.isfinite()
    if undefined.any():
        raise ValueError(f"logits row {int(undefined.nonzero()[0])} is no distribution: NaN, +inf, or -inf throughout")
    return stable_top_k(logits, 1)[0][:, 0].cpu()


def view_target(logits: Tensor, tree: DraftTree, *, token_ids: Tensor, params: SamplingParams) -> TargetView:
    """What the target's logits [N, V] say at every node of the tree, for the tokens [N] drawn from them; on the CPU.

    ``node_ranks`` count the tokens of larger raw logit, or of equal logit and smaller id. Raises ValueError when the
    rows of ``logits`` are not the tree's nodes, when a node's token is outside V, or when a row is no distribution.
    """
    if logits.ndim != 2 or logits.shape[0] != len(tree):
        raise ValueError(f"logits must be [N, V] with N = {len(tree)} nodes, got shape {tuple(logits.shape)}")
    outside = (tree.token_ids >= logits.shape[1]).nonzero().flatten()
    if outside.numel():
        node = int(outside[0])
        raise ValueError(f"node {node}: token {tree.token_ids[node]} is outside the target's {logits.shape[1]} tokens")
    logits = logits.detach().to(torch.float32)
    log_probs = filtered_log_probs(logits, params)
    best = stable_top_k(logits, 2)[1]
    drawn = token_ids.to(logits.device)[:, None]
    drafted, parents = tree.token_ids[1:].to(logits.device), tree.parents[1:].to(logits.device)
    return TargetView(
        token_ids=token_ids.cpu(),
        log_probs=log_probs.gather(-1, drawn)[:, 0].cpu(),
        gaps=(best[:, 0] - (best[:, 1] if best.shape[1] > 1 else -torch.inf)).cpu(),
        node_log_probs=F.pad(log_probs[parents, drafted], (1, 0)).cpu(),
        node_ranks=node_ranks(logits, tree).cpu(),
    )


def _shortlist(log_probs: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities [N, K], best first, of the top-k, or without one of enough tokens to reach top-p."""
    width = log_probs.shape[1]
    if top_k < width:
        ids, kept = stable_top_k(log_probs, top_k)
        return ids, kept.log_softmax(-1)
    count = _FIRST_NUCLEUS
    while True:
        ids, kept = stable_top_k(log_probs, count)
        if count >= width or bool((kept.exp().sum(-1, dtype=torch.float64) >= top_p).all()):
            return ids, kept
        count *= 16


def _cut_nucleus(log_probs: Tensor, top_p: float) -> Tensor:
    """Log-probabilities [N, K], best first, with -inf from where the sum of those before reaches top-p."""
    if top_p == 1:
        return log_probs
    probs = log_probs.exp().double()
    dropped = probs.cumsum(-1) - probs >= top_p - _ROUNDING
    dropped[:, 0] = False
    return log_probs.masked_fill(dropped, -torch.inf)


def _invert_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """For each row of weights [R, M] >= 0 the index [R] where their cumulative share exceeds uniform [R] in [0, 1)."""
    cdf = weights.cumsum(-1, dtype=torch.float64)
    # The largest float64 uniform is 1 - 2^-53, and that share of any total rounds to below the total.
    return torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0]


def node_ranks(logits: Tensor, tree: DraftTree) -> Tensor:
    """Int64 [N]: how many tokens come before each node's own in its parent's row of logits [N, V]; root 0.

    A token comes before another by larger logit, or by equal logit and smaller id.
    """
    parents, token_ids = tree.parents[1:], tree.token_ids[1:]
    if logits.device.type == "cpu":
        # Row by row stays in the processor's cache and counts bytes; several times faster than all rows at once.
        rows = logits.numpy()
        ranks = [
            _rank_in_row(rows[parent], token)
            for parent, token in zip(parents.tolist(), token_ids.tolist(), strict=True)
        ]
        return torch.tensor([0, *ranks])
    return F.pad(rank_in_rows(logits[parents.to(logits.device)], token_ids.to(logits.device)), (1, 0))


def rank_in_rows(rows: Tensor, token_ids: Tensor) -> Tensor:
    """Int64 [M]: the place of token_ids [M] in each row of values [M, V], as ``node_ranks``, all rows at once."""
    value = rows.gather(-1, token_ids[:, None])
    earlier = torch.arange(rows.shape[1], device=rows.device) < token_ids[:, None]
    return ((rows > value) | ((rows == value) & earlier)).sum(-1)


def _rank_in_row(row: NDArray[np.float32], token: int) -> int:
    return np.count_nonzero(row > row[token]) + np.count_nonzero(row[:token] == row[token])


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    return float(value)

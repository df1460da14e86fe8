"""Ranking of draft logits: [D, V] logits -> float32 log-probabilities -> the k best tokens of each depth.

Every builder starts from these, so that all of them build the same tree from the same logits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ddtree_lab.tree.validate import as_count

_BLOCK = 64  # columns per block of the search for the largest values


def log_probs_of(logits: Tensor, *, vocab_size: int | None = None) -> Tensor:
    """Float32 log-probabilities [D, min(V, vocab_size)] of logits [D, V], on their device.

    Any real dtype is taken to float32 first, float64 too, and normalised there. Columns from ``vocab_size`` on (a draft
    head wider than the vocabulary) are dropped before normalising. A row that is -inf throughout stays -inf: it offers
    no token. Log-probabilities are valid logits.

    Raises ValueError when ``logits`` is not [D, V], or names the first row that holds NaN or +inf.
    """
    logits = torch.as_tensor(logits)
    if logits.ndim != 2:
        raise ValueError(f"logits must be [D, V], got shape {tuple(logits.shape)}")
    if logits.is_complex() or logits.dtype == torch.bool:
        raise TypeError(f"logits must hold real numbers, got {logits.dtype}")
    if vocab_size is not None:
        logits = logits[:, : as_count("vocab_size", vocab_size, minimum=1)]
    logits = logits.detach().to(torch.float32)
    log_probs = logits.log_softmax(-1)
    if 0 in log_probs.shape:
        return log_probs
    undefined = log_probs[:, 0].isnan()  # NaN, +inf and an all -inf row each make the whole row NaN
    if undefined.any():
        bad = undefined & ~(logits == -torch.inf).all(-1)
        if bad.any():
            raise ValueError(
                f"logits row {int(bad.nonzero()[0])} holds NaN or +inf; allowed are finite values and -inf"
            )
        log_probs = log_probs.masked_fill(undefined[:, None], -torch.inf)
    return log_probs


def rank_rows(logits: Tensor, k: int, *, vocab_size: int | None = None) -> tuple[Tensor, Tensor]:
    """The k best tokens of each depth: ids [D, K] int64 and log_probs [D, K] float32, best first, K = min(k, V).

    Equal log-probabilities put the smaller token id first. Stays on the device of ``logits`` [D, V]; errors and
    ``vocab_size`` as in ``log_probs_of``.
    """
    log_probs = log_probs_of(logits, vocab_size=vocab_size)
    return stable_top_k(log_probs, as_count("k", k))


def stable_top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids [R, K] and values [R, K] of the K = min(k, V) largest of each row of float32 ``values`` [R, V], in order.

    Equal values come in the order of their ids, across the cut at K too: ``torch.topk`` promises neither. NaN is not
    allowed. Takes two passes over the values; only rows with a tie at the cut need more.
    """
    rows, width = values.shape
    k = min(k, width)
    if rows == 0 or k == 0:
        return values.new_empty((rows, k), dtype=torch.int64), values.new_empty((rows, k))
    top, ids = _top_k(values, min(k + 1, width))
    tied = (top[:, k - 1] == top[:, k]).nonzero().flatten().tolist() if k < width else []
    top, ids = top[:, :k], ids[:, :k]
    for row in tied:
        above = ids[row][top[row] > top[row, -1]]
        equal = np.flatnonzero(values[row].cpu().numpy() == top[row, -1].item())[: k - above.shape[0]]
        ids[row] = torch.cat((above, torch.from_numpy(equal).to(above.device)))
    ids = ids.sort(-1).values
    top, order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), top


def _top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As ``values.topk(k)``, reading wide rows through the k blocks of largest maximum, which hold the k largest."""
    width = values.shape[1]
    blocks = width // _BLOCK
    if blocks < 2 * k:
        return tuple(values.topk(k))
    best = values[:, : blocks * _BLOCK].unflatten(-1, (blocks, _BLOCK)).amax(-1).topk(k).indices
    columns = torch.arange(width, device=values.device)
    ids = (best[:, :, None] * _BLOCK + columns[:_BLOCK]).flatten(1)
    ids = torch.cat((ids, columns[blocks * _BLOCK :].expand(ids.shape[0], -1)), dim=-1)
    top, order = values.gather(-1, ids).topk(k)
    return top, ids.gather(-1, order)

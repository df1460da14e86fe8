"""Chain draft: draft logits [D, V] -> the most probable token of each depth as a DraftTree without branches."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ddtree_lab.tree.ranking import rank_rows
from ddtree_lab.tree.validate import as_count
from ddtree_lab.types import DraftTree


def build_chain(
    logits: Tensor, budget: int | None = None, *, root_token: int, vocab_size: int | None = None
) -> DraftTree:
    """The top-1 path of ``logits`` [D, V]: min(budget, D) nodes, D without a budget.

    Equal logits give the smaller token id. Ends before the first depth whose path has probability 0. Log-probabilities,
    ``vocab_size`` and errors as in ``build_best_first``.
    """
    ids, log_probs = rank_rows(logits, 1, vocab_size=vocab_size)
    length = ids.shape[0] if ids.numel() else 0
    if budget is not None:
        length = min(length, as_count("budget", budget))
    scores = np.zeros(length + 1, dtype=np.float32)
    scores[1:] = log_probs[:length, 0].cpu().numpy()
    with np.errstate(over="ignore"):
        scores = scores.cumsum(dtype=np.float32)
    length = int(np.count_nonzero(scores > -np.inf)) - 1
    return DraftTree(
        token_ids=[as_count("root_token", root_token), *ids[:length, 0].tolist()],
        parents=range(-1, length),
        depths=range(length + 1),
        ranks=[0] * (length + 1),
        log_probs=scores[: length + 1],
    )

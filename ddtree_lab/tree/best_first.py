"""Best-first draft tree: draft logits [D, V] and a budget -> the ``budget`` most probable prefixes as a DraftTree."""

from __future__ import annotations

import heapq

import numpy as np
from torch import Tensor

from ddtree_lab.tree.ranking import rank_rows
from ddtree_lab.tree.validate import as_count
from ddtree_lab.types import DraftTree


def build_best_first(logits: Tensor, budget: int, *, root_token: int, vocab_size: int | None = None) -> DraftTree:
    """The tree of the ``budget`` most probable prefixes of the per-depth distributions (DDTree, arXiv 2604.12989).

    ``logits`` [D, V] float, unnormalised or log-probabilities; normalised in float32 whatever their dtype. A path's
    score is the float32 sum of its log-probabilities from the root down. Nodes stand in order of falling score; equal
    scores put the smaller tuple of ranks first, and equal log-probabilities within a depth the smaller token id. A
    path of score -inf is never a node, so fewer than ``budget`` nodes may exist; D == 0 or budget 0 gives the root
    alone. Tokens from ``vocab_size`` on are ignored.

    Raises ValueError for logits that are not [D, V] or hold NaN or +inf, for a negative budget or root token; TypeError
    for a budget that is not an integer.
    """
    budget = as_count("budget", budget)
    ids, log_probs = rank_rows(logits, budget, vocab_size=vocab_size)
    return best_first_from_ranking(ids, log_probs, budget=budget, root_token=root_token)


def best_first_from_ranking(ids: Tensor, log_probs: Tensor, *, budget: int, root_token: int) -> DraftTree:
    """``build_best_first`` from the result of ``rank_rows``: ids [D, K] int64, log_probs [D, K] float32, best first.

    The tree is the best of all tokens when K >= min(budget, V), else the best of those ranked.
    """
    budget, root_token = as_count("budget", budget), as_count("root_token", root_token)
    token_rows, score_rows = ids.tolist(), log_probs.tolist()
    horizon, width = ids.shape
    token_ids, parents, depths, ranks, scores = [root_token], [-1], [0], [0], [0.0]
    heap: list[tuple[float, tuple[int, ...], int]] = []  # (-score, ranks from the root, parent)

    def offer(parent: int, prefix: tuple[int, ...], rank: int) -> None:
        if len(prefix) == horizon or rank == width:
            return
        score = float(np.float32(scores[parent] + score_rows[len(prefix)][rank]))
        if score > -np.inf:
            heapq.heappush(heap, (-score, (*prefix, rank), parent))

    with np.errstate(over="ignore"):  # a sum below the float32 range is -inf
        offer(0, (), 0)
        while heap and len(token_ids) <= budget:
            negated, path, parent = heapq.heappop(heap)
            node = len(token_ids)
            token_ids.append(token_rows[len(path) - 1][path[-1]])
            parents.append(parent)
            depths.append(len(path))
            ranks.append(path[-1])
            scores.append(-negated)
            offer(node, path, 0)
            offer(parent, path[:-1], path[-1] + 1)
    return DraftTree(token_ids, parents, depths, ranks, scores)

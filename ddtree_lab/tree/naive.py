"""Exhaustive twin of the best-first builder: every prefix is scored and sorted. For small D and V only."""

from __future__ import annotations

from itertools import product

import numpy as np
from torch import Tensor

from ddtree_lab.tree.ranking import log_probs_of
from ddtree_lab.tree.validate import as_count
from ddtree_lab.types import DraftTree

_MAX_PREFIXES = 1_000_000


def build_naive(logits: Tensor, budget: int, *, root_token: int, vocab_size: int | None = None) -> DraftTree:
    """Same result as ``build_best_first`` by its definition: the first ``budget`` of all possible prefixes.

    Raises ValueError when logits [D, V] have more than a million prefixes.
    """
    log_probs = log_probs_of(logits, vocab_size=vocab_size).cpu().numpy()
    horizon, width = log_probs.shape
    if sum(width**depth for depth in range(1, horizon + 1)) > _MAX_PREFIXES:
        raise ValueError(f"logits [{horizon}, {width}] have more than {_MAX_PREFIXES} prefixes to enumerate")
    by_rank = [sorted(range(width), key=lambda token, row=row: (-row[token], token)) for row in log_probs]

    scored = []
    for depth in range(1, horizon + 1):
        for path in product(range(width), repeat=depth):
            score = np.float32(0)
            with np.errstate(over="ignore"):
                for row, rank in enumerate(path):
                    score += log_probs[row, by_rank[row][rank]]
            if score > -np.inf:
                scored.append((-score, path))
    kept = sorted(scored)[: as_count("budget", budget)]

    node_of = {(): 0} | {path: node for node, (_, path) in enumerate(kept, start=1)}
    return DraftTree(
        token_ids=[as_count("root_token", root_token)] + [by_rank[len(path) - 1][path[-1]] for _, path in kept],
        parents=[-1] + [node_of[path[:-1]] for _, path in kept],
        depths=[0] + [len(path) for _, path in kept],
        ranks=[0] + [path[-1] for _, path in kept],
        log_probs=[0.0] + [float(-negated) for negated, _ in kept],
    )

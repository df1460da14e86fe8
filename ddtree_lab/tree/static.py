"""Static draft tree: draft logits [D, V] and EAGLE tree choices -> a DraftTree of that fixed shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from ddtree_lab.tree.ranking import log_probs_of, stable_top_k
from ddtree_lab.tree.validate import as_count
from ddtree_lab.types import DraftTree


def build_static(
    logits: Tensor, choices: Iterable[Sequence[int]], *, root_token: int, vocab_size: int | None = None
) -> DraftTree:
    """The tree whose nodes are the rank tuples in ``choices``, e.g. ``[(0,), (0, 0), (1,)]``, filled from ``logits``.

    Nodes are ordered by depth, then by rank tuple, whatever the order of ``choices``. Tokens whose path has
    probability 0 are left out with everything below them.

    Raises ValueError naming a choice that is empty, repeated, deeper than D, of a rank outside the vocabulary, or whose
    own prefix is not a choice; TypeError for a rank that is not an integer. Logits and log-probabilities as in
    ``build_best_first``.
    """
    paths = sorted((tuple(as_count("rank in choices", rank) for rank in path) for path in choices), key=_by_depth)
    full = log_probs_of(logits, vocab_size=vocab_size)
    _check_choices(paths, horizon=full.shape[0], vocab_size=full.shape[1])
    ids, log_probs = stable_top_k(full, 1 + max((rank for path in paths for rank in path), default=-1))
    token_rows, score_rows = ids.tolist(), log_probs.tolist()
    token_ids, parents, depths, ranks, scores = [as_count("root_token", root_token)], [-1], [0], [0], [0.0]
    nodes = {(): 0}
    with np.errstate(over="ignore"):
        for path in paths:
            parent, row, rank = nodes.get(path[:-1]), len(path) - 1, path[-1]
            if parent is None:
                continue
            score = float(np.float32(scores[parent] + score_rows[row][rank]))
            if score == -np.inf:
                continue
            nodes[path] = len(token_ids)
            token_ids.append(token_rows[row][rank])
            parents.append(parent)
            depths.append(len(path))
            ranks.append(rank)
            scores.append(score)
    return DraftTree(token_ids, parents, depths, ranks, scores)


def _by_depth(path: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return len(path), path


def _check_choices(paths: list[tuple[int, ...]], *, horizon: int, vocab_size: int) -> None:
    seen = {()}
    for path in paths:
        if path in seen:
            what = "is repeated" if path else "is the root, which every tree has"
            raise ValueError(f"choice {path} {what}")
        if len(path) > horizon:
            raise ValueError(f"choice {path} is {len(path)} deep; the logits have D = {horizon} depths")
        if path[-1] >= vocab_size:
            raise ValueError(f"choice {path}: rank {path[-1]} is outside the vocabulary of {vocab_size} tokens")
        if path[:-1] not in seen:
            raise ValueError(f"choice {path} needs its prefix {path[:-1]} among the choices")
        seen.add(path)

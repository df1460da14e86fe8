"""Replay: a recorded round -> what another budget or another verification would have accepted. No model is needed."""

from __future__ import annotations

from ddtree_lab.accept import verify_linear, walk
from ddtree_lab.tree.validate import as_count
from ddtree_lab.types import Acceptance, DraftTree, Round

VERIFICATIONS = ("tree_walk", "eagle_linear")


def prune(round_or_tree: Round | DraftTree, budget: int) -> DraftTree:
    """The tree of the first ``budget`` drafted nodes in order of building.

    Best-first trees are nested (arXiv 2604.12989): pruning one gives the tree that the smaller budget would have built.
    A budget beyond the tree gives the whole tree. Raises TypeError or ValueError for a budget that is not an int >= 0.
    """
    tree = round_or_tree.tree if isinstance(round_or_tree, Round) else round_or_tree
    kept = slice(0, as_count("budget", budget) + 1)
    return DraftTree(
        token_ids=tree.token_ids[kept],
        parents=tree.parents[kept],
        depths=tree.depths[kept],
        ranks=tree.ranks[kept],
        log_probs=tree.log_probs[kept],
    )


def replay(round_: Round, *, budget: int | None = None, verify: str = "tree_walk") -> Acceptance:
    """What ``verify`` ("tree_walk" or "eagle_linear") accepts of the tree pruned to ``budget`` (None: all of it).

    Uses the recorded target token of each node, at temperature > 0 the recorded draw.
    """
    if verify not in VERIFICATIONS:
        raise ValueError(f"verify must be one of {', '.join(VERIFICATIONS)}, got {verify!r}")
    tree = round_.tree if budget is None else prune(round_, budget)
    target_ids = round_.target.token_ids[: len(tree)]
    return walk(tree, target_ids) if verify == "tree_walk" else verify_linear(tree, target_ids)

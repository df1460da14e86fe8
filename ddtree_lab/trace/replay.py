"""Replay: a recorded round -> what another budget or another verification would have accepted. No model is needed."""

from __future__ import annotations

from dataclasses import fields, replace

from ddtree_lab.accept import verify_linear, walk
from ddtree_lab.tree.validate import as_count
from ddtree_lab.types import Acceptance, DraftTree, Round, TargetView

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


def replay_round(round_: Round, budget: int) -> Round:
    """The round as tree-walk goes over its tree pruned to ``budget``: tree, target, acceptance and emitted tokens.

    What tree-walk emits at a budget is the beginning of what it emits at a larger one, so a round that the run cut is
    cut at the same token here. Times are left out: none was measured at this budget. Raises as ``prune`` does.
    """
    tree = prune(round_, budget)
    kept = {field.name: getattr(round_.target, field.name)[: len(tree)] for field in fields(TargetView)}
    acceptance = walk(tree, kept["token_ids"])
    emitted = (*tree.token_ids[list(acceptance.path[1:])].tolist(), acceptance.bonus_token)
    was_cut = len(round_.emitted) < round_.acceptance.acceptance_length
    return replace(
        round_,
        tree=tree,
        target=TargetView(**kept),
        acceptance=acceptance,
        emitted=emitted[: len(round_.emitted)] if was_cut else emitted,
        stage_seconds={},
    )

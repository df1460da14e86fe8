"""Tree stage: per-depth draft logits [D, V] -> DraftTree."""

from ddtree_lab.tree.best_first import best_first_from_ranking, build_best_first
from ddtree_lab.tree.chain import build_chain
from ddtree_lab.tree.edges import tree_from_edges
from ddtree_lab.tree.naive import build_naive
from ddtree_lab.tree.ranking import log_probs_of, rank_rows, stable_top_k
from ddtree_lab.tree.static import build_static
from ddtree_lab.tree.validate import check_parents, check_tree

__all__ = [
    "best_first_from_ranking",
    "build_best_first",
    "build_chain",
    "build_naive",
    "build_static",
    "check_parents",
    "check_tree",
    "log_probs_of",
    "rank_rows",
    "stable_top_k",
    "tree_from_edges",
]

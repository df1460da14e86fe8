"""Accept stage: a tree and the target's logits at its nodes -> the accepted path, the bonus token, the tokens kept."""

from ddtree_lab.accept.linear import flatten_dfs, verify_linear
from ddtree_lab.accept.sampling import SamplingParams, draw_tokens, filtered_log_probs, sample, view_target
from ddtree_lab.accept.stops import cut_tokens, stop_set
from ddtree_lab.accept.walk import walk

__all__ = [
    "SamplingParams",
    "cut_tokens",
    "draw_tokens",
    "filtered_log_probs",
    "flatten_dfs",
    "sample",
    "stop_set",
    "verify_linear",
    "view_target",
    "walk",
]

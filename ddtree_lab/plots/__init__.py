"""Plots of what was recorded: traces or the content of summary.json -> charts that show themselves in a notebook.

The figures are those of ``ddtree_lab.metrics``; where it has None, a plot has a gap. A drafter's label stands beside
everything that it made, but rounds without their run do not know it: give runs where the drafter is no trained model.
"""

from ddtree_lab.plots.acceptance import acceptance_by_depth, calibration, missed_ranks, tokens_per_round
from ddtree_lab.plots.speed import speed_by_budget, stage_times, tau_by_budget

__all__ = [
    "acceptance_by_depth",
    "calibration",
    "missed_ranks",
    "speed_by_budget",
    "stage_times",
    "tau_by_budget",
    "tokens_per_round",
]

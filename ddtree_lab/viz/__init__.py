"""Pictures of what was recorded: traces -> SVG, plotly figures, tables, report, widget. No model is needed here."""

from typing import Any

from ddtree_lab.viz.interactive import Interactive, explore_round, explore_tree
from ddtree_lab.viz.layout import TreeLayout, layout_tree
from ddtree_lab.viz.mask_picture import show_mask
from ddtree_lab.viz.picture import Picture, show_round, show_tree
from ddtree_lab.viz.plotly_tree import round_figure, tree_figure
from ddtree_lab.viz.report import render_report
from ddtree_lab.viz.svg import round_svg, tree_svg
from ddtree_lab.viz.tables import Table, depth_table, draft_table, node_table, run_table, verdict_table
from ddtree_lab.viz.tokens import visible
from ddtree_lab.viz.verdicts import describe_verdicts, most_lost, view_round
from ddtree_lab.viz.words import Words, load_words, save_words, words_of

__all__ = [
    "Interactive",
    "Picture",
    "Table",
    "TreeLayout",
    "Words",
    "depth_table",
    "describe_verdicts",
    "draft_table",
    "explore_round",
    "explore_tree",
    "layout_tree",
    "load_words",
    "most_lost",
    "node_table",
    "render_report",
    "round_figure",
    "round_svg",
    "run_table",
    "save_words",
    "show_mask",
    "show_round",
    "show_tree",
    "tree_figure",
    "tree_svg",
    "verdict_table",
    "view_round",
    "visible",
    "words_of",
]


def __getattr__(name: str) -> Any:
    if name == "TreeWidget":  # needs the packages of the extra "lab", which nothing else here does
        from ddtree_lab.viz.widget import TreeWidget

        return TreeWidget
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

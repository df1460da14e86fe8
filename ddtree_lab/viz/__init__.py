"""Pictures of what was recorded: traces -> SVG, report page. No model is needed here."""

from ddtree_lab.viz.layout import TreeLayout, layout_tree
from ddtree_lab.viz.report import render_report
from ddtree_lab.viz.svg import round_svg, tree_svg
from ddtree_lab.viz.tokens import visible

__all__ = ["TreeLayout", "layout_tree", "render_report", "round_svg", "tree_svg", "visible"]

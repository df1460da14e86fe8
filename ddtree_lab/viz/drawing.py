"""What a picture of a tree shows: DraftTree or Round -> nodes with places, marks and texts, for SVG and plotly alike.

Nothing is escaped here: each picture does that for its own markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ddtree_lab.types import DraftTree, Round
from ddtree_lab.viz.layout import layout_tree
from ddtree_lab.viz.verdicts import describe_verdicts, view_round

LABEL_COLUMNS = 14  # character cells of a node's token
DRAFT_NOTE = "d: the drafter's probability of the token given its parent"
ODDS_NOTE = f"{DRAFT_NOTE}; t: the target's"


@dataclass(frozen=True)
class Geometry:
    """Pixels of the drawing; the report's page draws with the same numbers."""

    step_x: int = 172
    step_y: int = 44
    node_width: int = 132
    node_height: int = 36
    margin: int = 14


GEOMETRY = Geometry()


@dataclass(frozen=True)
class Mark:
    """How one kind of node is drawn and explained."""

    name: str  # the CSS class
    sign: str  # drawn in the node's corner
    meaning: str  # the legend's words


MARKS = {
    mark.name: mark
    for mark in (
        Mark("root", "●", "root: the last committed token"),
        Mark("kept", "✓", "accepted"),
        Mark("beyond", "»", "accepted by walking the tree, lost by EAGLE-linear"),
        Mark("stop", "×", "EAGLE-linear stopped: the next node of its sequence"),
        Mark("bonus", "+", "bonus token, from the target"),
        Mark("plain", "", "drafted, not accepted"),
    )
}
UNSEEN = Mark("plain", "", "drafted")  # by no target yet


@dataclass(frozen=True)
class Node:
    """One node of a drawing."""

    parent: int  # -1 for the root
    x: float  # steps, as ``TreeLayout`` has them
    y: float
    mark: Mark
    text: str  # decoded, may hold anything
    odds: str


@dataclass(frozen=True)
class Drawing:
    """A tree ready to be drawn. A round's has N + 1 nodes: the last is the bonus token."""

    nodes: tuple[Node, ...]
    heading: str
    description: str
    note: str  # what the odds mean

    @property
    def legend(self) -> list[Mark]:
        """The marks in use, in the order of ``MARKS``."""
        used = {node.mark.name: node.mark for node in self.nodes}
        return [used[name] for name in MARKS if name in used]


def draw_round(round: Round, decode_token: Callable[[int], str], *, title: str | None = None) -> Drawing:
    """A round: its tree with the odds of drafter and target, both verdicts as marks, and the bonus token."""
    tree, target, end = round.tree, round.target, round.acceptance.path[-1]
    layout = layout_tree(tree, extra_child_of=end)
    odds = [
        f"d {probability(d)} · t {probability(t)}"
        for d, t in zip(conditional_log_probs(tree), target.node_log_probs.tolist(), strict=True)
    ]
    fields = zip(
        [*tree.parents.tolist(), end],
        layout.x,
        layout.y,
        [MARKS[name] for name in (*view_round(round).marks, "bonus")],
        [decode_token(token) for token in (*tree.token_ids.tolist(), round.acceptance.bonus_token)],
        ["root", *odds[1:], f"t {probability(float(target.log_probs[end]))}"],
        strict=True,
    )
    return Drawing(
        nodes=tuple(Node(*values) for values in fields),
        heading=title or f"Round: {round.acceptance.num_accepted} of {tree.budget_used} drafted nodes accepted",
        description=describe_verdicts(round, decode_token),
        note=ODDS_NOTE,
    )


def draw_tree(tree: DraftTree, decode_token: Callable[[int], str], *, title: str | None = None) -> Drawing:
    """A draft tree that no target has seen."""
    layout = layout_tree(tree)
    fields = zip(
        tree.parents.tolist(),
        layout.x,
        layout.y,
        [MARKS["root"]] + [UNSEEN] * tree.budget_used,
        map(decode_token, tree.token_ids.tolist()),
        ["root", *(f"d {probability(value)}" for value in conditional_log_probs(tree)[1:])],
        strict=True,
    )
    return Drawing(
        nodes=tuple(Node(*values) for values in fields),
        heading=title or f"Draft tree of {tree.budget_used} nodes",
        description=f"A tree of {tree.budget_used} drafted nodes, {int(tree.depths.max())} deep.",
        note=DRAFT_NOTE,
    )


def conditional_log_probs(tree: DraftTree) -> list[float]:
    """[N] the drafter's log-probability of each node given its parent; the root's is 0."""
    path = tree.log_probs.tolist()
    return [0.0] + [path[node] - path[parent] for node, parent in enumerate(tree.parents.tolist()[1:], start=1)]


def probability(log_prob: float) -> str:
    """A log-probability as a short probability."""
    if math.isnan(log_prob):
        return "–"
    value = math.exp(min(log_prob, 0.0))
    if value < 0.001:
        return "<0.001"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"

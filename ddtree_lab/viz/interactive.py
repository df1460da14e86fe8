"""A plotly figure and its static twin as one output of a notebook.

One MIME bundle serves every reader. JupyterLab with plotly's extension, which the plotly package brings, takes the
figure, whether the notebook is trusted or not, and needs no network for it. nbconvert knows no plotly and takes the
HTML, as does a JupyterLab without the extension: an ``img`` element with the SVG in it, which the cleaning of untrusted
HTML leaves in place. A terminal takes the words.

The bundle is written by the kernel and is the same every time. JupyterLab's extension adds an ``image/png`` of its own
to the figures that it has drawn when the notebook is saved there; nbconvert still takes the HTML, and nbval does not
compare images.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddtree_lab.types import DraftTree, Round
from ddtree_lab.viz.picture import Picture, show_round, show_tree
from ddtree_lab.viz.plotly_tree import round_figure, tree_figure

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ddtree_lab.target.protocol import Target

PLOTLY_MIME = "application/vnd.plotly.v1+json"
MODE_BAR = {  # no button that sends the figure away, none that only selects
    "displaylogo": False,
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d"],
}


@dataclass(frozen=True, eq=False)
class Interactive:
    """A figure to point at and a picture of the same. Equal inputs give the same bytes."""

    figure: Figure = field(repr=False)
    picture: Picture

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return {
            PLOTLY_MIME: json.loads(self.figure.to_json()) | {"config": MODE_BAR},
            "text/html": self.picture._repr_html_(),
            "text/plain": self.picture.alt,
        }


def explore_round(round: Round, target: Target | None = None, *, title: str | None = None) -> Interactive:
    """``show_round`` with ``round_figure``. Raises ImportError when plotly is not installed."""
    return Interactive(round_figure(round, target, title=title), show_round(round, target, title=title))


def explore_tree(tree: DraftTree, target: Target | None = None, *, title: str | None = None) -> Interactive:
    """``show_tree`` with ``tree_figure``. Raises ImportError when plotly is not installed."""
    return Interactive(tree_figure(tree, target, title=title), show_tree(tree, target, title=title))

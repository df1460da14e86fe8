"""Pictures that show themselves in a notebook: DraftTree or Round -> SVG in an image element.

An image keeps the SVG's style sheet to itself and is shown in a saved notebook whether or not the reader trusts it.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddtree_lab.types import DraftTree, Round
from ddtree_lab.viz.svg import round_svg, tree_svg
from ddtree_lab.viz.tokens import escape, token_decoder
from ddtree_lab.viz.verdicts import describe_verdicts

if TYPE_CHECKING:
    from ddtree_lab.target.protocol import Target

SMALLEST = 0.7  # of the drawn size, where a narrow page shrinks the picture; below that it scrolls


@dataclass(frozen=True)
class Picture:
    """A standalone SVG document and the same in words."""

    svg: str = field(repr=False)
    alt: str

    @property
    def width(self) -> int:
        """Pixels of the SVG as drawn, rounded."""
        found = re.match(r'<svg\b[^>]*? width="([\d.]+)"', self.svg)
        if found is None:
            raise ValueError(f"svg must start with an svg element that has a width, got {self.svg!r:.60}")
        return round(float(found[1]))

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.svg.encode()).decode()
        size = f"width:100%;max-width:{self.width}px;min-width:{round(SMALLEST * self.width)}px"
        image = f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(self.alt)}" style="{size}">'
        return f'<div style="overflow-x:auto">{image}</div>'


def show_round(round: Round, target: Target | None = None, *, title: str | None = None) -> Picture:
    """The tree of a round with both verdicts (``round_svg``). Tokens are shown as texts of ``target``'s tokenizer, as
    ids when there is none."""
    decode = token_decoder(target)
    return Picture(round_svg(round, decode, title=title), describe_verdicts(round, decode))


def show_tree(tree: DraftTree, target: Target | None = None, *, title: str | None = None) -> Picture:
    """A draft tree that no target has seen (``tree_svg``). Tokens are shown as ``show_round`` does."""
    alt = title or f"Draft tree: {tree.budget_used} drafted nodes, {int(tree.depths.max())} deep."
    return Picture(tree_svg(tree, token_decoder(target), title=title), alt)

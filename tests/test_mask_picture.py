"""The picture of a mask: its cells against the mask, its words, and what it refuses."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from ddtree_lab.attention import ancestor_mask, full_mask
from ddtree_lab.tree import tree_from_edges
from ddtree_lab.viz import show_mask

FORK = tree_from_edges([(0, 1), (0, 2), (2, 3)], [7, 8, 9, 10])
NAMES = {"kept": "seen", "stop": "wrong", "plain": "hidden"}


def cells(svg: str) -> list[str]:
    """What each cell is drawn as, row by row; the legend's boxes have another size."""
    drawn = re.findall(r'<g class="node (\w+)" transform="[^"]*"><rect class="box" x="1"', svg)
    return [NAMES[name] for name in drawn]


def test_every_cell_is_drawn_as_the_mask_has_it() -> None:
    drawn = cells(show_mask(FORK).svg)
    assert [cell == "seen" for cell in drawn] == ancestor_mask(FORK).flatten().tolist()
    assert "wrong" not in drawn


def test_a_causal_mask_shows_what_is_no_ancestor() -> None:
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    drawn = cells(show_mask(FORK, causal).svg)
    assert [cell != "hidden" for cell in drawn] == causal.flatten().tolist()
    assert [index for index, cell in enumerate(drawn) if cell == "wrong"] == [2 * 4 + 1, 3 * 4 + 1]
    assert show_mask(FORK, causal).alt.splitlines()[3] == "Node 2 sees 0, 2; no ancestors of it: 1."


def test_context_stands_before_the_tree() -> None:
    mask = full_mask(FORK, 3, sliding_window=2)
    picture = show_mask(FORK, mask, title="Windows & more")
    assert Counter(cells(picture.svg)) == {"seen": int(mask.sum()), "hidden": int((~mask).sum())}
    assert picture.alt.splitlines()[:3] == [
        "Windows & more",
        "Node 0 sees 1 of 3 of the context and 0.",
        "Node 1 sees 0 of 3 of the context and 0, 1.",
    ]


def test_it_is_valid_svg_with_hostile_tokens_as_text() -> None:
    words = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: f"</text><script>{ids[0]}"), vocab_size=100)
    picture = show_mask(FORK, target=words, title="<script>")
    root = ElementTree.fromstring(picture.svg)
    assert root.tag.endswith("svg") and not [tag for tag in root.iter() if tag.tag.endswith("script")]
    assert picture == show_mask(FORK, target=words, title="<script>")


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (4,), (1, 4, 4)])
def test_a_mask_of_another_tree_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"mask must be \[N, M\] with N = 4"):
        show_mask(FORK, torch.ones(shape, dtype=torch.bool))


def test_a_mask_of_numbers_is_refused() -> None:
    with pytest.raises(TypeError, match="mask must be bool"):
        show_mask(FORK, torch.zeros(4, 4))

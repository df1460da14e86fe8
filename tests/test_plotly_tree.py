"""Trees as plotly figures: the SVG's places, marks and words, and tokens that stay text."""

from __future__ import annotations

import html
import math
import re
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_viz import HOSTILE, follow, fork, grow, hostile, verified

from ddtree_lab.types import DraftTree, Round
from ddtree_lab.viz import layout_tree, round_figure, round_svg, tree_figure, tree_svg, visible
from ddtree_lab.viz.drawing import GEOMETRY, MARKS, ODDS_NOTE
from ddtree_lab.viz.plotly_tree import VIEW_HEIGHT, VIEW_WIDTH
from ddtree_lab.viz.stylesheet import read_style
from ddtree_lab.viz.tokens import escape_plotly

WORDS = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: hostile(ids[0])), vocab_size=10**6)
SIZES = (1, 2, 33, 257)


def trace(figure, name: str):
    (found,) = [each for each in figure.data if each.name == name]
    return found


def legend(figure) -> list[str]:
    return [each.name for each in figure.data if each.showlegend is not False]


def round_of(size: int) -> Round:
    tree = grow(size)
    return verified(tree, follow(tree, [1, 0, 1]))


def svg_places(svg: str) -> list[tuple[float, float]]:
    """The nodes' left edges and middles in an SVG, in steps from the root's."""
    nodes = re.findall(r'<g class="node \w+" transform="translate\(([\d.]+) ([\d.]+)\)"><title>', svg)
    return [
        (
            (float(x) - GEOMETRY.margin) / GEOMETRY.step_x,
            (float(y) - float(nodes[0][1])) / GEOMETRY.step_y,
        )
        for x, y in nodes
    ]


@pytest.mark.parametrize("size", SIZES)
def test_a_round_has_the_places_of_the_layout_and_of_its_svg(size: int) -> None:
    round_ = round_of(size)
    nodes = trace(round_figure(round_), "nodes")
    layout = layout_tree(round_.tree, extra_child_of=round_.acceptance.path[-1])
    assert (nodes.x, nodes.y) == (layout.x, layout.y)
    places = svg_places(round_svg(round_, str))
    assert places == [(x, y - nodes.y[0]) for x, y in zip(nodes.x, nodes.y, strict=True)]


@pytest.mark.parametrize("size", SIZES)
def test_a_tree_has_the_places_of_the_layout_and_of_its_svg(size: int) -> None:
    nodes = trace(tree_figure(grow(size)), "nodes")
    layout = layout_tree(grow(size))
    assert (nodes.x, nodes.y) == (layout.x, layout.y)
    assert svg_places(tree_svg(grow(size), str)) == [(x, y - nodes.y[0]) for x, y in zip(nodes.x, nodes.y, strict=True)]


def test_edges_lead_from_the_parents_to_the_nodes_in_the_colours_of_the_style_sheet() -> None:
    round_ = verified(fork(), [2, 9, 4, 9, 8])
    figure, style = round_figure(round_), read_style("tree")
    nodes = trace(figure, "nodes")
    parents, marks = [*round_.tree.parents.tolist(), 4], ["root", "stop", "beyond", "plain", "beyond", "bonus"]
    edges = [shape for shape in figure.layout.shapes if shape.type == "path"]
    half = GEOMETRY.node_width / 2 / GEOMETRY.step_x
    assert len(edges) == 5
    for node, edge in enumerate(edges, start=1):
        numbers = [float(number) for number in re.findall(r"[\d.]+", edge.path)]
        parent = parents[node]
        assert numbers[:2] == pytest.approx([nodes.x[parent] + half, nodes.y[parent]], abs=1e-5)
        assert numbers[-2:] == pytest.approx([nodes.x[node] - half, nodes.y[node]], abs=1e-5)
        drawn = style.stroke(".ddtree .edge", f".ddtree .edge.{marks[node]}")
        assert (edge.line.color, edge.line.width) == (drawn.colour, drawn.width)
    assert [edge.line.dash for edge in edges] == ["2px,3px", "solid", "solid", "solid", "5px,4px"]
    boxes = [shape for shape in figure.layout.shapes if shape.type == "rect" and shape.fillcolor]
    assert [box.line.color for box in boxes] == [
        style.light[name] for name in ("dd-ink", "dd-stop", "dd-beyond", "dd-line", "dd-beyond", "dd-bonus")
    ]
    assert [(box.x0 + box.x1) / 2 for box in boxes] == pytest.approx(nodes.x)
    assert [(box.y0 + box.y1) / 2 for box in boxes] == pytest.approx(nodes.y)


def test_legend_and_odds_are_the_words_of_the_svg() -> None:
    round_ = verified(fork(), [2, 9, 4, 9, 8])
    figure, svg = round_figure(round_, title="A title"), round_svg(round_, str, title="A title")
    used = [MARKS[name] for name in ("root", "beyond", "stop", "bonus", "plain")]
    assert legend(figure) == [f"{mark.sign} {mark.meaning}".strip() for mark in used]
    assert all(f'<text class="note" x="30" y="12">{mark.meaning}</text>' in svg for mark in used)
    assert list(trace(figure, "odds").text) == re.findall(r'class="odds"[^>]*>([^<]*)<', svg)
    assert list(trace(figure, "tokens").text) == re.findall(r'class="token"[^>]*>([^<]*)<', svg)
    assert [sign or None for sign in trace(figure, "signs").text] == ["●", "×", "»", None, "»", "+"]
    assert figure.layout.title.text == "A title"
    assert figure.layout.annotations[0].text == ODDS_NOTE


def test_a_tree_alone_says_nothing_of_a_target() -> None:
    assert "target" in round_figure(verified(fork(), [2, 9, 4, 9, 8])).to_json()
    told = tree_figure(fork()).to_json()
    assert "target" not in told and "accepted" not in told


def test_pointing_at_a_node_shows_what_drafter_and_target_gave_it() -> None:
    round_ = verified(fork(), [2, 9, 4, 9, 8])
    round_.target.node_ranks[4] = 6
    hover = trace(round_figure(round_), "nodes").hovertext
    assert hover[4].split("<br>") == [
        "<b>4</b>",
        "accepted by walking the tree, lost by EAGLE-linear",
        "token 4, node 4, depth 2",
        f"drafter: path {math.exp(-2.1):.2f}, given its parent {math.exp(-0.2):.2f}, rank 1",
        f"target, given its parent: {math.exp(-0.5):.2f}, rank 7",
        f"target goes on with “8”, {math.exp(-0.25):.2f}",
    ]
    assert hover[2].split("<br>")[3] == f"drafter: path {math.exp(-1.9):.2f}, given its parent 0.15, rank 2"
    assert hover[0].split("<br>")[2:] == ["token 0, node 0, depth 0", "target goes on with “2”, 0.78"]
    assert hover[5].split("<br>") == ["<b>8</b>", "bonus token, from the target", "token 8", "target: 0.78"]


def test_a_probability_that_was_not_recorded_is_a_dash() -> None:
    round_ = verified(fork(), [2, 9, 4, 9, 8])
    round_.target.node_log_probs[3] = math.nan
    figure = round_figure(round_)
    assert trace(figure, "odds").text[3] == "d 0.74 · t –"
    assert "target, given its parent: –, rank 1" in trace(figure, "nodes").hovertext[3]


@pytest.mark.parametrize("text", HOSTILE)
def test_escaped_text_is_without_markup_and_reads_as_it_was(text: str) -> None:
    escaped = escape_plotly(text)
    assert not set("<>$") & set(escaped)
    assert html.unescape(escaped) == html.unescape(re.sub("&", "&amp;", text))


def test_hostile_tokens_and_titles_are_escaped_everywhere() -> None:
    figure = round_figure(round_of(33), WORDS, title=HOSTILE[0] + " $x$")
    texts = [figure.layout.title.text, *trace(figure, "tokens").text]
    texts += [re.sub(r"<br>|^<b>|</b>(?=<br>)", "", text) for text in trace(figure, "nodes").hovertext]
    assert not [text for text in texts if set("<>$") & set(text)]
    assert html.unescape(figure.layout.title.text) == HOSTILE[0] + " $x$"
    assert html.unescape(trace(figure, "nodes").hovertext[0]).startswith(f"<b>{visible(hostile(0))}</b>")


@pytest.mark.parametrize("size", SIZES)
def test_the_window_shows_the_root_at_the_size_of_the_svg(size: int) -> None:
    figure = round_figure(round_of(size))
    layout, nodes = figure.layout, trace(figure, "nodes")
    assert layout.width <= VIEW_WIDTH and layout.height <= VIEW_HEIGHT
    left, right = layout.xaxis.range
    bottom, top = layout.yaxis.range
    inner = layout.width - layout.margin.l - layout.margin.r, layout.height - layout.margin.t - layout.margin.b
    assert inner[0] / (right - left) == pytest.approx(GEOMETRY.step_x)
    assert inner[1] / (bottom - top) == pytest.approx(GEOMETRY.step_y)
    half_x, half_y = GEOMETRY.node_width / 2 / GEOMETRY.step_x, GEOMETRY.node_height / 2 / GEOMETRY.step_y
    assert left <= nodes.x[0] - half_x and top <= nodes.y[0] - half_y and nodes.y[0] + half_y <= bottom
    whole = right >= max(nodes.x) + half_x and top <= min(nodes.y) - half_y and bottom >= max(nodes.y) + half_y
    assert ("drag" in layout.annotations[0].text) == (not whole)


def test_an_accepted_path_that_fits_is_in_the_middle_of_the_window() -> None:
    star = DraftTree(
        token_ids=list(range(101)),
        parents=[-1] + [0] * 100,
        depths=[0] + [1] * 100,
        ranks=[0, *range(100)],
        log_probs=[0.0] + [-1.0] * 100,
    )
    figure = round_figure(verified(star, follow(star, [45], bonus=499)))
    nodes, (bottom, top) = trace(figure, "nodes"), figure.layout.yaxis.range
    rows = nodes.y[0], nodes.y[46], nodes.y[-1]
    assert max(rows) - min(rows) > 2 and bottom - top < 20
    assert (bottom + top) / 2 == pytest.approx((max(rows) + min(rows)) / 2)


def test_nodes_of_a_column_do_not_overlap_and_labels_fit_their_boxes() -> None:
    figure = round_figure(round_of(257), WORDS)
    boxes = sorted((shape.x0, shape.y0, shape.y1) for shape in figure.layout.shapes if shape.fillcolor)
    assert all(below[1] > above[2] for above, below in pairwise(boxes) if above[0] == below[0])
    assert max(len(html.unescape(text)) for text in trace(figure, "tokens").text) <= 14


def test_the_same_round_gives_the_same_bytes() -> None:
    assert round_figure(round_of(33), WORDS).to_json() == round_figure(round_of(33), WORDS).to_json()
    assert round_figure(round_of(33)).to_json() != round_figure(round_of(33), WORDS).to_json()


def test_plain_numbers_of_a_figure_are_not_encoded() -> None:
    tree = DraftTree(token_ids=[0, 1], parents=[-1, 0], depths=[0, 1], ranks=[0, 0], log_probs=torch.tensor([0.0, -1]))
    assert "bdata" not in tree_figure(tree).to_json()


@pytest.mark.browser
def test_a_browser_shows_hostile_tokens_as_text(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    tree = DraftTree(
        token_ids=list(range(len(HOSTILE))),
        parents=[-1] + [0] * (len(HOSTILE) - 1),
        depths=[0] + [1] * (len(HOSTILE) - 1),
        ranks=[0, *range(len(HOSTILE) - 1)],
        log_probs=[0.0] + [-1.0] * (len(HOSTILE) - 1),
    )
    figure = tree_figure(tree, WORDS, title=HOSTILE[1])
    path = tmp_path / "tree.html"
    figure.write_html(path, include_plotlyjs=True)
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = next((found for name in names if (found := shutil.which(name))), None)
    events: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1000, "height": 900})
        page.on("dialog", lambda dialog: (events.append(dialog.message), dialog.dismiss()))
        page.on("pageerror", lambda error: events.append(str(error)))
        page.on("request", lambda request: None if request.url == path.as_uri() else events.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector(".textpoint")
        drawn = page.locator(".textpoint").all_text_contents()
        assert page.locator(".gtitle").text_content() == HOSTILE[1]
        box = page.locator(".scatterlayer .trace").last.locator(".point").nth(1).bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_selector(".hovertext")
        hovered = page.locator(".hovertext").text_content()
        browser.close()
    assert events == []
    assert "<script>alert…" in drawn and "&lt;b&gt;" in drawn and "$data␣${scrip…" in drawn and "]]>" in drawn
    assert hovered.startswith(visible(HOSTILE[1]))

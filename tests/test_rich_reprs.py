"""How trees, rounds and runs show themselves in a notebook, and the tables and verdicts beside them."""

from __future__ import annotations

import base64
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from samples import make_round, sample_run
from test_viz import HOSTILE, follow, fork, grow, hostile, verified

from ddtree_lab.accept import verify_linear
from ddtree_lab.metrics import linear_against_walk
from ddtree_lab.tree import build_best_first, rank_rows
from ddtree_lab.types import Acceptance, DraftTree, RunResult
from ddtree_lab.viz import (
    Picture,
    Table,
    depth_table,
    describe_verdicts,
    draft_table,
    most_lost,
    node_table,
    round_svg,
    run_table,
    show_round,
    show_tree,
    tree_svg,
    verdict_table,
    view_round,
)

WORDS = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: f"<{ids[0]}>"), vocab_size=10**6)


class Tags(HTMLParser):
    """The elements of a page, and the text of table cells row by row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self._in_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._in_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data


def svg_in(html: str) -> str:
    ((_, image),) = [element for element in Tags(html).elements if element[0] == "img"]
    kind, data = (image["src"] or "").split(",")
    assert kind == "data:image/svg+xml;base64"
    return base64.b64decode(data).decode()


def test_a_tree_shows_itself_as_an_image_of_its_svg_with_ids() -> None:
    tree = grow(33)
    assert svg_in(tree._repr_html_()) == tree_svg(tree, str)
    assert tree._repr_html_() == grow(33)._repr_html_()


def test_a_tree_alone_says_nothing_of_a_target() -> None:
    for word in ("accepted", "target", "d 0.82 · t"):
        assert word in round_svg(verified(fork(), [2, 9, 4, 9, 8]), str)
        assert word not in tree_svg(fork(), str)


def test_a_round_shows_itself_as_an_image_of_its_svg_with_ids() -> None:
    tree = grow(33)
    round_ = verified(tree, follow(tree, [0, 1]))
    assert svg_in(round_._repr_html_()) == round_svg(round_, str)


def test_pictures_show_texts_where_the_target_has_a_tokenizer() -> None:
    round_ = verified(fork(), [2, 9, 4, 9, 8])
    assert "&lt;4&gt;" in show_round(round_, WORDS).svg and "“<4>”" in show_round(round_, WORDS).alt
    assert "&lt;4&gt;" in show_tree(fork(), WORDS).svg
    nameless = SimpleNamespace(tokenizer=None)
    assert show_round(round_, nameless) == show_round(round_) != show_round(round_, WORDS)


def test_a_picture_is_drawn_to_its_own_width_and_says_its_text() -> None:
    picture = show_round(verified(fork(), [2, 9, 4, 9, 8]), title="A round")
    assert f'width="{picture.width}"' in picture.svg and "A round" in picture.svg
    ((_, image),) = [element for element in Tags(picture._repr_html_()).elements if element[0] == "img"]
    assert image["alt"] == picture.alt == describe_verdicts(verified(fork(), [2, 9, 4, 9, 8]))
    assert f"max-width:{picture.width}px" in (image["style"] or "")
    assert repr(picture) == f"Picture(alt={picture.alt!r})"
    with pytest.raises(ValueError, match="svg must start with an svg element that has a width, got '<p>'"):
        _ = Picture("<p>", "").width


def test_hostile_tokens_stay_text_in_the_page_of_a_picture() -> None:
    target = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: hostile(ids[0])), vocab_size=10**6)
    tree = grow(33, vocabulary=len(HOSTILE) * 50)
    page = show_round(verified(tree, follow(tree, [0, 0, 1])), target)._repr_html_()
    tags = Tags(page).elements
    assert [tag for tag, _ in tags] == ["div", "img"]
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]


def test_texts_of_the_objects_are_one_short_line() -> None:
    round_ = verified(fork(), [2, 9, 4, 9, 8])
    assert repr(round_.tree) == "DraftTree(4 drafted nodes, 2 deep, root 0)"
    assert repr(round_) == "Round(past 10, DraftTree(4 drafted nodes, 2 deep, root 0), 2 accepted, 3 emitted)"
    run = sample_run("chain", tokens=24)
    assert repr(run) == f"RunResult(chain, 24 tokens in {len(run.rounds)} rounds, stop reason 'length')"


def test_the_types_do_not_need_the_pictures_before_they_are_shown() -> None:
    code = "import sys, ddtree_lab.types; sys.exit(any(name.startswith('ddtree_lab.viz') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_run_shows_itself_as_one_row() -> None:
    run = sample_run("tree_walk")
    head, row = Tags(run._repr_html_()).rows
    assert head == ["mode", "nodes per round", "tau", "rounds", "tokens", "target forwards"]
    tau = 23 / len(run.rounds)
    assert row == ["tree_walk [toy]", "12", f"{tau:.2f}", str(len(run.rounds)), "23", str(len(run.rounds) + 1)]


def test_run_table_compares_with_plain_decoding_of_the_same_prompt() -> None:
    plain, walked = sample_run("ar"), sample_run("tree_walk")
    changed = replace(walked, output_ids=[*walked.output_ids[:-1], -1])
    elsewhere = replace(walked, prompt_ids=(1,))
    table = run_table([plain, walked, changed, elsewhere])
    assert table.head[-1] == "identical to ar"
    assert [row[-1] for row in table.rows] == ["yes", "yes", "no", "–"]
    assert table.rows[0][:6] == ("ar [toy]", "0", "1.00", "23", "23", "24")
    sampled = [sample_run("ar", temperature=0.5), sample_run("tree_walk", temperature=0.5)]
    assert [row[-1] for row in run_table(sampled).rows] == ["–", "–"]


def test_run_table_of_a_run_without_rounds_has_no_rates() -> None:
    run = RunResult("tree_walk", (1, 2), [], [], "length", {})
    assert run_table([run]).rows == (("tree_walk", "–", "–", "0", "0", "0"),)


def test_depth_table_states_both_shares_and_ends_at_the_deepest_depth_reached() -> None:
    draft = [[1], [2], [3]]
    both = make_round(parents=[-1, 0, 1], tokens=[0, 1, 2], targets=[1, 2, 9], draft=draft)
    one = make_round(parents=[-1, 0, 1], tokens=[0, 1, 2], targets=[1, 9, 9], draft=draft)
    none = make_round(parents=[-1, 0, 1], tokens=[0, 1, 2], targets=[9, 9, 9], draft=draft)
    run = RunResult("chain", (1,), [0], [both, one, one, none], "length", {}, {"label": "toy"})
    table = depth_table([sample_run("ar"), run])
    assert table.head == ("depth", "chain [toy], 4 rounds")
    assert table.rows == (("1", "75% (75%)"), ("2", "25% (33%)"))
    assert depth_table([replace(run, rounds=[none])]).rows == ()


def test_verdict_table_has_a_row_a_run_and_their_sum() -> None:
    runs = {f"run <{seed}>": sample_run("tree_walk", seed=seed) for seed in range(2)}
    table = verdict_table(runs)
    assert [row[0] for row in table.rows] == ["run <0>", "run <1>", "all"]
    for row, run in zip(table.rows, runs.values(), strict=False):
        found, tokens = linear_against_walk(run.rounds), sum(len(round_.emitted) for round_ in run.rounds)
        kept, lost, false = tokens - found["tokens_lost"], found["lost_rounds"], found["false_continuations"]
        assert row[1:] == tuple(map(str, (len(run.rounds), tokens, kept, lost, false)))
    figures = [[int(cell) for cell in row[1:]] for row in table.rows]
    assert [sum(pair) for pair in zip(*figures[:2], strict=True)] == figures[2]
    with pytest.raises(ValueError, match="runs of tree_walk, got 'chain' for 'c'"):
        verdict_table({"c": sample_run("chain")})


def test_draft_table_has_a_row_a_depth_with_the_best_tokens_first() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.3], [0.009, 0.99, 0.001]]).log()
    table = draft_table(*rank_rows(logits, 2), target=WORDS)
    assert table.head == ("depth", "rank 1", "rank 2")
    assert table.rows == (("1", "<0> 0.50", "<2> 0.30"), ("2", "<1> 0.99", "<0> 0.009"))


def test_node_table_tells_each_path_in_tokens_and_ranks() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.9, 0.0]]).log()
    table = node_table(build_best_first(logits, 3, root_token=9))
    assert table.head == ("node", "parent", "path", "ranks", "path probability")
    assert table.rows == (
        ("1", "0", "0", "1", "0.50"),
        ("2", "1", "0 1", "1 1", "0.45"),
        ("3", "0", "2", "2", "0.30"),
    )
    assert node_table(build_best_first(logits, 0, root_token=9)).rows == ()


def test_a_table_is_aligned_text_and_escaped_html() -> None:
    table = Table(("mode", "n"), (("<b>", "12"),), "a & b")
    assert repr(table) == "a & b\nmode   n\n<b>   12"
    tags = Tags(table._repr_html_())
    assert tags.rows == [["mode", "n"], ["<b>", "12"]]
    assert "b" not in [tag for tag, _ in tags.elements]
    assert [element[1].get("scope") for element in tags.elements if element[0] == "th"] == ["col", "col", "row"]


def test_verdicts_name_what_each_verifier_accepts_and_where_the_linear_one_stops() -> None:
    assert describe_verdicts(verified(fork(), [2, 9, 4, 9, 8])) == (
        "Tree-walk accepts 2 of 4 drafted nodes: “2” “4”.\nWith the bonus token “8” it emits 3 tokens.\n"
        "EAGLE-linear accepts 0, then stops at “1”, the next node of its sequence, as the target says “2”.\n"
        "It emits 1 token, 2 fewer."
    )


def test_verdicts_of_a_round_where_both_agree() -> None:
    chain = DraftTree(token_ids=[0, 1], parents=[-1, 0], depths=[0, 1], ranks=[0, 0], log_probs=[0.0, -0.1])
    assert describe_verdicts(verified(chain, [1, 7]), lambda token: " " * token) == (
        "Tree-walk accepts 1 of 1 drafted node: “␣”.\nWith the bonus token “␣␣␣␣␣␣␣” it emits 2 tokens.\n"
        "EAGLE-linear accepts 1, then has read its whole sequence.\nIt emits 2 tokens."
    )


def test_verdicts_say_where_the_match_is_a_false_continuation() -> None:
    round_ = verified(fork(), [1, 3, 9, 2, 9])  # after 3 the flat list goes on with 2, a child of the root
    assert verify_linear(round_.tree, round_.target.token_ids).false_continuations == 1
    assert "stops before “2”, the right token under another parent (a false continuation)" in describe_verdicts(round_)


def test_verdicts_do_not_depend_on_the_verification_of_the_run() -> None:
    walked = verified(fork(), [2, 9, 4, 9, 8])
    linear = replace(walked, acceptance=Acceptance((0,), 2), emitted=(2,))
    assert describe_verdicts(linear) == describe_verdicts(walked)


def test_verdicts_say_what_a_cut_round_kept_and_what_nothing_drafted_means() -> None:
    assert describe_verdicts(verified(fork(), [2, 9, 4, 9, 8], kept=1)).splitlines()[-1] == (
        "Output ended within the round: the run kept 1 token of 3."
    )
    root = DraftTree(token_ids=[5], parents=[-1], depths=[0], ranks=[0], log_probs=[0.0])
    assert describe_verdicts(verified(root, [6])) == "Nothing was drafted; the target says “6”: 1 token."


def test_most_lost_is_the_first_round_of_the_largest_loss() -> None:
    rounds = [verified(fork(), [2, 9, 4, 9, 8], kept=kept) for kept in (1, 2, 3, 3, 2)]
    assert [view_round(round_).tokens_lost for round_ in rounds] == [0, 1, 2, 2, 1]
    assert most_lost(rounds) == 2
    with pytest.raises(ValueError, match="rounds must hold at least one round"):
        most_lost([])


def test_figures_in_texts_do_not_show_float_noise() -> None:
    tree = grow(12)
    nudged = replace(tree, log_probs=torch.where(tree.depths == 0, tree.log_probs, tree.log_probs - 1e-6))
    assert tree_svg(tree, str) == tree_svg(nudged, str)

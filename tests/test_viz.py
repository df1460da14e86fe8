"""Pictures: visible tokens, layout, SVG and the report page, on rounds made by hand."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import torch

from ddtree_lab.accept.linear import verify_linear
from ddtree_lab.accept.walk import walk
from ddtree_lab.metrics import linear_against_walk
from ddtree_lab.types import DraftTree, Round, RunResult, TargetView
from ddtree_lab.viz import layout_tree, render_report, round_svg, tree_svg, visible
from ddtree_lab.viz.report import MAX_LOSSES, MAX_PROMPTS
from ddtree_lab.viz.tokens import escape, label, script_json
from ddtree_lab.viz.verdicts import view_round

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "]]>",
    "<!--",
    "&lt;b&gt;",
    "\" onload='alert(3)",
    "\u202eevil\u2066",
    "\ud800",
    "\x00\x1b[31m",
    "$data ${script}",
    "مرحبا",
    "👩\u200d💻",
    "",
    "\n",
    " the",
]


def grow(size: int, *, depth: int = 15, vocabulary: int = 500, seed: int = 0) -> DraftTree:
    """A tree of ``size`` nodes that hangs each new node under a random earlier one."""
    generator = torch.Generator().manual_seed(seed)
    parents, depths, ranks, log_probs, tokens = [-1], [0], [0], [0.0], [0]
    children = [0]
    while len(parents) < size:
        low = max(0, len(parents) - 24)
        parent = int(torch.randint(low, len(parents), (), generator=generator))
        if depths[parent] == depth:
            parent = 0
        parents.append(parent)
        depths.append(depths[parent] + 1)
        ranks.append(children[parent])
        log_probs.append(log_probs[parent] - 0.3 - 0.7 * children[parent])
        tokens.append((7 * parent + children[parent] + 1) % vocabulary)
        children[parent] += 1
        children.append(0)
    return DraftTree(token_ids=tokens, parents=parents, depths=depths, ranks=ranks, log_probs=log_probs)


def verified(tree: DraftTree, target_ids: list[int], *, past: int = 10, kept: int | None = None) -> Round:
    """The tree-walk round of a target that says ``target_ids`` after the nodes."""
    size = len(tree)
    acceptance = walk(tree, target_ids)
    tokens = [int(tree.token_ids[node]) for node in acceptance.path[1:]] + [acceptance.bonus_token]
    target = TargetView(
        token_ids=torch.tensor(target_ids),
        log_probs=torch.full((size,), -0.25),
        gaps=torch.full((size,), 2.0),
        node_log_probs=torch.where(torch.arange(size) == 0, 0.0, -0.5),
        node_ranks=torch.zeros(size, dtype=torch.int64),
    )
    return Round(
        past_length=past,
        tree=tree,
        draft_token_ids=torch.zeros(1, 1, dtype=torch.int64),
        draft_log_probs=torch.zeros(1, 1),
        target=target,
        acceptance=acceptance,
        emitted=tuple(tokens[:kept]),
    )


def follow(tree: DraftTree, ranks: list[int], *, bonus: int = 499) -> list[int]:
    """Target tokens that accept the children of these ranks in turn, then say ``bonus``."""
    targets = [bonus] * len(tree)
    node = 0
    for rank in ranks:
        children = [child for child in tree.children()[node] if int(tree.ranks[child]) == rank]
        if not children:
            break
        targets[node] = int(tree.token_ids[children[0]])
        node = children[0]
    return targets


def fork() -> DraftTree:
    """Root 0; children 1 (rank 0) and 2 (rank 1); 3 under 1; 4 under 2."""
    return DraftTree(
        token_ids=[0, 1, 2, 3, 4],
        parents=[-1, 0, 0, 1, 2],
        depths=[0, 1, 1, 2, 2],
        ranks=[0, 0, 1, 0, 0],
        log_probs=[0.0, -0.2, -1.9, -0.5, -2.1],
    )


def run_of(
    rounds: list[Round], *, prompt: str = "A prompt", prompt_id: object = "p0", mode: str = "tree_walk"
) -> RunResult:
    emitted = [token for round in rounds for token in round.emitted]
    return RunResult(
        mode=mode,
        prompt_ids=(1, 2, 3),
        output_ids=[5, *emitted],
        rounds=rounds,
        stop_reason="length",
        stats={},
        meta={"budget": 32, "prompt_id": prompt_id, "prompt": prompt, "target": "tiny", "drafter": "toy"},
    )


def summary_of(**extra: object) -> dict[str, object]:
    figures = {
        "budget": 32,
        "tau": 3.25,
        "rounds": 12,
        "tokens": 39,
        "tokens_per_second": 41.5,
        "ratio_to_ar": 1.75,
        "identical_to_ar": 2,
        "ties": 0,
        "diverged": 0,
        "per_depth": [0.8, 0.4],
        "per_depth_conditional": [0.8, 0.5],
    }
    return {"modes": {"ar": {"tokens": 39, "tokens_per_second": 23.7}, "tree_walk": figures}, **extra}


def hostile(token: int) -> str:
    return HOSTILE[token % len(HOSTILE)]


class Page(HTMLParser):
    """What a browser would see of a page: elements, attributes, text outside script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.data = ""
        self._inside: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag in ("script", "style"):
            self._inside = (tag, dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = ("", {})

    def handle_data(self, data: str) -> None:
        tag, attributes = self._inside
        if attributes.get("id") == "data":
            self.data += data
        elif not tag:
            self.text += data


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "∅"),
        (" the", "␣the"),
        ("\n\t\r", "⏎⇥␍"),
        ("\x00", "⟨U+0000⟩"),
        ("\u202eabc", "⟨U+202E⟩abc"),
        ("\ud800", "⟨U+D800⟩"),
        ("\u00a0\u2028\ufeff\u200b", "⟨U+00A0⟩⟨U+2028⟩⟨U+FEFF⟩⟨U+200B⟩"),
        ("\ufffd", "\ufffd"),
        ("\u0301a", "◌\u0301a"),
        ("a" + "\u0301" * 5, "a" + "\u0301" * 4 + "⟨U+0301⟩"),
        ("👩\u200d💻", "👩\u200d💻"),
        ("👩🏽\u200d💻", "👩🏽\u200d💻"),
        ("a\u200db", "a⟨U+200D⟩b"),
        ("مرحبا", "مرحبا"),
        ("\u3164", "⟨U+3164⟩"),
    ],
)
def test_visible_hides_nothing(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_visible_running_text_keeps_spaces_and_line_breaks() -> None:
    assert visible("a b\n\u202ec", laid_out=True) == "a b⏎\n⟨U+202E⟩c"
    assert visible("", laid_out=True) == ""


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdefg", 6, "abcde…"),
        ("日本語日本語", 6, "日本…"),
        ("e\u0301e\u0301e\u0301e\u0301", 3, "e\u0301e\u0301…"),
        ("👩\u200d💻👩\u200d💻", 3, "👩\u200d💻…"),
        ("ab\u202e", 6, "ab…"),
        ("", 2, "∅"),
    ],
)
def test_label_cuts_between_clusters(text: str, columns: int, shown: str) -> None:
    assert label(text, columns=columns) == shown


def test_label_rejects_too_few_columns() -> None:
    with pytest.raises(ValueError, match="columns must be at least 2, got 1"):
        label("a", columns=1)


@pytest.mark.parametrize("text", HOSTILE)
def test_escaped_text_is_text_in_xml(text: str) -> None:
    parsed = ElementTree.fromstring(f"<a b='{escape(text)}'>{escape(text)}</a>")
    assert len(parsed) == 0
    assert (parsed.text or "") == re.sub(r"[\x00\x1b\ud800]", lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


def test_script_json_cannot_leave_a_script_element() -> None:
    text = script_json(HOSTILE)
    assert not set("<>&\u2028\u2029") & set(text)
    text.encode()
    assert json.loads(text) == HOSTILE


@pytest.mark.parametrize("size", [1, 2, 33, 257])
def test_layout_grows_right_by_depth_and_never_overlaps(size: int) -> None:
    tree = grow(size)
    layout = layout_tree(tree)
    assert layout == layout_tree(tree)
    assert list(layout.x) == tree.depths.tolist()
    assert min(layout.y) == 0.0 and layout.rows == max(layout.y) and layout.columns == max(layout.x)
    assert all(y * 4 == int(y * 4) for y in layout.y)
    for depth in set(layout.x):
        column = sorted(y for x, y in zip(layout.x, layout.y, strict=True) if x == depth)
        assert all(below - above >= 1 for above, below in pairwise(column))


def test_layout_stacks_siblings_by_rank_and_the_extra_node_last() -> None:
    tree = DraftTree(
        token_ids=[9, 3, 1, 2],
        parents=[-1, 0, 0, 0],
        depths=[0, 1, 1, 1],
        ranks=[0, 2, 0, 1],
        log_probs=[0.0, -3.0, -1.0, -2.0],
    )
    layout = layout_tree(tree, extra_child_of=0)
    assert layout.y[2] < layout.y[3] < layout.y[1] < layout.y[4]
    assert layout.x == (0.0, 1.0, 1.0, 1.0, 1.0)


def test_layout_rejects_an_extra_node_without_a_parent() -> None:
    with pytest.raises(ValueError, match="extra_child_of must be a node index from 0 to 4, got 5"):
        layout_tree(fork(), extra_child_of=5)


def test_marks_of_a_round_that_only_the_walk_continues() -> None:
    round = verified(fork(), [2, 9, 4, 9, 8])
    view = view_round(round)
    assert round.acceptance.path == (0, 2, 4)
    assert view.linear_path == verify_linear(round.tree, round.target.token_ids).path == (0,)
    assert view.marks == ("root", "stop", "beyond", "plain", "beyond")
    assert (view.linear_stop, view.tokens_lost) == (1, 2)


def test_marks_of_a_round_where_both_verifiers_agree() -> None:
    view = view_round(verified(fork(), [1, 3, 9, 8, 9]))
    assert view.marks == ("root", "kept", "stop", "kept", "plain")
    assert (view.linear_stop, view.tokens_lost) == (2, 0)


def test_marks_when_the_sequence_is_accepted_whole() -> None:
    tree = DraftTree(token_ids=[0, 1], parents=[-1, 0], depths=[0, 1], ranks=[0, 0], log_probs=[0.0, -0.1])
    view = view_round(verified(tree, [1, 7]))
    assert (view.marks, view.linear_stop, view.tokens_lost) == (("root", "kept"), None, 0)


def test_tokens_cut_by_the_length_cap_are_not_counted_as_lost() -> None:
    assert view_round(verified(fork(), [2, 9, 4, 9, 8], kept=2)).tokens_lost == 1
    assert view_round(verified(fork(), [2, 9, 4, 9, 8], kept=1)).tokens_lost == 0


def test_lost_tokens_are_those_that_the_metrics_count() -> None:
    rounds = []
    for seed in range(40):
        tree = grow(20, depth=5, seed=seed)
        ranks = [(seed >> level) % 3 for level in range(4)]
        rounds.append(verified(tree, follow(tree, ranks), kept=1 + seed % 5))
    counts = linear_against_walk(rounds)
    lost = [view_round(round).tokens_lost for round in rounds]
    assert (sum(lost), sum(map(bool, lost))) == (counts["tokens_lost"], counts["lost_rounds"])
    assert 0 < counts["lost_rounds"] < len(rounds)


def elements(svg: str, class_name: str) -> list[ElementTree.Element]:
    return [element for element in ElementTree.fromstring(svg).iter() if class_name in element.get("class", "").split()]


@pytest.mark.parametrize("size", [1, 2, 33, 257])
def test_round_svg_draws_every_node_and_the_bonus_token(size: int) -> None:
    tree = grow(size)
    svg = round_svg(verified(tree, follow(tree, [0, 1, 0])), hostile)
    assert svg == round_svg(verified(tree, follow(tree, [0, 1, 0])), hostile)
    assert len(elements(svg, "token")) == size + 1
    assert len(elements(svg, "edge")) == size
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert [child.tag.split("}")[1] for child in root][:2] == ["title", "desc"]
    assert float(root.get("height", 0)) > 44 * layout_tree(tree).rows


def test_svg_shows_hostile_tokens_as_text_only() -> None:
    tree = grow(33, vocabulary=len(HOSTILE) * 50)
    for svg in (round_svg(verified(tree, follow(tree, [0, 0])), hostile, title=HOSTILE[1]), tree_svg(tree, hostile)):
        svg.encode()
        root = ElementTree.fromstring(svg)
        tags = {element.tag.split("}")[1] for element in root.iter()}
        assert tags == {"svg", "title", "desc", "style", "clipPath", "rect", "text", "g", "path"}
        assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]
        titles = [element.text or "" for element in root.iter() if element.tag.endswith("title")]
        assert any(title.startswith(visible(HOSTILE[1])) for title in titles)
        assert svg.replace("http://www.w3.org/2000/svg", "").count("http") == 0


def test_svg_states_both_probabilities_and_the_signs() -> None:
    svg = round_svg(verified(fork(), [2, 9, 4, 9, 8]), str)
    odds = ["".join(element.itertext()) for element in elements(svg, "odds")]
    assert odds[1] == f"d {math.exp(-0.2):.2f} · t {math.exp(-0.5):.2f}"
    assert odds[4] == f"d {math.exp(-0.2):.2f} · t {math.exp(-0.5):.2f}"  # given the parent: -2.1 + 1.9
    assert odds[5] == f"t {math.exp(-0.25):.2f}"
    legend = {"".join(note.itertext()) for note in elements(svg, "note")}
    assert len(legend) == 6
    assert all(any(word in line for line in legend) for word in ("root", "lost", "stopped", "bonus"))
    assert len(elements(svg, "inner")) == 2


def page_of(decode: Callable[[int], str] = hostile, **extra: object) -> str:
    sizes = (1, 2, 33, 257)
    trees = [grow(size, vocabulary=len(HOSTILE) * 50, seed=size) for size in sizes]
    rounds = [verified(fork(), [2, 9, 4, 9, 8])] + [verified(tree, follow(tree, [1, 0, 1])) for tree in trees]
    return render_report(summary_of(**extra), [run_of(rounds, prompt=HOSTILE[1], prompt_id=HOSTILE[0])], decode)


def test_report_is_deterministic() -> None:
    assert page_of().encode() == page_of().encode()


def test_report_shows_hostile_text_as_text_only() -> None:
    mismatches = [{"prompt_id": HOSTILE[0], "gap": 0.5}]
    page = Page(page_of(label=HOSTILE[0], config={"command": HOSTILE[1]}, mismatches=mismatches))
    assert page.tags.count("script") == 2
    assert not {"img", "iframe", "object", "embed", "link"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "style")]
    assert page.text.count(HOSTILE[0]) >= 2 and HOSTILE[1] in page.text
    assert "\u202e" not in page.text + page.data
    data = json.loads(page.data)
    assert set(data["texts"]) <= {visible(text) for text in HOSTILE}
    assert HOSTILE[0] in data["texts"]


def test_report_fetches_nothing() -> None:
    page = page_of(str)
    assert re.findall(r"https?://[^\"'\s]*", page) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"@import|url\((?!#)", page)
    assert "default-src 'none'; style-src 'sha256-" in page


def test_report_embeds_layout_and_marks_of_every_round() -> None:
    data = json.loads(Page(page_of()).data)
    (run,) = data["runs"]
    assert [len(round["tokens"]) for round in run["rounds"]] == [5, 1, 2, 33, 257]
    first = run["rounds"][0]
    assert (first["marks"], first["end"], first["accepted"], first["linear"], first["lost"]) == ("rsw.w", 4, 2, 0, 2)
    layout = layout_tree(fork(), extra_child_of=4)
    assert first["y"] == [y * data["geometry"]["step_y"] for y in layout.y]
    assert [data["ids"][token] for token in first["emitted"]] == [2, 4, 8]
    assert [data["ids"][token] for token in run["before"]] == [5]
    assert first["path"] == [0, -200, -1900, -500, -2100]


def test_report_links_lost_rounds_to_their_trees() -> None:
    page = page_of(linear_against_walk={"32": {"rounds": 5, "lost_rounds": 3, "tokens_lost": 7}})
    assert 'href="#run-0-round-1"' in page
    assert ">7<" in page


def test_report_shows_acceptance_per_depth() -> None:
    figures = {"per_depth": [0.8, 0.4], "per_depth_conditional": [0.8, 0.5]}
    text = Page(render_report({"modes": {"chain": figures}}, [], str)).text
    assert "80.0% (80.0%)" in text and "40.0% (50.0%)" in text


def test_report_does_not_claim_a_comparison_that_was_not_made() -> None:
    sampled = {"modes": {"tree_walk": {"identical_to_ar": None}}, "mismatches": []}
    assert "Not compared" in Page(render_report(sampled, [], str)).text


def test_report_has_a_row_for_every_budget() -> None:
    budgets = {"tree_walk": {"64": {"tau": 4.5}, "8": {"tau": 2.5}}}
    text = Page(render_report(summary_of(by_budget=budgets), [], str)).text
    assert text.index("2.50") < text.index("4.50") and "3.25" not in text


def test_report_shows_the_label_and_the_mismatches() -> None:
    text = Page(page_of(str, label="replay", mismatches=[{"prompt_id": "p7", "position": 12, "gap": 1.5e-5}])).text
    assert (
        "tree-walk [replay]" in text
        and "3 rounds, most tokens lost first. [replay]" in text
        and "p7" in text
        and "1.5e-05" in text
    )
    assert "None: every run" in Page(page_of(str)).text


def test_report_caps_what_can_be_browsed_and_says_so() -> None:
    results = [run_of([verified(fork(), [2, 9, 4, 9, 8])], prompt_id=number) for number in range(MAX_PROMPTS + 3)]
    page = Page(render_report(summary_of(), results, str))
    assert len(json.loads(page.data)["runs"]) == MAX_PROMPTS
    assert f"{MAX_PROMPTS} of {MAX_PROMPTS + 3} recorded runs can be browsed here" in page.text


def test_report_caps_the_lost_rounds_and_says_so() -> None:
    rounds = [verified(fork(), [2, 9, 4, 9, 8])] * (MAX_LOSSES + 4)
    page = render_report(summary_of(), [run_of(rounds)], str)
    assert f"The {MAX_LOSSES} rounds that lost most, of {MAX_LOSSES + 4}." in page
    assert page.count('href="#run-') == MAX_LOSSES


def test_report_of_sixty_prompts_stays_under_eight_megabytes() -> None:
    rounds = [verified(grow(33, seed=seed), follow(grow(33, seed=seed), [0, 1, 0])) for seed in range(24)]
    modes = ("tree_walk", "eagle_linear")
    results = [run_of(rounds, prompt_id=number, mode=mode) for number in range(60) for mode in modes]
    assert len(render_report(summary_of(), results, str).encode()) < 8_000_000


def test_report_needs_modes() -> None:
    with pytest.raises(ValueError, match="summary must have a non-empty 'modes', got the keys \\['config'\\]"):
        render_report({"config": {}}, [], str)

"""The widget's Python side: its traits, what it sends, and that every verdict in it is the replay's."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from samples import make_round, sample_run
from test_viz import HOSTILE, follow, fork, grow, hostile, run_of, verified
from traitlets import TraitError

from ddtree_lab.accept.linear import flatten_dfs
from ddtree_lab.trace import prune, replay, replay_round
from ddtree_lab.types import Acceptance, Round
from ddtree_lab.viz import TreeWidget, describe_verdicts, layout_tree, show_round, visible
from ddtree_lab.viz.drawing import MARKS
from ddtree_lab.viz.stylesheet import themed_style, tree_style

LETTERS = {"root": "r", "kept": "k", "beyond": "w", "stop": "s", "bonus": "b", "plain": ".", "pruned": "p"}


def linear(round_: Round) -> Round:
    """The round as an EAGLE-linear run records it."""
    acceptance = replay(round_, verify="eagle_linear")
    tokens = round_.tree.token_ids[list(acceptance.path[1:])].tolist()
    return replace(round_, acceptance=acceptance, emitted=(*tokens, acceptance.bonus_token))


def by_hand() -> list[Round]:
    chain = make_round(parents=[-1, 0, 1, 2], tokens=[0, 1, 2, 3], targets=[1, 2, 9, 9])
    broom = make_round(parents=[-1, 0, 0, 0, 3, 4], tokens=[0, 1, 2, 3, 4, 5], targets=[3, 9, 9, 4, 5, 6])
    rounds = [
        verified(fork(), [2, 9, 4, 9, 8]),
        verified(fork(), [2, 9, 4, 9, 8], kept=2),
        verified(fork(), [1, 3, 9, 2, 9]),
        verified(grow(1), [7]),
        verified(grow(33), follow(grow(33), [1, 0, 1])),
        chain,
        broom,
    ]
    return [*rounds, linear(rounds[0]), linear(broom)]


def drawn_at_random() -> list[Round]:
    runs = [
        sample_run(mode, seed=seed, boost=boost)
        for mode in ("tree_walk", "eagle_linear", "chain", "ar")
        for seed, boost in ((0, 4.0), (1, 2.0), (2, 6.0))
    ]
    return [round_ for run in runs for round_ in run.rounds]


@pytest.mark.parametrize("rounds", [by_hand(), drawn_at_random()], ids=["by hand", "at random"])
def test_every_budget_shows_the_replays_verdicts(rounds: list[Round]) -> None:
    widget = TreeWidget(rounds)
    for index, round_ in enumerate(rounds):
        widget.round_index = index
        for budget in range(round_.tree.budget_used + 1):
            widget.budget = budget
            check_outcome(widget, round_, budget)


def check_outcome(widget: TreeWidget, round_: Round, budget: int) -> None:
    outcome, tree = widget._outcome, prune(round_, budget)
    walked, linearly = (replay(round_, budget=budget, verify=verify) for verify in ("tree_walk", "eagle_linear"))
    assert widget.shown_round.acceptance == walked and widget.shown_round.tree == tree
    assert (outcome["end"], outcome["accepted"]) == (walked.path[-1], walked.num_accepted)
    assert outcome["linear"] == linearly.num_accepted

    tokens = [*tree.token_ids[list(walked.path[1:])].tolist(), walked.bonus_token]
    cut = len(round_.emitted) if len(round_.emitted) < round_.acceptance.acceptance_length else None
    assert outcome["emitted"] == [str(token) for token in tokens[:cut]]
    assert outcome["lost"] == max(0, len(tokens[:cut]) - linearly.acceptance_length)
    assert outcome["words"] == describe_verdicts(widget.shown_round)

    marks = ["plain"] * len(tree) + ["pruned"] * (len(round_.tree) - len(tree))
    for node in walked.path:
        marks[node] = "kept" if node in linearly.path else "beyond"
    sequence = flatten_dfs(tree)
    if len(linearly.path) < len(sequence):
        marks[sequence[len(linearly.path)]] = "stop"
    marks[0] = "root"
    for node in range(len(tree), len(round_.tree)):
        if (round_.tree.parents[node], round_.tree.token_ids[node]) == (walked.path[-1], walked.bonus_token):
            marks[node] = "bonus"
    assert outcome["marks"] == "".join(LETTERS[mark] for mark in marks)


def test_a_round_replayed_whole_is_the_recorded_one_and_a_smaller_one_emits_its_beginning() -> None:
    for round_ in by_hand() + drawn_at_random():
        whole = replay_round(round_, round_.tree.budget_used)
        if round_.acceptance == replay(round_):
            assert (whole.acceptance, whole.emitted) == (round_.acceptance, round_.emitted)
        for budget in range(round_.tree.budget_used):
            smaller = replay_round(round_, budget)
            assert smaller.emitted == whole.emitted[: len(smaller.emitted)]
            assert len(smaller.target.gaps) == len(smaller.tree) == budget + 1 and smaller.stage_seconds == {}


def test_the_round_in_view_comes_with_its_layout_tokens_and_text_before() -> None:
    run = sample_run(tokens=60)
    widget = TreeWidget(run, round_index=2)
    sent, tree = widget._round, run.rounds[2].tree
    assert sent["index"] == widget._outcome["index"] == 2 and sent["kept"] == len(run.rounds[2].emitted)
    assert [sent["table"]["ids"][token] for token in sent["tokens"]] == tree.token_ids.tolist()
    layout = layout_tree(tree, extra_child_of=run.rounds[2].acceptance.path[-1])
    assert sent["y"] == [y * widget._run["geometry"]["step_y"] for y in layout.y]
    before = [sent["table"]["ids"][token] for token in sent["before"]]
    assert before == run.output_ids[: len(before)] and before[-1] == run.rounds[2].root_token
    assert (widget._run["rounds"], widget._run["budget"]) == (len(run.rounds), 12)
    assert widget._run["name"] == "tree-walk, budget 12 [toy]"
    assert {mark["name"] for mark in widget._run["marks"]} == {*MARKS, "pruned"}


def test_traits_are_observed_and_a_step_forgets_the_nodes() -> None:
    widget = TreeWidget([verified(fork(), [2, 9, 4, 9, 8]), verified(grow(33), follow(grow(33), [0]))])
    seen: list[tuple[str, object]] = []
    widget.observe(
        lambda change: seen.append((change.name, change.new)), ["round_index", "budget", "selected", "hovered"]
    )
    widget.selected, widget.hovered = 5, 0
    widget.budget = 2
    widget.round_index = 1
    assert seen[:3] == [("selected", 5), ("hovered", 0), ("budget", 2)]
    assert {("round_index", 1), ("selected", None), ("hovered", None)} == set(seen[3:])
    widget.set_state({"round_index": 0, "selected": None, "hovered": None})  # as the browser's message does
    widget.set_state({"selected": 4})
    assert (widget._round["index"], widget._outcome["index"], widget.selected) == (0, 0, 4)


@pytest.mark.parametrize(
    ("name", "value", "largest"),
    [
        ("round_index", 2, 1),
        ("round_index", -1, 1),
        ("budget", 33, 32),
        ("budget", -1, 32),
        ("budget", True, 32),
        ("selected", 6, 5),
        ("hovered", -1, 5),
    ],
)
def test_a_trait_out_of_its_range_is_named_and_changes_nothing(name: str, value: object, largest: int) -> None:
    widget = TreeWidget([verified(fork(), [2, 9, 4, 9, 8]), verified(grow(33), follow(grow(33), [0]))])
    before = getattr(widget, name)
    message = rf"{name} must be an integer from 0 to {largest}, got {value!r}"
    with pytest.raises(TraitError, match=message):
        setattr(widget, name, value)
    with pytest.raises(TraitError, match=message):
        widget.set_state({name: value})
    assert getattr(widget, name) == before
    with pytest.raises(TraitError, match=name):
        setattr(widget, name, "1")
    if name in ("round_index", "budget"):
        with pytest.raises(TraitError, match=message):
            TreeWidget(widget._rounds, **{name: value})


def test_what_is_no_run_is_named() -> None:
    with pytest.raises(ValueError, match="run must hold at least one round, got \\[\\]"):
        TreeWidget([])
    with pytest.raises(ValueError, match="run must hold at least one round, got RunResult"):
        TreeWidget(run_of([]))
    for wrong in (5, [1], fork()):
        with pytest.raises(TypeError, match="run must be a RunResult or a sequence of Round, got "):
            TreeWidget(wrong)


def test_hostile_tokens_are_sent_as_visible_text() -> None:
    target = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: hostile(ids[0])), vocab_size=10**6)
    tree = grow(33, vocabulary=len(HOSTILE) * 50)
    widget = TreeWidget([verified(tree, follow(tree, [0, 0]))], target)
    assert set(widget._round["table"]["texts"]) <= {visible(text) for text in HOSTILE}
    assert {visible(HOSTILE[1]), "⏎", "∅"} <= set(widget._round["table"]["texts"])
    json.dumps(widget.get_state(["_run", "_round", "_outcome"]), allow_nan=False).encode()


def test_a_step_sends_one_round_of_some_kilobytes() -> None:
    tree = grow(257)
    widget = TreeWidget([verified(tree, follow(tree, [0, 1, 0]))] * 200)
    assert len(json.dumps(widget.get_state(["_round", "_outcome"]))) < 32_000
    assert len(json.dumps(widget.get_state())) < 100_000


def test_display_puts_a_still_picture_before_the_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr("ddtree_lab.viz.widget.display", lambda *objects, **_: shown.extend(objects))
    widget = TreeWidget(sample_run(), round_index=1, budget=5)
    widget._ipython_display_()
    still, bundle = shown
    svg = base64.b64decode(re.search(r'src="data:image/svg\+xml;base64,([\w+/=]+)"', still.data)[1]).decode()
    assert svg == widget.picture().svg and "budget 5" in svg
    assert widget.picture() == show_round(widget.shown_round, title=f"Round 2 of {len(widget._rounds)}, budget 5")
    assert bundle["text/plain"] == repr(widget) == f"TreeWidget(round 2 of {len(widget._rounds)}, budget 5)"
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == widget.model_id


def test_an_eagle_linear_round_shows_what_the_walk_would_have_done_and_what_the_run_kept() -> None:
    round_ = linear(verified(fork(), [2, 9, 4, 9, 8]))
    assert round_.acceptance == Acceptance((0,), 2)
    widget = TreeWidget([round_])
    assert (widget._outcome["accepted"], widget._outcome["linear"], widget._round["kept"]) == (2, 0, 1)


def test_the_script_is_self_contained_and_writes_text_only() -> None:
    script = TreeWidget._esm
    assert re.findall(r"https?://[^\"'\s]*", script) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|\beval\b|\bimport\b|document\.write", script)
    assert not re.search(r"@import|url\(", TreeWidget._css)


def test_jupyterlabs_themes_get_the_palettes_of_the_pictures() -> None:
    colours = re.findall(r"--dd-[\w-]+: #\w+", tree_style())
    assert len(colours) > 20 and re.findall(r"--dd-[\w-]+: #\w+", themed_style()) == colours


@pytest.mark.parametrize("missing", ["anywidget", "IPython"])
def test_only_the_widget_needs_the_packages_of_the_lab(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "import ddtree_lab, ddtree_lab.viz\n"
        "from ddtree_lab.viz import *\n"
        "assert 'ipywidgets' not in sys.modules\n"
        "try: ddtree_lab.viz.TreeWidget\n"
        "except ImportError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout == f"TreeWidget needs {missing}: pip install ddtree-lab[lab]\n", result.stderr

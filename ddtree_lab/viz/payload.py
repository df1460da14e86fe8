"""Rounds as plain JSON values for the scripts that draw them: Round -> token numbers, coordinates, marks.

The report embeds these values and the widget sends them; ``static/tree.js`` draws both. Tokens are numbers of a
``TokenTable``, log-probabilities thousandths, coordinates pixels, y growing downwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ddtree_lab.trace.replay import replay_round
from ddtree_lab.types import Round, RunResult
from ddtree_lab.viz.drawing import GEOMETRY, LABEL_COLUMNS, MARKS, ODDS_NOTE, Mark
from ddtree_lab.viz.layout import layout_tree
from ddtree_lab.viz.tokens import label, visible
from ddtree_lab.viz.verdicts import Decode, RoundView, describe_verdicts, view_round

MODE_NAMES = {
    "ar": "ar (plain decoding)",
    "chain": "chain (DFlash)",
    "eagle_linear": "EAGLE-linear",
    "tree_walk": "tree-walk",
}
CONTEXT = 40  # tokens of the text before a round that a reader of the widget sees
PRUNED = Mark("pruned", "", "pruned: beyond the budget")  # no mark of a picture: a picture leaves such nodes out
_LETTERS = {"root": "r", "kept": "k", "beyond": "w", "stop": "s", "bonus": "b", "plain": ".", "pruned": "p"}


class TokenTable:
    """Numbers for token ids in the order they are first met; every id is decoded once."""

    def __init__(self, decode_token: Decode) -> None:
        self._decode_token = decode_token
        self._numbers: dict[int, int] = {}

    def refer(self, ids: Iterable[int]) -> list[int]:
        """The number of each id."""
        return [self._numbers.setdefault(token, len(self._numbers)) for token in ids]

    def payload(self) -> dict[str, Any]:
        """``ids`` and visible ``texts`` by number; ``labels`` and ``running`` text where they differ from ``texts``."""
        decoded = [self._decode_token(token) for token in self._numbers]
        texts = list(map(visible, decoded))
        labels = [label(text, columns=LABEL_COLUMNS) for text in decoded]
        running = [visible(text, laid_out=True) for text in decoded]
        return {
            "ids": list(self._numbers),
            "texts": texts,
            "labels": {number: text for number, text in enumerate(labels) if text != texts[number]},
            "running": {number: text for number, text in enumerate(running) if text != texts[number]},
        }


def drawing_payload(*, pruned: bool = False) -> dict[str, Any]:
    """What every drawing shares: ``geometry``, ``marks`` with their letters, ``bonus`` (its letter), ``oddsNote``.

    ``pruned=True`` adds the mark of nodes beyond a budget.
    """
    marks = [*MARKS.values(), PRUNED] if pruned else MARKS.values()
    return {
        "geometry": asdict(GEOMETRY),
        "marks": [asdict(mark) | {"letter": _LETTERS[mark.name]} for mark in marks],
        "bonus": _LETTERS["bonus"],
        "oddsNote": ODDS_NOTE,
    }


def round_payload(round: Round, view: RoundView, tokens: TokenTable) -> dict[str, Any]:
    """One round: lists of N nodes; ``x`` and ``y`` have one entry more, the place of the bonus token."""
    tree, target, end = round.tree, round.target, round.acceptance.path[-1]
    layout = layout_tree(tree, extra_child_of=end)
    return {
        "past": round.past_length,
        "tokens": tokens.refer(tree.token_ids.tolist()),
        "parents": tree.parents.tolist(),
        "ranks": tree.ranks.tolist(),
        "x": [int(x * GEOMETRY.step_x) for x in layout.x],
        "y": [int(y * GEOMETRY.step_y) for y in layout.y],
        "path": _thousandths(tree.log_probs.tolist()),
        "target": _thousandths(target.node_log_probs.tolist()),
        "targetRanks": target.node_ranks.tolist(),
        "next": tokens.refer(target.token_ids.tolist()),
        "nextOdds": _thousandths(target.log_probs.tolist()),
        "marks": _letters(view.marks),
        "end": end,
        "accepted": round.acceptance.num_accepted,
        "linear": len(view.linear_path) - 1,
        "lost": view.tokens_lost,
        "emitted": tokens.refer(round.emitted),
    }


def browsed_payload(rounds: Sequence[Round], index: int, decode_token: Decode) -> dict[str, Any]:
    """``round_payload`` of a run's round as tree-walk goes over it, with ``index`` and a token table of its own.

    ``before`` is the end of the text before the round, ``kept`` counts the tokens that the run itself emitted in it.
    """
    recorded, tokens = rounds[index], TokenTable(decode_token)
    walked = replay_round(recorded, recorded.tree.budget_used)
    before = [rounds[0].root_token, *(token for earlier in rounds[:index] for token in earlier.emitted)]
    extra = {"index": index, "kept": len(recorded.emitted), "before": tokens.refer(before[-CONTEXT:])}
    return round_payload(walked, view_round(walked), tokens) | extra | {"table": tokens.payload()}


def outcome_payload(round: Round, budget: int, decode_token: Decode) -> dict[str, Any]:
    """Both verdicts on the round's tree pruned to ``budget`` (``ddtree_lab.trace.replay_round``).

    ``marks`` cover all N nodes: those beyond the budget are pruned, and the bonus token is marked where a pruned child
    of the path's end holds it. ``emitted`` are visible texts, ``words`` sentences.
    """
    replayed = replay_round(round, budget)
    view, acceptance = view_round(replayed), replayed.acceptance
    bonus = (acceptance.path[-1], acceptance.bonus_token)
    children = list(zip(round.tree.parents.tolist(), round.tree.token_ids.tolist(), strict=True))
    beyond = ["bonus" if child == bonus else "pruned" for child in children[len(replayed.tree) :]]
    return {
        "budget": replayed.tree.budget_used,
        "marks": _letters([*view.marks, *beyond]),
        "end": acceptance.path[-1],
        "accepted": acceptance.num_accepted,
        "linear": len(view.linear_path) - 1,
        "lost": view.tokens_lost,
        "emitted": [visible(decode_token(token)) for token in replayed.emitted],
        "words": describe_verdicts(replayed, decode_token),
    }


def run_name(result: RunResult) -> str:
    """Mode, budget, and the drafter's label when it has one."""
    budget, label = result.meta.get("budget"), result.meta.get("label")
    shown = [MODE_NAMES[result.mode] + (f", budget {budget}" if budget is not None else "")]
    return " ".join([*shown, f"[{visible(str(label), laid_out=True)}]"] if label else shown)


def _letters(marks: Iterable[str]) -> str:
    return "".join(_LETTERS[mark] for mark in marks)


def _thousandths(log_probs: Sequence[float]) -> list[int | None]:
    return [round(value * 1000) if math.isfinite(value) else None for value in log_probs]

"""A round seen by both verifiers: Round -> marks for its nodes, and the two verdicts in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddtree_lab.accept.linear import flatten_dfs, verify_linear
from ddtree_lab.accept.walk import walk
from ddtree_lab.types import Round
from ddtree_lab.viz.tokens import visible
from ddtree_lab.wording import counted

Decode = Callable[[int], str]


@dataclass(frozen=True)
class RoundView:
    """A round seen from both verifiers of the same tree and target tokens."""

    marks: tuple[str, ...]  # [N] names of ddtree_lab.viz.drawing.MARKS
    linear_path: tuple[int, ...]  # nodes EAGLE-linear keeps, root first
    linear_stop: int | None  # the next node of its sequence, which it refused; None when it took them all
    tokens_lost: int  # kept tokens of this round that EAGLE-linear would not have emitted


def view_round(round: Round) -> RoundView:
    """Mark every node of a recorded round; EAGLE-linear is computed again from the recorded target tokens."""
    path = set(round.acceptance.path)
    linear = verify_linear(round.tree, round.target.token_ids)
    sequence = flatten_dfs(round.tree)
    linear_stop = sequence[len(linear.path)] if len(linear.path) < len(sequence) else None
    marks = ["plain"] * len(round.tree)
    for node in path:
        marks[node] = "kept" if node in linear.path else "beyond"
    if linear_stop is not None:
        marks[linear_stop] = "stop"
    marks[0] = "root"
    lost = max(0, len(round.emitted) - linear.acceptance_length)
    return RoundView(marks=tuple(marks), linear_path=linear.path, linear_stop=linear_stop, tokens_lost=lost)


def describe_verdicts(round: Round, decode_token: Decode = str) -> str:
    """What tree-walk and EAGLE-linear accept of this round's tree and why the latter stops, a line a sentence.

    Both are computed again from the recorded target tokens, so the words hold whatever verification the run used. The
    last line says where a stop token or the length cap cut the round. ``decode_token`` maps a token id to its text,
    which may hold anything; without it tokens are shown as ids.
    """
    tree, said = round.tree, round.target.token_ids
    walked = walk(tree, said)
    bonus = _quoted(walked.bonus_token, decode_token)
    if tree.budget_used == 0:
        return f"Nothing was drafted; the target says {bonus}: 1 token."
    linear, stop = verify_linear(tree, said), view_round(round).linear_stop
    tokens = [_quoted(int(tree.token_ids[node]), decode_token) for node in walked.path[1:]]
    accepted = f"{walked.num_accepted} of {counted(tree.budget_used, 'drafted node')}"
    fewer = walked.acceptance_length - linear.acceptance_length
    lines = [
        f"Tree-walk accepts {accepted}{': ' + ' '.join(tokens) if tokens else ''}.",
        f"With the bonus token {bonus} it emits {counted(walked.acceptance_length, 'token')}.",
        f"EAGLE-linear accepts {linear.num_accepted}, then {_why_it_ends(round, linear.path[-1], stop, decode_token)}.",
        f"It emits {counted(linear.acceptance_length, 'token')}{f', {fewer} fewer' if fewer else ''}.",
    ]
    if len(round.emitted) < round.acceptance.acceptance_length:
        kept = counted(len(round.emitted), "token")
        lines.append(f"Output ended within the round: the run kept {kept} of {round.acceptance.acceptance_length}.")
    return "\n".join(lines)


def most_lost(rounds: Sequence[Round]) -> int:
    """The index of the round in which EAGLE-linear loses the most tokens, the first of several. ValueError if empty."""
    if not rounds:
        raise ValueError("rounds must hold at least one round")
    return max(range(len(rounds)), key=lambda index: view_round(rounds[index]).tokens_lost)


def _why_it_ends(round: Round, last: int, stop: int | None, decode_token: Decode) -> str:
    if stop is None:
        return "has read its whole sequence"
    refused, wanted = int(round.tree.token_ids[stop]), int(round.target.token_ids[last])
    shown = _quoted(refused, decode_token)
    if refused == wanted:
        return f"stops before {shown}, the right token under another parent (a false continuation)"
    return f"stops at {shown}, the next node of its sequence, as the target says {_quoted(wanted, decode_token)}"


def _quoted(token: int, decode_token: Decode) -> str:
    return f"“{visible(decode_token(token))}”"

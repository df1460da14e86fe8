"""Traces as text: a run or one of its rounds -> lines for a terminal. Token texts and names are always escaped."""

from __future__ import annotations

import math
from collections.abc import Callable

from ddtree_lab.types import Round, RunResult

MARKS = {True: "*", False: " "}


def describe_run(result: RunResult, *, token_text: Callable[[int], str] | None = None) -> str:
    """A few lines about the run, then one line a round."""
    lines = [
        f"mode {result.mode}  stop {result.stop_reason}  prompt {len(result.prompt_ids)} tokens  "
        f"output {len(result.output_ids)} tokens  rounds {len(result.rounds)}"
    ]
    lines += [f"{_escaped(key)}: {value!r}" for key, value in result.meta.items()]
    if token_text:
        lines.append(f"output: {_escaped(''.join(token_text(token) for token in result.output_ids))}")
    for index, round_ in enumerate(result.rounds):
        emitted = " ".join(_token(token, token_text) for token in round_.emitted)
        lines.append(
            f"round {index}: past {round_.past_length}, {round_.tree.budget_used} nodes, "
            f"accepted {round_.acceptance.num_accepted}, emitted {emitted}"
        )
    return "\n".join(lines)


def describe_round(round_: Round, *, token_text: Callable[[int], str] | None = None) -> str:
    """The round's tree, indented by depth; accepted nodes carry a star, and each node the target's token after it."""
    acceptance = round_.acceptance
    lines = [f"past {round_.past_length}, {round_.tree.budget_used} drafted nodes, accepted {acceptance.num_accepted}"]
    tree, path = round_.tree, set(acceptance.path)
    tokens, depths, ranks = tree.token_ids.tolist(), tree.depths.tolist(), tree.ranks.tolist()
    targets, children = round_.target.token_ids.tolist(), tree.children()
    pending = [0]
    while pending:
        node = pending.pop()
        pending.extend(reversed(children[node]))
        probability = math.exp(float(tree.log_probs[node]))
        lines.append(
            f"{MARKS[node in path]}{node:>4} {'  ' * depths[node]}{_token(tokens[node], token_text)}"
            f"  rank {ranks[node] + 1}  p {probability:.4f}  target {_token(targets[node], token_text)}"
        )
    lines.append(f"bonus {_token(acceptance.bonus_token, token_text)}")
    lines += [f"{_escaped(stage)}: {seconds * 1e3:.3f} ms" for stage, seconds in round_.stage_seconds.items()]
    return "\n".join(lines)


def _token(token: int, token_text: Callable[[int], str] | None) -> str:
    return f"{token}" if token_text is None else f"{token}:{_escaped(token_text(token))}"


def _escaped(text: str) -> str:
    """Quoted, with control, format and other unprintable characters spelled out."""
    return repr(text)

"""Trace schema: RunResult -> named arrays and a JSON header, and back, with the check that every trace passes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddtree_lab.trace.replay import replay
from ddtree_lab.types import MODES, RECORDED_RANKS, Acceptance, DraftTree, Round, RunResult, TargetView

FORMAT = "ddtree-trace"
VERSION = 1
STOP_REASONS = ("stop", "length")
MAX_JSON_DEPTH = 32
MAX_ROUNDS = 2**17
MAX_DEPTHS = 4096
LOG_PROB_ROUNDING = 1e-4  # a log-probability may be this far above 0


class ArraySpec(NamedTuple):
    """One array of a round: its dtype in memory and the name of its shape."""

    dtype: torch.dtype
    shape: str  # "nodes": [N]; "draft": [D, K]; "path": [num_accepted + 1]; "emitted": [tokens kept]


ARRAYS: Mapping[str, ArraySpec] = {
    "tree.token_ids": ArraySpec(torch.int64, "nodes"),
    "tree.parents": ArraySpec(torch.int64, "nodes"),
    "tree.depths": ArraySpec(torch.int64, "nodes"),
    "tree.ranks": ArraySpec(torch.int64, "nodes"),
    "tree.log_probs": ArraySpec(torch.float32, "nodes"),
    "target.token_ids": ArraySpec(torch.int64, "nodes"),
    "target.log_probs": ArraySpec(torch.float32, "nodes"),
    "target.gaps": ArraySpec(torch.float32, "nodes"),
    "target.node_log_probs": ArraySpec(torch.float32, "nodes"),
    "target.node_ranks": ArraySpec(torch.int64, "nodes"),
    "draft.token_ids": ArraySpec(torch.int64, "draft"),
    "draft.log_probs": ArraySpec(torch.float32, "draft"),
    "path": ArraySpec(torch.int64, "path"),
    "emitted": ArraySpec(torch.int64, "emitted"),
}


class RoundScalars(NamedTuple):
    """The integers of a round that are not arrays."""

    past_length: int
    bonus_token: int
    false_continuations: int


def header_of(result: RunResult) -> dict[str, Any]:
    """Everything of a run but its token ids and rounds, as JSON values.

    Raises TypeError or ValueError naming ``stats`` or ``meta`` when they hold what JSON cannot keep.
    """
    header = {
        "format": FORMAT,
        "version": VERSION,
        "mode": result.mode,
        "stop_reason": result.stop_reason,
        "rounds": len(result.rounds),
        "stats": json_value(result.stats, name="stats"),
        "meta": json_value(result.meta, name="meta"),
    }
    return check_header(header)


def check_header(header: object) -> dict[str, Any]:
    """The header when it is one of this format and version; ValueError otherwise."""
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"not a {FORMAT} file")
    if type(header.get("version")) is not int or header["version"] != VERSION:
        raise ValueError(f"version must be {VERSION}, got {header.get('version')!r:.40}")
    for name, kind in (("mode", str), ("stop_reason", str), ("rounds", int), ("stats", dict), ("meta", dict)):
        if not isinstance(header.get(name), kind):
            raise ValueError(f"header: {name} must be a {kind.__name__}, got {header.get(name)!r:.40}")
    if isinstance(header["rounds"], bool) or not 0 <= header["rounds"] <= MAX_ROUNDS:
        raise ValueError(f"header: rounds must be 0 to {MAX_ROUNDS}, got {header['rounds']!r:.40}")
    return header | {name: json_value(header[name], name=name) for name in ("stats", "meta")}


def arrays_of(round_: Round) -> dict[str, Tensor]:
    """The arrays of a round by the names of ``ARRAYS``, on the CPU."""
    arrays = {
        "draft.token_ids": round_.draft_token_ids,
        "draft.log_probs": round_.draft_log_probs,
        "path": torch.tensor(round_.acceptance.path, dtype=torch.int64),
        "emitted": torch.tensor(round_.emitted, dtype=torch.int64),
    }
    for name in ARRAYS:
        part, _, attribute = name.partition(".")
        if part in ("tree", "target"):
            arrays[name] = getattr(getattr(round_, part), attribute)
    return {name: arrays[name].detach().cpu() for name in ARRAYS}


def scalars_of(round_: Round) -> RoundScalars:
    """The integers of a round."""
    acceptance = round_.acceptance
    return RoundScalars(round_.past_length, acceptance.bonus_token, acceptance.false_continuations)


def round_from(arrays: Mapping[str, Tensor], scalars: RoundScalars, stage_seconds: Mapping[str, float]) -> Round:
    """The inverse of ``arrays_of`` and ``scalars_of``. ValueError when the arrays do not form a tree."""

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.partition(".")[2]: arrays[name] for name in ARRAYS if name.startswith(prefix)}

    return Round(
        past_length=scalars.past_length,
        tree=DraftTree(**part("tree.")),
        draft_token_ids=arrays["draft.token_ids"],
        draft_log_probs=arrays["draft.log_probs"],
        target=TargetView(**part("target.")),
        acceptance=Acceptance(tuple(arrays["path"].tolist()), scalars.bonus_token, scalars.false_continuations),
        emitted=tuple(arrays["emitted"].tolist()),
        stage_seconds=dict(stage_seconds),
    )


def check_draft_shape(depths: int, width: int) -> None:
    """ValueError unless a draft may have the shape [depths, width]."""
    if not 0 <= depths <= MAX_DEPTHS or not min(depths, 1) <= width <= RECORDED_RANKS:
        raise ValueError(
            f"draft_shape must be [D, K] with D <= {MAX_DEPTHS} and K from 1 (0 where D is 0) to {RECORDED_RANKS}, "
            f"got [{depths}, {width}]"
        )


def check_result(result: RunResult) -> None:
    """Raise ValueError naming the round and the field unless the run is whole and agrees with itself.

    Beyond shapes and finite values: each acceptance is the mode's verdict on the recorded target tokens, the emitted
    tokens are the path's and the bonus, cut in the last round alone, the rounds add up to ``output_ids``, and the
    tree's nodes are the draft's tokens of their rank, as far as those are recorded.
    """
    if len(result.rounds) > MAX_ROUNDS:
        raise ValueError(f"rounds must be at most {MAX_ROUNDS}, got {len(result.rounds)}")
    if result.mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {result.mode!r:.40}")
    if result.stop_reason not in STOP_REASONS:
        raise ValueError(f"stop_reason must be one of {', '.join(STOP_REASONS)}, got {result.stop_reason!r:.40}")
    for name in ("prompt_ids", "output_ids"):
        if any(token < 0 for token in getattr(result, name)):
            raise ValueError(f"{name} must not be negative, got {min(getattr(result, name))}")
    if result.rounds and not result.output_ids:
        raise ValueError("output_ids is empty although there are rounds")
    position = 0  # of the round's root in output_ids
    for index, round_ in enumerate(result.rounds):
        try:
            _check_round(round_)
            _check_verdict(round_, result.mode)
            _check_place(round_, result, position, last=index == len(result.rounds) - 1)
        except ValueError as error:
            raise ValueError(f"round {index}: {error}") from None
        position += len(round_.emitted)
    if result.output_ids and position + 1 != len(result.output_ids):
        raise ValueError(f"output_ids has {len(result.output_ids)} tokens, prefill and rounds emit {position + 1}")


def json_value(value: object, *, name: str, depth: int = 0) -> Any:
    """``value`` as plain JSON types, tuples as lists. TypeError or ValueError naming ``name`` for anything else."""
    if depth > MAX_JSON_DEPTH:
        raise ValueError(f"{name} must not be nested more than {MAX_JSON_DEPTH} deep")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} must hold finite numbers, got {value}")
        return value
    if isinstance(value, list | tuple):
        return [json_value(item, name=name, depth=depth + 1) for item in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{name} must have string keys, got {key!r:.40}")
        return {key: json_value(item, name=name, depth=depth + 1) for key, item in value.items()}
    raise TypeError(f"{name} must hold JSON values, got {type(value).__name__}")


def _check_round(round_: Round) -> None:
    num_nodes = len(round_.tree)
    for name, array in arrays_of(round_).items():
        spec = ARRAYS[name]
        if array.dtype != spec.dtype:
            raise ValueError(f"{name} must be {spec.dtype}, got {array.dtype}")
        if spec.shape == "nodes" and array.shape != (num_nodes,):
            raise ValueError(f"{name} must have shape [{num_nodes}], got {list(array.shape)}")
        if spec.dtype.is_floating_point and bool(array.isnan().any()):
            raise ValueError(f"{name} holds NaN")
        if spec.dtype == torch.int64 and name != "tree.parents" and bool((array < 0).any()):
            raise ValueError(f"{name} must not be negative, got {int(array.min())}")
    draft_shape = round_.draft_token_ids.shape
    if len(draft_shape) != 2 or round_.draft_log_probs.shape != draft_shape:
        raise ValueError(f"draft arrays must share one shape [D, K], got {list(draft_shape)}")
    if int(round_.tree.depths.max()) > draft_shape[0]:
        raise ValueError(f"tree of depth {int(round_.tree.depths.max())} beyond the draft's {draft_shape[0]} depths")
    _check_draft(round_)
    for name, array in (
        ("draft.log_probs", round_.draft_log_probs),
        ("target.node_log_probs", round_.target.node_log_probs),
        ("target.log_probs", round_.target.log_probs),
    ):
        if bool((array > LOG_PROB_ROUNDING).any()):
            raise ValueError(f"{name} must not be above 0, got {float(array.max())}")
    if round_.target.node_ranks[0] != 0:
        raise ValueError(f"target.node_ranks must be 0 at the root, got {int(round_.target.node_ranks[0])}")
    if not bool(round_.target.log_probs.isfinite().all()):
        raise ValueError("target.log_probs must be finite")
    if bool((round_.target.gaps < 0).any()):
        raise ValueError("target.gaps must not be negative")
    for stage, seconds in round_.stage_seconds.items():
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"stage_seconds[{stage!r:.40}] must be finite and not negative, got {seconds}")
    _check_acceptance(round_)


def _check_draft(round_: Round) -> None:
    """A draft's rows are sorted, and a node whose rank they reach is the draft's token of its depth and rank."""
    tree, ids, log_probs = round_.tree, round_.draft_token_ids, round_.draft_log_probs
    check_draft_shape(*ids.shape)
    if bool((log_probs[:, 1:] > log_probs[:, :-1]).any()):
        raise ValueError("draft.log_probs must fall along each depth")
    recorded = (tree.ranks < ids.shape[1]) & (tree.depths > 0)
    drafted = ids[tree.depths[recorded] - 1, tree.ranks[recorded]]
    wrong = drafted != tree.token_ids[recorded]
    if bool(wrong.any()):
        node = int(recorded.nonzero()[wrong.nonzero()[0, 0], 0])
        raise ValueError(f"node {node}: token {int(tree.token_ids[node])} is not the draft's of its depth and rank")


def _check_acceptance(round_: Round) -> None:
    path, parents = round_.acceptance.path, round_.tree.parents.tolist()
    tokens, target_ids = round_.tree.token_ids.tolist(), round_.target.token_ids.tolist()
    if not path or path[0] != 0 or max(path) >= len(parents):
        raise ValueError(f"path must start at node 0 and stay below {len(parents)}, got {list(path[:8])}")
    for parent, node in pairwise(path):
        if parents[node] != parent:
            raise ValueError(f"path: node {node} is not a child of node {parent}")
        if tokens[node] != target_ids[parent]:
            raise ValueError(f"path: node {node} is not the target's token after node {parent}")
    if round_.acceptance.bonus_token != target_ids[path[-1]]:
        raise ValueError(f"bonus_token must be the target's token {target_ids[path[-1]]} after node {path[-1]}")
    if not 0 <= round_.acceptance.false_continuations < len(parents):
        raise ValueError(f"false_continuations out of range: {round_.acceptance.false_continuations}")
    full = (*(tokens[node] for node in path[1:]), round_.acceptance.bonus_token)
    if not round_.emitted or round_.emitted != full[: len(round_.emitted)]:
        raise ValueError("emitted must be the path's tokens and the bonus, cut at most at the end")


def _check_verdict(round_: Round, mode: str) -> None:
    verify = "eagle_linear" if mode == "eagle_linear" else "tree_walk"
    expected = replay(round_, verify=verify)
    if round_.acceptance != expected:
        raise ValueError(f"path must be {list(expected.path)} as {verify} has it, got {list(round_.acceptance.path)}")


def _check_place(round_: Round, result: RunResult, position: int, *, last: bool) -> None:
    if not last and len(round_.emitted) != round_.acceptance.acceptance_length:
        raise ValueError("emitted is cut; only the last round's may be")
    expected = len(result.prompt_ids) + position
    if round_.past_length != expected:
        raise ValueError(f"past_length must be {expected}, got {round_.past_length}")
    tokens = [round_.root_token, *round_.emitted]
    if result.output_ids[position : position + len(tokens)] != tokens:
        raise ValueError(f"root and emitted tokens differ from output_ids at {position}")

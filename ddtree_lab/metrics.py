"""Metrics: rounds and runs -> plain JSON values. Pure functions, no model.

Counts of accepted drafts leave out tokens that a stop token or the length cap cut off. A rate over nothing is None (an
empty list for the lists by depth), never 0. Depths and ranks in results count from 1. tau, the mean acceptance length,
is that of DDTree (arXiv 2604.12989): tokens emitted / rounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ddtree_lab.trace.replay import replay
from ddtree_lab.types import Round, RunResult


@dataclass(frozen=True)
class Match:
    """How a run's tokens stand to plain decoding's."""

    kind: str  # "identical", "tie" (the gap is within the tolerance) or "diverged"
    position: int | None = None  # first differing index of output_ids; None when identical
    gap: float | None = None  # plain decoding's top-1 minus top-2 logit there; None when it was not recorded
    tolerance: float | None = None


def summarise_rounds(rounds: Sequence[Round]) -> dict[str, object]:
    """All figures of a list of rounds but calibration.

    Keys: ``tau``, ``rounds``, ``tokens``, ``tokens_per_round`` (entry t counts the rounds that emitted t tokens),
    ``per_depth`` and ``per_depth_conditional`` (entry d - 1 is depth d), ``offered_nodes``, ``accepted_nodes``,
    ``accepted_per_node``, ``first_miss``, ``stage_ms``.
    """
    tokens = sum(len(round_.emitted) for round_ in rounds)
    offered = sum(round_.tree.budget_used for round_ in rounds)
    accepted = sum(round_.num_accepted_kept for round_ in rounds)
    return {
        "tau": tokens / len(rounds) if rounds else None,
        "rounds": len(rounds),
        "tokens": tokens,
        "tokens_per_round": tokens_per_round(rounds),
        "per_depth": per_depth(rounds),
        "per_depth_conditional": per_depth_conditional(rounds),
        "offered_nodes": offered,
        "accepted_nodes": accepted,
        "accepted_per_node": accepted / offered if offered else None,
        "first_miss": first_miss(rounds),
        "stage_ms": stage_milliseconds(rounds),
    }


def summarise_results(results: Sequence[RunResult]) -> dict[str, object]:
    """``summarise_rounds`` of the rounds of all results together, with ``calibration`` and the speed.

    ``decode_seconds`` sums ``result.stats["decode_seconds"]`` (neither prefill nor the recording of traces);
    ``tokens_per_second`` is the tokens of rounds over it, None without rounds or times.
    """
    rounds = [round_ for result in results for round_ in result.rounds]
    summary = summarise_rounds(rounds)
    seconds = [result.stats.get("decode_seconds") for result in results if result.rounds]
    total = sum(seconds) if seconds and None not in seconds else None
    return summary | {
        "decode_seconds": total,
        "tokens_per_second": summary["tokens"] / total if total else None,
        "calibration": calibration(rounds),
    }


def speed_ratio(speed: float | None, plain: float | None) -> float | None:
    """Tokens/s over those of plain decoding; None without either."""
    return speed / plain if speed is not None and plain else None


def tokens_per_round(rounds: Sequence[Round]) -> list[int]:
    """Histogram: entry t is the number of rounds that emitted t tokens."""
    counts = Counter(len(round_.emitted) for round_ in rounds)
    return [counts[tokens] for tokens in range(max(counts, default=-1) + 1)]


def per_depth(rounds: Sequence[Round]) -> list[float]:
    """Entry d - 1: the fraction of all rounds that accepted and kept depth d or more, for d up to the horizon D."""
    return [reached / len(rounds) for reached in _reached(rounds)[1:]]


def per_depth_conditional(rounds: Sequence[Round]) -> list[float | None]:
    """Entry d - 1: of the rounds that accepted depth d - 1, the fraction that accepted depth d; None without any."""
    reached = _reached(rounds)
    return [now / before if before else None for before, now in pairwise(reached)]


def first_miss(rounds: Sequence[Round]) -> dict[str, object] | None:
    """Where the target's token stood in the drafter's distribution when acceptance ended; None without drafts.

    ``ranks`` maps the 1-based position among the recorded top-K at the depth after the path to the number of rounds,
    ``beyond_k`` counts the rounds whose token is not among them. Not misses, and counted apart: ``full_horizon`` (every
    depth accepted) and ``cut`` (a stop token or the cap ended the round before its miss).
    """
    ranks: Counter[int] = Counter()
    apart: Counter[str] = Counter()
    drafted = [round_ for round_ in rounds if round_.draft_token_ids.shape[0] > 0]
    for round_ in drafted:
        depth = round_.acceptance.num_accepted
        if len(round_.emitted) < round_.acceptance.acceptance_length:
            apart["cut"] += 1
        elif depth == round_.draft_token_ids.shape[0]:
            apart["full_horizon"] += 1
        else:
            found = (round_.draft_token_ids[depth] == round_.acceptance.bonus_token).nonzero()
            if found.numel():
                ranks[int(found[0]) + 1] += 1
            else:
                apart["beyond_k"] += 1
    if not drafted:
        return None
    by_rank = {str(rank): ranks[rank] for rank in sorted(ranks)}
    return {"ranks": by_rank} | {name: apart[name] for name in ("beyond_k", "full_horizon", "cut")}


def calibration(rounds: Sequence[Round]) -> list[dict[str, float | int]]:
    """Stated path probability against observed acceptance, by depth and rank of the node.

    Every drafted node of every round is one observation, unconditional like the probability of its path: it was
    observed when the walk over the recorded target tokens passes through it, whatever verification the run used.
    Entries {depth, rank, nodes, stated, observed} with means over the nodes, sorted by depth, then rank.
    """
    stated: dict[tuple[int, int], list[float]] = {}
    accepted: Counter[tuple[int, int]] = Counter()
    for round_ in rounds:
        tree = round_.tree
        keys = list(zip(tree.depths.tolist(), (tree.ranks + 1).tolist(), strict=True))
        for key, log_prob in zip(keys[1:], tree.log_probs.tolist()[1:], strict=True):
            stated.setdefault(key, []).append(math.exp(log_prob))
        accepted.update(keys[node] for node in replay(round_).path[1:])
    return [
        {
            "depth": depth,
            "rank": rank,
            "nodes": len(values),
            "stated": math.fsum(values) / len(values),
            "observed": accepted[depth, rank] / len(values),
        }
        for (depth, rank), values in sorted(stated.items())
    ]


def linear_against_walk(rounds: Sequence[Round]) -> dict[str, int] | None:
    """EAGLE-linear verification replayed on the trees of tree-walk rounds; None when nothing was drafted.

    ``lost_rounds`` counts the rounds where it kept fewer tokens, ``tokens_lost`` those tokens (of the ones the run
    kept), ``false_continuations`` its matches under a wrong parent, ``linear_won`` the rounds where it accepted more:
    always 0, as its path is a prefix of the walk's.
    """
    totals: Counter[str] = Counter()
    drafted = [round_ for round_ in rounds if round_.tree.budget_used > 0]
    for round_ in drafted:
        walk, linear = replay(round_), replay(round_, verify="eagle_linear")
        kept = len(round_.emitted)
        lost = min(walk.acceptance_length, kept) - min(linear.acceptance_length, kept)
        totals["lost_rounds"] += lost > 0
        totals["tokens_lost"] += max(lost, 0)
        totals["false_continuations"] += linear.false_continuations
        totals["linear_won"] += linear.acceptance_length > walk.acceptance_length
    if not drafted:
        return None
    names = ("lost_rounds", "tokens_lost", "false_continuations", "linear_won")
    return {"rounds": len(drafted)} | {name: totals[name] for name in names}


def stage_milliseconds(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """For each stage its median and total over the rounds that have it, in milliseconds."""
    times: dict[str, list[float]] = {}
    for round_ in rounds:
        for stage, seconds in round_.stage_seconds.items():
            times.setdefault(stage, []).append(seconds * 1e3)
    return {stage: {"median": median(values), "total": math.fsum(values)} for stage, values in times.items()}


def compare_tokens(result: RunResult, reference: RunResult, tolerance: float) -> Match | None:
    """A run's tokens against plain decoding's (mode "ar") of the same prompt; None at temperature > 0.

    The gap is the reference's at the first difference. The prefill's token has no recorded gap, nor has the end of the
    shorter of two outputs: without a gap a mismatch counts as diverged. Raises ValueError for different prompts or a
    reference of another mode.
    """
    if reference.mode != "ar":
        raise ValueError(f"reference must be a run of mode 'ar', got {reference.mode!r}")
    if tuple(result.prompt_ids) != tuple(reference.prompt_ids):
        raise ValueError("result and reference must have the same prompt")
    if max(run.meta.get("temperature") or 0.0 for run in (result, reference)) > 0:
        return None
    ours, theirs = result.output_ids, reference.output_ids
    if ours == theirs:
        return Match("identical")
    shorter = min(len(ours), len(theirs))
    position = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    gap = _gap_at(reference, position) if position < shorter else None
    return Match("tie" if gap is not None and gap <= tolerance else "diverged", position, gap, tolerance)


def _gap_at(result: RunResult, position: int) -> float | None:
    """The recorded logit gap of the target at output token ``position``; None for the prefill's."""
    end = 1
    for round_ in result.rounds:
        if end <= position < end + len(round_.emitted):
            return float(round_.target.gaps[round_.acceptance.path[position - end]])
        end += len(round_.emitted)
    return None


def _reached(rounds: Sequence[Round]) -> list[int]:
    """Entry d: rounds that accepted and kept d or more drafted nodes, d from 0 to the horizon."""
    horizon = max((round_.draft_token_ids.shape[0] for round_ in rounds), default=0)
    return [sum(round_.num_accepted_kept >= depth for round_ in rounds) for depth in range(horizon + 1)]

"""Metrics of rounds and runs, and the match of a run with plain decoding."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from samples import make_round, sample_run

from ddtree_lab.metrics import (
    Match,
    calibration,
    compare_tokens,
    first_miss,
    linear_against_walk,
    per_depth,
    per_depth_conditional,
    stage_milliseconds,
    summarise_results,
    summarise_rounds,
    tokens_per_round,
)
from ddtree_lab.types import Acceptance, Round


def chain_round(accepted: int, depth: int = 5, *, kept: int | None = None, first: int = 10) -> Round:
    """A chain of ``depth`` nodes whose first ``accepted`` match; the bonus is 99."""
    tokens = [1, *range(first, first + depth)]
    targets = [*tokens[1 : accepted + 1], *[99] * (depth + 1 - accepted)]
    draft = [[token, token + 20, 99] for token in tokens[1:]]
    return make_round(parents=list(range(-1, depth)), tokens=tokens, targets=targets, draft=draft, kept=kept)


def test_tokens_cut_by_a_stop_token_are_not_counted():
    rounds = [chain_round(3), chain_round(0), chain_round(5, kept=2)]
    summary = summarise_rounds(rounds)
    assert [len(round_.emitted) for round_ in rounds] == [4, 1, 2]
    assert summary["tokens"] == 7 and summary["rounds"] == 3 and summary["tau"] == 7 / 3
    assert summary["tokens_per_round"] == [0, 1, 1, 0, 1]
    assert summary["accepted_nodes"] == 5 and summary["offered_nodes"] == 15 and summary["accepted_per_node"] == 1 / 3


def test_per_depth_is_of_all_rounds_and_of_those_that_got_there():
    rounds = [chain_round(3), chain_round(0), chain_round(5, kept=2), chain_round(1)]
    assert per_depth(rounds) == [3 / 4, 2 / 4, 1 / 4, 0, 0]
    assert per_depth_conditional(rounds) == [3 / 4, 2 / 3, 1 / 2, 0, None]


def test_the_mean_of_depths_is_tau_less_the_bonus_tokens():
    rounds = [round_ for seed in range(3) for round_ in sample_run(tokens=40, seed=seed).rounds]
    cut = sum(len(round_.emitted) <= round_.acceptance.num_accepted for round_ in rounds)
    assert math.isclose(sum(per_depth(rounds)), summarise_rounds(rounds)["tau"] - 1 + cut / len(rounds))


def test_no_rounds_and_no_drafts_have_no_rates():
    empty = summarise_rounds([])
    assert empty["tau"] is None and empty["accepted_per_node"] is None and empty["first_miss"] is None
    assert empty["tokens"] == 0 and empty["rounds"] == 0 and empty["per_depth"] == [] == empty["tokens_per_round"]
    plain = summarise_results([sample_run("ar")])
    assert plain["tau"] == 1.0 and plain["offered_nodes"] == 0
    assert plain["accepted_per_node"] is None and plain["first_miss"] is None
    assert plain["per_depth"] == [] == plain["per_depth_conditional"] and plain["calibration"] == []
    assert linear_against_walk([]) is None and linear_against_walk(sample_run("ar").rounds) is None
    assert summarise_results([])["tokens_per_second"] is None


def test_token_id_0_counts_as_a_draft():
    round_ = make_round(parents=[-1, 0], tokens=[4, 0], targets=[0, 0], draft=[[0, 1]])
    summary = summarise_rounds([round_])
    assert summary["tau"] == 2 and summary["accepted_per_node"] == 1.0 and summary["per_depth"] == [1.0]
    missed = make_round(parents=[-1, 0], tokens=[4, 7], targets=[0, 0], draft=[[7, 0]])
    assert first_miss([missed])["ranks"] == {"2": 1}


def test_first_miss_finds_the_rank_at_the_depth_after_the_path():
    draft = [[10, 11, 12], [20, 21, 22]]

    def missed(first: int, second: int, kept: int | None = None) -> Round:
        tree = {"parents": [-1, 0, 1], "tokens": [1, 10, 20]}
        return make_round(**tree, targets=[first, second, 77], draft=draft, kept=kept)

    rounds = [missed(11, 0), missed(12, 0), missed(99, 0), missed(10, 21), missed(10, 21), missed(10, 10)]
    rounds += [missed(10, 20), missed(10, 20, kept=2), missed(10, 21, kept=1)]
    assert first_miss(rounds) == {"ranks": {"2": 3, "3": 1}, "beyond_k": 2, "full_horizon": 1, "cut": 2}


def test_a_first_miss_of_rank_1_is_a_node_the_tree_had_no_room_for():
    round_ = make_round(parents=[-1], tokens=[1], targets=[10], draft=[[10, 11]])
    assert first_miss([round_])["ranks"] == {"1": 1}


def test_calibration_counts_every_offered_node_against_the_walk():
    half, quarter = math.log(0.5), math.log(0.25)
    shape = {"parents": [-1, 0, 0, 1], "tokens": [1, 10, 11, 20], "log_probs": [0.0, half, quarter, quarter]}
    hit = make_round(**shape, targets=[10, 20, 0, 0])
    sibling = make_round(**shape, targets=[11, 20, 0, 0])
    entries = calibration([hit, sibling, sibling, make_round(**shape, targets=[10, 5, 0, 0])])
    assert [(entry["depth"], entry["rank"], entry["nodes"], entry["observed"]) for entry in entries] == [
        (1, 1, 4, 0.5),
        (1, 2, 4, 0.5),
        (2, 1, 4, 0.25),
    ]
    assert [round(entry["stated"], 6) for entry in entries] == [0.5, 0.25, 0.25]


def test_calibration_of_eagle_linear_rounds_uses_the_walk_too():
    parents, tokens, targets = [-1, 0, 0], [1, 10, 11], [11, 0, 0]
    walked = make_round(parents=parents, tokens=tokens, targets=targets)
    linear = make_round(parents=parents, tokens=tokens, targets=targets, acceptance=Acceptance((0,), 11))
    assert calibration([linear]) == calibration([walked]) and calibration([linear])[1]["observed"] == 1.0


def test_eagle_linear_loses_the_tree_to_a_wrong_first_token():
    lost = make_round(parents=[-1, 0, 0, 2], tokens=[1, 10, 11, 12], targets=[11, 0, 12, 5])
    even = make_round(parents=[-1, 0, 0, 2], tokens=[1, 10, 11, 12], targets=[10, 0, 12, 5])
    counts = linear_against_walk([lost, even])
    assert counts == {"rounds": 2, "lost_rounds": 1, "tokens_lost": 2, "false_continuations": 0, "linear_won": 0}
    kept_one = replace(lost, emitted=lost.emitted[:1])
    assert linear_against_walk([kept_one])["lost_rounds"] == 0
    kept_two = replace(lost, emitted=lost.emitted[:2])
    assert linear_against_walk([kept_two])["tokens_lost"] == 1


def test_a_false_continuation_is_counted_and_not_kept():
    # Depth first: 0, 1, 2. The target's token after node 1 is node 2's, but node 2 is node 1's sibling.
    round_ = make_round(parents=[-1, 0, 0], tokens=[1, 10, 11], targets=[10, 11, 0])
    counts = linear_against_walk([round_])
    assert counts["false_continuations"] == 1 and counts["lost_rounds"] == 0


def test_eagle_linear_never_wins_on_random_trees():
    rounds = [r for seed in range(8) for r in sample_run(tokens=60, seed=seed, boost=seed / 2).rounds]
    counts = linear_against_walk(rounds)
    assert counts["rounds"] > 150 and counts["linear_won"] == 0
    assert counts["lost_rounds"] > 15 and counts["tokens_lost"] >= counts["lost_rounds"]


def test_summary_pools_rounds_over_prompts_and_is_json():
    results = [sample_run(seed=seed, tokens=30) for seed in range(3)]
    summary = summarise_results(results)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    rounds = [round_ for result in results for round_ in result.rounds]
    assert summary["rounds"] == len(rounds) and summary["tokens"] == 3 * 29
    assert summary["decode_seconds"] == 1.5 and summary["tokens_per_second"] == 87 / 1.5
    assert summarise_results([replace(results[0], stats={})])["tokens_per_second"] is None


def test_a_prompt_without_rounds_adds_no_time():
    ended = replace(sample_run(), rounds=[], output_ids=[4], stats={"decode_seconds": 100.0})
    assert summarise_results([ended, sample_run()])["decode_seconds"] == 0.5


def test_stage_times_are_milliseconds():
    rounds = [replace(chain_round(1), stage_seconds={"draft": s, "verify": 2 * s}) for s in (0.001, 0.002, 0.009)]
    rounds.append(chain_round(0))
    times = stage_milliseconds(rounds)
    assert times["draft"]["median"] == pytest.approx(2.0) and times["verify"]["total"] == pytest.approx(24.0)


def test_histogram_has_an_entry_for_every_length():
    assert tokens_per_round([chain_round(2), chain_round(2), chain_round(0)]) == [0, 1, 0, 2]


def test_matches_are_identical_ties_or_diverged():
    reference = sample_run("ar")
    assert compare_tokens(sample_run(), reference, 0.1) == Match("identical")
    gap = float(reference.rounds[6].target.gaps[0])
    output = list(reference.output_ids)
    output[7] += 1
    changed = replace(sample_run(), output_ids=output)
    assert compare_tokens(changed, reference, gap) == Match("tie", 7, gap, gap)
    assert compare_tokens(changed, reference, gap * 0.999) == Match("diverged", 7, gap, gap * 0.999)


def test_a_mismatch_without_a_recorded_gap_has_diverged():
    reference = sample_run("ar")
    first = replace(sample_run(), output_ids=[49, *reference.output_ids[1:]])
    assert compare_tokens(first, reference, math.inf) == Match("diverged", 0, None, math.inf)
    shorter = replace(sample_run(), output_ids=reference.output_ids[:9])
    assert compare_tokens(shorter, reference, math.inf) == Match("diverged", 9, None, math.inf)


def test_sampled_runs_have_no_match_and_wrong_references_are_refused():
    assert compare_tokens(sample_run(temperature=0.7), sample_run("ar", temperature=0.7), 1.0) is None
    with pytest.raises(ValueError, match="reference must be a run of mode 'ar', got 'chain'"):
        compare_tokens(sample_run(), sample_run("chain"), 1.0)
    with pytest.raises(ValueError, match="same prompt"):
        compare_tokens(replace(sample_run(), prompt_ids=(1,)), sample_run("ar"), 1.0)

"""End to end on the embedded model with its shipped drafter: all modes, a comparison's files, first tokens."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from ddtree_lab.compare import Setting, format_table, run_comparison, summarise, write_outputs
from ddtree_lab.data_files import data_path
from ddtree_lab.decode import generate
from ddtree_lab.metrics import compare_tokens
from ddtree_lab.prompts import read_prompts, to_input_ids
from ddtree_lab.target.protocol import TargetOutput
from ddtree_lab.trace import load_trace, replay

BUDGET = 16
TOKENS = 32
AR, WALK, LINEAR = Setting("ar", None), Setting("tree_walk", BUDGET), Setting("eagle_linear", BUDGET)
REJECT = 1e-4  # a sound sampler fails a seeded test with this probability; a broken one has far less


@pytest.fixture(scope="module")
def prompts():
    by_category = {prompt.category: prompt for prompt in read_prompts(data_path("prompts.jsonl"))}
    return list(by_category.values())[:3]


@pytest.fixture(scope="module")
def comparison(embedded_target, embedded_drafter, prompts):
    return run_comparison(
        embedded_target, embedded_drafter, prompts, budgets=(BUDGET,), max_new_tokens=TOKENS, progress=False
    )


@pytest.fixture(scope="module")
def summary(comparison):
    return summarise(comparison)


def chain_setting(drafter):
    return Setting("chain", drafter.horizon)


def test_plain_decoding_equals_transformers(comparison, embedded_target):
    result = comparison.results[AR][0]
    prompt = torch.tensor([result.prompt_ids])
    output = embedded_target.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=TOKENS
    )
    assert result.output_ids == output[0, prompt.shape[1] :].tolist()
    stopped = result.output_ids[-1] in embedded_target.stop_token_ids
    assert result.stop_reason == ("stop" if stopped else "length")


def test_every_mode_equals_plain_decoding(comparison, summary):
    assert len(comparison.results) == 4
    for setting, results in comparison.results.items():
        for prompt, result, plain in zip(comparison.prompts, results, comparison.results[AR], strict=True):
            match = compare_tokens(result, plain, comparison.tolerance)
            assert match.kind in ("identical", "tie"), (setting, prompt.id, match)
            if match.kind == "tie":
                warnings.warn(f"{setting.mode} on {prompt.id}: {match}", stacklevel=1)
    assert comparison.tolerance < 1e-3
    for entry in summary["modes"].values():
        assert entry["identical_to_ar"] + entry["ties"] == 3 and entry["diverged"] == 0


def test_a_tree_accepts_more_than_a_chain_and_a_chain_more_than_nothing(summary):
    tau = {mode: entry["tau"] for mode, entry in summary["modes"].items()}
    assert tau["ar"] == 1
    assert 1.5 < tau["chain"] <= tau["tree_walk"]
    assert tau["eagle_linear"] <= tau["tree_walk"]


def test_linear_verification_of_the_same_trees_never_wins(comparison, summary):
    rounds = [round_ for result in comparison.results[WALK] for round_ in result.rounds]
    for round_ in rounds:
        walked, linear = replay(round_), replay(round_, verify="eagle_linear")
        assert walked == round_.acceptance
        assert linear.path == walked.path[: len(linear.path)]
    counts = summary["linear_against_walk"][str(BUDGET)]
    assert counts["rounds"] == len(rounds)
    assert counts["linear_won"] == 0
    lost = [replay(r).num_accepted > replay(r, verify="eagle_linear").num_accepted for r in rounds]
    assert counts["lost_rounds"] <= sum(lost) and counts["tokens_lost"] >= counts["lost_rounds"] > 0


def test_every_round_can_be_read_in_a_trace(comparison, embedded_drafter):
    for setting in (WALK, LINEAR, chain_setting(embedded_drafter)):
        for result in comparison.results[setting]:
            assert result.output_ids[1:] == [token for round_ in result.rounds for token in round_.emitted]
            for round_ in result.rounds:
                assert round_.tree.budget_used == setting.budget
                assert round_.draft_token_ids.shape == (embedded_drafter.horizon, 32)
                assert (round_.target.node_ranks[list(round_.acceptance.path)] == 0).all()
                assert (round_.target.log_probs <= 0).all() and (round_.target.gaps >= 0).all()


def test_a_comparison_is_written_whole(comparison, summary, embedded_target, tmp_path):
    write_outputs(
        comparison, summary, tmp_path / "out", decode_token=lambda token: embedded_target.tokenizer.decode(token)
    )
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == json.loads(json.dumps(summary))
    traces = sorted((tmp_path / "out" / "traces").iterdir())
    assert len(traces) == 4 * 3
    for path, result in zip(traces, written_order(comparison), strict=True):
        loaded = load_trace(path)
        assert (loaded.mode, loaded.output_ids) == (result.mode, result.output_ids)
        assert [r.tree for r in loaded.rounds] == [r.tree for r in result.rounds]
        assert [r.acceptance for r in loaded.rounds] == [r.acceptance for r in result.rounds]
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert "tree_walk" in page and 'src="http' not in page
    assert "tree_walk" in format_table(summary)


def written_order(comparison):
    """All results in the order of the names of their files."""
    settings = sorted(comparison.results, key=lambda setting: setting.mode)
    return [result for setting in settings for result in comparison.results[setting]]


class OnePrompt:
    """The target with its answer to one prompt remembered."""

    def __init__(self, inner, prompt):
        self.inner = inner
        self.logits = inner.prefill(inner.new_state(), prompt).logits

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def prefill(self, state, input_ids):
        return TargetOutput(self.logits, self.logits.new_empty(len(input_ids), 0))


def first_tokens(target, prompt, trials, **sampling):
    return [
        generate(target, None, prompt, mode="ar", max_new_tokens=1, seed=seed, **sampling).output_ids[0]
        for seed in range(trials)
    ]


def transformers_distribution(target, prompt, *, temperature, top_p):
    """Probabilities [V] float64 of the next token as transformers' own sampling shapes them."""
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper

    with torch.no_grad():
        logits = target.model(prompt).logits[:, -1].double()
    for shape in (TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)):
        logits = shape(prompt, logits)
    return logits[0].softmax(-1).numpy()


def p_value(tokens, probs):
    """Of chi-square, tokens expected less than 5 times taken together; 0 when an impossible one was seen."""
    counts = np.bincount(tokens, minlength=len(probs)).astype(float)
    if counts[probs == 0].any():
        return 0.0
    expected = len(tokens) * probs
    rare = expected < 5
    pooled = [np.append(values[~rare], values[rare].sum()) for values in (counts, expected)]
    kept = pooled[1] > 0
    return float(chisquare(pooled[0][kept], pooled[1][kept]).pvalue)


def test_the_first_token_is_drawn_from_the_models_distribution(embedded_target):
    prompt = to_input_ids("Say a random word.", embedded_target)
    sampling = {"temperature": 0.8, "top_p": 0.9}
    probs = transformers_distribution(embedded_target, prompt, **sampling)
    assert (probs > 0).sum() > 8 and math.isclose(probs.sum(), 1)
    tokens = first_tokens(OnePrompt(embedded_target, prompt[0]), prompt, 2000, **sampling)
    assert p_value(tokens, probs) > REJECT
    for wrong in ({"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.8, "top_p": 0.6}):
        assert p_value(tokens, transformers_distribution(embedded_target, prompt, **wrong)) < REJECT

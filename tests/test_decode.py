"""The decoding loop: every mode against plain decoding and transformers, stops and ends, traces, and draws at T > 0."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from test_dflash import config_fields, random_drafter_model
from test_sampling import naive_filter
from transformers import GPT2Config, LlamaConfig

from ddtree_lab import decode, types
from ddtree_lab.accept import SamplingParams, walk
from ddtree_lab.accept.sampling import draw_tokens
from ddtree_lab.decode import RECORDED_RANKS, generate
from ddtree_lab.draft.dflash import DFlashDrafter
from ddtree_lab.draft.ngram import NGramDrafter
from ddtree_lab.draft.replay import ReplayDrafter
from ddtree_lab.draft.toy import ToyDrafter
from ddtree_lab.metrics import linear_against_walk, summarise_rounds
from ddtree_lab.target.dense import DenseTarget
from ddtree_lab.target.load import load_target
from ddtree_lab.target.protocol import TargetOutput
from ddtree_lab.target.random import random_model
from ddtree_lab.trace import load_trace, replay, save_trace
from ddtree_lab.tree import build_best_first, build_chain
from ddtree_lab.tree.ranking import rank_rows
from ddtree_lab.tree.validate import MAX_BUDGET
from ddtree_lab.types import DraftTree

DRAFTED_MODES = ("chain", "eagle_linear", "tree_walk")
MODES = ("ar", *DRAFTED_MODES)
BUDGETS = (0, 1, 4, 15, 64)
REJECT = 1e-4  # a sound sampler fails a seeded test with this probability; a broken one has far less
FIELDS = ("token_ids", "log_probs", "gaps", "node_log_probs", "node_ranks")


def small_config(**changes):
    """A Llama of 8 tokens, so that drafts hit by chance and distributions can be enumerated."""
    fields = {
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return LlamaConfig(**fields | changes)


def letters_target():
    return DenseTarget(random_model(small_config(), seed=3), name="letters")


@pytest.fixture(scope="module")
def letters():
    return letters_target()


@pytest.fixture(scope="module", params=["random:tiny-dense", "random:tiny-qwen3", "random:tiny-sliding", "letters"])
def target(request):
    name = request.param
    return letters_target() if name == "letters" else load_target(name, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def sliding():
    return load_target("random:tiny-sliding", device="cpu", dtype="float32")


def prompt_of(target, length, seed=0):
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(target.vocab_size, (1, length), generator=generator)


def greedy(target, prompt, tokens):
    """The new tokens of transformers' own greedy generation."""
    output = target.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=tokens,
        pad_token_id=0,
    )
    return output[0, prompt.shape[1] :].tolist()


class SharpReplay(ReplayDrafter):
    """Each rank is much less probable than the one before: 64 nodes hold every path of one rank 1 or 2."""

    def draft(self, state, root_token):
        return 3 * super().draft(state, root_token)


def make_drafter(kind, target, continuation, block_size=8):
    vocab = target.vocab_size
    if kind == "toy":
        return ToyDrafter(vocab, block_size, seed=1)
    if kind == "ngram":
        return NGramDrafter(vocab, block_size)
    if kind == "replay":
        return SharpReplay(continuation, vocab, block_size=block_size, ranks=lambda index, depth: index % 3 % 2)
    fields = config_fields(vocab_size=vocab, block_size=block_size, dflash={"mask_token_id": vocab - 1})
    return DFlashDrafter(random_drafter_model(fields), target)


class Proxy:
    """Stands in for a target or a drafter and hands on what it does not change."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Listening(Proxy):
    """A drafter that keeps the logits it gave out."""

    def __init__(self, inner):
        super().__init__(inner)
        self.logits = []

    def draft(self, state, root_token):
        self.logits.append(self.inner.draft(state, root_token))
        return self.logits[-1]


@pytest.fixture
def forward_sizes():
    """``forward_sizes(target)``: a list that grows by the number of tokens of every forward of the model."""
    handles = []

    def listen(target):
        sizes = []
        hook = lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1])  # noqa: E731
        handles.append(target.model.register_forward_pre_hook(hook, with_kwargs=True))
        return sizes

    yield listen
    for handle in handles:
        handle.remove()


def assert_same_rounds(ours, theirs):
    """Every number of the rounds but the times, bit by bit."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.past_length, a.tree, a.acceptance, a.emitted) == (b.past_length, b.tree, b.acceptance, b.emitted)
        assert torch.equal(a.draft_token_ids, b.draft_token_ids)
        assert torch.equal(a.draft_log_probs, b.draft_log_probs)
        for name in FIELDS:
            assert torch.equal(getattr(a.target, name), getattr(b.target, name)), name


# Temperature 0: the tokens of plain decoding


@pytest.mark.parametrize("kind", ["toy", "ngram", "dflash", "replay"])
def test_every_mode_equals_plain_decoding_and_transformers(target, kind):
    for seed, budget in enumerate(BUDGETS):
        prompt = prompt_of(target, 5 + 3 * seed, seed)
        expected = greedy(target, prompt, 15)
        plain = generate(target, None, prompt, mode="ar", max_new_tokens=15)
        assert plain.output_ids == expected
        assert [round_.emitted for round_ in plain.rounds] == [(token,) for token in expected[1:]]
        drafter = make_drafter(kind, target, expected)
        for mode in DRAFTED_MODES:
            result = generate(target, drafter, prompt, mode=mode, budget=budget, max_new_tokens=15)
            assert result.output_ids == expected, (mode, budget)
            assert result.stop_reason == "length"
            offered = min(budget, 7) if mode == "chain" else budget
            assert all(round_.tree.budget_used == offered for round_ in result.rounds)


@pytest.mark.parametrize("kind", ["toy", "ngram", "dflash", "replay"])
@pytest.mark.parametrize(("block_size", "everything"), [(1, 0), (2, 8), (3, 72), (4, 584)])
def test_a_budget_beyond_every_path_takes_them_all(letters, kind, block_size, everything):
    prompt = prompt_of(letters, 6)
    expected = greedy(letters, prompt, 16)
    drafter = make_drafter(kind, letters, expected, block_size)
    for mode in DRAFTED_MODES:
        result = generate(letters, drafter, prompt, mode=mode, budget=MAX_BUDGET, max_new_tokens=16)
        assert result.output_ids == expected
        nodes = block_size - 1 if mode == "chain" else everything
        assert {round_.tree.budget_used for round_ in result.rounds} == {nodes}
        if mode == "tree_walk":  # nothing can be missed
            assert all(round_.acceptance.num_accepted == block_size - 1 for round_ in result.rounds)


@pytest.mark.parametrize(("depth", "rank"), [(1, 2), (2, 1), (3, 2), (4, 1), (5, 2), (6, 1), (7, 2)])
def test_a_sibling_at_any_depth_is_accepted_by_the_walk_alone(target, depth, rank):
    prompt = prompt_of(target, 4 + depth, rank)
    expected = greedy(target, prompt, 33)
    ranks = [0] * 7
    ranks[depth - 1] = rank
    drafter = SharpReplay(expected, target.vocab_size, ranks=ranks)
    accepted = {}
    for mode in DRAFTED_MODES:
        result = generate(target, drafter, prompt, mode=mode, budget=64, max_new_tokens=33)
        assert result.output_ids == expected, mode
        accepted[mode] = [round_.acceptance.num_accepted for round_ in result.rounds]
        for round_ in result.rounds[:-1]:
            path_ranks = round_.tree.ranks[list(round_.acceptance.path[1:])].tolist()
            assert path_ranks == ranks[: len(path_ranks)]
    assert accepted["tree_walk"] == [7, 7, 7, 7]
    for mode in ("chain", "eagle_linear"):
        whole_blocks = accepted[mode][: (32 - 7) // depth]  # the continuation reaches beyond their block
        assert whole_blocks == [depth - 1] * len(whole_blocks)


def test_accepted_is_the_longest_part_of_the_continuation_in_the_tree(target):
    lengths, sibling_depths = Counter(), Counter()
    for seed in range(6):
        prompt = prompt_of(target, 6 + seed, seed)
        expected = greedy(target, prompt, 40)
        pattern = np.random.default_rng(seed).choice([0, 1, 7], size=60, p=[0.7, 0.22, 0.08]).tolist()
        drafter = SharpReplay(
            expected, target.vocab_size, ranks=lambda index, depth, pattern=pattern: pattern[index + depth]
        )
        result = generate(target, drafter, prompt, mode="tree_walk", budget=64, max_new_tokens=40)
        assert result.output_ids == expected
        done = 1
        for round_ in result.rounds:
            in_tree = dict(zip(zip(*tree_edges(round_.tree), strict=True), range(1, len(round_.tree)), strict=True))
            path = [0]
            for token in expected[done:]:
                if (path[-1], token) not in in_tree:
                    break
                path.append(in_tree[path[-1], token])
            if done + len(path) < len(expected):  # what comes after the end of the continuation is not known here
                assert round_.acceptance.path == tuple(path)
                lengths[len(path) - 1] += 1
                sibling_depths.update(int(round_.tree.depths[node]) for node in path[1:] if round_.tree.ranks[node])
            done += len(round_.emitted)
    assert set(range(8)) <= set(lengths)
    assert set(range(1, 8)) <= set(sibling_depths)


def tree_edges(tree):
    return tree.parents[1:].tolist(), tree.token_ids[1:].tolist()


@pytest.mark.parametrize("length", range(5, 12))
def test_prompts_around_the_sliding_window(sliding, length):
    for seed, ranks in enumerate(([0, 1, 0, 0, 2, 0, 0], [2, 0, 0, 0, 0, 0, 0])):
        prompt = prompt_of(sliding, length, seed)
        expected = greedy(sliding, prompt, 25)
        drafter = SharpReplay(expected, sliding.vocab_size, ranks=ranks)
        for mode in DRAFTED_MODES:
            result = generate(sliding, drafter, prompt, mode=mode, budget=30, max_new_tokens=25)
            assert result.output_ids == expected, (mode, ranks)
    slow = SharpReplay(expected, sliding.vocab_size, block_size=3, ranks=[1, 0])
    result = generate(sliding, slow, prompt, mode="tree_walk", budget=6, max_new_tokens=40)
    assert result.output_ids == greedy(sliding, prompt, 40)
    assert len(result.rounds) > 10
    _, first, second = result.rounds[0].acceptance.path
    assert 1 < first < second - 1  # both move on commit


def test_the_target_is_read_at_every_node_as_a_plain_forward_reads_its_path(target):
    prompt = prompt_of(target, 7)
    expected = greedy(target, prompt, 24)
    drafter = SharpReplay(expected, target.vocab_size, ranks=[0, 1, 0, 0, 1, 0, 0])
    result = generate(target, drafter, prompt, mode="tree_walk", budget=12, max_new_tokens=24)
    assert max(round_.acceptance.num_accepted for round_ in result.rounds) > 2
    context = [*result.prompt_ids, result.output_ids[0]]
    for round_ in result.rounds:
        paths = node_paths(round_.tree)
        for node in range(len(round_.tree)):
            with torch.no_grad():
                row = target.model(torch.tensor([context + paths[node]])).logits[0, -1]
            best = row.topk(2).values
            assert round_.target.token_ids[node] == row.argmax()
            assert float(round_.target.gaps[node]) == pytest.approx(float(best[0] - best[1]), abs=1e-4)
        context += round_.emitted


def node_paths(tree):
    """The tokens from below the root to each node."""
    paths = [[]]
    for parent, token in zip(*tree_edges(tree), strict=True):
        paths.append([*paths[parent], token])
    return paths


def test_false_continuations_are_met_and_cut(letters):
    met = 0
    for seed in range(4):
        prompt = prompt_of(letters, 5, seed)
        expected = greedy(letters, prompt, 40)
        drafter = SharpReplay(expected, letters.vocab_size, block_size=2)
        result = generate(letters, drafter, prompt, mode="eagle_linear", budget=8, max_new_tokens=40)
        assert result.output_ids == expected
        met += sum(round_.acceptance.false_continuations for round_ in result.rounds)
    assert met > 0


def test_linear_verification_never_beats_the_walk(target):
    prompt = prompt_of(target, 9)
    expected = greedy(target, prompt, 40)
    rounds = []
    for kind in ("toy", "ngram", "replay"):
        drafter = make_drafter(kind, target, expected)
        rounds += generate(target, drafter, prompt, mode="tree_walk", budget=30, max_new_tokens=40).rounds
    counts = linear_against_walk(rounds)
    assert counts["linear_won"] == 0
    assert counts["lost_rounds"] > 0 and counts["tokens_lost"] >= counts["lost_rounds"]


# What a round leaves behind


class Poisoning(Proxy):
    """A target that fills every cache row from ``first_row`` behind the committed ones on with NaN."""

    def __init__(self, inner, *, first_row=0):
        super().__init__(inner)
        self.first_row = first_row

    def prefill(self, state, input_ids):
        output = self.inner.prefill(state, input_ids)
        self._poison(state)
        return output

    def commit(self, state, path):
        self.inner.commit(state, path)
        self._poison(state)

    def _poison(self, state):
        for rows in (*state.cache.keys, *state.cache.values):
            assert rows.shape[2] > state.length
            rows[:, :, state.length + self.first_row :] = math.nan


@pytest.mark.parametrize("mode", MODES)
def test_rejected_rows_are_never_read(target, mode):
    prompt = prompt_of(target, 7)
    expected = greedy(target, prompt, 40)
    drafter = SharpReplay(expected, target.vocab_size, ranks=lambda index, depth: index % 5 % 3)
    arguments = {"mode": mode, "budget": 30, "max_new_tokens": 40}
    clean = generate(target, drafter, prompt, **arguments)
    poisoned = generate(Poisoning(target), drafter, prompt, **arguments)
    assert poisoned.output_ids == clean.output_ids == expected
    assert_same_rounds(poisoned.rounds, clean.rounds)
    with pytest.raises(ValueError, match="row 0 is no distribution"):  # and a committed row is
        generate(Poisoning(target, first_row=-1), drafter, prompt, **arguments)


def test_rows_of_a_rejected_draft_are_never_read_by_the_drafter(tiny_target):
    class PoisoningDrafter(Proxy):
        def observe(self, state, token_ids, hidden):
            self.inner.observe(state, token_ids, hidden)
            with torch.inference_mode():
                for rows in (*state.keys, *state.values):
                    rows[:, :, state.length :] = math.nan

    prompt, drafter = prompt_of(tiny_target, 9), make_drafter("dflash", tiny_target, [])
    clean, poisoned = (
        generate(tiny_target, each, prompt, mode="tree_walk", budget=15, max_new_tokens=20)
        for each in (drafter, PoisoningDrafter(drafter))
    )
    assert_same_rounds(poisoned.rounds, clean.rounds)


def rounds_by_hand(target, drafter, prompt, budget):
    """Greedy tree-walk decoding from the parts; yields the tokens of the prefill and of each round, without end."""
    state, draft_state = target.new_state(drafter.target_layer_ids), drafter.new_state()
    output = target.prefill(state, prompt[0])
    drafter.observe(draft_state, prompt[0], output.hidden)
    tokens = [int(output.logits[-1].argmax())]
    while True:
        yield tokens
        tree = build_best_first(drafter.draft(draft_state, tokens[-1]), budget, root_token=tokens[-1])
        output = target.verify(state, tree)
        acceptance = walk(tree, output.logits.argmax(-1))
        path = list(acceptance.path)
        target.commit(state, path)
        drafter.observe(draft_state, tree.token_ids[path], output.hidden[path])
        tokens = [*tree.token_ids[path[1:]].tolist(), acceptance.bonus_token]


@pytest.mark.parametrize("kind", ["dflash", "ngram", "replay"])
def test_interleaved_requests_equal_solo_runs(target, kind):
    prompts = [prompt_of(target, length, seed) for seed, length in enumerate((5, 9, 17))]
    prompts[1][:, :5] = prompts[0]  # a shared beginning
    solo, requests = [], []
    for prompt, budget in zip(prompts, (3, 7, 12), strict=True):
        drafter = make_drafter(kind, target, greedy(target, prompt, 16 + 8))
        solo.append(generate(target, drafter, prompt, mode="tree_walk", budget=budget, max_new_tokens=16).output_ids)
        requests.append(rounds_by_hand(target, drafter, prompt, budget))
    outputs = [[], [], []]
    order = torch.Generator().manual_seed(0)
    while min(map(len, outputs)) < 16:
        for index in torch.randperm(3, generator=order).tolist():
            outputs[index] += next(requests[index])
    assert [output[:16] for output in outputs] == solo


def test_a_second_prompt_sharing_half_of_the_first_runs_as_from_cold(target):
    first, second = prompt_of(target, 24, 1), prompt_of(target, 24, 2)
    second[:, :12] = first[:, :12]
    drafter = make_drafter("dflash", target, [])
    arguments = {"mode": "tree_walk", "budget": 15, "max_new_tokens": 16}
    generate(target, drafter, first, **arguments)
    warm = generate(target, drafter, second, **arguments)
    cold = generate(target, make_drafter("dflash", target, []), second, **arguments)
    assert warm.output_ids == cold.output_ids
    assert_same_rounds(warm.rounds, cold.rounds)


@pytest.mark.parametrize("kind", ["toy", "ngram", "dflash"])
def test_every_round_drafts_as_a_cold_start_on_the_committed_tokens(letters, kind):
    inner = make_drafter(kind, letters, [], block_size=4)
    drafter = Listening(inner)
    result = generate(letters, drafter, prompt_of(letters, 6), mode="tree_walk", budget=40, max_new_tokens=40)
    assert any(path != tuple(range(len(path))) for path in (round_.acceptance.path for round_ in result.rounds))
    tokens = [*result.prompt_ids, *result.output_ids]
    for round_, logits in zip(result.rounds, drafter.logits, strict=True):
        committed = torch.tensor(tokens[: round_.past_length])
        state = inner.new_state()
        hidden = letters.prefill(letters.new_state(inner.target_layer_ids), committed).hidden
        inner.observe(state, committed, hidden)
        torch.testing.assert_close(logits, inner.draft(state, round_.root_token), rtol=1e-3, atol=1e-3)


# Trees and traces


def test_the_budget_does_not_change_what_is_drafted(tiny_target):
    prompt, drafts = prompt_of(tiny_target, 20), []
    for budget in (4, 15, 16, 64):
        drafter = Listening(make_drafter("dflash", tiny_target, [], block_size=16))
        result = generate(tiny_target, drafter, prompt, mode="tree_walk", budget=budget, max_new_tokens=3)
        assert result.rounds[0].tree.budget_used == budget
        drafts.append((drafter.logits[0], result.rounds[0].draft_token_ids, result.rounds[0].draft_log_probs))
    assert drafts[0][0].shape == (15, 256)
    for draft in drafts[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(draft, drafts[0], strict=True))


@pytest.mark.parametrize("kind", ["toy", "ngram", "dflash", "replay"])
@pytest.mark.parametrize("budget", [0, 3, 7, 33, 80])
def test_trees_are_those_of_the_builders(tiny_target, kind, budget):
    prompt = prompt_of(tiny_target, 8)
    for mode in DRAFTED_MODES:
        drafter = Listening(make_drafter(kind, tiny_target, greedy(tiny_target, prompt, 12)))
        result = generate(tiny_target, drafter, prompt, mode=mode, budget=budget, max_new_tokens=12)
        build = build_chain if mode == "chain" else build_best_first
        root, past = result.output_ids[0], prompt.shape[1]
        for round_, logits in zip(result.rounds, drafter.logits, strict=True):
            assert round_.tree == build(logits, budget, root_token=root)
            ids, log_probs = rank_rows(logits, RECORDED_RANKS)
            assert torch.equal(round_.draft_token_ids, ids) and torch.equal(round_.draft_log_probs, log_probs)
            assert round_.past_length == past
            root, past = round_.emitted[-1], past + len(round_.emitted)


def test_a_drafter_wider_than_the_vocabulary_drafts_within_it(letters):
    class Wide(ToyDrafter):
        def draft(self, state, root_token):
            logits = torch.full((self.horizon, 12), 50.0)
            logits[:, :8] = super().draft(state, root_token)
            return logits

    prompt = prompt_of(letters, 5)
    wide = generate(letters, Wide(8), prompt, mode="tree_walk", budget=20, max_new_tokens=20)
    plain = generate(letters, ToyDrafter(8), prompt, mode="tree_walk", budget=20, max_new_tokens=20)
    assert wide.output_ids == greedy(letters, prompt, 20)
    assert [round_.tree.token_ids.tolist() for round_ in wide.rounds] == [
        round_.tree.token_ids.tolist() for round_ in plain.rounds
    ]


def test_plain_decoding_drafts_nothing_and_needs_no_drafter(tiny_target):
    prompt = prompt_of(tiny_target, 5)
    drafter = Listening(ToyDrafter(256))
    with_drafter = generate(tiny_target, drafter, prompt, mode="ar", max_new_tokens=6)
    without = generate(tiny_target, None, prompt, mode="ar", max_new_tokens=6)
    assert drafter.logits == []
    assert with_drafter.output_ids == without.output_ids
    assert all(len(round_.tree) == 1 and round_.draft_token_ids.shape[0] == 0 for round_ in with_drafter.rounds)
    assert with_drafter.meta["label"] is None


SAMPLED = {"temperature": 0.8, "top_k": 5, "top_p": 0.9}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_recorded_rounds_replay_to_the_same_acceptance(letters, mode, sampling):
    prompt = prompt_of(letters, 6)
    drafter = make_drafter("ngram", letters, [])
    result = generate(letters, drafter, prompt, mode=mode, budget=20, max_new_tokens=40, **sampling)
    assert mode == "ar" or any(round_.acceptance.num_accepted for round_ in result.rounds)
    for round_ in result.rounds:
        verify = "eagle_linear" if mode == "eagle_linear" else "tree_walk"
        assert replay(round_, verify=verify) == round_.acceptance
        kept = (*round_.tree.token_ids[list(round_.acceptance.path[1:])].tolist(), round_.acceptance.bonus_token)
        assert round_.emitted == kept[: len(round_.emitted)]


@pytest.mark.parametrize("suffix", [".safetensors", ".jsonl"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_saved_and_loaded_is_the_same(letters, tmp_path, mode, sampling, suffix):
    drafter = make_drafter("ngram", letters, [])
    result = generate(letters, drafter, prompt_of(letters, 6), mode=mode, budget=20, max_new_tokens=30, **sampling)
    path = tmp_path / f"run{suffix}"
    save_trace(result, path)
    loaded = load_trace(path)
    for name in ("mode", "prompt_ids", "output_ids", "stop_reason", "stats", "meta"):
        assert getattr(loaded, name) == getattr(result, name), name
    assert_same_rounds(loaded.rounds, result.rounds)
    for ours, theirs in zip(loaded.rounds, result.rounds, strict=True):
        assert ours.stage_seconds == theirs.stage_seconds


def test_numbers_of_numpy_and_torch_are_saved_as_plain_ones(letters, tmp_path):
    arguments = {
        "budget": np.int64(5),
        "max_new_tokens": np.int32(6),
        "temperature": np.float32(0.5),
        "top_k": np.int16(4),
        "top_p": np.float32(0.75),
        "seed": torch.tensor(3),
        "stop_token_ids": torch.tensor([7]),
    }
    result = generate(letters, ToyDrafter(8), np.array([1, 2, 3], dtype=np.int32), mode="tree_walk", **arguments)
    save_trace(result, tmp_path / "run.jsonl")
    meta = load_trace(tmp_path / "run.jsonl").meta
    expected = {"budget": 5, "temperature": 0.5, "top_k": 4, "top_p": 0.75, "seed": 3, "dtype": "float32"}
    assert {name: meta[name] for name in expected} == expected


# Figures


@pytest.mark.parametrize("mode", MODES)
def test_the_figures_agree_with_the_rounds(tiny_target, forward_sizes, mode):
    prompt = prompt_of(tiny_target, 9)
    drafter = make_drafter("replay", tiny_target, greedy(tiny_target, prompt, 30))
    sizes = forward_sizes(tiny_target)
    result = generate(tiny_target, drafter, prompt, mode=mode, budget=20, max_new_tokens=30)
    rounds, stats = result.rounds, result.stats
    assert sizes == [9] + [len(round_.tree) for round_ in rounds]  # one forward a round, and one for the prompt
    emitted = [token for round_ in rounds for token in round_.emitted]
    assert result.output_ids[1:] == emitted
    assert {**stats, **summarise_rounds(rounds)} == stats
    assert (stats["rounds"], stats["tokens"]) == (len(rounds), len(emitted))
    assert stats["tau"] == pytest.approx(len(emitted) / len(rounds))
    stages = {"draft", "tree_build", "verify", "accept", "commit", "record"}
    for round_ in rounds:
        assert set(round_.stage_seconds) == stages
        assert all(seconds > 0 for seconds in round_.stage_seconds.values())
    assert set(stats["stage_ms"]) == stages
    seconds = sum(sum(round_.stage_seconds.values()) - round_.stage_seconds["record"] for round_ in rounds)
    assert stats["decode_seconds"] == pytest.approx(seconds)
    assert stats["prefill_seconds"] > 0
    assert stats["tokens_per_second"] == pytest.approx(len(emitted) / seconds)


def test_a_run_says_what_made_it(tiny_target):
    result = generate(tiny_target, ToyDrafter(256), [5, 6], mode="tree_walk", budget=3, max_new_tokens=2, seed=9)
    assert result.meta == {
        "target": "random:tiny-dense",
        "drafter": "toy",
        "label": "toy",
        "budget": 3,
        "temperature": 0.0,
        "top_k": None,
        "top_p": None,
        "seed": 9,
        "dtype": "float32",
    }
    assert (result.mode, result.prompt_ids) == ("tree_walk", (5, 6))


# Stop tokens, caps and the end of the context


@dataclass
class ScriptState:
    length: int = 0
    prompt_length: int = 0


class ScriptedTarget:
    """Says ``script`` after any prompt, whatever the tree holds."""

    name, config, tokenizer = "script", SimpleNamespace(), None
    device, dtype = torch.device("cpu"), torch.float32
    vocab_size, hidden_size, num_layers, context_length = 12, 1, 1, 64
    stop_token_ids = ()

    def __init__(self, script):
        self.script = script
        self.forwards = 0

    def new_state(self, layer_ids=()):
        return ScriptState()

    def prefill(self, state, input_ids):
        state.length = state.prompt_length = len(input_ids)
        return self._say([0])

    def verify(self, state, tree):
        return self._say((tree.depths + state.length + 1 - state.prompt_length).tolist())

    def commit(self, state, path):
        state.length += len(path)

    def _say(self, places):
        self.forwards += 1
        said = [self.script[place] if place < len(self.script) else 0 for place in places]
        logits = torch.nn.functional.one_hot(torch.tensor(said), self.vocab_size).float()
        return TargetOutput(logits, torch.empty(len(places), 0))


STOP = 6
COMMITTED = (7, 8, STOP, 9, 4)


def run_script(script, *, mode="tree_walk", block_size=5, **arguments):
    target = ScriptedTarget(script)
    drafter = ReplayDrafter(script, target.vocab_size, block_size=block_size)
    return generate(target, drafter, [1, 2], mode=mode, budget=8, **arguments), target.forwards


@pytest.mark.parametrize("stop", [STOP, [STOP], (STOP, 11), {STOP}, torch.tensor([STOP])], ids=repr)
@pytest.mark.parametrize(
    ("room", "output", "reason"),
    [
        (5, (7, 8, STOP), "stop"),
        (4, (7, 8, STOP), "stop"),
        (3, (7, 8, STOP), "stop"),
        (2, (7, 8), "length"),
        (1, (7,), "length"),
    ],
)
def test_a_round_is_cut_at_the_stop_token_or_the_cap(room, output, reason, stop):
    result, forwards = run_script([3, *COMMITTED, 5], max_new_tokens=1 + room, stop_token_ids=stop)
    assert (result.output_ids, result.stop_reason, forwards) == ([3, *output], reason, 2)
    (round_,) = result.rounds
    assert round_.acceptance.num_accepted == 4 and round_.acceptance.bonus_token == 4
    assert round_.emitted == output
    assert result.stats["tokens"] == len(output)


def test_without_the_stop_token_the_round_goes_on():
    for stop in (None, [], 11, [11, 10]):
        result, _ = run_script([3, *COMMITTED, 5], max_new_tokens=7, stop_token_ids=stop)
        assert (result.output_ids, result.stop_reason) == ([3, *COMMITTED, 5], "length")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "place", range(9), ids=lambda place: {0: "prefill", 1: "first", 4: "leaf", 5: "bonus"}.get(place)
)
def test_nothing_follows_a_stop_token_wherever_it_stands(mode, place):
    script = [3, 7, 8, 5, 9, 4, 10, 2, 1, 3]
    script[place] = STOP
    for stop in (STOP, [11, STOP]):
        result, forwards = run_script(script, mode=mode, max_new_tokens=30, stop_token_ids=stop)
        assert (result.output_ids, result.stop_reason) == (script[: place + 1], "stop")
        assert forwards == len(result.rounds) + 1
        if mode == "tree_walk":
            assert len(result.rounds) == (place + 4) // 5


def test_a_stop_token_in_the_prompt_or_in_a_rejected_branch_does_not_end_output():
    class Siblings(ReplayDrafter):
        def draft(self, state, root_token):
            logits = super().draft(state, root_token)
            logits[:, STOP] = 0.5  # always drafted, more probable than the continuation
            return logits

    script = [3, 7, 8, 5, 9, 4]
    target = ScriptedTarget(script)
    drafter = Siblings(script, target.vocab_size, block_size=5)
    result = generate(target, drafter, [1, STOP], mode="tree_walk", budget=60, max_new_tokens=6, stop_token_ids=STOP)
    assert any(STOP in round_.tree.token_ids for round_ in result.rounds)
    assert (result.output_ids, result.stop_reason) == (script, "length")


def test_any_token_of_the_output_can_end_it(target):
    prompt = prompt_of(target, 8)
    expected = greedy(target, prompt, 16)
    drafters = [make_drafter(kind, target, expected) for kind in ("replay", "replay", "ngram")]
    for stop in sorted(set(expected)):
        for mode, drafter in zip(DRAFTED_MODES, drafters, strict=True):
            result = generate(target, drafter, prompt, mode=mode, budget=10, max_new_tokens=16, stop_token_ids=[stop])
            assert result.output_ids == expected[: expected.index(stop) + 1]
            assert result.stop_reason == "stop"


@pytest.mark.parametrize("mode", MODES)
def test_output_ends_at_any_cap(tiny_target, mode):
    prompt = prompt_of(tiny_target, 8)
    expected = greedy(tiny_target, prompt, 20)
    drafter = make_drafter("replay", tiny_target, expected)
    for cap in range(1, 20):
        result = generate(tiny_target, drafter, prompt, mode=mode, budget=20, max_new_tokens=cap)
        assert (result.output_ids, result.stop_reason) == (expected[:cap], "length")
        assert (len(result.rounds) == 0) == (cap == 1)


@pytest.mark.parametrize("mode", MODES)
def test_no_new_tokens_run_no_forward(tiny_target, forward_sizes, mode):
    sizes = forward_sizes(tiny_target)
    drafter = make_drafter("dflash", tiny_target, [])
    result = generate(tiny_target, drafter, [1, 2], mode=mode, max_new_tokens=0)
    assert (result.output_ids, result.rounds, result.stop_reason, sizes) == ([], [], "length", [])
    assert result.stats["tau"] is None and result.stats["tokens_per_second"] is None
    assert result.stats["prefill_seconds"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_one_new_token_is_the_prefills(tiny_target, forward_sizes, mode):
    sizes = forward_sizes(tiny_target)
    result = generate(tiny_target, ToyDrafter(256), [1, 2], mode=mode, max_new_tokens=1)
    assert (sizes, result.rounds, result.stop_reason) == ([2], [], "length")
    assert result.output_ids == greedy(tiny_target, torch.tensor([[1, 2]]), 1)
    assert result.stats["tokens_per_second"] is None


def absolute_target():
    """Learned position embeddings: there is nothing to look up beyond the context."""
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return DenseTarget(random_model(config), name="learned positions")


def stretching_target():
    """A rope that changes all its frequencies once a position lies beyond the context."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config = small_config(vocab_size=64, max_position_embeddings=32, rope_parameters=rope)
    return DenseTarget(random_model(config), name="dynamic rope")


def short_target():
    return DenseTarget(random_model(small_config(vocab_size=64, max_position_embeddings=32)), name="plain rope")


@pytest.mark.parametrize("make", [short_target, absolute_target, stretching_target])
@pytest.mark.parametrize("length", [17, 24, 25, 29, 30, 31])
def test_output_ends_with_the_context(make, length):
    target = make()
    prompt = prompt_of(target, length)
    expected = generate(target, None, prompt, mode="ar").output_ids
    assert len(expected) == 32 - length
    assert expected == greedy(make(), prompt, 32 - length)
    for kind in ("replay", "toy"):
        drafter = make_drafter(kind, target, [*expected, 1, 2, 3, 4, 5, 6, 7])
        for mode in DRAFTED_MODES:
            result = generate(target, drafter, prompt, mode=mode, budget=20)
            assert (result.output_ids, result.stop_reason) == (expected, "length")
            for round_ in result.rounds:
                assert round_.past_length + int(round_.tree.depths.max()) < 32
                assert round_.draft_token_ids.shape[0] == 7
    assert generate(target, drafter, prompt, mode="tree_walk", max_new_tokens=1).output_ids == expected[:1]


@pytest.mark.parametrize("length", [32, 33])
def test_a_prompt_that_fills_the_context_is_refused(length):
    with pytest.raises(ValueError, match=f"input_ids has {length} tokens.*context of 32"):
        generate(short_target(), None, [1] * length, mode="ar")


# Wrong arguments


@pytest.mark.parametrize("value", [[], torch.empty(1, 0, dtype=torch.int64), torch.empty(0)])
def test_an_empty_prompt_is_refused(tiny_target, value):
    with pytest.raises(ValueError, match="input_ids is empty"):
        generate(tiny_target, None, value, mode="ar")


@pytest.mark.parametrize(
    "value",
    [
        [1.5],
        [True, False],
        torch.tensor([1 + 2j]),
        torch.tensor([[1.0, 2.0]]),
        5,
        torch.tensor(5),
        [[[1, 2]]],
        "abc",
        ["a"],
        [1, None],
        None,
        {1: 2},
        [[1, 2], [3]],
        [2**70],
    ],
    ids=repr,
)
def test_a_prompt_that_is_no_token_ids_is_named(tiny_target, value):
    with pytest.raises(TypeError, match="input_ids must be token ids"):
        generate(tiny_target, None, value, mode="ar")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_every_integer_dtype_and_shape_of_a_prompt_is_taken(tiny_target, dtype):
    expected = generate(tiny_target, None, [1, 2, 3], mode="ar", max_new_tokens=3).output_ids
    for prompt in (torch.tensor([1, 2, 3], dtype=dtype), torch.tensor([[1, 2, 3]], dtype=dtype)):
        assert generate(tiny_target, None, prompt, mode="ar", max_new_tokens=3).output_ids == expected
    for prompt in ((1, 2, 3), [[1, 2, 3]], np.array([1, 2, 3], dtype=np.uint16)):
        assert generate(tiny_target, None, prompt, mode="ar", max_new_tokens=3).output_ids == expected


def test_two_prompts_are_refused(tiny_target):
    with pytest.raises(ValueError, match=r"input_ids must hold one prompt.*\(2, 3\)"):
        generate(tiny_target, None, torch.ones(2, 3, dtype=torch.int64), mode="ar")


@pytest.mark.parametrize("token", [-1, 256, 10**9])
def test_a_token_outside_the_vocabulary_is_refused(tiny_target, token):
    with pytest.raises(ValueError, match=f"from 0 to 255 for random:tiny-dense, got {token}"):
        generate(tiny_target, None, [1, token], mode="ar")


@pytest.mark.parametrize("mode", ["AR", "tree", "", None, 3])
def test_an_unknown_mode_is_named(tiny_target, mode):
    with pytest.raises(ValueError, match="mode must be one of ar, chain, eagle_linear, tree_walk, got"):
        generate(tiny_target, ToyDrafter(256), [1], mode=mode)


@pytest.mark.parametrize("mode", DRAFTED_MODES)
def test_a_missing_drafter_is_named(tiny_target, mode):
    with pytest.raises(ValueError, match=f"drafter is None; mode '{mode}' needs one"):
        generate(tiny_target, None, [1], mode=mode)


NUMBERS = [
    *[("budget", value, ValueError if value == -1 else TypeError) for value in (-1, 1.5, True, None, "4", math.nan)],
    *[("max_new_tokens", value, ValueError if value == -1 else TypeError) for value in (-1, 2.0, False, None, "4")],
    *[("seed", value, ValueError) for value in (-1, 2**64)],
    *[("seed", value, TypeError) for value in (1.5, None, "a", True)],
    *[("temperature", value, ValueError) for value in (math.nan, math.inf, -0.5)],
    *[("temperature", value, TypeError) for value in (None, "1", True)],
    *[("top_k", value, ValueError) for value in (0, -2)],
    *[("top_k", value, TypeError) for value in (1.5, True)],
    *[("top_p", value, ValueError) for value in (0.0, 1.5, math.nan)],
    *[("top_p", value, TypeError) for value in ("0.9", True)],
    *[("stop_token_ids", value, ValueError) for value in (-1, [3, -1])],
    *[("stop_token_ids", value, TypeError) for value in ("2", 1.5, True, [1.5], ["2"], [None])],
]


@pytest.mark.parametrize(("name", "value", "error"), NUMBERS, ids=repr)
@pytest.mark.parametrize("mode", ["ar", "tree_walk"])
def test_a_wrong_number_is_named_before_any_forward(tiny_target, forward_sizes, mode, name, value, error):
    sizes = forward_sizes(tiny_target)
    with pytest.raises(error, match=name):
        generate(tiny_target, ToyDrafter(256), [1], mode=mode, **{name: value})
    assert sizes == []


# Temperature above 0: the target's distribution


@pytest.mark.parametrize("mode", MODES)
def test_the_seed_decides(letters, mode):
    prompt, drafter = prompt_of(letters, 6), ToyDrafter(8)

    def run(seed):
        return generate(letters, drafter, prompt, mode=mode, max_new_tokens=20, temperature=1.0, seed=seed)

    outputs = {seed: run(seed) for seed in range(4)}
    assert len({tuple(result.output_ids) for result in outputs.values()}) == 4
    for seed, result in outputs.items():
        again = run(seed)
        assert again.output_ids == result.output_ids
        assert_same_rounds(again.rounds, result.rounds)


def test_the_seed_changes_nothing_at_temperature_0(letters):
    runs = [
        generate(letters, ToyDrafter(8), [1, 2], mode="tree_walk", max_new_tokens=20, seed=seed).output_ids
        for seed in (0, 1, 2**64 - 1)
    ]
    assert runs[0] == runs[1] == runs[2]


def test_the_global_random_state_is_left_alone(letters):
    before = torch.get_rng_state()
    generate(letters, ToyDrafter(8), [1, 2], mode="tree_walk", max_new_tokens=20, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)


@dataclass
class Tokens:
    committed: list[int] = field(default_factory=list)
    pending: DraftTree | None = None

    @property
    def length(self):
        return len(self.committed)


class Remembering(Proxy):
    """Runs the inner target once for every committed sequence and tree, and answers from memory after that."""

    def __init__(self, inner):
        super().__init__(inner)
        self.outputs = {}

    def new_state(self, layer_ids=()):
        return Tokens()

    def prefill(self, state, input_ids):
        state.committed += input_ids.tolist()
        return self._answer(state, None)

    def verify(self, state, tree):
        state.pending = tree
        return self._answer(state, tree)

    def commit(self, state, path):
        state.committed += state.pending.token_ids[list(path)].tolist()

    def _answer(self, state, tree):
        nodes = (tuple(tree.token_ids.tolist()), tuple(tree.parents.tolist())) if tree else None
        key = (tuple(state.committed), nodes)
        if key not in self.outputs:
            inner = self.inner.new_state()
            output = self.inner.prefill(inner, state.committed)
            self.outputs[key] = self.inner.verify(inner, tree) if tree else output
        return self.outputs[key]


class TableDrafter:
    """The same distributions at every place: unlike the target's, so that rounds end at every depth."""

    name, label, target, block_size, horizon, target_layer_ids = "table", "toy", None, 3, 2, ()
    table = torch.tensor([[2.0, 0, 0, 1.5, 0, 0, 1, 0], [0.0, 1, 0, 0, 2, 0, 0, 1.5]])

    def new_state(self):
        return None

    def observe(self, state, token_ids, hidden):
        pass

    def draft(self, state, root_token):
        return self.table


PROMPT = [5, 2, 7, 1]
TABLE_BUDGET = 12
PARAMS = [SamplingParams(1.0), SamplingParams(0.7, top_k=6, top_p=0.9)]


def true_joint(target, params):
    """Probabilities [8, 8, 8] of the three tokens after PROMPT, by one plain forward a prefix, in float64."""

    def rows(prefixes):
        with torch.no_grad():
            logits = target.model(torch.tensor([PROMPT + prefix for prefix in prefixes])).logits[:, -1].double().numpy()
        return np.stack([naive_filter(row, params) for row in logits])

    first = rows([[]])[0]
    second = rows([[a] for a in range(8)])
    third = rows([[a, b] for a in range(8) for b in range(8)]).reshape(8, 8, 8)
    return first[:, None, None] * second[:, :, None] * third


def drawn(target, mode, params, trials):
    """Counts [8, 8, 8] of the first three tokens of many runs."""
    counts = np.zeros((8, 8, 8))
    drafter = TableDrafter()
    for seed in range(trials):
        result = generate(
            target,
            drafter,
            PROMPT,
            mode=mode,
            budget=TABLE_BUDGET,
            max_new_tokens=3,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=seed,
        )
        counts[tuple(result.output_ids)] += 1
    return counts


def p_value(counts, probs):
    """Of chi-square, outcomes expected less than 5 times taken together; 0 when an impossible outcome was seen."""
    counts, probs = counts.ravel(), probs.ravel()
    if counts[probs == 0].any():
        return 0.0
    expected = counts.sum() * probs
    rare = expected < 5
    pooled = [np.append(values[~rare], values[rare].sum()) for values in (counts, expected)]
    kept = pooled[1] > 0
    return float(chisquare(pooled[0][kept], pooled[1][kept]).pvalue)


TRIALS = 900


@pytest.fixture(scope="module")
def remembering(letters):
    return Remembering(letters)


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("mode", DRAFTED_MODES)
def test_the_first_three_tokens_are_jointly_the_targets(remembering, mode, params):
    counts = drawn(remembering, mode, params, TRIALS)
    joint = true_joint(remembering.inner, params)
    assert counts.sum() == TRIALS and joint.sum() == pytest.approx(1)
    assert p_value(counts, joint) > REJECT
    other = PARAMS[1 - PARAMS.index(params)]
    assert p_value(counts, true_joint(remembering.inner, other)) < REJECT  # the parameters were applied


def table_tree():
    return build_best_first(TableDrafter.table, TABLE_BUDGET, root_token=0)


def one_draw_for_all(draw, logits, params, generator):
    return draw(logits[:1], params=params, generator=generator).expand(len(logits))


def draws_of_the_drafter(draw, logits, params, generator):
    if len(logits) > 1:
        depths = table_tree().depths.tolist()
        rows = [*TableDrafter.table, logits[0]]
        logits = torch.stack([rows[depth] for depth in depths])
    return draw(logits, params=params, generator=generator)


def draws_of_the_next_node(draw, logits, params, generator):
    return draw(logits.roll(1, dims=0), params=params, generator=generator)


def draws_without_filters(draw, logits, params, generator):
    return draw(logits, params=SamplingParams(params.temperature), generator=generator)


def draws_without_temperature(draw, logits, params, generator):
    return draw(logits, params=SamplingParams(1.0, params.top_k, params.top_p), generator=generator)


@pytest.mark.parametrize(
    "wrong",
    [
        one_draw_for_all,
        draws_of_the_drafter,
        draws_of_the_next_node,
        draws_without_filters,
        draws_without_temperature,
    ],
    ids=lambda wrong: wrong.__name__,
)
def test_the_joint_test_rejects_a_wrong_sampler(remembering, monkeypatch, wrong):
    assert len(table_tree()) == TABLE_BUDGET + 1
    monkeypatch.setattr(
        "ddtree_lab.decode.draw_tokens",
        lambda logits, *, params, generator: wrong(draw_tokens, logits, params, generator),
    )
    params = PARAMS[1]
    counts = drawn(remembering, "tree_walk", params, TRIALS // 2)
    assert p_value(counts, true_joint(remembering.inner, params)) < REJECT


def test_sampled_rounds_end_at_every_depth(letters):
    rounds = []
    for seed in range(5):
        result = generate(
            letters, TableDrafter(), PROMPT, mode="tree_walk", budget=TABLE_BUDGET, temperature=1.0, seed=seed
        )
        rounds += result.rounds
    assert {round_.acceptance.num_accepted for round_ in rounds} == {0, 1, 2}


def test_the_loop_has_every_mode():
    assert tuple(decode.MODES) == types.MODES

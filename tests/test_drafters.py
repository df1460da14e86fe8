"""The drafters without a network: toy, ngram and replay, and the loading of any drafter by name."""

from __future__ import annotations

import math

import pytest
import torch

from ddtree_lab.draft.load import load_drafter
from ddtree_lab.draft.ngram import NGramDrafter
from ddtree_lab.draft.replay import ReplayDrafter
from ddtree_lab.draft.toy import ToyDrafter
from ddtree_lab.tree.best_first import build_best_first
from ddtree_lab.tree.chain import build_chain

VOCAB = 40


def observed(drafter, *pieces):
    state = drafter.new_state()
    for piece in pieces:
        drafter.observe(state, torch.tensor(piece, dtype=torch.int64), torch.empty(len(piece), 0))
    return state


def drafters():
    return [ToyDrafter(VOCAB), NGramDrafter(VOCAB), ReplayDrafter(range(20), VOCAB, ranks=[0, 1, 2, 0, 5, 0, 0])]


@pytest.mark.parametrize("drafter", drafters(), ids=lambda drafter: drafter.name)
def test_logits_are_finite_and_build_a_full_tree(drafter):
    state = observed(drafter, [1, 2, 3, 1, 2, 4, 1])
    logits = drafter.draft(state, 2)
    assert logits.shape == (7, VOCAB) and logits.dtype == torch.float32
    assert logits.isfinite().all()
    assert len(build_best_first(logits, 30, root_token=2)) == 31


@pytest.mark.parametrize("drafter", drafters(), ids=lambda drafter: drafter.name)
def test_a_drafter_without_borrowed_weights_serves_any_target(drafter):
    assert drafter.target is None


@pytest.mark.parametrize("drafter", drafters(), ids=lambda drafter: drafter.name)
def test_a_context_in_pieces_is_the_same_context_and_drafting_leaves_no_trace(drafter):
    whole = observed(drafter, [1, 2, 3, 1, 2])
    drafter.observe(whole, torch.tensor([3, 1]), torch.empty(2, 0))
    pieces = observed(drafter, [1, 2, 3, 1, 2])
    drafter.draft(pieces, 9)
    drafter.observe(pieces, torch.tensor([3]), torch.empty(1, 0))
    drafter.draft(pieces, 7)
    drafter.observe(pieces, torch.tensor([1]), torch.empty(1, 0))
    assert torch.equal(drafter.draft(whole, 2), drafter.draft(pieces, 2))


@pytest.mark.parametrize(
    "kind", [ToyDrafter, NGramDrafter, lambda *sizes: ReplayDrafter([1], sizes[0], block_size=sizes[1])]
)
def test_block_size_one_drafts_nothing_and_smaller_sizes_raise(kind):
    drafter = kind(VOCAB, 1)
    assert drafter.horizon == 0
    assert drafter.draft(observed(drafter, [1, 2]), 3).shape == (0, VOCAB)
    with pytest.raises(ValueError, match="block_size is 0"):
        kind(VOCAB, 0)
    with pytest.raises(ValueError, match="vocab_size is 0"):
        kind(0, 4)


def test_toy_depends_on_context_root_depth_and_seed_only():
    drafter = ToyDrafter(VOCAB, 5)
    logits = drafter.draft(observed(drafter, [1, 2]), 3)
    torch.manual_seed(1)
    assert torch.equal(logits, ToyDrafter(VOCAB, 5).draft(observed(drafter, [1, 2]), 3))
    assert torch.equal(logits[:2], ToyDrafter(VOCAB, 3).draft(observed(drafter, [1, 2]), 3))
    others = [
        drafter.draft(observed(drafter, [2, 1]), 3),
        drafter.draft(observed(drafter, [1, 2]), 4),
        drafter.draft(observed(drafter, [1, 2, 3]), 3),
        drafter.draft(observed(drafter), 3),
    ]
    seeded = ToyDrafter(VOCAB, 5, seed=1)
    others.append(seeded.draft(observed(seeded, [1, 2]), 3))
    assert not any(torch.equal(logits, other) for other in others)
    assert not torch.equal(logits[0].argsort(), logits[1].argsort())


def test_toy_leaves_the_global_generator_alone_and_is_peaked_at_some_depth():
    before = torch.get_rng_state()
    drafter = ToyDrafter(50_000, 16)
    top = drafter.draft(observed(drafter, [1]), 3).softmax(-1).amax(-1)
    assert torch.equal(before, torch.get_rng_state())
    assert top.max() > 0.7 and top.min() < 0.5


def naive_ngram(context, root, *, vocab_size, horizon, n):
    """The definition, over the whole sequence each time."""
    sequence = [*context, root]
    for length in range(min(n, len(sequence)), 0, -1):
        ends = [e for e in range(length, len(context) + 1) if sequence[e - length : e] == sequence[-length:]][-64:]
        if ends:
            break
    else:
        ends = []
    rows = []
    for depth in range(horizon):
        found = [sequence[e + depth] for e in ends if e + depth < len(sequence)]
        total = len(found) + 1
        rows.append([math.log((found.count(token) + 1 / vocab_size) / total) for token in range(vocab_size)])
    return torch.tensor(rows)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_ngram_equals_counting_over_the_whole_sequence(n):
    tokens = torch.randint(3, (400,), generator=torch.Generator().manual_seed(n)).tolist()
    drafter = NGramDrafter(5, 6, n=n)
    state = drafter.new_state()
    for end in range(0, len(tokens), 7):
        piece = torch.tensor(tokens[end : end + 7])
        expected = naive_ngram(tokens[:end], tokens[end], vocab_size=5, horizon=5, n=n)
        torch.testing.assert_close(drafter.draft(state, tokens[end]), expected)
        drafter.observe(state, piece, torch.empty(len(piece), 0))


def test_ngram_drafts_the_repeated_passage_and_prefers_the_longest_suffix():
    drafter = NGramDrafter(VOCAB, 4, n=3)
    state = observed(drafter, [7, 8, 9, 10, 11, 12, 5, 9, 20, 21, 22, 6, 9, 20, 21, 22, 7, 8])
    assert build_chain(drafter.draft(state, 9), root_token=9).token_ids.tolist() == [9, 10, 11, 12]


def test_ngram_without_a_match_is_uniform():
    drafter = NGramDrafter(VOCAB, 3)
    logits = drafter.draft(observed(drafter, [1, 2, 3]), 30)
    torch.testing.assert_close(logits, torch.full((2, VOCAB), -math.log(VOCAB)))


def rank_of(row, token):
    return (row > row[token]).sum().item()


@pytest.mark.parametrize("ranks", [[0, 3, 1, VOCAB - 1], lambda index, depth: (index * 7 + depth) % VOCAB])
def test_replay_places_every_token_at_its_rank(ranks):
    continuation = [3, 39, 0, 17, 5, 5, 21, 8]
    drafter = ReplayDrafter(continuation, VOCAB, block_size=5, ranks=ranks)
    state = observed(drafter, list(range(11)))
    for step in range(3):
        logits = drafter.draft(state, 0)
        for depth, row in enumerate(logits, start=1):
            index = step + depth
            expected = ranks(index, depth) if callable(ranks) else ranks[depth - 1]
            assert rank_of(row, continuation[index]) == expected
            assert row.unique().numel() == VOCAB
        drafter.observe(state, torch.tensor([30]), torch.empty(1, 0))


def test_replay_drafts_valid_tokens_past_the_end_of_its_continuation():
    drafter = ReplayDrafter([4, 5, 6], VOCAB, block_size=5)
    state = observed(drafter, [1, 2])
    assert build_chain(drafter.draft(state, 4), root_token=4).token_ids.tolist() == [4, 5, 6, 0, 0]
    drafter.observe(state, torch.tensor([4, 5, 6, 0]), torch.empty(4, 0))
    assert build_chain(drafter.draft(state, 0), root_token=0).token_ids.tolist() == [0] * 5


def test_replay_refuses_ranks_and_tokens_out_of_range():
    with pytest.raises(ValueError, match="continuation has token 40"):
        ReplayDrafter([40], VOCAB)
    with pytest.raises(ValueError, match="ranks has 2 entries; it must have 7"):
        ReplayDrafter([1], VOCAB, ranks=[0, 1])
    drafter = ReplayDrafter([1, 2], VOCAB, ranks=[VOCAB] * 7)
    with pytest.raises(ValueError, match="ranks gives 40 at depth 1"):
        drafter.draft(observed(drafter, [1]), 1)


def test_labels_mark_the_drafters_that_are_not_real():
    assert [drafter.label for drafter in drafters()] == ["toy", None, "replay"]


def test_drafters_load_by_name_with_the_vocabulary_of_the_target(tiny_target):
    for name in ("toy", "ngram"):
        drafter = load_drafter(name, tiny_target)
        assert drafter.name == name and drafter.target_layer_ids == ()
        assert drafter.draft(observed(drafter, [1]), 2).shape == (7, tiny_target.vocab_size)
    with pytest.raises(ValueError, match="needs a continuation"):
        load_drafter("replay", tiny_target)


@pytest.mark.parametrize("name", ["", "nonsense", "/no/such/folder", "./a/b", "a/b/c", "-x/y"])
def test_an_unknown_drafter_is_one_line_that_says_what_there_is(name, tiny_target, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match="must be 'toy', 'ngram', 'embedded'") as caught:
        load_drafter(name, tiny_target)
    assert "\n" not in str(caught.value)


def test_a_hub_id_fetches_config_and_weights_only_and_a_failure_is_one_line(tiny_target, monkeypatch):
    asked = []

    def refuse(hub_id, *, allow_patterns):
        asked.append((hub_id, allow_patterns))
        raise OSError("offline\nmore\nlines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"drafter 'z-lab/Some-DFlash' .* cannot be fetched .*\(offline\)") as caught:
        load_drafter("z-lab/Some-DFlash", tiny_target)
    assert "\n" not in str(caught.value)
    assert asked == [("z-lab/Some-DFlash", ["config.json", "*.safetensors"])]


def test_a_missing_shipped_drafter_is_a_value_error(tiny_target, monkeypatch):
    def missing(*parts):
        raise FileNotFoundError(f"shipped data {'/'.join(parts)!r} is missing")

    monkeypatch.setattr("ddtree_lab.draft.load.data_path", missing)
    with pytest.raises(ValueError, match="drafter 'embedded': shipped data 'drafters/smollm2"):
        load_drafter("embedded", tiny_target)

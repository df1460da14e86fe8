"""Parts of training, each against a naive twin: conversations, blocks, masks, loss, schedule, held-out rounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_lab.draft.dflash_model import DFlashConfig
from ddtree_lab.training.acceptance import accepted_depths, chain_rounds, held_out
from ddtree_lab.training.blocks import block_masks, make_blocks, sample_anchors
from ddtree_lab.training.config import TrainConfig
from ddtree_lab.training.conversations import Conversations
from ddtree_lab.training.loss import head_loss, position_weights
from ddtree_lab.training.network import drafter_config, new_drafter, spread_layer_ids
from ddtree_lab.training.text import batch_order

MASK = 7


def dflash_config(*, layer_types: tuple[str, ...] = ("full_attention",), causal: bool | None = None):
    fields = {
        "vocab_size": 50,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "layer_types": list(layer_types),
        "sliding_window": 3,
        "block_size": 4,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0]},
    }
    return DFlashConfig.from_dict(fields | ({} if causal is None else {"is_causal": causal}))


def ragged(lengths: list[int]) -> Conversations:
    """Conversation c holds 100 c, 100 c + 1, ...; its second half is written."""
    ids = [100 * c + i for c, n in enumerate(lengths) for i in range(n)]
    written = [i >= n // 2 for n in lengths for i in range(n)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return Conversations(torch.tensor(ids, dtype=torch.int32), torch.tensor(written), offsets)


def test_rows_are_cut_where_conversations_begin():
    ids = torch.arange(16).view(2, 8)
    begins = torch.tensor([[1, 0, 0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 1, 0, 0]]).bool()
    written = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0, 1, 1]]).bool()
    found = Conversations.of_rows(ids, written, begins, fewest=2)
    assert found.offsets.tolist() == [0, 3, 8, 11]
    assert found.token_ids.tolist() == [0, 1, 2, 8, 9, 10, 11, 12, 13, 14, 15]
    assert found.written.tolist() == [False, True, True, False, False, True, True, True, False, True, True]
    assert found.token_ids.dtype == torch.int32


def test_conversations_join_split_and_pad():
    whole = Conversations.join([ragged([3, 5]), ragged([20])])
    assert whole.lengths.tolist() == [3, 5, 20] and len(whole) == 3
    first, rest = whole.split(1)
    assert first.token_ids.tolist() == [0, 1, 2] and rest.lengths.tolist() == [5, 20]
    batch = rest.batch(torch.tensor([1, 0]))
    assert batch.token_ids.shape == (2, 32) and batch.token_ids.dtype == torch.int64
    assert batch.token_ids[0].tolist() == [*range(20)] + [0] * 12
    assert batch.token_ids[1].tolist() == [*range(100, 105)] + [0] * 27
    assert batch.written[0].nonzero().flatten().tolist() == list(range(10, 20))
    assert batch.written[1].nonzero().flatten().tolist() == [2, 3, 4]


def test_an_epoch_holds_every_conversation_once_and_batches_those_of_like_length():
    lengths = torch.randint(10, 500, (1003,), generator=torch.Generator().manual_seed(0))
    epoch = torch.stack(list(batch_order(lengths, batch=10, seed=4, first=0, steps=100)))
    assert epoch.shape == (100, 10)
    assert len(set(epoch.flatten().tolist())) == 1000
    used = lengths[epoch]
    waste = 1 - used.sum() / (10 * used.amax(1).sum())
    assert waste < 0.05
    assert used.amax(1)[:-1].sub(used.amax(1)[1:]).abs().float().mean() > 50  # batches themselves are shuffled


def test_batches_go_on_where_a_run_stopped_and_change_with_seed_and_epoch():
    lengths = torch.arange(10, 47)
    whole = list(batch_order(lengths, batch=5, seed=1, first=0, steps=20))
    rest = list(batch_order(lengths, batch=5, seed=1, first=9, steps=20))
    assert len(rest) == 11 and all(map(torch.equal, whole[9:], rest))
    other = list(batch_order(lengths, batch=5, seed=2, first=0, steps=20))
    assert not torch.equal(torch.stack(whole), torch.stack(other))
    assert not torch.equal(torch.stack(whole[:7]), torch.stack(whole[7:14]))


@settings(max_examples=60)
@given(
    rows=st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=4),
    count=st.integers(1, 16),
    seed=st.integers(0, 9),
)
def test_anchors_are_different_written_tokens_with_a_written_next_one(rows, count, seed):
    written = torch.tensor(rows)
    anchors = sample_anchors(written, count, torch.Generator().manual_seed(seed))
    assert anchors.shape == (len(rows), min(count, 12))
    for row, picked in zip(rows, anchors.tolist(), strict=True):
        eligible = {p for p in range(1, 11) if row[p] and row[p + 1]}
        real = [p for p in picked if p]
        assert len(real) == len(set(real)) == min(len(eligible), count)
        assert set(real) <= eligible
    assert torch.equal(anchors, sample_anchors(written, count, torch.Generator().manual_seed(seed)))


def test_anchors_reach_every_eligible_place():
    written = torch.tensor([[False, True, True, True, True, False]])
    found = {int(sample_anchors(written, 1, torch.Generator().manual_seed(seed))) for seed in range(60)}
    assert found == {1, 2, 3}


def test_blocks_equal_a_loop_over_their_elements():
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(10, 50, (3, 11), generator=generator)
    written = torch.rand(3, 11, generator=generator) < 0.8
    anchors = torch.randint(0, 11, (3, 5), generator=generator)
    blocks = make_blocks(token_ids, written, anchors, dflash_config())
    for row in range(3):
        for number, anchor in enumerate(anchors[row].tolist()):
            part = slice(4 * number, 4 * number + 4)
            assert blocks.inputs[row, part].tolist() == [int(token_ids[row, anchor]), MASK, MASK, MASK]
            assert blocks.positions[row, part].tolist() == list(range(anchor, anchor + 4))
            for depth in range(1, 4):
                inside = anchor + depth < 11
                expected = inside and all(written[row, anchor : anchor + depth + 1].tolist())
                assert bool(blocks.valid[row, number, depth - 1]) == expected
                if inside:
                    assert blocks.labels[row, number, depth - 1] == token_ids[row, anchor + depth]


@pytest.mark.parametrize("causal", [None, True, False])
def test_block_masks_equal_a_loop_over_their_elements(causal):
    config = dflash_config(layer_types=("full_attention", "sliding_attention", "full_attention"), causal=causal)
    anchors, length, size = torch.tensor([[0, 3, 6], [5, 1, 6]]), 7, 4
    masks = block_masks(anchors, length, config)
    assert [mask.shape for mask in masks] == [(2, 1, 12, 19)] * 3
    for layer, mask in enumerate(masks):
        window = 3 if layer == 1 else None
        one_way = causal if causal is not None else layer == 1
        for row in range(2):
            for query in range(12):
                anchor = int(anchors[row, query // size])
                at = anchor + query % size
                for key in range(19):
                    if key < length:
                        position, visible = key, key < anchor
                    else:
                        other = key - length
                        position = int(anchors[row, other // size]) + other % size
                        visible = other // size == query // size
                    visible = visible and (window is None or abs(at - position) < window)
                    visible = visible and (not one_way or position <= at)
                    assert bool(mask[row, 0, query, key]) == visible, (layer, row, query, key)


@pytest.mark.parametrize("share, rows_at_once", [(0.0, 3), (0.3, 3), (1.0, 100), (0.3, 10)])
def test_the_loss_and_its_gradient_equal_autograd_on_all_logits(share, rows_at_once):
    generator = torch.Generator().manual_seed(0)
    hidden, teacher = torch.randn(2, 10, 8, generator=generator)
    labels = torch.randint(0, 20, (10,), generator=generator)
    weights = torch.rand(10, generator=generator)
    head = torch.nn.Linear(8, 20, bias=False).requires_grad_(False)
    total = torch.tensor(7.0)
    found = head_loss(
        hidden,
        labels,
        weights=weights,
        total=total,
        lm_head=head,
        teacher=teacher,
        teacher_share=share,
        rows_at_once=rows_at_once,
    )
    leaf = hidden.clone().requires_grad_()
    log_probs = head(leaf).log_softmax(-1)
    plain = -log_probs[torch.arange(10), labels]
    soft = torch.nn.functional.cross_entropy(head(leaf), head(teacher).softmax(-1), reduction="none")
    expected = (weights * ((1 - share) * plain + share * soft)).sum() / total
    expected.backward()
    torch.testing.assert_close(found.loss, expected.detach())
    torch.testing.assert_close(found.gradient, leaf.grad)


def test_the_loss_over_no_labels_is_zero():
    nothing = torch.empty(0, 8)
    found = head_loss(
        nothing,
        torch.empty(0, dtype=torch.int64),
        weights=torch.empty(0),
        total=torch.tensor(1.0),
        lm_head=torch.nn.Linear(8, 20),
        teacher=nothing,
        teacher_share=0.5,
    )
    assert found.loss == 0 and found.gradient.shape == (0, 8)


def test_position_weights_fall_by_a_constant_factor_from_one():
    weights = position_weights(5, 4.0, torch.device("cpu"))
    assert weights.tolist() == pytest.approx([math.exp(-d / 4) for d in range(5)])


def test_accepted_depths_end_at_the_first_miss_or_at_the_end_of_the_answer():
    correct = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    valid = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    assert accepted_depths(correct, valid).tolist() == [2, 0, 2, 4]


def test_rounds_go_from_root_to_root_over_the_answer():
    written = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0, 0, 0, 0, 0]]).bool()
    accepted = torch.tensor([[9, 9, 2, 9, 9, 0, 2, 9, 9, 9], [9, 2, 9, 9, 9, 9, 9, 9, 9, 9]])
    rounds, emitted = chain_rounds(accepted, written)
    # first answer: root 2 takes 3, 4 and a bonus, root 5 a bonus, root 6 the last two; second: the whole rest
    assert rounds.tolist() == [2, 0, 2, 2]
    assert emitted == 6 + 2
    figures = held_out(rounds, emitted, horizon=3)
    assert figures.tau == 2.0
    assert figures.acceptance == (0.75, 0.75, 0.0)


def test_layers_are_spread_over_the_target():
    assert spread_layer_ids(30, 5) == [1, 8, 14, 20, 27]
    assert spread_layer_ids(4, 1) == [2]
    for layers in range(1, 40):
        for count in range(1, layers + 1):
            ids = spread_layer_ids(layers, count)
            assert ids == sorted(set(ids)) and len(ids) == count and 0 <= ids[0] <= ids[-1] < layers
    with pytest.raises(ValueError, match="num_features must be from 1 to the target's 4 layers, got 5"):
        spread_layer_ids(4, 5)


def test_a_new_drafter_has_the_targets_geometry_and_repeats_with_the_seed(tiny_target):
    config = TrainConfig(num_layers=2, num_features=2, block_size=5, seed=3)
    model, again = (new_drafter(tiny_target, config, 2) for _ in range(2))
    qwen3 = model.config.qwen3
    assert (qwen3.hidden_size, qwen3.num_key_value_heads, qwen3.head_dim, qwen3.vocab_size) == (64, 2, 16, 256)
    assert model.config.horizon == 4 and model.config.target_layer_ids == (1, 2)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    with pytest.raises(ValueError, match="mask_token_id is 256"):
        drafter_config(tiny_target, config, 256)


@pytest.mark.parametrize(
    "name, value",
    [
        ("text_tokens", 0),
        ("steps", -3),
        ("batch", 0),
        ("anchors", -1),
        ("block_size", 1),
        ("warmup", -1),
        ("seed", -1),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("cooldown", 1.1),
        ("weight_decay", -0.1),
        ("decay", 0.0),
        ("teacher_share", -0.5),
    ],
)
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got {value}$"):
        TrainConfig(**{name: value})

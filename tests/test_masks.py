"""Masks and positions against their definitions, and every format against the bool mask it was made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddtree_lab.attention import (
    ancestor_mask,
    full_mask,
    pack_bits,
    pack_masks,
    pad_mask,
    positions,
    to_additive,
    to_mask_mod,
    unpack_bits,
    unpack_masks,
)
from ddtree_lab.attention.naive import naive_ancestor_mask, naive_full_mask, naive_pack_bits
from ddtree_lab.tree import build_best_first, tree_from_edges


def random_parents(generator: np.random.Generator, size: int) -> list[int]:
    return [-1, *(int(generator.integers(0, node)) for node in range(1, size))]


def random_mask(generator: np.random.Generator, rows: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(generator.random((rows, columns)) < 0.5)


@given(st.data())
def test_ancestor_mask_equals_walking_the_parents(data):
    size = data.draw(st.integers(1, 40))
    parents = [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, size))]
    expected = naive_ancestor_mask(parents)
    for given_as in (parents, np.array(parents, dtype=np.int32), torch.tensor(parents)):
        assert torch.equal(ancestor_mask(given_as), expected)
    assert torch.equal(positions(parents, 7), 7 + expected.sum(-1) - 1)


def test_masks_of_thousands_of_random_trees():
    generator = np.random.default_rng(0)
    for _ in range(2000):
        parents = random_parents(generator, int(generator.integers(1, 20)))
        assert torch.equal(ancestor_mask(parents), naive_ancestor_mask(parents))


def test_mask_and_positions_of_a_drafted_tree(random_logits):
    tree = build_best_first(random_logits(15, 100), 256, root_token=0)
    assert torch.equal(ancestor_mask(tree), naive_ancestor_mask(tree.parents.tolist()))
    assert torch.equal(positions(tree, 100), 100 + tree.depths)
    assert positions(tree, 100).dtype == torch.int64
    assert torch.equal(ancestor_mask(list(range(-1, 300))), torch.ones(301, 301, dtype=torch.bool).tril())


@pytest.mark.parametrize("parents", [[-1, 0, 0, 2], [-1, 0, 0, 1]])
def test_siblings_share_a_position_and_do_not_see_each_other(parents):
    mask = ancestor_mask(parents)
    assert positions(parents, 10).tolist() == [10, 11, 11, 12]
    assert mask[3].nonzero().flatten().tolist() == sorted([0, parents[3], 3])
    assert not mask[1, 2] and not mask[2, 1]


def test_broken_parents_are_refused():
    with pytest.raises(ValueError, match="node 2 is its own parent"):
        ancestor_mask([-1, 0, 2])
    with pytest.raises(TypeError, match="integers"):
        ancestor_mask(torch.tensor([-1.0, 0.0]))
    with pytest.raises(ValueError, match="past_length"):
        positions([-1, 0], -1)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 8, 50])
@pytest.mark.parametrize("past_length", [0, 1, 7, 12])
def test_full_mask_equals_its_definition(past_length, window, random_logits):
    tree = build_best_first(random_logits(5, 8, seed=past_length), 20, root_token=0)
    expected = naive_full_mask(tree, past_length, sliding_window=window)
    assert torch.equal(full_mask(tree, past_length, sliding_window=window), expected)


def test_sliding_window_counts_positions_not_columns():
    # Six siblings: the last stands six columns from the root, but one position.
    tree = tree_from_edges([(0, child) for child in range(1, 7)], range(7))
    mask = full_mask(tree, 3, sliding_window=2)
    assert mask[6].nonzero().flatten().tolist() == [3, 9]
    with pytest.raises(ValueError, match="sliding_window"):
        full_mask(tree, 3, sliding_window=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_additive_mask_is_zero_or_the_smallest_finite_value(dtype):
    mask = random_mask(np.random.default_rng(1), 5, 9)
    additive = to_additive(mask, dtype)
    assert additive.dtype == dtype
    assert torch.equal(additive == 0, mask)
    assert torch.equal(additive == torch.finfo(dtype).min, ~mask)
    with pytest.raises(TypeError, match="floating"):
        to_additive(mask, torch.int64)
    with pytest.raises(TypeError, match="bool"):
        to_additive(additive, dtype)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 65])
@pytest.mark.parametrize("columns", [0, 1, 31, 32, 33, 64, 65, 97])
def test_packed_bits_unpack_to_the_mask(rows, columns):
    mask = random_mask(np.random.default_rng(columns), rows, columns)
    words = pack_bits(mask)
    assert words.dtype == torch.int32
    assert words.numpy().astype(np.uint32).tolist() == naive_pack_bits(mask)
    assert torch.equal(unpack_bits(words, columns), mask)
    assert torch.equal(unpack_bits(words.view(torch.uint32), columns), mask)


def test_bits_count_from_the_least_significant():
    mask = torch.zeros(1, 40, dtype=torch.bool)
    mask[0, [0, 3, 31, 33]] = True
    assert pack_bits(mask).tolist() == [[1 + 8 - 2**31, 2]]
    with pytest.raises(ValueError, match="num_columns"):
        unpack_bits(pack_bits(mask), 65)
    with pytest.raises(ValueError, match="words"):
        unpack_bits(mask, 40)


@pytest.mark.parametrize("sizes", [(5, 33), (33, 5), (31, 32, 33, 64, 65), (1,), ()])
def test_a_ragged_batch_unpacks_to_each_mask(sizes):
    generator = np.random.default_rng(2)
    masks = [ancestor_mask(random_parents(generator, size)) for size in sizes]
    packed = pack_masks(masks)
    assert packed.num_rows.tolist() == list(sizes)
    unpacked = unpack_masks(packed)
    assert len(unpacked) == len(masks)
    for mask, again in zip(masks, unpacked, strict=True):
        assert torch.equal(mask, again)
    for request, size in enumerate(sizes):
        assert not packed.words[request, size:].any()


def test_a_ragged_batch_of_rectangles_unpacks_to_each_mask(random_logits):
    masks = [
        full_mask(build_best_first(random_logits(4, 9, seed=seed), budget, root_token=0), past_length)
        for seed, (budget, past_length) in enumerate([(4, 30), (32, 0), (0, 65)])
    ]
    for mask, again in zip(masks, unpack_masks(pack_masks(masks)), strict=True):
        assert torch.equal(mask, again)


def test_mask_mod_reads_the_mask_under_flex_attention():
    create_mask = pytest.importorskip("torch.nn.attention.flex_attention").create_mask
    generator = np.random.default_rng(4)
    mask = random_mask(generator, 6, 10)
    assert torch.equal(create_mask(to_mask_mod(mask), 1, 1, 6, 10, device="cpu")[0, 0], mask)
    batch = torch.stack([random_mask(generator, 6, 10) for _ in range(3)])
    assert torch.equal(create_mask(to_mask_mod(batch), 3, 1, 6, 10, device="cpu")[:, 0], batch)
    with pytest.raises(ValueError, match="mask must be"):
        to_mask_mod(mask[0])


@pytest.mark.parametrize("past_length", [0, 4])
def test_padded_nodes_change_no_real_row_and_stay_finite(past_length, random_logits):
    tree = build_best_first(random_logits(3, 6), 4, root_token=0)
    mask = full_mask(tree, past_length)
    padded = pad_mask(mask, 8)
    assert padded.shape == (8, past_length + 8)
    assert not padded[:5, past_length + 5 :].any()
    assert torch.equal(padded[5:].nonzero()[:, 1], past_length + torch.arange(5, 8))

    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, length, 16, generator=generator) for length in (8, past_length + 8, past_length + 8)
    )
    value[:, past_length + 5 :] = 1e4  # what a padded slot holds must not leak
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(query, key, value, attn_mask=to_additive(padded, torch.float32))
    real = past_length + 5
    expected = attend(query[:, :5], key[:, :real], value[:, :real], attn_mask=to_additive(mask, torch.float32))
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, :5], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(pad_mask(mask, 5), mask)
    with pytest.raises(ValueError, match="size"):
        pad_mask(mask, 4)

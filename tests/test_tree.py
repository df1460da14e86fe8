"""Tree builders against their exhaustive twin, the tie rule, and the invariants that are checked on every tree."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_lab.tree import (
    best_first_from_ranking,
    build_best_first,
    build_chain,
    build_naive,
    build_static,
    check_parents,
    check_tree,
    log_probs_of,
    rank_rows,
    stable_top_k,
    tree_from_edges,
)
from ddtree_lab.types import DraftTree

INF = float("inf")
VALID = {
    "token_ids": [7, 1, 2, 1],
    "parents": [-1, 0, 0, 2],
    "depths": [0, 1, 1, 2],
    "ranks": [0, 0, 1, 0],
    "log_probs": [0.0, -0.5, -1.0, -1.5],
}


def draw_logits(generator: np.random.Generator, *, depth: int, width: int, kind: str) -> torch.Tensor:
    """Logits rich in the inputs that break builders: ties, impossible tokens, whole rows without any token."""
    if kind == "normal":
        return torch.from_numpy(generator.normal(size=(depth, width)).astype(np.float32))
    logits = torch.from_numpy(generator.integers(0, 3, size=(depth, width)).astype(np.float32))
    if kind == "impossible":
        logits[torch.from_numpy(generator.random((depth, width)) < 0.4)] = -INF
        logits[torch.from_numpy(generator.random(depth) < 0.1)] = -INF
    return logits


@pytest.mark.parametrize("kind", ["normal", "ties", "impossible"])
def test_best_first_equals_the_exhaustive_builder(kind):
    generator = np.random.default_rng(3)
    for _ in range(800):
        depth, width = int(generator.integers(1, 4)), int(generator.integers(1, 5))
        logits = draw_logits(generator, depth=depth, width=width, kind=kind)
        budget = int(generator.integers(0, 40))
        assert build_best_first(logits, budget, root_token=9) == build_naive(logits, budget, root_token=9)


@given(
    logits=st.integers(1, 3).flatmap(
        lambda width: st.lists(
            st.lists(st.sampled_from([-INF, -1.0, 0.0, 1.0, 2.0]), min_size=width, max_size=width),
            min_size=1,
            max_size=4,
        )
    ),
    budget=st.integers(0, 130),
)
@settings(max_examples=300)
def test_best_first_keeps_the_most_probable_prefixes(logits, budget):
    logits = torch.tensor(logits)
    tree = build_best_first(logits, budget, root_token=0)
    everything = build_naive(logits, 10_000, root_token=0)
    assert len(tree) == min(len(everything), budget + 1)
    for name in ("token_ids", "parents", "depths", "ranks", "log_probs"):
        assert torch.equal(getattr(tree, name), getattr(everything, name)[: len(tree)])
    assert (tree.log_probs[1:] <= tree.log_probs[:-1]).all()


def test_a_larger_budget_only_appends_nodes(random_logits):
    logits = random_logits(6, 50)
    large = build_best_first(logits, 64, root_token=1)
    for budget in range(64):
        small = build_best_first(logits, budget, root_token=1)
        assert torch.equal(small.parents, large.parents[: budget + 1])
        assert torch.equal(small.token_ids, large.token_ids[: budget + 1])


def test_scores_are_float32_sums_from_the_root_down(random_logits):
    logits = random_logits(8, 40)
    table = torch.log_softmax(logits, -1).numpy()
    tree = build_best_first(logits, 100, root_token=1)
    for node in range(1, len(tree)):
        path = []
        while node:
            path.append(node)
            node = int(tree.parents[node])
        score = np.float32(0)
        for step in reversed(path):
            score = score + table[int(tree.depths[step]) - 1, int(tree.token_ids[step])]
        assert score == tree.log_probs[path[0]].numpy()


@pytest.mark.parametrize(
    ("budget", "tokens"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (4, [1, 2, 4, 0]), (9, [1, 2, 4, 0, 3])]
)
def test_equal_logits_give_the_smaller_token_first(budget, tokens):
    tree = build_best_first(torch.tensor([[1.0, 4.0, 4.0, 0.0, 4.0]]), budget, root_token=0)
    assert tree.token_ids.tolist()[1:] == tokens
    assert tree.ranks.tolist()[1:] == list(range(len(tokens)))


def test_equal_paths_give_the_smaller_rank_tuple_first():
    tree = build_best_first(torch.zeros(2, 2), 6, root_token=5)
    # Depth 1 at log 1/2 before depth 2 at log 1/4; within each, by ranks.
    assert tree.token_ids.tolist() == [5, 0, 1, 0, 1, 0, 1]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    # A certain token ties with its parent: the prefix comes first, then its child, before any sibling of the parent.
    certain = build_best_first(torch.tensor([[0.0, 0.0], [0.0, -INF]]), 4, root_token=5)
    assert certain.parents.tolist() == [-1, 0, 1, 0, 3]


def test_budget_beyond_what_exists_gives_every_node():
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 2.0]])
    assert build_best_first(logits, 8, root_token=0).budget_used == 8
    assert build_best_first(logits, 50, root_token=0).budget_used == 12
    two_each = torch.tensor([[0.0, -INF, 1.0, -INF], [-INF, 2.0, -INF, 2.0]])
    tree = build_best_first(two_each, 10, root_token=0)
    assert tree.budget_used == 6
    assert tree.log_probs.isfinite().all()
    assert set(tree.token_ids.tolist()[1:]) == {0, 1, 2, 3}


@pytest.mark.parametrize("build", [build_best_first, build_naive, build_chain])
def test_an_impossible_row_ends_the_tree_above_it(build):
    logits = torch.tensor([[0.0, 1.0], [-INF, -INF], [0.0, 1.0]])
    tree = build(logits, 10, root_token=0)
    assert tree.depths.max() == 1
    assert torch.equal(build(logits[1:], 10, root_token=4).token_ids, torch.tensor([4]))


@pytest.mark.parametrize("build", [build_best_first, build_naive, build_chain])
def test_path_scores_below_the_float32_range_are_impossible(build):
    lowest = torch.finfo(torch.float32).min
    logits = torch.tensor([[0.0, lowest], [0.0, lowest]])
    tree = build(logits, 10, root_token=0)
    assert tree.log_probs.isfinite().all()
    assert [1, 1] not in [
        [int(tree.token_ids[p]), int(t)] for p, t in zip(tree.parents, tree.token_ids, strict=True) if p
    ]


@pytest.mark.parametrize("build", [build_best_first, build_naive, build_chain])
@pytest.mark.parametrize("value", [float("nan"), INF])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (1, 3), (2, 99)])
def test_nan_and_positive_infinity_name_their_row(build, value, row, column):
    logits = torch.zeros(3, 100)
    logits[row, 1:] = -INF
    logits[row, column] = value
    with pytest.raises(ValueError, match=f"row {row} holds NaN"):
        build(logits, 2, root_token=0)


def test_an_all_impossible_row_with_a_nan_is_still_an_error():
    with pytest.raises(ValueError, match="row 1"):
        build_best_first(torch.tensor([[0.0, 1.0], [-INF, float("nan")]]), 1, root_token=0)


@pytest.mark.parametrize("build", [build_best_first, build_naive, build_chain])
def test_columns_beyond_the_vocabulary_are_ignored(build):
    logits = torch.tensor([[0.0, 1.0, 50.0, 60.0], [1.0, 0.0, 60.0, 50.0]])
    tree = build(logits, 6, root_token=0, vocab_size=2)
    assert tree.token_ids.max() < 2
    assert tree == build(logits[:, :2], 6, root_token=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype_is_reduced_to_float32_first(dtype, random_logits):
    logits = random_logits(4, 300).to(dtype)
    assert build_best_first(logits, 32, root_token=0) == build_best_first(logits.float(), 32, root_token=0)
    assert torch.equal(log_probs_of(logits), logits.float().log_softmax(-1))


def test_log_probabilities_as_logits_rank_alike(random_logits):
    logits = random_logits(5, 60)
    first = build_best_first(logits, 40, root_token=0)
    again = build_best_first(logits.log_softmax(-1), 40, root_token=0)
    assert torch.equal(first.token_ids, again.token_ids)


def test_empty_trees():
    for tree in (
        build_best_first(torch.zeros(0, 5), 4, root_token=3),
        build_best_first(torch.zeros(4, 5), 0, root_token=3),
        build_naive(torch.zeros(0, 5), 4, root_token=3),
        build_chain(torch.zeros(0, 5), root_token=3),
        build_chain(torch.zeros(4, 5), 0, root_token=3),
        build_static(torch.zeros(0, 5), [], root_token=3),
    ):
        assert (tree.token_ids.tolist(), tree.parents.tolist(), len(tree)) == ([3], [-1], 1)


def test_wrong_arguments_name_themselves():
    logits = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="budget must be an integer >= 0, got -1"):
        build_best_first(logits, -1, root_token=0)
    for wrong in (1.5, "2", None, True):
        with pytest.raises(TypeError, match="budget"):
            build_best_first(logits, wrong, root_token=0)
    with pytest.raises(ValueError, match="root_token"):
        build_best_first(logits, 1, root_token=-1)
    with pytest.raises(ValueError, match=r"logits must be \[D, V\]"):
        build_best_first(logits[0], 1, root_token=0)
    with pytest.raises(TypeError, match="logits"):
        build_best_first(logits.bool(), 1, root_token=0)
    with pytest.raises(ValueError, match="vocab_size"):
        build_best_first(logits, 1, root_token=0, vocab_size=0)
    with pytest.raises(ValueError, match="prefixes"):
        build_naive(torch.zeros(8, 50), 1, root_token=0)


def test_the_tree_from_a_wider_ranking_is_the_same(random_logits):
    logits = random_logits(7, 500)
    ids, log_probs = rank_rows(logits, 32)
    for budget in (0, 1, 5, 32):
        tree = best_first_from_ranking(ids, log_probs, budget=budget, root_token=2)
        assert tree == build_best_first(logits, budget, root_token=2)


@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 200, 1000, 5000])
@pytest.mark.parametrize("kind", ["normal", "ties", "impossible"])
def test_stable_top_k_equals_a_full_stable_sort(width, kind):
    values = draw_logits(np.random.default_rng(width), depth=6, width=width, kind=kind)
    order = values.sort(dim=-1, descending=True, stable=True)
    for k in sorted({0, 1, 2, 7, 31, width - 1, width, width + 3}):
        ids, top = stable_top_k(values, k)
        assert torch.equal(ids, order.indices[:, :k])
        assert torch.equal(top, order.values[:, :k])


def test_stable_top_k_cuts_through_ties_in_wide_bfloat16_rows(random_logits):
    values = random_logits(5, 49_152).bfloat16().float()
    ids, _ = stable_top_k(values, 64)
    assert torch.equal(ids, values.sort(dim=-1, descending=True, stable=True).indices[:, :64])


def test_chain_is_the_greedy_path(random_logits):
    logits = random_logits(5, 30)
    chain = build_chain(logits, root_token=4)
    assert chain.token_ids.tolist() == [4, *logits.argmax(-1).tolist()]
    assert chain.parents.tolist() == [-1, 0, 1, 2, 3, 4]
    assert len(build_chain(logits, 3, root_token=4)) == 4
    assert len(build_chain(logits, 50, root_token=4)) == 6
    assert chain == build_static(logits, [(0,) * depth for depth in range(1, 6)], root_token=4)


def test_static_tree_stands_in_order_of_depth_and_ranks():
    logits = torch.tensor([[1.0, 4.0, 4.0, 0.0], [0.0, 3.0, 1.0, 2.0]])
    tree = build_static(logits, [(1, 0), (0, 1), (1,), (0,), (0, 0)], root_token=9)
    assert tree.token_ids.tolist() == [9, 1, 2, 1, 3, 1]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2]
    assert tree.ranks.tolist() == [0, 0, 1, 0, 1, 0]


def test_static_tree_holds_the_scores_of_best_first(random_logits):
    logits = random_logits(3, 20)
    best = build_best_first(logits, 30, root_token=0)
    paths = {0: ()}
    for node in range(1, len(best)):
        paths[node] = (*paths[int(best.parents[node])], int(best.ranks[node]))
    static = build_static(logits, list(paths.values())[1:], root_token=0)
    assert sorted(static.log_probs.tolist()) == sorted(best.log_probs.tolist())


def test_static_tree_drops_impossible_tokens_and_what_is_below():
    logits = torch.tensor([[0.0, -INF, 1.0], [0.0, 1.0, 2.0]])
    tree = build_static(logits, [(0,), (1,), (2,), (2, 0), (1, 0)], root_token=0)
    assert tree.token_ids.tolist() == [0, 2, 0, 2]
    assert tree.parents.tolist() == [-1, 0, 0, 2]


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([(0, 0)], r"\(0, 0\) needs its prefix \(0,\)"),
        ([(0,), (0,)], "repeated"),
        ([()], "root"),
        ([(0,), (0, 0), (0, 0, 0)], "3 deep"),
        ([(3,)], "rank 3 is outside"),
        ([(-1,)], "rank in choices"),
    ],
)
def test_wrong_static_choices_are_named(choices, words):
    with pytest.raises(ValueError, match=words):
        build_static(torch.zeros(2, 3), choices, root_token=0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("parents", [-1, 0, 2, 2], "node 2 is its own parent"),
        ("parents", [-1, 0, 3, 2], "node 2: its parent 3 stands after it"),
        ("parents", [-1, 0, 9, 2], "node 2: missing parent 9"),
        ("parents", [-1, 0, -2, 2], "node 2: missing parent -2"),
        ("parents", [-1, 0, -1, 2], "node 2 is a second root"),
        ("parents", [0, 0, 0, 2], "node 0 is the root"),
        ("parents", [-1, 0, 0], "token_ids has 4 rows but parents has 3"),
        ("parents", [], "parents is empty"),
        ("parents", [[-1, 0, 0, 2]], "parents must have one axis"),
        ("depths", [0, 1, 1, 3], "node 3: depth 3, but its parent 2 has 1"),
        ("depths", [1, 2, 2, 3], "node 0 is the root: its entry in depths"),
        ("depths", [0, 1, 1], "depths has 3 rows"),
        ("token_ids", [7, 1, 1, 1], "node 2: token 1 is already a child of its parent 0"),
        ("token_ids", [7, 1, -2, 1], "node 2: its entry in token_ids must be >= 0"),
        ("ranks", [0, 0, -1, 0], "node 2: its entry in ranks must be >= 0"),
        ("ranks", [1, 0, 1, 0], "node 0 is the root: its entry in ranks"),
        ("log_probs", [0.0, -0.5, float("nan"), -1.5], "node 2: path log-probability nan"),
        ("log_probs", [0.0, -0.5, -1.0, -INF], "node 3: path log-probability -inf"),
        ("log_probs", [0.0, -0.5, -1.0, -0.9], "node 3: path log-probability .* above its parent 2"),
        ("log_probs", [0.0, 0.1, -1.0, -1.5], "node 1: path log-probability .* above its parent 0"),
        ("log_probs", [-0.1, -0.5, -1.0, -1.5], "node 0 is the root: its entry in log_probs"),
    ],
)
def test_a_broken_tree_names_the_node(field, value, words):
    dtype = torch.float32 if field == "log_probs" else torch.int64
    broken = {**VALID, field: value}
    with pytest.raises(ValueError, match=words):
        check_tree(**broken)
    with pytest.raises(ValueError, match=words):
        DraftTree(**{**broken, field: torch.tensor(value, dtype=dtype)})


def test_a_sound_tree_passes_whatever_holds_it():
    check_tree(**VALID)
    check_tree(**{name: np.array(value) for name, value in VALID.items()})
    check_tree(**{name: torch.tensor(value) for name, value in VALID.items()})
    check_tree([5], [-1], [0], [0], [0.0])
    check_tree(**{**VALID, "log_probs": [0.0, 0.0, -1.0, -1.0]})


def test_fields_of_the_wrong_kind_raise():
    with pytest.raises(TypeError, match="parents must hold integers"):
        check_parents(torch.tensor([-1.0, 0.0]))
    with pytest.raises(TypeError, match="log_probs must hold real numbers"):
        check_tree(**{**VALID, "log_probs": ["a", "b", "c", "d"]})


@pytest.mark.parametrize("field", list(VALID))
@pytest.mark.parametrize("kind", [bool, complex, float, str, None, 2**70])
@pytest.mark.parametrize("hold", [list, np.array, torch.tensor])
def test_a_tree_is_not_made_of_other_kinds_of_number(field, kind, hold):
    if field == "log_probs" and kind is float:
        return
    values = [kind(value) for value in VALID[field]] if isinstance(kind, type) else [kind] * len(VALID[field])
    if hold is torch.tensor and kind in (str, None, 2**70):
        return
    wanted = "real numbers" if field == "log_probs" else "integers"
    with pytest.raises(TypeError, match=f"{field} must hold {wanted}"):
        DraftTree(**{**VALID, field: hold(values)})


def test_path_log_probabilities_may_be_any_real_numbers():
    for held in ([0, -1, -1, -2], np.array([0, -1, -1, -2]), torch.tensor([0, -1, -1, -2], dtype=torch.float16)):
        tree = DraftTree(**{**VALID, "log_probs": held})
        assert torch.equal(tree.log_probs, torch.tensor([0.0, -1.0, -1.0, -2.0]))
    with pytest.raises(ValueError, match="parents is empty"):
        DraftTree([], [], [], [], [])


def test_broken_trees_are_found_in_bounded_time():
    size = 100_000
    ring = torch.arange(size).roll(-1)
    ring[0] = -1
    repeated = {
        "token_ids": torch.zeros(size, dtype=torch.int64),
        "parents": torch.cat((torch.tensor([-1]), torch.zeros(size - 1, dtype=torch.int64))),
        "depths": torch.cat((torch.tensor([0]), torch.ones(size - 1, dtype=torch.int64))),
        "ranks": torch.arange(size),
        "log_probs": torch.zeros(size),
    }
    start = time.perf_counter()
    with pytest.raises(ValueError, match="node 1"):
        check_parents(ring)
    with pytest.raises(ValueError, match="node 2: token 0 is already a child"):
        DraftTree(**repeated)
    with pytest.raises(ValueError, match="cycle"):
        tree_from_edges([(i % (size - 1) + 1, i) for i in range(1, size)], range(size))
    assert time.perf_counter() - start < 20


def test_a_tree_from_edges_equals_the_tree_they_come_from(random_logits):
    tree = build_best_first(random_logits(5, 20), 40, root_token=3)
    edges = [(int(parent), node) for node, parent in enumerate(tree.parents) if node]
    again = tree_from_edges(reversed(edges), tree.token_ids, ranks=tree.ranks, log_probs=tree.log_probs)
    assert again == tree
    assert torch.equal(tree_from_edges(edges, tree.token_ids.tolist()).ranks, tree.ranks)


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        ([(0, 1), (0, 2), (1, 2)], "node 2 has two parents: 0 and 1"),
        ([(0, 1), (0, 1), (0, 2)], "node 1 has two parents: 0 and 0"),
        ([(0, 1)], "node 2 has no parent"),
        ([(0, 1), (7, 2)], "node 2: missing parent 7"),
        ([(0, 1), (0, 7)], "no node 7"),
        ([(0, 1), (2, 2)], "node 2 stands on a cycle"),
        ([(2, 1), (1, 2)], "node 1 stands on a cycle"),
        ([(0, 1), (1, 0), (0, 2)], "node 0 is the root"),
        ([(2, 1), (0, 2)], "node 1: its parent 2 stands after it"),
        ([(0, 1), (-1, 2)], "parent in edges"),
    ],
)
def test_broken_edges_name_the_node(edges, words):
    with pytest.raises(ValueError, match=words):
        tree_from_edges(edges, [5, 6, 7])


def test_token_zero_is_a_node_like_any_other():
    tree = build_best_first(torch.tensor([[5.0, 0.0], [5.0, 0.0]]), 2, root_token=0)
    assert tree.token_ids.tolist() == [0, 0, 0]
    assert tree.budget_used == 2

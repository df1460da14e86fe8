"""The walk, EAGLE-linear on the same trees, and the cut at stop tokens and the length cap."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddtree_lab.accept import cut_tokens, flatten_dfs, stop_set, verify_linear, walk
from ddtree_lab.attention import pad_mask
from ddtree_lab.attention.ancestors import ancestor_mask
from ddtree_lab.tree import build_best_first, build_chain, tree_from_edges
from ddtree_lab.types import DraftTree

X, Y, STOP = 11, 12, 2


def naive_walk(tree: DraftTree, targets: list[int]) -> tuple[list[int], int]:
    path = [0]
    while True:
        wanted = targets[path[-1]]
        matches = [child for child in tree.children()[path[-1]] if int(tree.token_ids[child]) == wanted]
        if not matches:
            return path, wanted
        path.append(matches[0])


def naive_linear(tree: DraftTree, targets: list[int], sequence: list[int]) -> tuple[list[int], int]:
    """Path and false continuations: all matches of the sequence first, then the cut."""
    accepted = 0
    while accepted + 1 < len(sequence) and int(tree.token_ids[sequence[accepted + 1]]) == targets[sequence[accepted]]:
        accepted += 1
    steps = [(sequence[t], int(tree.parents[sequence[t]]) == sequence[t - 1]) for t in range(1, accepted + 1)]
    false = [index for index, (_, true) in enumerate(steps) if not true]
    kept = steps[: false[0]] if false else steps
    return [0, *(node for node, _ in kept)], len(false)


def naive_dfs(tree: DraftTree, node: int = 0) -> list[int]:
    order = sorted(tree.children()[node], key=lambda c: (-float(tree.log_probs[c]), int(tree.ranks[c]), c))
    return [node, *(below for child in order for below in naive_dfs(tree, child))]


def random_case(generator: np.random.Generator) -> tuple[DraftTree, list[int]]:
    """A small tie-rich tree over three tokens, with targets that follow it often."""
    logits = torch.from_numpy(generator.integers(0, 3, size=(4, 3)).astype(np.float32))
    tree = build_best_first(logits, int(generator.integers(0, 25)), root_token=0)
    return tree, generator.integers(0, 3, size=len(tree)).tolist()


def emitted(tree: DraftTree, targets: list[int]) -> tuple[int, ...]:
    acceptance = walk(tree, targets)
    return (*tree.token_ids[list(acceptance.path[1:])].tolist(), acceptance.bonus_token)


def test_walk_and_linear_equal_their_twins_on_thousands_of_trees():
    generator = np.random.default_rng(7)
    false_continuations = linear_lost = 0
    for _ in range(3000):
        tree, targets = random_case(generator)
        path, bonus = naive_walk(tree, targets)
        walked = walk(tree, targets)
        assert (list(walked.path), walked.bonus_token) == (path, bonus)
        assert flatten_dfs(tree) == naive_dfs(tree)
        for order, sequence in (("dfs", naive_dfs(tree)), ("index", list(range(len(tree))))):
            linear = verify_linear(tree, targets, order)
            kept, false = naive_linear(tree, targets, sequence)
            assert (list(linear.path), linear.false_continuations) == (kept, false)
            assert linear.bonus_token == targets[linear.path[-1]]
            assert walked.path[: len(linear.path)] == linear.path
            assert linear.num_accepted <= walked.num_accepted
            false_continuations += linear.false_continuations
            linear_lost += linear.num_accepted < walked.num_accepted
    assert false_continuations > 0 and linear_lost > 0  # the trees reach both branches


@given(st.data())
def test_walk_emits_the_targets_own_tokens(data):
    logits = torch.tensor(data.draw(st.lists(st.lists(st.floats(-4, 4), min_size=4, max_size=4), max_size=4)))
    tree = build_best_first(logits.reshape(-1, 4), data.draw(st.integers(0, 40)), root_token=0)
    targets = data.draw(st.lists(st.integers(0, 3), min_size=len(tree), max_size=len(tree)))
    acceptance = walk(tree, targets)
    assert emitted(tree, targets) == tuple(targets[node] for node in acceptance.path)
    assert all(int(tree.parents[b]) == a for a, b in zip(acceptance.path, acceptance.path[1:], strict=False))
    assert acceptance.acceptance_length == acceptance.num_accepted + 1 == len(acceptance.path)
    last = acceptance.path[-1]
    assert all(int(tree.token_ids[child]) != acceptance.bonus_token for child in tree.children()[last])


def test_on_a_chain_both_verifiers_agree(random_logits):
    chain = build_chain(random_logits(6, 3), root_token=0)
    generator = np.random.default_rng(1)
    for _ in range(200):
        targets = generator.integers(0, 3, size=7).tolist()
        assert walk(chain, targets) == verify_linear(chain, targets)


def test_a_right_sibling_saves_the_walk_but_not_the_linear_verifier():
    tree = tree_from_edges([(0, 1), (0, 2), (2, 3)], [5, X, Y, X], log_probs=[0.0, -0.1, -2.0, -2.5])
    targets = [Y, 0, X, 9]  # the target wants the second child, then its child
    assert walk(tree, targets).path == (0, 2, 3)
    linear = verify_linear(tree, targets)
    assert (linear.path, linear.bonus_token, linear.false_continuations) == ((0,), Y, 0)


def test_a_false_continuation_is_counted_and_cut():
    # Depth first: 0, 1, 2. The target wants X after the root, then Y: node 2 holds Y, but under the root.
    tree = tree_from_edges([(0, 1), (0, 2)], [5, X, Y], log_probs=[0.0, -0.1, -2.0])
    linear = verify_linear(tree, [X, Y, 9])
    assert (linear.path, linear.bonus_token, linear.false_continuations) == ((0, 1), Y, 1)
    assert walk(tree, [X, Y, 9]).path == (0, 1)


def test_matches_after_a_false_continuation_are_not_accepted():
    tree = tree_from_edges([(0, 1), (0, 2), (2, 3)], [5, X, Y, 8], log_probs=[0.0, -0.1, -2.0, -2.5])
    linear = verify_linear(tree, [X, Y, 8, 9])
    assert (linear.path, linear.bonus_token, linear.false_continuations) == ((0, 1), Y, 1)


def test_depth_first_order_starts_with_the_greedy_path():
    tree = tree_from_edges(
        [(0, 1), (0, 2), (2, 3), (2, 4)], range(5), ranks=[0, 1, 0, 1, 0], log_probs=[0.0, -3.0, -1.0, -2.0, -2.0]
    )
    assert flatten_dfs(tree) == [0, 2, 4, 3, 1]  # equal children: rank 0 before rank 1
    assert verify_linear(tree, [1, 9, 9, 9, 9], "index").path == (0, 1)
    assert verify_linear(tree, [1, 9, 9, 9, 9], "dfs").path == (0,)


def test_one_node_tree_with_a_wrong_token_accepts_nothing():
    tree = build_best_first(torch.tensor([[0.0, 5.0]]), 1, root_token=0)
    for acceptance in (walk(tree, [0, 1]), verify_linear(tree, [0, 1])):
        assert (acceptance.path, acceptance.num_accepted, acceptance.bonus_token) == ((0,), 0, 0)


def test_token_zero_can_be_accepted():
    tree = build_best_first(torch.tensor([[5.0, 0.0], [5.0, 0.0]]), 2, root_token=0)
    assert walk(tree, [0, 0, 0]).num_accepted == 2
    assert verify_linear(tree, [0, 0, 0]).num_accepted == 2


def test_padded_nodes_change_no_verdict():
    tree = build_best_first(torch.tensor([[5.0, 1.0], [5.0, 1.0]]), 4, root_token=0)
    generator = torch.Generator().manual_seed(0)
    embedding, head = torch.randn(2, 6, generator=generator), torch.randn(6, 2, generator=generator)

    def target_ids(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = embedding[tokens]
        weights = (x @ x.T).masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights @ x @ head).argmax(-1)

    mask = ancestor_mask(tree)
    alone = target_ids(tree.token_ids, mask)
    for filler in (0, 1):
        padded = torch.cat([tree.token_ids, torch.full((3,), filler)])
        answers = target_ids(padded, pad_mask(mask, 8))
        assert walk(tree, answers[: len(tree)]) == walk(tree, alone)
    with pytest.raises(ValueError, match="target_ids"):
        walk(tree, answers)


@pytest.mark.parametrize("verify", [walk, verify_linear])
def test_target_ids_come_as_tensor_array_or_list(verify):
    tree = build_best_first(torch.zeros(2, 2), 6, root_token=0)
    targets = [1, 0, 1, 0, 1, 0, 1]
    assert verify(tree, targets) == verify(tree, np.array(targets)) == verify(tree, torch.tensor(targets))
    assert verify(tree, torch.tensor(targets, dtype=torch.int32)) == verify(tree, targets)
    assert isinstance(verify(tree, torch.tensor(targets)).bonus_token, int)
    for wrong in (targets[:-1], [targets], []):
        with pytest.raises(ValueError, match="target_ids must have shape"):
            verify(tree, wrong)
    with pytest.raises(TypeError, match="integers"):
        verify(tree, torch.zeros(7))


def test_only_known_orders_are_taken():
    with pytest.raises(ValueError, match='order must be "dfs" or "index", got \'bfs\''):
        verify_linear(build_best_first(torch.zeros(1, 2), 1, root_token=0), [0, 0], "bfs")


@pytest.mark.parametrize("stops", [STOP, [STOP], (STOP, 99), {STOP}, torch.tensor([STOP])])
@pytest.mark.parametrize(
    ("drafted", "bonus", "kept"),
    [
        ([X, STOP, Y], 9, (X, STOP)),  # inside the path: no token after it, no bonus
        ([STOP, X], 9, (STOP,)),  # first node
        ([X, STOP], 9, (X, STOP)),  # leaf
        ([X, Y], STOP, (X, Y, STOP)),  # bonus
    ],
)
def test_output_ends_at_the_stop_token(stops, drafted, bonus, kept):
    edges = [(node, node + 1) for node in range(len(drafted))]
    tree = tree_from_edges(edges, [5, *drafted])
    tokens = emitted(tree, [*drafted, bonus])
    assert tokens == (*drafted, bonus)
    assert cut_tokens(tokens, stops, 100) == (kept, "stop")


def test_the_cap_and_the_stop_token():
    tokens = [7, 8, STOP, 9, 4]
    assert cut_tokens(tokens, STOP, 4) == ((7, 8, STOP), "stop")
    assert cut_tokens(tokens, STOP, 2) == ((7, 8), "length")
    assert cut_tokens(tokens, STOP, 3) == ((7, 8, STOP), "stop")  # both on one token
    assert cut_tokens(tokens, STOP, 0) == ((), "length")
    assert cut_tokens(tokens, None, 5) == (tuple(tokens), "length")
    assert cut_tokens(tokens, [], 6) == (tuple(tokens), None)
    assert cut_tokens(tokens, 0, 6) == (tuple(tokens), None)
    with pytest.raises(ValueError, match="room"):
        cut_tokens(tokens, STOP, -1)


def test_stop_ids_are_an_int_several_or_none():
    assert stop_set(None) == frozenset()
    assert stop_set(0) == {0}
    assert stop_set([3, 3, 5]) == {3, 5}
    for wrong in ("3", 1.5, True, ["3"]):
        with pytest.raises(TypeError, match="stop_token_ids"):
            stop_set(wrong)
    with pytest.raises(ValueError, match="stop_token_ids"):
        stop_set([-1])

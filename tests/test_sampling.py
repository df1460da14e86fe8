"""The target's distribution, its draws, and the tokens the walk emits from them, by chi-square on toy vocabularies."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from ddtree_lab.accept import SamplingParams, draw_tokens, filtered_log_probs, sample, view_target, walk
from ddtree_lab.accept.sampling import rank_in_rows
from ddtree_lab.tree import build_best_first, tree_from_edges
from ddtree_lab.types import DraftTree, TargetView

INF = float("inf")
GREEDY = SamplingParams()
REJECT = 1e-4  # a sound sampler fails a seeded test with this probability; a broken one has far less

# The target over five tokens, after nothing and after each token.
FIRST = np.log([0.35, 0.3, 0.2, 0.1, 0.05])
SECOND = np.log(
    [
        [0.1, 0.2, 0.3, 0.25, 0.15],
        [0.5, 0.1, 0.1, 0.1, 0.2],
        [0.05, 0.05, 0.1, 0.2, 0.6],
        [0.2, 0.2, 0.2, 0.2, 0.2],
        [0.01, 0.04, 0.9, 0.03, 0.02],
    ]
)
PARAMS = [
    SamplingParams(1.0),
    SamplingParams(0.6),
    SamplingParams(1.7),
    SamplingParams(1.0, top_k=2),
    SamplingParams(1.0, top_p=0.72),
    SamplingParams(0.8, top_k=3, top_p=0.8),
]


def read_target(logits, tree, *, params, generator=None) -> TargetView:
    """The draw and the view in one, as a round makes them."""
    token_ids = draw_tokens(logits, params=params, generator=generator)
    return view_target(logits, tree, token_ids=token_ids, params=params)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def naive_filter(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities [V] of one row of logits, in float64, from the definitions of temperature, top-k and top-p."""
    scaled = logits / params.temperature
    probs = np.exp(scaled - scaled.max())
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))[: params.top_k]
    kept = np.zeros_like(probs)
    kept[order] = probs[order]
    kept /= kept.sum()
    if params.top_p not in (None, 1):
        reached = 0.0
        for token in order:
            if reached >= params.top_p - 1e-9:
                kept[token] = 0
            reached += kept[token]
    return kept / kept.sum()


def drafted_tree() -> DraftTree:
    """Two levels of a drafter that disagrees with the target, so that rounds end at every depth."""
    q = np.log([[0.02, 0.6, 0.06, 0.3, 0.02], [0.3, 0.1, 0.2, 0.1, 0.3]])
    return build_best_first(torch.from_numpy(q), 7, root_token=0)


def logits_at(tree: DraftTree) -> torch.Tensor:
    """The target's logits [N, 5] at the nodes of a tree of two levels; those below the second level do not matter."""
    rows = [FIRST] + [SECOND[int(token)] for token in tree.token_ids[1:]]
    return torch.from_numpy(np.stack(rows))


def draw_many(log_probs: torch.Tensor, trials: int, generator: torch.Generator) -> torch.Tensor:
    """Targets [trials, N] of many rounds on one tree."""
    nodes = log_probs.shape[0]
    return sample(log_probs.repeat(trials, 1), generator).reshape(trials, nodes)


def walk_many(tree: DraftTree, targets: torch.Tensor) -> Counter[tuple[int, ...]]:
    """How often each sequence was emitted, accepted tokens and bonus, over targets [trials, N]."""
    counts: Counter[tuple[int, ...]] = Counter()
    rows, times = targets.unique(dim=0, return_counts=True)
    for row, count in zip(rows.tolist(), times.tolist(), strict=True):
        acceptance = walk(tree, row)
        counts[(*tree.token_ids[list(acceptance.path[1:])].tolist(), acceptance.bonus_token)] += count
    return counts


def pair_counts(
    emitted: Counter[tuple[int, ...]], params: SamplingParams, generator: np.random.Generator
) -> np.ndarray:
    """Counts [5, 5] of the first two tokens; where a round emitted one, the next round draws from the target."""
    pairs = np.zeros((5, 5))
    for tokens, count in emitted.items():
        if len(tokens) == 1:
            pairs[tokens[0]] += generator.multinomial(count, naive_filter(SECOND[tokens[0]], params))
        else:
            pairs[tokens[0], tokens[1]] += count
    return pairs


def joint(params: SamplingParams) -> np.ndarray:
    """Probabilities [5, 5] of the target's first two tokens."""
    return naive_filter(FIRST, params)[:, None] * np.stack([naive_filter(row, params) for row in SECOND])


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Of chi-square; 0 when an impossible outcome was seen."""
    counts, probs = counts.ravel(), probs.ravel()
    if counts[probs == 0].any():
        return 0.0
    possible = probs > 0
    return float(chisquare(counts[possible], counts.sum() * probs[possible]).pvalue)


def test_first_token_of_a_one_level_tree_is_the_targets():
    q, p = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.3, 0.5])
    trials = 131_072
    tree = build_best_first(torch.from_numpy(np.log(q))[None], 2, root_token=0)
    log_p = torch.from_numpy(np.log(p)).float().repeat(len(tree), 1)
    emitted = walk_many(tree, draw_many(log_p, trials, seeded()))
    first = np.zeros(3)
    for tokens, count in emitted.items():
        first[tokens[0]] += count
    assert abs(first / trials - p).max() < 0.0055
    assert p_value(first, p) > REJECT
    assert p_value(first, q) < REJECT


def test_acceptance_is_the_probability_of_the_children():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    trials = 200_000
    tree = tree_from_edges([(0, 1), (0, 2)], [0, 1, 2])
    log_p = torch.from_numpy(np.log(p)).float().repeat(3, 1)
    emitted = walk_many(tree, draw_many(log_p, trials, seeded(1)))
    first, accepted = np.zeros(4), 0
    for tokens, count in emitted.items():
        first[tokens[0]] += count
        accepted += count * (len(tokens) > 1)
    assert abs(first / trials - p).max() < 0.0045
    assert abs(accepted / trials - 0.45) < 0.0045
    assert p_value(first, p) > REJECT


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_first_two_tokens_are_jointly_the_targets(params):
    tree = drafted_tree()
    log_probs = filtered_log_probs(logits_at(tree), params)
    emitted = walk_many(tree, draw_many(log_probs, 40_000, seeded(2)))
    assert len({len(tokens) for tokens in emitted}) > 1  # rounds end at several levels
    pairs = pair_counts(emitted, params, np.random.default_rng(2))
    assert p_value(pairs, joint(params)) > REJECT
    if params != PARAMS[0]:
        assert p_value(pairs, joint(PARAMS[0])) < REJECT  # the parameters were applied


def test_the_joint_test_rejects_one_draw_shared_by_all_nodes():
    tree, params = drafted_tree(), PARAMS[0]
    cdf = filtered_log_probs(logits_at(tree), params).exp().cumsum(-1)
    uniform = torch.rand(40_000, 1, generator=seeded(3))
    shared = torch.stack([torch.searchsorted(row, uniform[:, 0]).clamp(max=4) for row in cdf], dim=-1)
    pairs = pair_counts(walk_many(tree, shared), params, np.random.default_rng(3))
    assert p_value(pairs, joint(params)) < REJECT


def test_the_joint_test_rejects_a_node_read_under_its_sibling():
    tree, params = drafted_tree(), PARAMS[0]
    log_probs = filtered_log_probs(logits_at(tree), params)
    first_children = (tree.parents == 0).nonzero().flatten()
    log_probs[first_children] = log_probs[first_children.roll(1)]
    pairs = pair_counts(walk_many(tree, draw_many(log_probs, 40_000, seeded(4))), params, np.random.default_rng(4))
    assert p_value(pairs, joint(params)) < REJECT


@pytest.mark.parametrize("params", [PARAMS[0], PARAMS[-1]], ids=str)
def test_the_whole_reading_of_the_target_is_exact(params):
    tree, logits, generator = drafted_tree(), logits_at(drafted_tree()), seeded(5)
    rounds = torch.stack([read_target(logits, tree, params=params, generator=generator).token_ids for _ in range(3000)])
    pairs = pair_counts(walk_many(tree, rounds), params, np.random.default_rng(5))
    assert p_value(pairs, joint(params)) > REJECT
    assert p_value(pairs, np.full((5, 5), 1 / 25)) < REJECT


@pytest.mark.parametrize("width", [1, 2, 127, 128, 129, 400])
def test_draws_follow_the_distribution_across_blocks(width):
    logits = 1.5 * torch.randn(1, width, generator=seeded(width))
    logits[0, width // 2 :: 7] = -INF if width > 2 else 0.0
    log_probs = logits.log_softmax(-1)
    draws = sample(log_probs.expand(100_000, -1), seeded(6))
    counts = np.bincount(draws.numpy(), minlength=width).astype(float)
    assert counts.shape == (width,)
    if width > 1:
        assert p_value(counts, log_probs[0].exp().double().numpy() / float(log_probs.exp().double().sum())) > REJECT


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(monkeypatch, uniform):
    logits = torch.full((3, 300), -INF)
    logits[0, 150] = 0.0
    logits[1, [3, 290]] = 0.0
    logits[2, 100:200] = torch.randn(100, generator=seeded())
    log_probs = logits.log_softmax(-1)
    monkeypatch.setattr(torch, "rand", lambda *size, **options: torch.full(size, uniform, dtype=torch.float64))
    draws = sample(log_probs, seeded())
    assert log_probs[torch.arange(3), draws].isfinite().all()
    assert draws.tolist()[:2] == ([150, 3] if uniform == 0 else [150, 290])


def test_draws_are_seeded_and_independent_between_nodes():
    log_probs = torch.zeros(2, 64).log_softmax(-1).repeat(5000, 1)
    draws = sample(log_probs, seeded(8))
    assert torch.equal(draws, sample(log_probs, seeded(8)))
    assert not torch.equal(draws, sample(log_probs, seeded(9)))
    pairs = np.zeros((4, 4))
    for a, b in (draws.reshape(-1, 2) // 16).tolist():
        pairs[a, b] += 1
    assert p_value(pairs, np.full((4, 4), 1 / 16)) > REJECT


@pytest.mark.parametrize("kind", ["normal", "ties", "wide", "flat"])
def test_filters_equal_their_definition(kind):
    generator = np.random.default_rng(9)
    width = {"wide": 1500, "flat": 700}.get(kind, 12)
    for _ in range(20 if width > 12 else 300):
        logits = generator.normal(size=(2, width)) * {"wide": 4, "flat": 0.1}.get(kind, 2)
        if kind == "ties":
            logits = logits.round()
        params = SamplingParams(
            temperature=float(generator.choice([0.25, 1.0, 2.0])),
            top_k=generator.choice([None, 1, 3, width, width + 5]),
            top_p=generator.choice([None, 0.05, 0.55, 0.9, 1.0]),
        )
        logits = torch.from_numpy(logits).float()
        expected = np.stack([naive_filter(row.double().numpy(), params) for row in logits])
        actual = filtered_log_probs(logits, params)
        assert (actual.isfinite().numpy() == (expected > 0)).all()
        np.testing.assert_allclose(actual.exp().numpy(), expected, rtol=2e-5, atol=1e-7)


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = torch.from_numpy(np.log([[0.5, 0.3, 0.15, 0.05]]))
    for top_p, kept in [(1e-9, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (0.95, 3), (0.96, 4), (1.0, 4)]:
        log_probs = filtered_log_probs(logits, SamplingParams(1.0, top_p=top_p))
        assert log_probs.isfinite().sum() == kept
        assert log_probs.exp().sum() == pytest.approx(1)


def test_equal_logits_keep_the_smaller_ids():
    logits = torch.tensor([[1.0, 4.0, 4.0, 0.0, 4.0]])
    assert filtered_log_probs(logits, SamplingParams(1.0, top_k=2)).isfinite()[0].nonzero().flatten().tolist() == [1, 2]
    assert filtered_log_probs(torch.zeros(1, 4), SamplingParams(1.0, top_p=0.5)).isfinite().tolist() == [
        [True, True, False, False]
    ]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-30, 1e-3])
def test_a_tiny_temperature_is_the_argmax_without_overflow(temperature):
    logits = torch.tensor([[-80.0, 3.0, 90.0, -INF]])
    log_probs = filtered_log_probs(logits, SamplingParams(temperature))
    assert log_probs.tolist() == [[-INF, -INF, 0.0, -INF]] or log_probs.argmax() == 2
    assert not log_probs.isnan().any()
    assert sample(log_probs, seeded()).tolist() == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_maxima_give_the_smallest_id(dtype):
    logits = torch.zeros(3, 12, dtype=dtype)
    logits[:, [5, 9]] = 3.0
    logits[2] = 1.0
    view = read_target(logits, tree_from_edges([(0, 1), (0, 2)], [0, 9, 5]), params=GREEDY)
    assert view.token_ids.tolist() == [5, 5, 0]
    assert view.gaps.tolist() == [0.0, 0.0, 0.0]
    assert view.node_ranks.tolist() == [0, 1, 0]
    wide = torch.zeros(1, 49_152, dtype=dtype)
    wide[0, [7_000, 40_000]] = 1.0
    assert read_target(wide, tree_from_edges([], [0]), params=GREEDY).token_ids.tolist() == [7_000]


def test_the_view_holds_the_targets_opinion_of_every_node(random_logits):
    tree = build_best_first(random_logits(4, 30), 20, root_token=3)
    logits = random_logits(len(tree), 30, seed=1)
    view = read_target(logits, tree, params=GREEDY)
    log_probs = logits.log_softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(view.token_ids, order.indices[:, 0])
    assert torch.equal(view.gaps, order.values[:, 0] - order.values[:, 1])
    assert view.node_log_probs[0] == 0 and view.node_ranks[0] == 0
    for node in range(len(tree)):
        assert view.log_probs[node] == log_probs[node, view.token_ids[node]]
        if node:
            parent, token = int(tree.parents[node]), int(tree.token_ids[node])
            assert view.node_log_probs[node] == log_probs[parent, token]
            assert view.node_ranks[node] == order.indices[parent].tolist().index(token)


def test_the_view_at_a_temperature_is_of_the_filtered_distribution(random_logits):
    tree = build_best_first(random_logits(4, 30), 20, root_token=3)
    logits = random_logits(len(tree), 30, seed=2)
    params = SamplingParams(0.7, top_k=4, top_p=0.9)
    view = read_target(logits, tree, params=params, generator=seeded())
    log_probs = filtered_log_probs(logits, params)
    assert torch.equal(view.log_probs, log_probs.gather(-1, view.token_ids[:, None])[:, 0])
    assert torch.equal(view.node_log_probs[1:], log_probs[tree.parents[1:], tree.token_ids[1:]])
    greedy = read_target(logits, tree, params=GREEDY)
    assert torch.equal(view.gaps, greedy.gaps) and torch.equal(view.node_ranks, greedy.node_ranks)
    for field in ("token_ids", "node_ranks"):
        assert getattr(view, field).dtype == torch.int64
    for field in ("log_probs", "gaps", "node_log_probs"):
        assert getattr(view, field).dtype == torch.float32


def test_ranks_row_by_row_equal_ranks_of_all_rows_at_once():
    generator = np.random.default_rng(11)
    for _ in range(200):
        logits = torch.from_numpy(generator.integers(0, 4, size=(6, 9)).astype(np.float32))
        tree = tree_from_edges([(0, 1), (0, 2), (1, 3), (1, 4), (3, 5)], [8, 1, 2, 4, 0, 8])
        expected = rank_in_rows(logits[tree.parents[1:]], tree.token_ids[1:])
        assert torch.equal(read_target(logits, tree, params=GREEDY).node_ranks[1:], expected)


def test_one_token_vocabulary_has_an_infinite_gap():
    view = read_target(torch.zeros(1, 1), tree_from_edges([], [0]), params=GREEDY)
    assert (view.token_ids.tolist(), view.gaps.tolist()) == ([0], [INF])


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0), SamplingParams(0.5, top_k=2)], ids=str)
@pytest.mark.parametrize("value", [float("nan"), INF])
def test_logits_without_a_distribution_name_their_row(params, value):
    tree = tree_from_edges([(0, 1), (0, 2)], [0, 1, 2])
    logits = torch.zeros(3, 200)
    logits[1, 150] = value
    with pytest.raises(ValueError, match="row 1 is no distribution"):
        read_target(logits, tree, params=params, generator=seeded())
    with pytest.raises(ValueError, match="row 0 is no distribution"):
        read_target(torch.full((3, 200), -INF), tree, params=params, generator=seeded())


def test_wrong_readings_are_named():
    tree = tree_from_edges([(0, 1)], [0, 6])
    with pytest.raises(ValueError, match="N = 2 nodes"):
        read_target(torch.zeros(3, 8), tree, params=GREEDY)
    with pytest.raises(ValueError, match="node 1: token 6 is outside the target's 5 tokens"):
        read_target(torch.zeros(2, 5), tree, params=GREEDY)
    with pytest.raises(ValueError, match="generator is needed at temperature 1"):
        read_target(torch.zeros(2, 8), tree, params=SamplingParams(1.0))
    with pytest.raises(ValueError, match="logits must be"):
        filtered_log_probs(torch.zeros(8), GREEDY)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", INF),
        ("top_k", 0),
        ("top_k", -3),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
    ],
)
def test_parameters_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("temperature", "1"), ("top_k", 1.5), ("top_k", True), ("top_p", "0.9")])
def test_parameters_of_the_wrong_kind_are_named(field, value):
    with pytest.raises(TypeError, match=field):
        SamplingParams(**{field: value})


# Drawing and viewing apart


def test_a_draw_is_one_sample_of_the_filtered_distribution_and_no_more(random_logits):
    params, logits = SamplingParams(0.7, top_k=9, top_p=0.9), random_logits(6, 300)
    ours, theirs = seeded(7), seeded(7)
    drawn = draw_tokens(logits, params=params, generator=ours)
    assert torch.equal(drawn, sample(filtered_log_probs(logits, params), theirs))
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_a_draw_needs_no_tree_and_any_number_of_rows(random_logits):
    for rows in (1, 2, 33):
        logits = random_logits(rows, 50, seed=rows)
        for params in (GREEDY, SamplingParams(1.0)):
            drawn = draw_tokens(logits, params=params, generator=seeded())
            assert (drawn.shape, drawn.dtype, drawn.device.type) == ((rows,), torch.int64, "cpu")
        assert torch.equal(draw_tokens(logits, params=GREEDY), logits.argmax(-1))


def test_the_argmax_uses_no_randomness(random_logits):
    generator, logits = seeded(8), random_logits(4, 50)
    before = generator.get_state()
    assert torch.equal(draw_tokens(logits, params=GREEDY, generator=generator), draw_tokens(logits, params=GREEDY))
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_equal_maxima_are_drawn_as_the_smallest_id(dtype):
    logits = torch.zeros(2, 49_152, dtype=dtype)
    logits[0, [9_000, 5, 40_000]] = 3.0
    assert draw_tokens(logits, params=GREEDY).tolist() == [5, 0]


def test_viewing_reads_the_tokens_given_and_draws_none(random_logits):
    tree = build_best_first(random_logits(3, 12), 8, root_token=3)
    logits, params = random_logits(len(tree), 12, seed=1), SamplingParams(0.8)
    log_probs = filtered_log_probs(logits, params)
    views = []
    for shift in (0, 5):
        token_ids = (torch.arange(len(tree)) + shift) % 12
        views.append(view_target(logits, tree, token_ids=token_ids, params=params))
        assert torch.equal(views[-1].token_ids, token_ids)
        assert torch.equal(views[-1].log_probs, log_probs[torch.arange(len(tree)), token_ids])
    for name in ("gaps", "node_log_probs", "node_ranks"):
        assert torch.equal(getattr(views[0], name), getattr(views[1], name))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0)], ids=str)
def test_wrong_logits_are_named_by_the_draw_and_by_the_view(params):
    tree = tree_from_edges([(0, 1)], [0, 1])
    for value in (float("nan"), INF):
        logits = torch.zeros(2, 200)
        logits[1, 150] = value
        with pytest.raises(ValueError, match="row 1 is no distribution"):
            draw_tokens(logits, params=params, generator=seeded())
        with pytest.raises(ValueError, match="row 1 is no distribution"):
            view_target(logits, tree, token_ids=torch.zeros(2, dtype=torch.int64), params=params)
    for shape in ((5,), (1, 2, 5), (2, 0)):
        with pytest.raises(ValueError, match="logits must be"):
            draw_tokens(torch.zeros(shape), params=params, generator=seeded())
    with pytest.raises(ValueError, match="N = 2 nodes"):
        view_target(torch.zeros(3, 5), tree, token_ids=torch.zeros(3, dtype=torch.int64), params=params)
    with pytest.raises(ValueError, match="node 1: token 1 is outside the target's 1 tokens"):
        view_target(torch.zeros(2, 1), tree, token_ids=torch.zeros(2, dtype=torch.int64), params=params)


def test_a_draw_above_temperature_0_needs_a_generator():
    with pytest.raises(ValueError, match=r"generator is needed at temperature 0\.5"):
        draw_tokens(torch.zeros(1, 5), params=SamplingParams(0.5))

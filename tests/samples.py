"""Runs made without a model: a rule for the target's next token, seeded logits, the library's own verification."""

from __future__ import annotations

import torch

from ddtree_lab.accept import verify_linear, walk
from ddtree_lab.tree import build_best_first, build_chain
from ddtree_lab.types import Acceptance, DraftTree, Round, RunResult, TargetView

VOCAB = 50
PROMPT = (3, 1, 4, 1, 5)


def next_token(prefix: tuple[int, ...]) -> int:
    """The target's token after ``prefix``; depends on its order and length, and is sometimes 0."""
    return (sum((index + 1) * token for index, token in enumerate(prefix[-6:])) + 7 * len(prefix)) % VOCAB


def sample_run(
    mode: str = "tree_walk",
    *,
    tokens: int = 24,
    depth: int = 5,
    budget: int = 12,
    width: int = 8,
    seed: int = 0,
    boost: float = 4.0,
    temperature: float = 0.0,
) -> RunResult:
    """Greedy decoding by ``next_token`` in any mode, cut at ``tokens`` new tokens."""
    generator = torch.Generator().manual_seed(seed)
    output = [next_token(PROMPT)]
    rounds: list[Round] = []
    while len(output) < tokens:
        context = (*PROMPT, *output)
        horizon = 0 if mode == "ar" else depth
        logits = torch.randn(horizon, VOCAB, generator=generator)
        future = context
        for row in logits:
            row[next_token(future)] += boost
            future = (*future, next_token(future))
        build = build_chain if mode == "chain" else build_best_first
        tree = build(logits, horizon if mode == "chain" else budget, root_token=output[-1])
        targets = torch.tensor([next_token(node_context(context, tree, node)) for node in range(len(tree))])
        acceptance = (verify_linear if mode == "eagle_linear" else walk)(tree, targets)
        tokens_kept = [*tree.token_ids[list(acceptance.path[1:])].tolist(), acceptance.bonus_token]
        emitted = tuple(tokens_kept[: tokens - len(output)])
        top = logits.log_softmax(-1).topk(width)
        noise = torch.rand(3, len(tree), generator=generator)
        rounds.append(
            Round(
                past_length=len(context) - 1,
                tree=tree,
                draft_token_ids=top.indices,
                draft_log_probs=top.values,
                target=TargetView(
                    token_ids=targets,
                    log_probs=-noise[0],
                    gaps=noise[1],
                    node_log_probs=-3 * noise[2],
                    node_ranks=torch.arange(len(tree)) % 7,
                ),
                acceptance=acceptance,
                emitted=emitted,
                stage_seconds={"draft": 0.1 + len(rounds) / 3, "verify": 1 / 3},
            )
        )
        output += emitted
    return RunResult(
        mode=mode,
        prompt_ids=PROMPT,
        output_ids=output,
        rounds=rounds,
        stop_reason="length",
        stats={"tau": 1.25, "decode_seconds": 0.5, "nothing": None},
        meta={"target": "rule", "temperature": temperature, "budget": budget, "label": "toy"},
    )


def node_context(context: tuple[int, ...], tree: DraftTree, node: int) -> tuple[int, ...]:
    """``context`` (the root's token last) and the tokens from the root's child down to ``node``."""
    above: list[int] = []
    while node:
        above.append(int(tree.token_ids[node]))
        node = int(tree.parents[node])
    return (*context, *reversed(above))


def make_round(
    *,
    parents: list[int],
    tokens: list[int],
    targets: list[int],
    log_probs: list[float] | None = None,
    draft: list[list[int]] | None = None,
    kept: int | None = None,
    past_length: int = 5,
    acceptance: Acceptance | None = None,
    gap: float = 1.0,
) -> Round:
    """One round from plain lists, walked; ``kept`` cuts what it emits. Without ``draft`` the draft has no columns."""
    depths, ranks = [0], [0]
    for node, parent in enumerate(parents[1:], start=1):
        depths.append(depths[parent] + 1)
        ranks.append(sum(other == parent for other in parents[1:node]))
    tree = DraftTree(tokens, parents, depths, ranks, log_probs or [-float(depth) for depth in depths])
    acceptance = acceptance or walk(tree, targets)
    emitted = (*(tokens[node] for node in acceptance.path[1:]), acceptance.bonus_token)
    ids = torch.tensor(draft, dtype=torch.int64) if draft else torch.zeros(max(depths), 0, dtype=torch.int64)
    count = len(tokens)
    return Round(
        past_length=past_length,
        tree=tree,
        draft_token_ids=ids,
        draft_log_probs=torch.zeros(ids.shape),
        target=TargetView(
            token_ids=torch.tensor(targets),
            log_probs=torch.zeros(count),
            gaps=torch.full((count,), gap),
            node_log_probs=torch.zeros(count),
            node_ranks=torch.zeros(count, dtype=torch.int64),
        ),
        acceptance=acceptance,
        emitted=emitted[:kept],
    )

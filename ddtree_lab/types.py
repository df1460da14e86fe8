"""The values that flow through a round: tree -> acceptance -> round -> run. No computation, no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

MODES = ("ar", "chain", "eagle_linear", "tree_walk")  # plain decoding, a chain, two verifications of a tree
RECORDED_RANKS = 32  # tokens of the drafter's distribution that a round keeps per depth


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A draft tree on the host. Node 0 is the root: the last committed token, whose KV is not cached yet.

    Nodes stand in the order of building and parents precede children. Every field has N = 1 + drafted nodes rows.
    Anything ``torch.as_tensor`` takes is accepted and stored as a CPU tensor of the dtype given here.

    Raises TypeError naming a field of another kind of number (bools are not integers), ValueError naming the node when
    the fields do not form a tree (``ddtree_lab.tree.validate``).
    """

    token_ids: Tensor  # [N] int64
    parents: Tensor  # [N] int64, parents[0] == -1
    depths: Tensor  # [N] int64, depths[0] == 0
    ranks: Tensor  # [N] int64: rank of the token within its depth's distribution, 0 the most probable; root 0
    log_probs: Tensor  # [N] float32: log-probability of the path from the root; root 0.0

    def __post_init__(self) -> None:
        from ddtree_lab.tree.validate import as_vector_of, check_tree  # the tree package imports this module

        for name in ("token_ids", "parents", "depths", "ranks"):
            object.__setattr__(self, name, as_vector_of(name, getattr(self, name), torch.int64))
        object.__setattr__(self, "log_probs", as_vector_of("log_probs", self.log_probs, torch.float32))
        check_tree(self.token_ids, self.parents, self.depths, self.ranks, self.log_probs)

    def __len__(self) -> int:
        """N, the root included."""
        return self.token_ids.shape[0]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DraftTree):
            return NotImplemented
        names = ("token_ids", "parents", "depths", "ranks", "log_probs")
        return all(torch.equal(getattr(self, name), getattr(other, name)) for name in names)

    def __repr__(self) -> str:
        root, depth = int(self.token_ids[0]), int(self.depths.max())
        return f"DraftTree({self.budget_used} drafted nodes, {depth} deep, root {root})"

    def _repr_html_(self) -> str:
        """The tree as a picture with token ids; ``ddtree_lab.viz.show_tree`` shows texts."""
        from ddtree_lab.viz.picture import show_tree  # pictures are made of the types here

        return show_tree(self)._repr_html_()

    @property
    def budget_used(self) -> int:
        """Drafted nodes: N - 1."""
        return len(self) - 1

    def children(self) -> list[list[int]]:
        """For each node the indices of its children, in node order."""
        children: list[list[int]] = [[] for _ in range(len(self))]
        for node, parent in enumerate(self.parents.tolist()[1:], start=1):
            children[parent].append(node)
        return children


@dataclass(frozen=True)
class Acceptance:
    """What verification kept of a tree."""

    path: tuple[int, ...]  # node indices from the root, path[0] == 0
    bonus_token: int  # the target's token after the last node of the path
    false_continuations: int = 0  # EAGLE-linear only: matches whose predecessor in the sequence is not the parent

    @property
    def num_accepted(self) -> int:
        """Drafted nodes accepted: the root is not counted."""
        return len(self.path) - 1

    @property
    def acceptance_length(self) -> int:
        """Tokens this round can emit: the accepted ones and the bonus token."""
        return len(self.path)


@dataclass(frozen=True, eq=False)
class TargetView:
    """What the target said at every node of a verified tree.

    ``token_ids`` is the draw that verification used: the argmax at temperature 0 (smallest id on a tie), a sample
    otherwise. The log-probabilities are those of the distribution drawn from (after temperature, top-k and top-p at
    temperature > 0; the plain softmax at 0).
    """

    token_ids: Tensor  # [N] int64: the target's token after each node
    log_probs: Tensor  # [N] float32: its log-probability
    gaps: Tensor  # [N] float32: top-1 minus top-2 raw logit
    node_log_probs: Tensor  # [N] float32: the target's log-probability of the node's own token after its parent; root 0
    node_ranks: Tensor  # [N] int64: rank of the node's own token in the target's distribution after its parent; root 0


@dataclass(frozen=True, eq=False)
class Round:
    """One round, with everything needed to replay it without a model."""

    past_length: int  # committed tokens before the root
    tree: DraftTree
    draft_token_ids: Tensor  # [D, K] int64: its K <= RECORDED_RANKS most probable tokens per depth, best first
    draft_log_probs: Tensor  # [D, K] float32: their log-probabilities
    target: TargetView
    acceptance: Acceptance
    emitted: tuple[int, ...]  # tokens kept: the path's, then the bonus, cut at a stop token or the length cap
    stage_seconds: Mapping[str, float] = field(default_factory=dict)  # draft, tree_build, verify, accept, commit, ...

    def __repr__(self) -> str:
        return (
            f"Round(past {self.past_length}, {self.tree!r}, {self.acceptance.num_accepted} accepted, "
            f"{len(self.emitted)} emitted)"
        )

    def _repr_html_(self) -> str:
        """The tree and both verdicts as a picture with token ids; ``ddtree_lab.viz.show_round`` shows texts."""
        from ddtree_lab.viz.picture import show_round

        return show_round(self)._repr_html_()

    @property
    def root_token(self) -> int:
        return int(self.tree.token_ids[0])

    @property
    def num_accepted_kept(self) -> int:
        """Accepted drafted nodes whose token was kept."""
        return min(self.acceptance.num_accepted, len(self.emitted))


@dataclass(frozen=True, eq=False)
class RunResult:
    """One prompt decoded in one mode."""

    mode: str  # "ar", "chain", "eagle_linear", "tree_walk"
    prompt_ids: tuple[int, ...]
    output_ids: list[int]  # new tokens only, the prefill's token first
    rounds: list[Round]
    stop_reason: str  # "stop" or "length"
    stats: Mapping[str, object]  # ddtree_lab.metrics.summarise_rounds, plus the times of the run
    meta: Mapping[str, object] = field(default_factory=dict)  # target, drafter, budget, temperature, seed, dtype, label

    def __repr__(self) -> str:
        return (
            f"RunResult({self.mode}, {len(self.output_ids)} tokens in {len(self.rounds)} rounds, "
            f"stop reason {self.stop_reason!r})"
        )

    def _repr_html_(self) -> str:
        """The row of ``ddtree_lab.viz.run_table``."""
        from ddtree_lab.viz.tables import run_table

        return run_table([self])._repr_html_()

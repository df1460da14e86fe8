"""Small tables that show themselves in a notebook: runs, drafts and trees -> figures side by side.

Every figure is a count, a ratio of counts or a short probability. There are no times here, so the same tokens give the
same table anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ddtree_lab.metrics import linear_against_walk, per_depth, per_depth_conditional
from ddtree_lab.types import DraftTree, RunResult
from ddtree_lab.viz.drawing import probability
from ddtree_lab.viz.tokens import escape, token_decoder, visible
from ddtree_lab.wording import aligned

if TYPE_CHECKING:
    from ddtree_lab.target.protocol import Target

NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """Text cells under a head, the first column naming the row. ``repr`` aligns them for a terminal."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    def __repr__(self) -> str:
        lines = aligned((self.head, *self.rows))
        return "\n".join([self.caption, *lines] if self.caption else lines)

    def _repr_html_(self) -> str:
        head = "".join(_cell("th", "col", text, first=not index) for index, text in enumerate(self.head))
        body = "".join(
            f"<tr>{_cell('th', 'row', row[0], first=True)}{''.join(map(_data_cell, row[1:]))}</tr>" for row in self.rows
        )
        caption = f"<p>{escape(self.caption)}</p>" if self.caption else ""
        return f"{caption}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def run_table(results: Iterable[RunResult]) -> Table:
    """One row a run: mode, drafted nodes per round, tau, rounds, tokens, forwards of the target, and whether the
    tokens are plain decoding's.

    Tokens are those of the rounds; the first token of a run comes from the prompt's own forward and belongs to none.
    The last column is there when a run of mode "ar" of the same prompt is among the results, and compares at
    temperature 0 only. A drafter's label stands beside the mode.
    """
    results = list(results)
    plain = {result.prompt_ids: result for result in results if result.mode == "ar"}
    head = ("mode", "nodes per round", "tau", "rounds", "tokens", "target forwards")
    rows = [_run_row(result) for result in results]
    if plain:
        head = (*head, "identical to ar")
        rows = [
            (*row, _identical(result, plain.get(result.prompt_ids))) for row, result in zip(rows, results, strict=True)
        ]
    return Table(head, tuple(rows))


def depth_table(results: Iterable[RunResult]) -> Table:
    """One row a depth, one column a run that drafted: the share of all rounds that accepted the depth, and in brackets
    the share of the rounds that accepted the depth before. Depths that no run reached are left out."""
    drafted = [result for result in results if any(round_.tree.budget_used for round_ in result.rounds)]
    shares = [per_depth(result.rounds) for result in drafted]
    given = [per_depth_conditional(result.rounds) for result in drafted]
    deepest = max((sum(share > 0 for share in column) for column in shares), default=0)
    rows = [
        (str(depth + 1), *(_share(column, depth, before) for column, before in zip(shares, given, strict=True)))
        for depth in range(deepest)
    ]
    caption = "Share of all rounds that accepted this depth (of the rounds that accepted the depth before)"
    head = ("depth", *(f"{_name(result)}, {len(result.rounds)} rounds" for result in drafted))
    return Table(head, tuple(rows), caption)


def verdict_table(results: Mapping[str, RunResult]) -> Table:
    """Both verdicts on the same trees (``metrics.linear_against_walk``): one row a run by its name, then all together.

    Tokens are those that tree-walk keeps; EAGLE-linear's are those less what it loses. Give runs of "tree_walk" that
    drafted. Raises ValueError for a run of another mode.
    """
    for name, result in results.items():
        if result.mode != "tree_walk":
            raise ValueError(f"results must hold runs of tree_walk, got {result.mode!r} for {name!r:.40}")
    rounds = {name: result.rounds for name, result in results.items()}
    rounds["all"] = [round_ for result in results.values() for round_ in result.rounds]
    head = ("prompt", "rounds", "tree-walk tokens", "EAGLE-linear tokens", "rounds lost", "false continuations")
    rows = []
    for name, of_run in rounds.items():
        tokens, lost = sum(len(round_.emitted) for round_ in of_run), linear_against_walk(of_run) or {}
        figures = (tokens - lost.get("tokens_lost", 0), lost.get("lost_rounds", 0), lost.get("false_continuations", 0))
        rows.append((visible(name, laid_out=True), *map(str, (len(of_run), tokens, *figures))))
    return Table(head, tuple(rows))


def draft_table(token_ids: Tensor, log_probs: Tensor, *, target: Target | None = None) -> Table:
    """A drafter's most probable tokens, one row a depth and one column a rank, each with its probability.

    ``token_ids`` and ``log_probs`` [D, K] are those of ``tree.rank_rows`` or of a Round. Tokens are shown as texts of
    ``target``'s tokenizer, as ids when there is none.
    """
    decode = token_decoder(target)
    rows = [
        (str(depth), *(f"{visible(decode(i))} {probability(p)}" for i, p in zip(ids, values, strict=True)))
        for depth, (ids, values) in enumerate(zip(token_ids.tolist(), log_probs.tolist(), strict=True), start=1)
    ]
    return Table(("depth", *(f"rank {rank}" for rank in range(1, token_ids.shape[1] + 1))), tuple(rows))


def node_table(tree: DraftTree, *, target: Target | None = None) -> Table:
    """One row a drafted node in order of building: its parent, its path from the root as tokens and as ranks (from 1),
    and the path's probability. Tokens are shown as ``draft_table`` does."""
    decode, parents, ranks = token_decoder(target), tree.parents.tolist(), tree.ranks.tolist()
    texts = [visible(decode(token)) for token in tree.token_ids.tolist()]
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents[1:], start=1):
        paths.append((*paths[parent], node))
    rows = [
        (
            str(node),
            str(parents[node]),
            " ".join(texts[step] for step in paths[node]),
            " ".join(str(ranks[step] + 1) for step in paths[node]),
            probability(float(tree.log_probs[node])),
        )
        for node in range(1, len(tree))
    ]
    return Table(("node", "parent", "path", "ranks", "path probability"), tuple(rows))


def _run_row(result: RunResult) -> tuple[str, ...]:
    rounds = len(result.rounds)
    tokens = sum(len(round_.emitted) for round_ in result.rounds)
    nodes = sum(round_.tree.budget_used for round_ in result.rounds)
    return (
        _name(result),
        f"{round(nodes / rounds, 1):g}" if rounds else NOTHING,
        f"{tokens / rounds:.2f}" if rounds else NOTHING,
        str(rounds),
        str(tokens),
        str(rounds + bool(result.output_ids)),
    )


def _identical(result: RunResult, plain: RunResult | None) -> str:
    if plain is None or max(run.meta.get("temperature") or 0.0 for run in (result, plain)) > 0:
        return NOTHING
    return "yes" if result.output_ids == plain.output_ids else "no"


def _name(result: RunResult) -> str:
    label = result.meta.get("label")
    return f"{result.mode} [{visible(str(label), laid_out=True)}]" if label else result.mode


def _share(shares: list[float], depth: int, given: list[float | None]) -> str:
    if depth >= len(shares):
        return NOTHING
    before = given[depth]
    return f"{shares[depth]:.0%} ({NOTHING if before is None else f'{before:.0%}'})"


def _cell(tag: str, scope: str, text: str, *, first: bool) -> str:
    return f'<{tag} scope="{scope}" style="text-align:{"left" if first else "right"}">{escape(text)}</{tag}>'


def _data_cell(text: str) -> str:
    return f'<td style="text-align:right">{escape(text)}</td>'

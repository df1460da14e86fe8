"""Decoding: a prompt in, a run out. One loop serves every mode: draft -> build -> verify -> accept -> commit.

Plain decoding is the loop over trees of the root alone; a chain is a tree of width 1; EAGLE-linear and tree-walk differ
in the verification only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddtree_lab.accept.linear import verify_linear
from ddtree_lab.accept.sampling import SamplingParams, draw_tokens, view_target
from ddtree_lab.accept.stops import cut_tokens, stop_set
from ddtree_lab.accept.walk import walk
from ddtree_lab.draft.protocol import Drafter
from ddtree_lab.metrics import summarise_rounds
from ddtree_lab.target.protocol import Target
from ddtree_lab.timing import StageClock
from ddtree_lab.tree.best_first import best_first_from_ranking
from ddtree_lab.tree.ranking import rank_rows
from ddtree_lab.tree.validate import as_budget, as_count
from ddtree_lab.types import RECORDED_RANKS, Acceptance, DraftTree, Round, RunResult


@dataclass(frozen=True)
class Mode:
    """How a mode drafts and verifies."""

    width: int | None  # ranks per depth that the tree may use; None for all, 0 for no drafting
    accept: Callable[[DraftTree, Tensor], Acceptance]


MODES = {
    "ar": Mode(0, walk),
    "chain": Mode(1, walk),
    "eagle_linear": Mode(None, verify_linear),
    "tree_walk": Mode(None, walk),
}


@torch.no_grad()
def generate(
    target: Target,
    drafter: Drafter | None,
    input_ids: Tensor | Sequence[int],
    *,
    mode: str,
    budget: int = 32,
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_token_ids: int | Iterable[int] | None = None,
) -> RunResult:
    """Continue a prompt by at most ``max_new_tokens`` tokens.

    ``input_ids`` [1, L] int64 or a list of int. ``mode`` is "ar" (plain decoding, needs no drafter), "chain" (the
    drafter's most probable path, at most ``budget`` nodes), "eagle_linear" or "tree_walk" (best-first tree of
    ``budget`` drafted nodes). ``budget`` is at most ``tree.validate.MAX_BUDGET``. At temperature 0 the tokens are those
    of plain decoding; above, every token is a draw from the target after temperature, top-k and top-p, whatever the
    drafter. ``stop_token_ids`` end the output and are part of it; None for none (``target.stop_token_ids`` has the
    model's own). Output ends at the target's context too, and no tree reaches beyond it. ``seed`` is below 2**64.

    ``stats`` has ``metrics.summarise_rounds`` and seconds: ``prefill_seconds``, ``decode_seconds`` (the rounds without
    the recording of their traces) and ``tokens_per_second`` (the rounds' tokens over that).

    Raises ValueError or TypeError naming the argument that is wrong.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if drafter is None and MODES[mode].width != 0:
        raise ValueError(f"drafter is None; mode {mode!r} needs one")
    if drafter is not None and drafter.target not in (None, target):
        raise ValueError(f"drafter {drafter.name} was loaded for another target than {target.name}")
    prompt = _prompt_tokens(input_ids, target)
    params = SamplingParams(temperature, top_k, top_p)
    cap = min(as_count("max_new_tokens", max_new_tokens), target.context_length - len(prompt))
    budget, seed = as_budget(budget), _checked_seed(seed)
    stops = stop_set(stop_token_ids)
    decoder = _Decoder(target, drafter, MODES[mode], budget, params, seed)

    output_ids: list[int] = []
    rounds: list[Round] = []
    reason = "length" if cap == 0 else None
    if reason is None:
        kept, reason = cut_tokens([decoder.prefill(prompt)], stops, cap)
        output_ids += kept
    prefill_seconds = sum(decoder.clock.take().values())
    while reason is None:
        emit = partial(cut_tokens, stop_token_ids=stops, room=cap - len(output_ids))
        round_, reason = decoder.round(output_ids[-1], emit)
        rounds.append(round_)
        output_ids += round_.emitted

    seconds = sum(s for round_ in rounds for stage, s in round_.stage_seconds.items() if stage != "record")
    stats = summarise_rounds(rounds) | {
        "prefill_seconds": prefill_seconds,
        "decode_seconds": seconds,
        "tokens_per_second": sum(len(r.emitted) for r in rounds) / seconds if rounds else None,
    }
    meta = {
        "target": target.name,
        "drafter": drafter.name if drafter else None,
        "label": drafter.label if drafter and MODES[mode].width != 0 else None,
        "budget": budget,
        "temperature": float(temperature),
        "top_k": None if top_k is None else int(top_k),
        "top_p": None if top_p is None else float(top_p),
        "seed": seed,
        "dtype": str(target.dtype).removeprefix("torch."),
    }
    return RunResult(mode, tuple(prompt), output_ids, rounds, reason, stats, meta)


class _Decoder:
    """The state of one run between its rounds."""

    def __init__(
        self, target: Target, drafter: Drafter | None, mode: Mode, budget: int, params: SamplingParams, seed: int
    ) -> None:
        self.clock = StageClock(target.device)
        self._target, self._mode, self._budget, self._params = target, mode, budget, params
        self._drafter = drafter if mode.width != 0 else None
        self._state = target.new_state(self._drafter.target_layer_ids if self._drafter else ())
        self._draft_state: Any = self._drafter.new_state() if self._drafter else None
        self._generator = torch.Generator().manual_seed(seed)

    def prefill(self, prompt: Sequence[int]) -> int:
        """Run the prompt; the target's first token."""
        with self.clock.stage("prefill"):
            tokens = torch.tensor(prompt)
            output = self._target.prefill(self._state, tokens)
            if self._drafter:
                self._drafter.observe(self._draft_state, tokens, output.hidden)
            return int(draw_tokens(output.logits, params=self._params, generator=self._generator)[0])

    def round(
        self, root_token: int, emit: Callable[[Sequence[int]], tuple[tuple[int, ...], str | None]]
    ) -> tuple[Round, str | None]:
        """One round from the last committed token; its trace, and why output ends if it does."""
        past_length = self._state.length
        with self.clock.stage("draft"):
            logits = self._draft(root_token)
        with self.clock.stage("tree_build"):
            ids, log_probs = rank_rows(logits, max(RECORDED_RANKS, self._budget), vocab_size=self._target.vocab_size)
            ids, log_probs = ids.cpu(), log_probs.cpu()
            # A node beyond the context has no position: learned embeddings end there, and some rope scalings change.
            offered = slice(self._target.context_length - past_length - 1), slice(self._mode.width)
            tree = best_first_from_ranking(ids[offered], log_probs[offered], budget=self._budget, root_token=root_token)
        with self.clock.stage("verify"):
            output = self._target.verify(self._state, tree)
        with self.clock.stage("accept"):
            target_ids = draw_tokens(output.logits, params=self._params, generator=self._generator)
            acceptance = self._mode.accept(tree, target_ids)
            path = list(acceptance.path)
            tokens = [*tree.token_ids[path[1:]].tolist(), acceptance.bonus_token]
            emitted, reason = emit(tokens)
        with self.clock.stage("commit"):
            self._target.commit(self._state, path)
            if self._drafter:
                self._drafter.observe(self._draft_state, tree.token_ids[path], output.hidden[path])
        with self.clock.stage("record"):
            view = view_target(output.logits, tree, token_ids=target_ids, params=self._params)
        round_ = Round(
            past_length=past_length,
            tree=tree,
            draft_token_ids=ids[:, :RECORDED_RANKS],
            draft_log_probs=log_probs[:, :RECORDED_RANKS],
            target=view,
            acceptance=acceptance,
            emitted=emitted,
            stage_seconds=self.clock.take(),
        )
        return round_, reason

    def _draft(self, root_token: int) -> Tensor:
        if self._drafter is None:
            return torch.empty(0, self._target.vocab_size)
        return self._drafter.draft(self._draft_state, root_token)


def _prompt_tokens(input_ids: Tensor | Sequence[int], target: Target) -> list[int]:
    wrong = "input_ids must be token ids, [1, L] or a list of int, got"
    try:
        tokens = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{wrong} {input_ids!r:.60}") from None
    if tokens.ndim == 2 and tokens.shape[0] != 1:
        raise ValueError(f"input_ids must hold one prompt, [1, L] or a list of int, got shape {tuple(tokens.shape)}")
    inexact = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    if tokens.ndim not in (1, 2) or (tokens.numel() and inexact):
        raise TypeError(f"{wrong} {input_ids!r:.60}")
    prompt = tokens.flatten().tolist()
    if not prompt:
        raise ValueError("input_ids is empty; a prompt has at least one token")
    if len(prompt) >= target.context_length:
        raise ValueError(
            f"input_ids has {len(prompt)} tokens; with at least one new token they do not fit the target's context of "
            f"{target.context_length}"
        )
    return prompt


def _checked_seed(seed: int) -> int:
    seed = as_count("seed", seed)
    if seed >= 2**64:
        raise ValueError(f"seed must be below 2**64, got {seed}")
    return seed

"""One optimiser step, and one held-out evaluation, of a drafter on batches of conversations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddtree_lab.draft.dflash_model import DFlashModel
from ddtree_lab.target.dense import DenseTarget
from ddtree_lab.training.acceptance import HeldOut, accepted_depths, chain_rounds, held_out
from ddtree_lab.training.blocks import Blocks, block_masks, make_blocks, sample_anchors
from ddtree_lab.training.config import TrainConfig
from ddtree_lab.training.conversations import Batch, Conversations
from ddtree_lab.training.features import Features, target_features
from ddtree_lab.training.loss import head_loss, position_weights

_EVALUATED_TOGETHER = 32  # conversations
_ROOTS_TOGETHER = 48  # a conversation
_PROCESSES = 4096  # more than a run has


@dataclass(frozen=True, eq=False)
class _Labelled:
    """The M tokens of a batch that the drafter is to predict."""

    hidden: Tensor  # [M, hidden], with a graph
    labels: Tensor  # [M] int64
    weights: Tensor  # [M] float32
    teacher: Tensor  # [M, hidden]: the target's final state where it predicted the label


class Trainer:
    """Holds the drafter, its optimisers and the target that it learns from."""

    def __init__(self, target: DenseTarget, config: TrainConfig, model: DFlashModel, accelerator: Any) -> None:
        self._target, self._config, self._accelerator = target, config, accelerator
        self._plain = model
        self._dflash = model.config
        self._weights = position_weights(self._dflash.horizon, config.decay, target.device)
        self._model, *self.optimizers = accelerator.prepare(model, *_optimizers(model, config))

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, a plateau, and a linear fall to 0."""
        config = self._config
        rise = (step + 1) / max(1, config.warmup)
        fall = (config.steps - step) / max(1.0, config.cooldown * config.steps)
        return config.learning_rate * min(1.0, rise, fall)

    def step(self, step: int, batch: Batch) -> Tensor:
        """One optimiser step on this process's conversations; returns the loss [] of all processes' together.

        Processes hold different numbers of labels. Their gradients are averaged, so each divides by the mean of the
        processes' weights: the average is then the gradient of the loss over all labels.
        """
        labelled = self._labelled(step, batch)
        total = self._accelerator.reduce(labelled.weights.sum(), "mean").clamp(min=1e-9)
        result = head_loss(
            labelled.hidden,
            labelled.labels,
            weights=labelled.weights,
            total=total,
            lm_head=self._target.lm_head,
            teacher=labelled.teacher,
            teacher_share=self._config.teacher_share,
        )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate(step)
            optimizer.zero_grad()
        labelled.hidden.backward(result.gradient)
        self._accelerator.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return self._accelerator.reduce(result.loss, "mean")

    @torch.no_grad()
    def evaluate(self, conversations: Conversations) -> HeldOut:
        """Decode the answers of ``conversations`` as a chain; on one process alone."""
        rounds, emitted = [], 0
        for indices in torch.arange(len(conversations)).split(_EVALUATED_TOGETHER):
            batch = conversations.batch(indices)
            accepted, tokens = chain_rounds(self._accepted(batch).cpu(), batch.written)
            rounds.append(accepted)
            emitted += tokens
        return held_out(torch.cat(rounds), emitted, horizon=self._dflash.horizon)

    def _accepted(self, batch: Batch) -> Tensor:
        """[B, T] int64: depths of the block at each root that are right; 0 where there is no answer."""
        token_ids, written = batch.token_ids.to(self._target.device), batch.written.to(self._target.device)
        features = target_features(self._target, token_ids, self._dflash.target_layer_ids)
        accepted = torch.zeros_like(token_ids)
        for anchors in _all_roots(written):
            blocks = make_blocks(token_ids, written, anchors, self._dflash)
            guesses = self._target.lm_head(self._hidden(self._plain, blocks, features)).argmax(-1)
            accepted.scatter_(1, anchors, accepted_depths(guesses == blocks.labels, blocks.valid))
        return accepted

    def _labelled(self, step: int, batch: Batch) -> _Labelled:
        config, device = self._config, self._target.device
        token_ids, written = batch.token_ids.to(device), batch.written.to(device)
        seed = (config.seed * 1_000_003 + step) * _PROCESSES + self._accelerator.process_index
        anchors = sample_anchors(written, config.anchors, torch.Generator(device).manual_seed(seed))
        blocks = make_blocks(token_ids, written, anchors, self._dflash)
        features = target_features(self._target, token_ids, self._dflash.target_layer_ids)
        hidden = self._hidden(self._model, blocks, features)
        keep = blocks.valid.flatten()
        labels_at = blocks.positions.unflatten(1, (-1, self._dflash.block_size))[..., 1:].flatten(1)
        predicted_at = (labels_at - 1).clamp(max=token_ids.shape[1] - 1)
        teacher = features.final.gather(1, predicted_at[..., None].expand(-1, -1, features.final.shape[-1]))
        return _Labelled(
            hidden=hidden.flatten(0, -2)[keep],
            labels=blocks.labels.flatten()[keep],
            weights=self._weights.expand(blocks.valid.shape).flatten()[keep],
            teacher=teacher.flatten(0, 1)[keep],
        )

    def _hidden(self, model: nn.Module, blocks: Blocks, features: Features) -> Tensor:
        """The drafter's hidden states [B, A, D, hidden] of the mask tokens, in the target's dtype."""
        rows, length = features.final.shape[:2]
        positions = torch.arange(length, device=features.final.device).expand(rows, -1)
        mixed = self._target.dtype != torch.float32
        with torch.autocast(self._target.device.type, torch.bfloat16, enabled=mixed):
            hidden = model(
                self._target.embed(blocks.inputs).float(),
                blocks.positions,
                features.context.float(),
                positions,
                block_masks(blocks.anchors, length, self._dflash),
            )
        hidden = hidden.unflatten(1, (-1, self._dflash.block_size))[:, :, 1:]
        return hidden.to(self._target.dtype)


def _optimizers(model: DFlashModel, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the norms' vectors."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    rate, decay = config.learning_rate, config.weight_decay
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def _all_roots(written: Tensor) -> Iterator[Tensor]:
    """Anchors [B, A] that go together over every written position but the last; positions past it repeat others."""
    first = written.int().argmax(1)
    last = written.shape[1] - 1 - written.flip(1).int().argmax(1)
    for start in range(0, int((last - first).max()), _ROOTS_TOGETHER):
        offsets = torch.arange(start, start + _ROOTS_TOGETHER, device=written.device)
        yield torch.minimum(first[:, None] + offsets, (last - 1).clamp(min=0)[:, None])

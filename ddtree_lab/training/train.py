"""A training run: a target in, a DFlash drafter in the published layout out.

Text -> steps -> checkpoint -> export. The target writes its own conversations, hands out hidden states for them, and a
DFlash network learns to continue random places in its answers. What a stopped run needs to go on is under OUT/work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree_lab.draft.checkpoint import save_drafter
from ddtree_lab.draft.dflash_model import DFlashConfig, DFlashModel
from ddtree_lab.machine import machine_facts
from ddtree_lab.progress import progress_bar
from ddtree_lab.target.dense import DenseTarget
from ddtree_lab.training.card import CardFacts, model_card
from ddtree_lab.training.checkpoint import Progress, load_checkpoint, save_checkpoint
from ddtree_lab.training.config import TrainConfig, WriterConfig
from ddtree_lab.training.conversations import Batch, Conversations
from ddtree_lab.training.files import read_header, save_text
from ddtree_lab.training.log import TrainingLog
from ddtree_lab.training.network import check_same_network, drafter_config, loaded_drafter, new_drafter
from ddtree_lab.training.text import TextFolder, batch_order
from ddtree_lab.training.trainer import Trainer

_HELD_OUT = 128  # conversations, at most an eighth of all
_STEPS_PER_EVALUATION = 500
_SECONDS_PER_CHECKPOINT = 120


@dataclass(frozen=True)
class Run:
    """What to train and where: the target, the settings, and the files under ``out``."""

    target: DenseTarget
    out: Path
    config: TrainConfig
    writer: WriterConfig
    openers: tuple[str, ...]
    mask_token_id: int
    command: str = ""  # for the card
    init_from: Path | None = None  # drafter folder whose weights the first step starts from; None: random ones

    @property
    def text(self) -> TextFolder:
        return TextFolder(
            self.out / "work" / "text",
            self.target,
            self.writer,
            openers=self.openers,
            seed=self.config.seed,
            tokens=self.config.text_tokens,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What a run that goes on must share."""
        own = {"mask_token_id": self.mask_token_id, "init_from": self.init_from and str(self.init_from)}
        return self.text.settings | asdict(self.config) | own

    @property
    def checkpoint(self) -> Path:
        return self.out / "work" / "checkpoint.safetensors"

    @property
    def drafter_config(self) -> DFlashConfig:
        return drafter_config(self.target, self.config, self.mask_token_id)

    def first_drafter(self) -> DFlashModel:
        """The float32 network that the first step starts from."""
        if self.init_from is None:
            return new_drafter(self.target, self.config, self.mask_token_id)
        return loaded_drafter(self.init_from, self.drafter_config).to(self.target.device)

    def log(self, last_step: int) -> TrainingLog:
        return TrainingLog(self.out / "training_log.jsonl", last_step=last_step)


def train(run: Run, accelerator: Any, *, minutes: float | None = None) -> int:
    """Train into ``run.out`` and return the steps that are done, fewer than asked for when ``minutes`` ended it.

    A run that was stopped or killed goes on from its last checkpoint when it is called again. ``accelerator`` is
    accelerate's, one in each process. Raises ValueError when the text does not fill a batch, when processes cannot
    share a batch, when ``run.out`` holds another run, or when ``run.init_from`` is no drafter that fits.
    """
    started = time.monotonic()
    processes = accelerator.num_processes
    if run.config.batch % processes:
        raise ValueError(f"batch must be a multiple of the {processes} processes, got {run.config.batch}")
    _check_before_writing(run)
    late = _deadline(started, minutes, accelerator)
    run.text.write(
        process=accelerator.process_index,
        processes=processes,
        stop=lambda: minutes is not None and time.monotonic() - started > 60 * minutes,
    )
    accelerator.wait_for_everyone()
    if not run.text.complete:
        return 0
    return _train_on(run, run.text.read(), accelerator, late=late, started=started)


def export(run: Run, *, evaluation: str = "") -> int:
    """Write the drafter and its card from the checkpoint as it stands; returns its step.

    ``evaluation`` is the card's section on unseen prompts (``card.evaluation_section``), if any.
    Raises ValueError when there is no checkpoint or it belongs to a run with other settings.
    """
    if not run.checkpoint.exists():
        raise ValueError(f"nothing to export: there is no {run.checkpoint}")
    model = DFlashModel(run.drafter_config)
    progress = load_checkpoint(run.checkpoint, model, settings=run.settings)
    facts = CardFacts(
        target=run.target.name,
        parameters=sum(p.numel() for p in model.parameters()),
        settings=run.settings,
        progress=progress,
        log=run.log(progress.step).entries,
        evaluation=evaluation,
    )
    card = model_card(facts)
    save_drafter(model, run.out, num_target_layers=run.target.num_layers)
    save_text(run.out / "README.md", card)
    return progress.step


def _check_before_writing(run: Run) -> None:
    wanted = run.drafter_config
    if run.init_from is not None:
        check_same_network(run.init_from, wanted)
    if run.checkpoint.exists():
        read_header(run.checkpoint, settings=run.settings)


def _train_on(run: Run, text: Conversations, accelerator: Any, *, late: Callable[[], bool], started: float) -> int:
    held, text = text.split(max(1, min(_HELD_OUT, len(text) // 8)) if len(text) else 0)
    if len(text) < run.config.batch:
        raise ValueError(f"batch must be at most {len(text)}, the conversations of the text, got {run.config.batch}")
    model = run.first_drafter()
    trainer = Trainer(run.target, run.config, model, accelerator)
    progress = Progress()
    if run.checkpoint.exists():
        progress = load_checkpoint(run.checkpoint, model, trainer.optimizers, settings=run.settings)
    log, before = run.log(progress.step), progress.seconds
    origin = {"machine": machine_facts(), "processes": accelerator.num_processes, "command": run.command}
    losses: list[Tensor] = []
    saved = time.monotonic()
    for step, batch in _batches(run.config, text, progress.step, accelerator):
        losses.append(trainer.step(step, batch))
        now = time.monotonic()
        progress = Progress(step + 1, before + now - started, **origin)
        last = late() or progress.step == run.config.steps
        if accelerator.is_main_process:
            if last or progress.step % _STEPS_PER_EVALUATION == 0:
                log.append(_entry(progress, losses, trainer, held))
                losses = []
            if last or now - saved > _SECONDS_PER_CHECKPOINT:
                save_checkpoint(run.checkpoint, model, trainer.optimizers, progress, settings=run.settings)
                saved = time.monotonic()
        if last:
            break
    accelerator.wait_for_everyone()
    return progress.step


def _batches(config: TrainConfig, text: Conversations, first: int, accelerator: Any) -> Iterator[tuple[int, Batch]]:
    """The steps from ``first`` on, each with this process's part of its batch."""
    order = batch_order(text.lengths, batch=config.batch, seed=config.seed, first=first, steps=config.steps)
    if accelerator.is_main_process:
        order = progress_bar(order, "training", total=config.steps - first, unit="step")
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    for step, indices in enumerate(order, start=first):
        yield step, text.batch(indices[mine])


def _entry(progress: Progress, losses: Sequence[Tensor], trainer: Trainer, held: Conversations) -> dict[str, Any]:
    result = trainer.evaluate(held)
    return {
        "step": progress.step,
        "loss": float(torch.stack(list(losses)).mean()),
        "held_out_tau": result.tau,
        "held_out_acceptance": list(result.acceptance),
        "seconds": progress.seconds,
    }


def _deadline(started: float, minutes: float | None, accelerator: Any) -> Callable[[], bool]:
    """Whether the time is over, by the main process's clock: all processes stop after the same step."""
    if minutes is None:
        return lambda: False

    def late() -> bool:
        from accelerate.utils import broadcast

        over = torch.tensor(time.monotonic() - started > 60 * minutes, dtype=torch.int32, device=accelerator.device)
        return bool(broadcast(over))

    return late

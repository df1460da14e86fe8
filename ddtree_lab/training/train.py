"""Drafter training: a target in, a DFlash drafter in the published layout out.

The target writes its own conversations, hands out hidden states for them, and a DFlash network learns to continue
random anchors in its answers. Everything a killed run needs to go on is under OUT/work.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ddtree_lab.draft.checkpoint import save_drafter
from ddtree_lab.draft.dflash_model import DFlashConfig, DFlashModel
from ddtree_lab.progress import progress_bar
from ddtree_lab.target.dense import DenseTarget
from ddtree_lab.training.blocks import Blocks, block_masks, make_blocks, sample_anchors
from ddtree_lab.training.card import model_card
from ddtree_lab.training.checkpoint import load_checkpoint, save_checkpoint
from ddtree_lab.training.features import Features, target_features
from ddtree_lab.training.loss import accepted_depths, head_loss, position_weights
from ddtree_lab.training.writer import SelfWriter, WriterConfig

HELD_OUT_ROWS = 256


@dataclass(frozen=True)
class TrainConfig:
    """A run. Two runs with equal settings on one machine see the same text and the same anchors."""

    text_tokens: int = 20_000_000  # self-written tokens, prompts and answers
    steps: int = 4000
    batch: int = 64  # conversations a step, over all processes
    anchors: int = 48  # blocks per conversation
    num_layers: int = 5
    num_features: int = 5  # layers of the target that the drafter reads
    block_size: int = 16
    learning_rate: float = 1e-3
    warmup: int = 200
    cooldown: float = 0.4  # last share of the steps, in which the learning rate falls to 0
    weight_decay: float = 0.05
    decay: float = 5.0  # of the position weights, in depths
    teacher_share: float = 0.2
    seed: int = 0


def spread_layer_ids(num_layers: int, count: int) -> list[int]:
    """``count`` blocks of the target from its second to its third from last, evenly spread (DFlash's choice)."""
    if not 1 <= count <= num_layers:
        raise ValueError(f"num_features is {count}; the target has {num_layers} layers")
    if count == 1:
        return [num_layers // 2]
    first, last = min(1, num_layers - 1), max(num_layers - 3, count - 1)
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def drafter_config(target: DenseTarget, config: TrainConfig, mask_token_id: int) -> DFlashConfig:
    """The drafter's geometry: the target's width and heads, ``num_layers`` layers."""
    text = target.config
    return DFlashConfig.from_dict(
        {
            "hidden_size": text.hidden_size,
            "intermediate_size": text.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": text.num_attention_heads,
            "num_key_value_heads": text.num_key_value_heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            "rms_norm_eps": text.rms_norm_eps,
            "vocab_size": target.vocab_size,
            "max_position_embeddings": target.context_length,
            "rope_parameters": {"rope_type": "default", "rope_theta": text.rope_parameters["rope_theta"]},
            "layer_types": ["full_attention"] * config.num_layers,
            "num_target_layers": target.num_layers,
            "block_size": config.block_size,
            "dflash_config": {
                "mask_token_id": mask_token_id,
                "target_layer_ids": spread_layer_ids(target.num_layers, config.num_features),
            },
        }
    )


def write_text(
    target: DenseTarget,
    folder: Path,
    *,
    tokens: int,
    writer: WriterConfig,
    openers: Sequence[str],
    seed: int,
    process: int = 0,
    processes: int = 1,
) -> list[Path]:
    """Shards of self-written conversations in ``folder``, at least ``tokens`` tokens; those that exist stay."""
    folder.mkdir(parents=True, exist_ok=True)
    count = -(-tokens // (writer.rows * writer.length))
    paths = [folder / f"{shard:05d}.safetensors" for shard in range(count)]
    todo = [shard for shard in range(process, count, processes) if not paths[shard].exists()]
    self_writer = SelfWriter(target, writer, openers=openers) if todo else None
    for shard in progress_bar(todo, "writing text"):
        text = self_writer.write(seed=seed * 1_000_003 + shard)
        temporary = paths[shard].with_suffix(".tmp")
        save_file({"token_ids": text.token_ids, "written": text.written}, temporary)
        temporary.replace(paths[shard])
    return paths


class Trainer:
    """Steps a drafter over the self-written text."""

    def __init__(self, target: DenseTarget, config: TrainConfig, model: DFlashModel, accelerator: Any) -> None:
        self._target, self._config, self._accelerator = target, config, accelerator
        target.model.requires_grad_(False)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim != 2]
        rate = config.learning_rate
        self.optimizers = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(vectors, lr=rate, weight_decay=0.0, betas=(0.9, 0.95)),
        ]
        self.model, *self.optimizers = accelerator.prepare(model, *self.optimizers)
        self._dflash = model.config
        self._weights = position_weights(self._dflash.horizon, config.decay, target.device)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, a plateau, and a linear fall to 0."""
        config = self._config
        rise = (step + 1) / max(1, config.warmup)
        fall = (config.steps - step) / max(1.0, config.cooldown * config.steps)
        return config.learning_rate * min(1.0, rise, fall)

    def step(self, step: int, token_ids: Tensor, written: Tensor) -> float:
        """One optimiser step on conversations [B, T]; returns the loss."""
        generator = torch.Generator(token_ids.device).manual_seed(step * 7919 + self._accelerator.process_index)
        blocks, features, hidden = self._forward(token_ids, written, self._config.anchors, generator)
        keep = blocks.valid.flatten()
        weights = self._weights.expand(blocks.valid.shape).flatten()[keep]
        teacher_at = (blocks.positions.view(*blocks.anchors.shape, -1)[..., 1:] - 1).clamp(max=token_ids.shape[1] - 1)
        teacher = features.final.gather(1, teacher_at.flatten(1)[..., None].expand(-1, -1, features.final.shape[-1]))
        rows = hidden.flatten(0, -2)[keep]
        result = head_loss(
            rows,
            blocks.labels.flatten()[keep],
            weights=weights,
            lm_head=self._target.lm_head,
            teacher=teacher.flatten(0, 1)[keep],
            teacher_share=self._config.teacher_share,
        )
        rate = self.learning_rate(step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
        rows.backward(result.gradient)
        self._accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return result.loss

    @torch.no_grad()
    def evaluate(self, token_ids: Tensor, written: Tensor, anchors: int = 16) -> list[float]:
        """Held-out acceptance [D]: the fraction of blocks whose chain is right to depth d and beyond."""
        generator = torch.Generator(token_ids.device).manual_seed(0)
        depths, pieces = torch.zeros(self._dflash.horizon, dtype=torch.float64, device=token_ids.device), 0
        for rows in range(0, len(token_ids), 32):
            part = slice(rows, rows + 32)
            blocks, _, hidden = self._forward(token_ids[part], written[part], anchors, generator)
            correct = self._target.lm_head(hidden).argmax(-1) == blocks.labels
            usable = blocks.valid[..., 0]
            depths += accepted_depths(correct[usable], blocks.valid[usable]) * int(usable.sum())
            pieces += int(usable.sum())
        return (depths / pieces).tolist()

    def _forward(
        self, token_ids: Tensor, written: Tensor, anchors: int, generator: torch.Generator
    ) -> tuple[Blocks, Features, Tensor]:
        """Blocks, the target's features, and the drafter's hidden states [B, A, D, hidden] of the mask tokens."""
        rows, length = token_ids.shape
        blocks = make_blocks(token_ids, written, sample_anchors(written, anchors, generator), self._dflash)
        features = target_features(self._target, token_ids, self._dflash.target_layer_ids)
        positions = torch.arange(length, device=token_ids.device).expand(rows, -1)
        with self._accelerator.autocast():
            hidden = self.model(
                self._target.embed(blocks.inputs).float(),
                blocks.positions,
                features.context.float(),
                positions,
                block_masks(blocks.anchors, length, self._dflash),
            )
        hidden = hidden.view(rows, anchors, self._dflash.block_size, -1)[:, :, 1:]
        return blocks, features, hidden.to(self._target.dtype)


def batches(token_ids: Tensor, *, batch: int, seed: int, first: int, steps: int) -> Iterator[Tensor]:
    """Row indices [batch] for the steps from ``first`` on: epochs of a seeded shuffle."""
    rows = len(token_ids)
    per_epoch = rows // batch
    epoch, order = -1, None
    for step in range(first, steps):
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch))
        at = step % per_epoch * batch
        yield order[at : at + batch]


def train(
    target: DenseTarget,
    out: Path,
    config: TrainConfig,
    *,
    writer: WriterConfig,
    openers: Sequence[str] = (),
    mask_token_id: int,
    minutes: float | None = None,
    mixed_precision: str = "no",
    command: str = "",
) -> bool:
    """Train into ``out``; True when the run is complete, False when ``minutes`` ended it before (call again to go on)."""
    from accelerate import Accelerator

    started = time.monotonic()
    accelerator = Accelerator(mixed_precision=mixed_precision, cpu=target.device.type == "cpu")
    main, work = accelerator.is_main_process, out / "work"
    work.mkdir(parents=True, exist_ok=True)
    paths = write_text(
        target,
        work / "text",
        tokens=config.text_tokens,
        writer=writer,
        openers=openers,
        seed=config.seed,
        process=accelerator.process_index,
        processes=accelerator.num_processes,
    )
    accelerator.wait_for_everyone()
    shards = [load_file(path) for path in paths]
    token_ids = torch.cat([s["token_ids"] for s in shards])
    written = torch.cat([s["written"] for s in shards])
    held_out = max(1, min(HELD_OUT_ROWS, len(token_ids) // 8))
    held_ids, held_written = (x[:held_out].to(target.device) for x in (token_ids.long(), written))
    token_ids, written = token_ids[held_out:], written[held_out:]

    torch.manual_seed(config.seed)
    model = DFlashModel(drafter_config(target, config, mask_token_id)).to(target.device)
    _initialise(model)
    trainer = Trainer(target, config, model, accelerator)
    run = asdict(config) | {"target": target.name, "mask_token_id": mask_token_id}
    checkpoint, log = work / "checkpoint.safetensors", out / "training_log.jsonl"
    first = load_checkpoint(checkpoint, model, trainer.optimizers, run) if checkpoint.exists() else 0

    share = config.batch // accelerator.num_processes
    mine = slice(accelerator.process_index * share, (accelerator.process_index + 1) * share)
    indices = batches(token_ids, batch=config.batch, seed=config.seed, first=first, steps=config.steps)
    step, losses, saved = first, [], time.monotonic()
    for step, rows in enumerate(progress_bar(indices, "training", total=config.steps - first), start=first):
        rows = rows[mine]
        losses.append(trainer.step(step, token_ids[rows].to(target.device).long(), written[rows].to(target.device)))
        done = step + 1 == config.steps
        late = minutes is not None and time.monotonic() - started > minutes * 60
        if main and (done or late or (step + 1) % 250 == 0):
            depths = trainer.evaluate(held_ids, held_written)
            entry = {
                "step": step + 1,
                "loss": sum(losses) / len(losses),
                "held_out_tau": 1 + sum(depths),
                "held_out_acceptance": depths,
                "seconds": time.monotonic() - started,
            }
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
            losses.clear()
        if main and (done or late or time.monotonic() - saved > 120):
            save_checkpoint(checkpoint, model, trainer.optimizers, step + 1, run)
            saved = time.monotonic()
        if late and not done:
            return False
    if main:
        save_drafter(model, out, num_target_layers=target.num_layers)
        entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        card = model_card(
            target.name, run, writer, entries, command=command, parameters=sum(p.numel() for p in model.parameters())
        )
        (out / "README.md").write_text(card, encoding="utf-8")
    return True


def _initialise(model: DFlashModel) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ddtree-lab train-drafter``."""
    defaults, text = TrainConfig(), WriterConfig()
    add = parser.add_argument
    add("--target", required=True, help="embedded, random:<preset>, a folder or a hub id")
    add("--out", required=True, type=Path, help="folder of the drafter; a killed run goes on when it is given again")
    add("--mask-token-id", type=int, help="token that stands for an unknown one; by default an unused special token")
    add("--minutes", type=float, help="stop after this time, with what is needed to go on")
    add("--device", default="auto")
    add("--dtype", default="auto", help="of the target")
    for config in (defaults, text):
        for name, value in asdict(config).items():
            if isinstance(value, int | float):
                add(f"--{name.replace('_', '-')}", type=type(value), default=value)


def run(args: argparse.Namespace) -> int:
    """Train as the options say. Returns 0; a run that ``--minutes`` ended says so on the standard error."""
    import sys

    from ddtree_lab.data_files import data_path
    from ddtree_lab.target.load import load_target

    target = load_target(args.target, device=args.device, dtype=args.dtype)
    config = TrainConfig(**{name: getattr(args, name) for name in asdict(TrainConfig())})
    text = {n: getattr(args, n) for n, value in asdict(WriterConfig()).items() if isinstance(value, int | float)}
    openers = data_path("openers.txt").read_text(encoding="utf-8").splitlines()
    complete = train(
        target,
        args.out,
        config,
        writer=WriterConfig(**text),
        openers=openers,
        minutes=args.minutes,
        mask_token_id=default_mask_token(target) if args.mask_token_id is None else args.mask_token_id,
        mixed_precision="bf16" if target.device.type == "cuda" else "no",
        command="ddtree-lab " + " ".join(sys.argv[1:]),
    )
    if not complete:
        print(f"ddtree-lab: stopped after {args.minutes} minutes; give the same command to go on", file=sys.stderr)
    return 0


def default_mask_token(target: DenseTarget) -> int:
    """The special token with the largest id that no template or stop uses: text does not hold it.

    Raises ValueError when the tokenizer has none.
    """
    tokenizer = target.tokenizer
    special = set(getattr(tokenizer, "all_special_ids", ())) | {
        index for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special
    }
    used = set(target.stop_token_ids) | set(
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )
    )
    free = [index for index in sorted(special - used, reverse=True) if index < target.vocab_size]
    if not free:
        raise ValueError("--mask-token-id is needed: the target's tokenizer has no unused special token")
    return free[0]

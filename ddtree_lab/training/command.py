"""``ddtree-lab train-drafter``: options -> a run -> an exit status."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddtree_lab.training.config import TrainConfig, WriterConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command; numbers of ``TrainConfig`` and ``WriterConfig`` have one each."""
    add = parser.add_argument
    add("--target", required=True, help="embedded, a folder or a hub id; it needs a chat template")
    add("--out", required=True, type=Path, help="folder of the drafter; a stopped run goes on when it is given again")
    add("--init-from", type=Path, metavar="FOLDER", help="start from this drafter's weights (default: random ones)")
    add("--minutes", type=float, help="stop after this time, with what is needed to go on")
    add("--export", action="store_true", help="train nothing: write the drafter and its card from the last checkpoint")
    add("--evaluation", type=Path, metavar="FILE", help="a summary.json of compare, for the card")
    add("--mask-token-id", type=int, help="token that stands for an unknown one (default: an unused special token)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:<index>; auto with several processes")
    add("--dtype", default="auto", help="of the target: auto, float32, bfloat16 or float16")
    for name, value in (_numbers(TrainConfig()) | _numbers(WriterConfig())).items():
        add(f"--{name.replace('_', '-')}", type=type(value), default=value, help="(default %(default)s)")
    add(
        "--user-turns",
        type=_ranges,
        default=WriterConfig().user_turns,
        metavar="N-N[,N-N...]",
        help="shortest and longest user turn in tokens (default 1-32,1-96,1-240,240-640)",
    )


def run(args: argparse.Namespace) -> int:
    """Train as the options say. Returns 0; a run that ``--minutes`` ended says so on the standard error."""
    config = TrainConfig(**_given(args, TrainConfig()))
    writer = WriterConfig(**_given(args, WriterConfig()), user_turns=args.user_turns)
    if args.minutes is not None and not 0 <= args.minutes < math.inf:
        raise ValueError(f"minutes must be at least 0, got {args.minutes}")
    evaluation = "" if args.evaluation is None else _evaluation(args.evaluation)
    accelerator = None if args.export else _accelerator(args.device)

    from ddtree_lab.data_files import data_path
    from ddtree_lab.target.load import load_target
    from ddtree_lab.training.chat import default_mask_token
    from ddtree_lab.training.train import Run, export, train

    device = accelerator.device if accelerator is not None and args.device == "auto" else args.device
    target = load_target(args.target, device=device, dtype=args.dtype)
    job = Run(
        target=target,
        out=args.out,
        config=config,
        writer=writer,
        openers=tuple(data_path("openers.txt").read_text(encoding="utf-8").splitlines()),
        mask_token_id=default_mask_token(target) if args.mask_token_id is None else args.mask_token_id,
        command=args.command_line,
        init_from=args.init_from,
    )
    if accelerator is None:
        step = export(job, evaluation=evaluation)
        print(f"Written to {args.out}: the drafter of step {step} of {config.steps}")
        return 0
    step = train(job, accelerator, minutes=args.minutes)
    if accelerator.is_main_process:
        if step == config.steps:
            export(job, evaluation=evaluation)
        else:
            print(
                f"ddtree-lab: stopped after {args.minutes} minutes at step {step} of {config.steps}; "
                "give the same command to go on",
                file=sys.stderr,
            )
    return 0


def _accelerator(device: str) -> Any:
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise ValueError("train-drafter needs accelerate: pip install ddtree-lab[train]") from error
    import torch

    on_cpu = device == "cpu" or not torch.cuda.is_available()
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="no", device_placement=False)
    if accelerator.num_processes > 1 and device not in ("auto", "cpu"):
        raise ValueError(f"device must be auto or cpu with several processes, got {device!r}")
    return accelerator


def _evaluation(path: Path) -> str:
    from ddtree_lab.training.card import evaluation_section

    try:
        return evaluation_section(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"evaluation {path} cannot be used: {error}") from error


def _numbers(config: TrainConfig | WriterConfig) -> dict[str, float]:
    return {name: value for name, value in asdict(config).items() if isinstance(value, int | float)}


def _given(args: argparse.Namespace, config: TrainConfig | WriterConfig) -> dict[str, Any]:
    return {name: getattr(args, name) for name in _numbers(config)}


def _ranges(text: str) -> tuple[tuple[int, int], ...]:
    try:
        pairs = [part.split("-") for part in text.split(",")]
        return tuple((int(low), int(high)) for low, high in pairs)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be like 1-32,100-200, got {text!r:.60}") from None

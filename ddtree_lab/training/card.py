"""The model card of a trained drafter: the recipe, the log's figures and how to repeat them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ddtree_lab.training.writer import WriterConfig


def model_card(
    target: str,
    run: Mapping[str, Any],
    writer: WriterConfig,
    log: Sequence[Mapping[str, Any]],
    *,
    parameters: int,
    command: str,
) -> str:
    """Markdown; every figure comes from ``log``, the lines of training_log.jsonl."""
    last = log[-1]
    seconds = sum(
        entry["seconds"]
        for entry, following in zip(log, [*log[1:], None], strict=True)
        if following is None or following["seconds"] < entry["seconds"]
    )
    depths = "\n".join(f"| {depth} | {share:.3f} |" for depth, share in enumerate(last["held_out_acceptance"], start=1))
    settings = "\n".join(f"| {key} | {value} |" for key, value in (run | asdict(writer)).items())
    return f"""# DFlash drafter for {target}

A block-diffusion drafter in the published DFlash layout (arXiv 2602.06036): {parameters / 1e6:.1f} M parameters, no embedding
and no head of its own. It drafts for one target only: {target}.

## How it was made

The target wrote its own conversations: it sampled a user turn after its chat template's empty user turn, or after one of
the short openers in `data/openers.txt`, and answered it, mostly greedily. The drafter learned to continue random anchors
in those answers from the target's hidden states. No other text was used.

Command: `{command}`

| setting | value |
| --- | --- |
{settings}

## Held-out conversations of the same kind

After {last["step"]} steps and {seconds:.0f} s: chain tau {last["held_out_tau"]:.2f} (accepted depths + 1, mean over anchors), loss
{last["loss"]:.3f}.

| depth | share of blocks right to this depth and beyond |
| --- | --- |
{depths}

The whole course is in `training_log.jsonl`.
"""

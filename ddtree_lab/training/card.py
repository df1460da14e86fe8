"""The model card of a trained drafter: settings, the log's figures and how to repeat them -> Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_lab.training.checkpoint import Progress

_LICENCES = {
    "embedded": (
        "SmolLM2-135M-Instruct is under Apache-2.0. The drafter was trained on that model's outputs and hidden states "
        "alone, so its weights derive from it and are under Apache-2.0 too."
    )
}
_OTHER_LICENCE = (
    "The drafter was trained on the target's outputs and hidden states alone: its weights derive from the target, "
    "whose licence applies to them."
)


@dataclass(frozen=True)
class CardFacts:
    """What a card states."""

    target: str
    parameters: int
    settings: dict[str, Any]  # of the run and its text
    progress: Progress  # of the weights
    log: Sequence[Mapping[str, Any]]  # entries of training_log.jsonl up to that step
    evaluation: str = ""  # what ``evaluation_section`` gave


def model_card(facts: CardFacts) -> str:
    """Markdown; every figure comes from the log or the evaluation."""
    licence = f"## Licence\n\n{_LICENCES.get(facts.target, _OTHER_LICENCE)}"
    sections = [_head(facts), _recipe(facts), _figures(facts), facts.evaluation, licence]
    return "\n\n".join(filter(None, sections)) + "\n"


def _head(facts: CardFacts) -> str:
    step, steps = facts.progress.step, facts.settings["steps"]
    stopped = "" if step == steps else f"\n\n**The run was stopped at step {step} of {steps}.**"
    return f"""# DFlash drafter for {facts.target}

A block-diffusion drafter in the published DFlash layout (arXiv 2602.06036): {facts.parameters / 1e6:.1f} M parameters.
It borrows the target's embedding and head, and drafts for one target only: {facts.target}.{stopped}"""


def _recipe(facts: CardFacts) -> str:
    turns = ", ".join(f"{low}-{high}" for low, high in facts.settings["user_turns"])
    rows = [[key, _plain(value)] for key, value in sorted((facts.settings | {"user_turns": turns}).items())]
    return f"""## How it was made

The target wrote conversations of one user turn and one answer: it sampled the user turn after its chat template's
empty user turn, or after one of the short openers in `data/openers.txt`, and answered it, mostly greedily. The drafter
learned to continue random places in those answers from the target's hidden states (cross-entropy weighted by depth, a
share of it against the target's distribution; Muon for matrices, AdamW for the rest). No other text was used.
It started from {_start(facts.settings["init_from"])}.

Command: `{facts.progress.command}`

Machine: {_machine(facts.progress)}

{_table(["setting", "value"], rows)}"""


def _start(init_from: str | None) -> str:
    return "random weights" if init_from is None else f"the weights of the drafter in `{init_from}`"


def _figures(facts: CardFacts) -> str:
    title = "## Held-out conversations of the same kind"
    if not facts.log:
        return f"{title}\n\nNot measured: the run was stopped before its first evaluation."
    last = facts.log[-1]
    rows = [[str(depth), f"{share:.3f}"] for depth, share in enumerate(last["held_out_acceptance"], start=1)]
    return f"""{title}

Measured at step {last["step"]}, after {last["seconds"]:.0f} s of writing text and training: chain tau
{last["held_out_tau"]:.2f} (tokens per round over the target's answers), training loss {last["loss"]:.3f}.

{_table(["depth", "rounds that accepted it"], rows)}

The whole course is in `training_log.jsonl`."""


def evaluation_section(summary: Mapping[str, Any]) -> str:
    """Markdown of the table that ``ddtree-lab compare`` wrote; ValueError when ``summary`` is not its summary.json."""
    try:
        config = summary["config"]
        rows = [
            [mode, *(_plain(entry.get(key)) for key in ("budget", "tau", "rounds", "tokens", "identical_to_ar"))]
            for mode, entry in summary["modes"].items()
        ]
        settings = ", ".join(f"{key} {_plain(value)}" for key, value in config.items())
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("the evaluation is not a summary.json of ddtree-lab compare") from error
    return f"""## Prompts it never saw

`ddtree-lab compare` with {settings}:

{_table(["mode", "budget", "tau", "rounds", "tokens", "prompts identical to ar"], rows)}"""


def _machine(progress: Progress) -> str:
    machine = progress.machine
    processor = machine.get("gpu") or machine.get("cpu")
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "transformers"))
    return f"{progress.processes} x {processor}, {versions}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _plain(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)

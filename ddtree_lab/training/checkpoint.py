"""A training run's progress on disk: weights, optimiser states and step, in one safetensors file that appears whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from ddtree_lab.training.files import read_header, save_tensors

_MODEL = "model."


@dataclass(frozen=True)
class Progress:
    """How far a run is, and how it came there."""

    step: int = 0
    seconds: float = 0.0  # of all its parts
    machine: Mapping[str, Any] = field(default_factory=dict)  # ddtree_lab.machine.machine_facts of the last part
    processes: int = 1
    command: str = ""


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    progress: Progress,
    *,
    settings: Mapping[str, Any],
) -> None:
    """Replace ``path`` by the present state; ``settings`` are what must be equal when the run goes on."""
    tensors = {_MODEL + name: value for name, value in model.state_dict().items()}
    scalars: dict[str, float] = {}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                into = tensors if isinstance(value, torch.Tensor) else scalars
                into[f"{_optimizer(number)}{index}.{key}"] = value
    header = {"progress": json.dumps(asdict(progress)), "scalars": json.dumps(scalars)}
    save_tensors(path, tensors, settings=settings, header=header)


def load_checkpoint(
    path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = (), *, settings: Mapping[str, Any]
) -> Progress:
    """Restore what ``save_checkpoint`` wrote, the weights alone without ``optimizers``.

    Raises ValueError when the checkpoint cannot be read or belongs to a run with other settings.
    """
    header = read_header(path, settings=settings)
    tensors = load_file(path)
    model.load_state_dict({k.removeprefix(_MODEL): v for k, v in tensors.items() if k.startswith(_MODEL)})
    values = tensors | json.loads(header["scalars"])
    for number, optimizer in enumerate(optimizers):
        states: dict[int, dict[str, Any]] = {}
        for name, value in values.items():
            if name.startswith(_optimizer(number)):
                index, key = name.removeprefix(_optimizer(number)).split(".", 1)
                states.setdefault(int(index), {})[key] = value
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    return Progress(**json.loads(header["progress"]))


def _optimizer(number: int) -> str:
    return f"optimizer.{number}."

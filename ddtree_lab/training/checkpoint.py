"""A training run's progress on disk: weights, optimiser states and step, in one safetensors file that appears whole."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn


def save_checkpoint(
    path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: int, run: dict
) -> None:
    """Replace ``path`` by the present state; ``run`` is what must be equal when the run resumes."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    scalars: dict[str, float] = {}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                name = f"optimizer.{number}.{index}.{key}"
                if isinstance(value, torch.Tensor):
                    tensors[name] = value
                else:
                    scalars[name] = value
    temporary = path.with_suffix(".tmp")
    header = {"step": str(step), "run": json.dumps(run, sort_keys=True), "scalars": json.dumps(scalars)}
    save_file({name: value.contiguous() for name, value in tensors.items()}, temporary, metadata=header)
    os.replace(temporary, path)


def load_checkpoint(path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], run: dict) -> int:
    """Restore what ``save_checkpoint`` wrote and return its step.

    Raises ValueError when the checkpoint belongs to a run with other settings.
    """
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
        saved = json.loads(header["run"])
        if saved != run:
            changed = sorted(key for key in saved.keys() | run.keys() if saved.get(key) != run.get(key))
            raise ValueError(
                f"{path} was written with another {changed[0]} ({saved.get(changed[0])!r}); use another --out"
            )
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    model.load_state_dict({n.removeprefix("model."): v for n, v in tensors.items() if n.startswith("model.")})
    values = tensors | json.loads(header["scalars"])
    for number, optimizer in enumerate(optimizers):
        states: dict[int, dict] = {}
        prefix = f"optimizer.{number}."
        for name, value in values.items():
            if name.startswith(prefix):
                index, key = name.removeprefix(prefix).split(".", 1)
                states.setdefault(int(index), {})[key] = value
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    return int(header["step"])

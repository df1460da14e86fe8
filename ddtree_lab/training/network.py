"""A new drafter for a target: its geometry and its first weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ddtree_lab.draft.checkpoint import load_model
from ddtree_lab.draft.dflash_model import OTHER_FIELDS, SIZES, DFlashConfig, DFlashModel
from ddtree_lab.target.dense import DenseTarget
from ddtree_lab.training.config import TrainConfig


def spread_layer_ids(num_layers: int, count: int) -> list[int]:
    """``count`` blocks of the target from its second to its third from last, evenly spread (DFlash's choice)."""
    if not 1 <= count <= num_layers:
        raise ValueError(f"num_features must be from 1 to the target's {num_layers} layers, got {count}")
    if count == 1:
        return [num_layers // 2]
    first = min(1, num_layers - count)
    last = max(num_layers - 3, first + count - 1)
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def drafter_config(target: DenseTarget, config: TrainConfig, mask_token_id: int) -> DFlashConfig:
    """The target's width, heads and rotary base, ``num_layers`` layers. ValueError for an unknown mask token."""
    text = target.config
    rope = getattr(text, "rope_parameters", None) or {}
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
            "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
            "layer_types": ["full_attention"] * config.num_layers,
            "num_target_layers": target.num_layers,
            "block_size": config.block_size,
            "dflash_config": {
                "mask_token_id": mask_token_id,
                "target_layer_ids": spread_layer_ids(target.num_layers, config.num_features),
            },
        }
    )


def new_drafter(target: DenseTarget, config: TrainConfig, mask_token_id: int) -> DFlashModel:
    """A float32 network on the target's device, its weights drawn from ``config.seed`` (torch's own seed is set)."""
    torch.manual_seed(config.seed)
    model = DFlashModel(drafter_config(target, config, mask_token_id))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model.to(target.device)


def loaded_drafter(folder: Path, wanted: DFlashConfig) -> DFlashModel:
    """A float32 network on the CPU with the weights of a checkpoint folder.

    Raises ValueError when the folder cannot be read or is ``check_same_network``'s to refuse.
    """
    check_same_network(folder, wanted)
    return load_model(folder).float()


def check_same_network(folder: Path, wanted: DFlashConfig) -> None:
    """Raises ValueError when the config.json of ``folder`` cannot be read or describes another network."""
    found, wanted_fields = _geometry(DFlashConfig.from_folder(folder)), _geometry(wanted)
    for name, value in wanted_fields.items():
        if found[name] != value:
            raise ValueError(f"drafter {folder}: {name} is {found[name]}, this run would train one with {value}")


def _geometry(config: DFlashConfig) -> dict[str, object]:
    """What two networks share that can take each other's weights and compute the same."""
    own = {name: getattr(config, name) for name in ("block_size", "mask_token_id", "target_layer_ids", "causal")}
    ignored = ("initializer_range", "max_position_embeddings")
    of_qwen3 = [name for name in (*SIZES, *OTHER_FIELDS, "rope_parameters") if name not in ignored]
    return own | {name: getattr(config.qwen3, name) for name in of_qwen3}

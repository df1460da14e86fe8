"""DFlash checkpoints in the published layout: a folder in, a network out, and back.

A folder holds config.json and *.safetensors with layers.*, fc, hidden_norm and norm. Some engines' exports carry copies
of what a drafter borrows or derives (``IGNORED``); those are never read, the target's own embedding and head are used.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ddtree_lab.draft.dflash_model import OTHER_FIELDS, SIZES, DFlashConfig, DFlashModel
from ddtree_lab.files import replacing

IGNORED = ("rotary_emb.inv_freq", "embed_tokens.weight", "lm_head.weight")


def load_model(folder: str | Path) -> DFlashModel:
    """The network of a checkpoint folder, on the CPU in the file's dtype; nothing in the folder is executed.

    Raises ValueError with one line when a file, a field or a weight is missing, unknown or of another shape.
    """
    folder = Path(folder)
    config = DFlashConfig.from_folder(folder)
    weights = _read_weights(folder)
    layers = {key.split(".")[1] for key in weights if key.startswith("layers.")}
    wanted = config.qwen3.num_hidden_layers
    if wanted > len(layers):
        raise ValueError(f"drafter {folder}: config.json says {wanted} layers, the weights have {len(layers)}")
    try:
        with torch.device("meta"):
            model = DFlashModel(config)
    except Exception as error:  # torch and the rope functions have no class of their own for this
        raise ValueError(f"drafter {folder}: config.json asks for weights or a rope of an impossible size") from error
    expected = model.state_dict()
    missing = sorted(expected.keys() - weights.keys())
    extra = sorted(weights.keys() - expected.keys())
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"has an unknown weight {extra[0]}"
        raise ValueError(f"drafter {folder}: the checkpoint {what}")
    for key, weight in weights.items():
        if weight.shape != expected[key].shape:
            raise ValueError(
                f"drafter {folder}: {key} has shape {list(weight.shape)}, config.json says {list(expected[key].shape)}"
            )
        if not weight.is_floating_point():
            raise ValueError(f"drafter {folder}: {key} has dtype {weight.dtype}; it must be a floating point one")
        if not weight.float().isfinite().all():
            raise ValueError(f"drafter {folder}: {key} has a value that is not finite")
    model.load_state_dict(weights, assign=True)
    model.rotary_emb = _rotary(config, folder)
    return model


def save_drafter(
    model: DFlashModel, folder: str | Path, *, num_target_layers: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config.json and model.safetensors, each whole or not at all, as serving engines read them too.

    ``num_target_layers`` is the number of decoder blocks of the target. Raises OSError when writing fails.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: value.detach().to("cpu", dtype).contiguous() for key, value in model.state_dict().items()}
    config = json.dumps(_config_fields(model.config, num_target_layers, dtype), indent=2) + "\n"
    with replacing(folder / "model.safetensors") as weights_file, replacing(folder / "config.json") as config_file:
        try:
            save_file(weights, weights_file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"drafter {folder}: model.safetensors cannot be written ({error})") from error
        config_file.write_text(config, encoding="utf-8")


def _rotary(config: DFlashConfig, folder: Path) -> Qwen3RotaryEmbedding:
    """The rotary frequencies, which have no weight: ValueError when config.json leads to none or not to finite ones."""
    try:
        rotary = Qwen3RotaryEmbedding(config.qwen3)
        finite = bool(rotary.inv_freq.isfinite().all()) and math.isfinite(rotary.attention_scaling)
        whole = 2 * rotary.inv_freq.numel() == config.qwen3.head_dim
        usable, reason = finite and whole, "its angles are not finite" if whole else "it does not turn whole heads"
    except Exception as error:  # the rope functions divide, take logarithms and index without a check
        usable, reason = False, " ".join(str(error).split()) or type(error).__name__
    if not usable:
        raise ValueError(f"drafter {folder}: the rope parameters of config.json cannot be used ({reason})")
    return rotary


def _read_weights(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"drafter {folder}: no .safetensors file")
    weights: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"drafter {folder}: {file.name} cannot be read (not a regular file)")
        try:
            weights.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"drafter {folder}: {file.name} cannot be read ({error})") from error
    return {key: weight for key, weight in weights.items() if key not in IGNORED}


def _config_fields(config: DFlashConfig, num_target_layers: int, dtype: torch.dtype) -> dict[str, Any]:
    """Rope parameters are written twice: transformers 5 reads ``rope_parameters``, 4 the other two."""
    qwen3 = config.qwen3
    rope = dict(qwen3.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "type")}
    dflash: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.causal is not None:
        dflash["causal"] = config.causal
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        **{name: getattr(qwen3, name) for name in SIZES + OTHER_FIELDS},
        "tie_word_embeddings": False,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "num_target_layers": num_target_layers,
        "block_size": config.block_size,
        "dflash_config": dflash,
    }

"""Target stage: a preset's name -> a small architecture with seeded random weights, for tests and structure checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_SEED = 0

_SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # wide enough that attention is peaked: a wrong mask shows in the logits
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _tiny_dense() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_SMALL)


def _tiny_qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_SMALL)


def _tiny_sliding() -> Any:
    from transformers import Qwen3Config

    layer_types = ["sliding_attention", "full_attention"] * 2
    return Qwen3Config(**_SMALL, use_sliding_window=True, sliding_window=8, layer_types=layer_types)


PRESETS: dict[str, Callable[[], Any]] = {
    "tiny-dense": _tiny_dense,
    "tiny-qwen3": _tiny_qwen3,
    "tiny-sliding": _tiny_sliding,
}


def preset_config(preset: str) -> Any:
    """The transformers config of a preset. An unknown preset is a ValueError that lists those there are."""
    if preset not in PRESETS:
        raise ValueError(f"random preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    return PRESETS[preset]()


def random_model(config: Any, *, dtype: torch.dtype = torch.float32, seed: int = _SEED) -> Any:
    """A CPU model of ``config`` with weights drawn from ``seed``. The global random state is left as it was."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).to(dtype)

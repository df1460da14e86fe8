"""The DFlash block-diffusion network: context features and a block of embeddings in, hidden states of the block out.

Architecture and weight names as published with DFlash (arXiv 2602.06036): Qwen3-style layers whose block tokens attend
to keys and values projected from the target's hidden states and, without a causal mask unless the config asks for one,
to each other.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from ddtree_lab.checks import is_count
from ddtree_lab.files import read_bounded

LAYER_TYPES = ("full_attention", "sliding_attention")
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
OTHER_FIELDS = (
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "use_sliding_window",
    "sliding_window",
    "layer_types",
)
ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
CONFIG_BYTES = 1 << 24
MOST = {"num_hidden_layers": 1024, "block_size": 1024}  # what no weight's shape bounds, far above any published drafter


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


@dataclass(frozen=True)
class DFlashConfig:
    """A drafter checkpoint's config.json, checked."""

    qwen3: Qwen3Config
    block_size: int  # b: the root and b - 1 mask tokens
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # blocks of the target whose outputs are the context features
    causal: bool | None = None  # whether block tokens see only earlier ones; None: in the sliding layers only

    @property
    def horizon(self) -> int:
        return self.block_size - 1

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> DFlashConfig:
        """The fields of a config.json. Raises ValueError naming the first one that is missing or wrong.

        ``layer_types`` alone decides which layers slide. As in vLLM and SGLang, sliding layers are causal and full ones
        are not, unless ``is_causal`` or ``dflash_config.causal`` decides for all.
        """
        dflash = fields.get("dflash_config")
        if not isinstance(dflash, dict):
            raise ValueError("drafter config: dflash_config is missing; a DFlash checkpoint has one")
        for key in ("use_swa", "attention_sink_bias"):
            if dflash.get(key):
                raise ValueError(f"drafter config: dflash_config.{key} is {dflash[key]!r}; it is not supported")
        block_size = fields.get("block_size", dflash.get("block_size"))
        if not is_count(block_size):
            raise ValueError(f"drafter config: block_size is {block_size!r}; it must be an integer of at least 1")
        for key in SIZES:
            if not is_count(fields.get(key)):
                raise ValueError(f"drafter config: {key} is {fields.get(key)!r}; it must be an integer of at least 1")
        for key, value in (("num_hidden_layers", fields["num_hidden_layers"]), ("block_size", block_size)):
            if value > MOST[key]:
                raise ValueError(f"drafter config: {key} is {value}; it must be at most {MOST[key]}")
        heads, groups = fields["num_attention_heads"], fields["num_key_value_heads"]
        if heads % groups:
            raise ValueError(
                f"drafter config: num_attention_heads is {heads}; it must be a multiple of num_key_value_heads {groups}"
            )
        layers = fields["num_hidden_layers"]
        layer_types = fields.get("layer_types")
        if layer_types is None:
            layer_types = ["full_attention"] * layers
        if not isinstance(layer_types, list):
            raise ValueError(f"drafter config: layer_types is {layer_types!r}; it must be a list")
        unknown = [t for t in layer_types if t not in LAYER_TYPES]
        if unknown:
            raise ValueError(f"drafter config: layer_types has {unknown[0]!r}; known are {', '.join(LAYER_TYPES)}")
        if len(layer_types) != layers:
            raise ValueError(f"drafter config: layer_types has {len(layer_types)} entries for {layers} layers")
        sliding = "sliding_attention" in layer_types
        window = fields.get("sliding_window")
        if sliding and not is_count(window):
            raise ValueError(
                f"drafter config: sliding_window is {window!r}; with sliding_attention in layer_types it must be an "
                "integer of at least 1"
            )
        mask_token_id = dflash.get("mask_token_id")
        vocab_size = fields["vocab_size"]
        if not isinstance(mask_token_id, int) or isinstance(mask_token_id, bool) or not 0 <= mask_token_id < vocab_size:
            raise ValueError(
                f"drafter config: dflash_config.mask_token_id is {mask_token_id!r}; it must be a token id below the "
                f"vocabulary size {vocab_size}"
            )
        layer_ids = dflash.get("target_layer_ids")
        if not isinstance(layer_ids, list) or not layer_ids or not all(type(i) is int for i in layer_ids):
            raise ValueError(
                f"drafter config: dflash_config.target_layer_ids is {layer_ids!r}; it must be a list of integers"
            )
        causal = fields.get("is_causal", dflash.get("causal"))
        if causal is not None and not isinstance(causal, bool):
            raise ValueError(f"drafter config: causal is {causal!r}; it must be true or false")
        qwen3 = _qwen3_config({**fields, "layer_types": list(layer_types), "use_sliding_window": sliding})
        return cls(qwen3, block_size, mask_token_id, tuple(layer_ids), causal)

    @classmethod
    def from_folder(cls, folder: Path) -> DFlashConfig:
        path = folder / "config.json"
        try:
            fields = json.loads(read_bounded(path, CONFIG_BYTES))
        except OSError as error:
            raise ValueError(f"drafter {folder}: config.json cannot be read ({error.strerror})") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"drafter {folder}: config.json is not valid JSON ({error})") from error
        if not isinstance(fields, dict):
            raise ValueError(f"drafter {folder}: config.json does not hold an object")
        return cls.from_dict(fields)

    def sliding_window(self, layer: int) -> int | None:
        """Window w of a layer (a query sees keys less than w positions away), None for full attention."""
        return self.qwen3.sliding_window if self.qwen3.layer_types[layer] == "sliding_attention" else None

    def is_causal(self, layer: int) -> bool:
        return self.sliding_window(layer) is not None if self.causal is None else self.causal

    def visible(self, layer: int, distance: Tensor) -> Tensor:
        """Whether a query of a block sees a key of its context or its block: bool of the shape of ``distance``.

        ``distance`` is the query's position minus the key's.
        """
        window = self.sliding_window(layer)
        near = torch.ones_like(distance, dtype=torch.bool) if window is None else distance.abs() < window
        return near & (distance >= 0) if self.is_causal(layer) else near


def _qwen3_config(fields: dict[str, Any]) -> Qwen3Config:
    used = {key: fields[key] for key in SIZES + OTHER_FIELDS + ROPE_FIELDS if key in fields}
    try:
        config = Qwen3Config(**copy.deepcopy(used))
    except Exception as error:  # transformers meets a field it did not expect with any class at all
        raise ValueError(f"drafter config: {' '.join(str(error).split())}") from error
    if not is_count(config.max_position_embeddings):
        raise ValueError(
            f"drafter config: max_position_embeddings is {config.max_position_embeddings!r}; it must be an integer of "
            "at least 1"
        )
    if not _is_positive(config.rms_norm_eps):
        raise ValueError(f"drafter config: rms_norm_eps is {config.rms_norm_eps!r}; it must be a positive number")
    _check_rope(config.rope_parameters)
    if not isinstance(config.hidden_act, str) or config.hidden_act not in ACT2FN:
        raise ValueError(f"drafter config: hidden_act is {config.hidden_act!r}; known are {', '.join(ACT2FN)}")
    return config


def _check_rope(rope: Any) -> None:
    rope_type = rope.get("rope_type") if isinstance(rope, dict) else None
    known = ("default", *ROPE_INIT_FUNCTIONS)
    if rope_type not in known:
        raise ValueError(f"drafter config: rope_type is {rope_type!r}; known are {', '.join(known)}")
    for key in ("rope_theta", "factor") if "factor" in rope else ("rope_theta",):
        if not _is_positive(rope.get(key)):
            raise ValueError(f"drafter config: rope {key} is {rope.get(key)!r}; it must be a positive finite number")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, H, n, K] with cos, sin [B or 1, n, K]."""
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


class DFlashAttention(nn.Module):
    """Grouped-query attention whose keys and values come from the context features and from the block."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        bias = config.attention_bias
        query_size, key_size = (h * self.head_dim for h in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, n, hidden] -> [B, H, n, K]."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[B, n, hidden] -> keys and values [B, H_kv, n, K]."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2), cos, sin)
        return keys, self._heads(self.v_proj(x)).transpose(1, 2)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of queries [B, H, n, K] over keys and values [B, H_kv, m, K]; mask bool, True is visible."""
        if torch.is_grad_enabled():  # no fused kernel with a gradient takes grouped heads and a mask
            groups = queries.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=queries.shape[1] != keys.shape[1]
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DFlashLayer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def feed_forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashModel(nn.Module):
    """Weights layers.*, fc, hidden_norm, norm. The embedding and the head are the target's."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        qwen3 = config.qwen3
        self.layers = nn.ModuleList(DFlashLayer(qwen3) for _ in range(qwen3.num_hidden_layers))
        self.norm = Qwen3RMSNorm(qwen3.hidden_size, eps=qwen3.rms_norm_eps)
        self.fc = nn.Linear(len(config.target_layer_ids) * qwen3.hidden_size, qwen3.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(qwen3.hidden_size, eps=qwen3.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(qwen3)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DFlashModel:
        """A cast of the weights leaves the rotary frequencies in float32; rounded, they would misplace far tokens."""
        super()._apply(fn, recurse)
        self.rotary_emb = Qwen3RotaryEmbedding(self.config.qwen3).to(self.fc.weight.device)
        return self

    def context(self, features: Tensor) -> Tensor:
        """Context features [B, n, F] of the target, projected to [B, n, hidden]."""
        return self.hidden_norm(self.fc(features))

    def forward(
        self, block: Tensor, block_positions: Tensor, features: Tensor, context_positions: Tensor, masks: list[Tensor]
    ) -> Tensor:
        """The training form: every block of a batch of sequences at once, without a cache.

        block [B, n, hidden] embeddings, block_positions [B, n]; features [B, T, F] of the target,
        context_positions [B, T]; masks: for each layer bool [B, 1, n, T + n], True is visible. Returns [B, n, hidden].
        """
        context = self.context(features)
        cos, sin = self.rotary_emb(block, block_positions)
        context_cos, context_sin = self.rotary_emb(context, context_positions)
        for layer, mask in zip(self.layers, masks, strict=True):
            normed = layer.input_layernorm(block)
            attention = layer.self_attn
            context_keys, context_values = attention.keys_values(context, context_cos, context_sin)
            keys, values = attention.keys_values(normed, cos, sin)
            attended = attention.attend(
                attention.queries(normed, cos, sin),
                torch.cat([context_keys, keys], dim=2),
                torch.cat([context_values, values], dim=2),
                mask,
            )
            block = layer.feed_forward(block + attended)
        return self.norm(block)

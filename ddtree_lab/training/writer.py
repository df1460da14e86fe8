"""Self-written text: a target and its chat template in, conversations that the target wrote out.

Every row of a batch is one conversation of a fixed number of tokens. The target samples the user's turn after the
template's empty user turn (or after a short opener), then answers greedily or by sampling, then samples the next user
turn, and so on. All rows advance together, one token a step, so a step is a fixed set of tensor operations: on a GPU it
is captured in one CUDA graph per length bucket and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from ddtree_lab.attention.formats import to_additive
from ddtree_lab.target.dense import DenseTarget
from ddtree_lab.training.chat import ChatFrame

USER, ANSWER = 0, 1


@dataclass(frozen=True)
class WriterConfig:
    """Shape and sampling of the conversations."""

    rows: int = 2048  # conversations written together
    length: int = 512  # tokens of each
    user_caps: tuple[int, ...] = (48, 96, 240)  # longest user turn, one drawn per row
    answer_cap: int = 256
    user_temperature: tuple[float, float] = (0.7, 1.0)  # drawn uniformly per row
    sampled_share: float = 0.15  # rows whose answers are sampled instead of greedy
    answer_temperature: float = 0.8
    opener_share: float = 0.6  # rows whose first user turn starts with an opener
    bucket: int = 64  # attention reads the cache up to the next multiple of this


@dataclass(frozen=True, eq=False)
class Conversations:
    """What a batch wrote."""

    token_ids: Tensor  # [R, T] int32
    written: Tensor  # [R, T] bool: the token is the target's own answer (its end-of-turn token included)


class _FixedCache(Cache):
    """KV buffers [R, K, T, head_dim] that every row fills at the same, device-held position."""

    def __init__(self, position: Tensor) -> None:
        super().__init__(layers=[])
        self._position = position
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self.length = 0  # rows of the cache that attention reads
        self.capacity = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        while len(self._buffers) <= layer_idx:
            rows, heads, _, size = key_states.shape
            shape = (rows, heads, self.capacity, size)
            self._buffers.append((key_states.new_zeros(shape), value_states.new_zeros(shape)))
        keys, values = self._buffers[layer_idx]
        keys.index_copy_(2, self._position, key_states)
        values.index_copy_(2, self._position, value_states)
        return keys[:, :, : self.length], values[:, :, : self.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def _grouped_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """One query per row against a grouped cache, without repeating its keys and values for every query head."""
    rows, heads, count, size = query.shape
    groups = key.shape[1]
    scaling = size**-0.5 if scaling is None else scaling
    grouped = query.reshape(rows, groups, heads // groups * count, size) * scaling
    scores = grouped @ key.transpose(-1, -2) + attention_mask
    out = scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    return out.reshape(rows, heads, count, size).transpose(1, 2), None


class SelfWriter:
    """Writes batches of conversations with one target."""

    def __init__(self, target: DenseTarget, config: WriterConfig, *, openers: Sequence[str] = ()) -> None:
        if config.length > target.context_length:
            raise ValueError(f"length is {config.length}; the target's context holds {target.context_length} tokens")
        self._target = target
        self._config = config
        self._device = target.device
        frame = ChatFrame.of(target.tokenizer)
        starts = [frame.prefix, *(frame.prefix + _encode(target, opener) for opener in openers)]
        pieces = [frame.user_end, frame.answer_end, *starts]
        ends = torch.tensor([len(p) for p in pieces]).cumsum(0)
        self._template = torch.tensor([t for p in pieces for t in p], device=self._device)
        self._piece_end = ends.to(self._device)
        self._piece_start = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]]).to(self._device)
        self._stop = torch.tensor([frame.user_end[0], frame.answer_end[0]], device=self._device)
        self._num_starts = len(starts)
        self._reset(seed=0)
        self._steps = self._capture() if self._device.type == "cuda" else None

    def write(self, *, seed: int) -> Conversations:
        """One batch: R conversations of T tokens."""
        torch.manual_seed(seed)
        self._reset(seed)
        for step in range(self._config.length - 1):
            if self._steps is None:
                self._step(self._bucket_of(step))
            else:
                self._steps[self._bucket_of(step)].replay()
        return Conversations(self._ids.to(torch.int32).cpu(), self._written.cpu())

    def _bucket_of(self, step: int) -> int:
        bucket = self._config.bucket
        return min((step // bucket + 1) * bucket, self._config.length)

    def _reset(self, seed: int) -> None:
        """Every row at its first token, with a start, caps and temperatures drawn from ``seed``."""
        config, device, rows = self._config, self._device, self._config.rows
        generator = torch.Generator().manual_seed(seed)

        def draw() -> Tensor:
            return torch.rand(rows, generator=generator)

        start = (
            torch.where(
                draw() < config.opener_share if self._num_starts > 1 else torch.zeros(rows, dtype=torch.bool),
                1 + (draw() * (self._num_starts - 1)).long(),
                0,
            )
            + 2
        )
        caps = torch.tensor(config.user_caps)[(draw() * len(config.user_caps)).long()]
        low, high = config.user_temperature
        sampled = draw() < config.sampled_share
        state = {
            "_ids": torch.zeros(rows, config.length, dtype=torch.int64),
            "_written": torch.zeros(rows, config.length, dtype=torch.bool),
            "_position": torch.zeros(1, dtype=torch.int64),
            "_phase": torch.full((rows,), USER),
            "_phase_length": torch.zeros(rows, dtype=torch.int64),
            "_cursor": self._piece_start.cpu()[start] + 1,  # next template token; the first is in place already
            "_cursor_end": self._piece_end.cpu()[start],
            "_caps": torch.stack([caps, torch.full((rows,), config.answer_cap)]),
            "_temperature": torch.stack([low + (high - low) * draw(), sampled * config.answer_temperature]),
        }
        state["_ids"][:, 0] = self._template.cpu()[self._piece_start.cpu()[start]]
        for name, value in state.items():
            if hasattr(self, name):
                getattr(self, name).copy_(value)
            else:
                setattr(self, name, value.to(device))

    @torch.inference_mode()
    def _step(self, bucket: int) -> None:
        """Read the token at the position, write the next one. Every tensor is updated in place."""
        if not hasattr(self, "_cache"):
            self._cache = _FixedCache(self._position)
            self._cache.capacity = self._config.length
        self._cache.length = bucket
        current = self._ids.gather(1, self._position.expand(len(self._ids), 1))
        logits = (
            self._target.model(
                input_ids=current,
                position_ids=self._position.expand(len(self._ids), 1),
                attention_mask=self._mask(bucket),
                use_cache=True,
                **{self._target.cache_argument: self._cache},
            )
            .logits[:, -1]
            .float()
        )
        temperature = self._temperature.gather(0, self._phase[None])[0]
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_()
        drawn = (logits - noise * temperature[:, None]).argmax(-1)

        forced = self._cursor < self._cursor_end
        at_stop = drawn == self._stop[self._phase]
        at_cap = self._phase_length >= self._caps.gather(0, self._phase[None])[0]
        turn_ends = ~forced & (at_stop | at_cap)
        token = torch.where(forced, self._template[self._cursor.clamp(max=len(self._template) - 1)], drawn)
        token = torch.where(turn_ends, self._template[self._piece_start[self._phase]], token)
        written = ~forced & (self._phase == ANSWER) & (at_stop | ~at_cap)

        self._position.add_(1)
        self._ids.scatter_(1, self._position.expand(len(self._ids), 1), token[:, None])
        self._written.scatter_(1, self._position.expand(len(self._ids), 1), written[:, None])
        self._cursor.copy_(torch.where(turn_ends, self._piece_start[self._phase] + 1, self._cursor + forced))
        self._cursor_end.copy_(torch.where(turn_ends, self._piece_end[self._phase], self._cursor_end))
        self._phase_length.copy_(torch.where(turn_ends, 0, self._phase_length + ~forced))
        self._phase.copy_(torch.where(turn_ends, 1 - self._phase, self._phase))

    def _mask(self, bucket: int) -> Tensor | dict[str, Tensor]:
        """Additive masks [1, 1, 1, bucket] as the model takes them: the cache up to the position, by layer type."""
        distance = self._position - torch.arange(bucket, device=self._device)
        masks = {
            kind: to_additive(
                ((distance >= 0) & (distance < (window or self._config.length)))[None], self._target.dtype
            )
            for kind, window in self._target.windows.items()
        }
        shaped = {kind: mask[None, None] for kind, mask in masks.items()}
        return shaped if len(shaped) > 1 else next(iter(shaped.values()))

    def _capture(self) -> dict[int, torch.cuda.CUDAGraph]:
        before = self._target.model.config._attn_implementation
        AttentionInterface.register("ddtree_grouped", _grouped_attention)
        self._target.model.set_attn_implementation("ddtree_grouped")
        graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        for bucket in sorted({self._bucket_of(step) for step in range(self._config.length - 1)}):
            self._reset(seed=0)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(bucket)
            torch.cuda.current_stream().wait_stream(stream)
            graphs[bucket] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[bucket], pool=pool):
                self._step(bucket)
        self._target.model.set_attn_implementation(before)
        return graphs


def _encode(target: DenseTarget, text: str) -> tuple[int, ...]:
    return tuple(target.tokenizer.encode(text, add_special_tokens=False))

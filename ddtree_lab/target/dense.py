"""Target stage, dense models: a prompt or a draft tree -> logits and hidden states from one transformers forward.

A tree runs as one sequence of N tokens with an additive ancestor mask and positions L + depth.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ddtree_lab.attention.ancestors import positions
from ddtree_lab.attention.formats import full_mask, to_additive
from ddtree_lab.target.cache import TreeCache
from ddtree_lab.target.protocol import TargetOutput
from ddtree_lab.types import DraftTree

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(eq=False)
class DenseState:
    """One committed sequence; the KV rows of ``pending`` stand in the cache behind it until commit."""

    layer_ids: tuple[int, ...]
    cache: TreeCache = field(default_factory=TreeCache)
    pending: DraftTree | None = None  # verified, not committed yet

    @property
    def length(self) -> int:
        """L: committed tokens whose KV is in the cache."""
        return self.cache.length


class DenseTarget:
    """A dense causal language model of transformers behind ``ddtree_lab.target.protocol.Target``.

    ``model`` is a loaded ``...ForCausalLM`` with attn_implementation "sdpa". Raises ValueError naming the model type
    for a model whose layers are not all full or sliding attention, or which cannot take a tree, and for one that scales
    or caps its embeddings or logits: ``embed`` and ``lm_head`` would not be what it computes. One forward finds out.

    For code that runs the model in its own way: ``model``, ``windows`` (``attention_windows`` of it) and
    ``cache_argument`` (the keyword under which its forward takes the KV cache).
    """

    def __init__(self, model: Any, *, name: str, tokenizer: Any | None = None) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.windows = attention_windows(self.config)
        self.cache_argument = _cache_argument(model)
        self.model = model.eval().requires_grad_(False)
        self._embeddings = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size: int = self.config.vocab_size
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.context_length: int = self.config.max_position_embeddings
        self.stop_token_ids = _stop_token_ids(model)
        self._check_embeddings_and_head()

    def new_state(self, layer_ids: Sequence[int] = ()) -> DenseState:
        """An empty state whose forwards hand out the hidden states of ``layer_ids``.

        Id i is transformers' ``hidden_states[i + 1]``: the output of block i, and for the last block that output after
        the final norm. A missing (None), negative or too large id is a ValueError.
        """
        for layer_id in layer_ids:
            if not isinstance(layer_id, int) or not 0 <= layer_id < self.num_layers:
                raise ValueError(f"layer_ids must be integers from 0 to {self.num_layers - 1}, got {layer_id!r}")
        return DenseState(tuple(layer_ids))

    def prefill(self, state: DenseState, input_ids: Tensor | Sequence[int]) -> TargetOutput:
        """Append input_ids [n] (or [1, n]) int64: logits [1, V] of the last one, hidden [n, len(layer_ids) * H].

        May be called again to append more. An uncommitted tree is dropped. An empty or too long input, or an id
        outside the vocabulary, is a ValueError.
        """
        token_ids = torch.as_tensor(input_ids, dtype=torch.int64).reshape(-1)
        self._check_tokens(state, token_ids, rows=token_ids.numel())
        state.pending = None
        past, n = state.length, token_ids.numel()

        def visible(window: int | None) -> Tensor:
            return _causal_mask(past, n, window, self.device)

        mask = self._mask(visible, causal=past == 0 or n == 1, total=past + n)
        output = self._forward(state, token_ids, torch.arange(past, past + n), mask, last_only=True)
        state.cache.append(n)
        return output

    def verify(self, state: DenseState, tree: DraftTree) -> TargetOutput:
        """Logits [N, V] and hidden [N, len(layer_ids) * H] of every node of ``tree`` on top of the committed tokens.

        ``state.length`` stays. A tree verified before and not committed is overwritten. The root must fit the
        context; deeper nodes may stand beyond it.
        """
        self._check_tokens(state, tree.token_ids, rows=1)
        past, n = state.length, len(tree)

        def visible(window: int | None) -> Tensor:
            return full_mask(tree, past, sliding_window=window)

        mask = self._mask(visible, causal=n == 1, total=past + n)
        output = self._forward(state, tree.token_ids, positions(tree, past), mask, last_only=False)
        state.pending = tree
        return output

    def commit(self, state: DenseState, path: Sequence[int]) -> None:
        """Keep the KV of the nodes of ``path`` of the tree verified last; ``state.length`` grows by len(path).

        ValueError when no tree waits for its commit, or when ``path`` does not go down from the root.
        """
        if state.pending is None:
            raise ValueError("commit needs a verified tree: call verify first, and commit it once")
        path = [int(node) for node in path]
        parents = state.pending.parents.tolist()
        descends = all(0 <= node < len(parents) and parents[node] == above for above, node in pairwise([-1, *path]))
        if not path or not descends:
            raise ValueError(f"path must go from the root (node 0) down the verified tree, child by child, got {path}")
        state.cache.compact(state.length, path)
        state.pending = None

    def rollback(self, state: DenseState, length: int) -> None:
        """Keep the first ``length`` committed tokens, and drop an uncommitted tree."""
        if not 0 <= length <= state.length:
            raise ValueError(f"length must be from 0 to the {state.length} committed tokens, got {length}")
        state.cache.crop(length)
        state.pending = None

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings [..., hidden_size] of token_ids [...] int64."""
        return self._embeddings(token_ids.to(self.device))

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of final hidden states [..., hidden_size] (already normed); gradients flow to ``hidden``."""
        return self._head(hidden)

    @torch.no_grad()
    def _check_embeddings_and_head(self) -> None:
        """Two tokens at one position: what the model adds to embeddings for positions cancels between them."""
        token_ids = torch.tensor([[0, self.vocab_size // 2]], device=self.device)
        output = self.model(
            input_ids=token_ids,
            position_ids=torch.zeros_like(token_ids),
            use_cache=False,
            output_hidden_states=True,
        )
        first, last = output.hidden_states[0][0], output.hidden_states[-1]
        embedded = self.embed(token_ids[0])
        if not _close(first[0] - first[1], embedded[0] - embedded[1], scale=first):
            raise ValueError(
                f"model type {self.config.model_type!r} changes its embeddings before its first layer: not supported"
            )
        if not _close(self.lm_head(last), output.logits, scale=output.logits):
            raise ValueError(
                f"model type {self.config.model_type!r} scales or caps the logits of its head: not supported"
            )

    def _check_tokens(self, state: DenseState, token_ids: Tensor, *, rows: int) -> None:
        if token_ids.numel() == 0:
            raise ValueError("input_ids is empty: a target needs at least one token")
        if state.length + rows > self.context_length:
            raise ValueError(
                f"{state.length} committed and {rows} new tokens do not fit the context of {self.name}: "
                f"{self.context_length} tokens"
            )
        low, high = token_ids.min().item(), token_ids.max().item()
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"token ids must be from 0 to {self.vocab_size - 1} for {self.name}, got {bad}")

    def _mask(
        self, visible: Callable[[int | None], Tensor], *, causal: bool, total: int
    ) -> Tensor | dict[str, Tensor | None] | None:
        """The additive mask [1, 1, n, total], or one for each kind of layer when the model mixes kinds.

        None stands where transformers' own causal attention sees the same keys: it runs without a mask there.
        """
        masks: dict[str, Tensor | None] = {}
        for kind, window in self.windows.items():
            if causal and (window is None or total <= window):
                masks[kind] = None
            else:
                masks[kind] = to_additive(visible(window).to(self.device), self.dtype)[None, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @torch.no_grad()
    def _forward(
        self, state: DenseState, token_ids: Tensor, position_ids: Tensor, mask: Any, *, last_only: bool
    ) -> TargetOutput:
        output = self.model(
            input_ids=token_ids[None].to(self.device),
            position_ids=position_ids[None].to(self.device),
            attention_mask=mask,
            use_cache=True,
            output_hidden_states=bool(state.layer_ids),
            logits_to_keep=int(last_only),  # 0 keeps all
            **{self.cache_argument: state.cache},
        )
        if state.layer_ids:
            hidden = torch.cat([output.hidden_states[layer_id + 1][0] for layer_id in state.layer_ids], dim=-1)
        else:
            hidden = output.logits.new_empty(token_ids.numel(), 0)
        return TargetOutput(output.logits[0], hidden)


def attention_windows(config: Any) -> dict[str, int | None]:
    """The kinds of attention layer in a transformers text config, each with its window in tokens (None: unlimited).

    ValueError naming the model type when a layer is neither full nor sliding attention, or when there are experts.
    """
    experts = next((name for name in _EXPERT_COUNTS if (getattr(config, name, None) or 0) > 1), None)
    if experts is not None:
        raise ValueError(f"model type {config.model_type!r} is a mixture of experts ({experts}): only dense models run")
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return {"full_attention": None} if window is None else {"sliding_attention": window}
    other = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if other:
        raise ValueError(
            f"model type {config.model_type!r} has {', '.join(other)} layers: only full and sliding attention run"
        )
    windows = {"full_attention": None, "sliding_attention": window}
    return {kind: windows[kind] for kind in dict.fromkeys(layer_types)}


def _cache_argument(model: Any) -> str:
    """The name under which this version of transformers takes the KV cache; ValueError if the model takes no tree."""
    accepted = inspect.signature(model.forward).parameters
    name = next((name for name in ("cache", "past_key_values") if name in accepted), None)
    needed = {"position_ids", "attention_mask", "logits_to_keep"}
    if name is None or not needed <= accepted.keys() or getattr(model, "_is_stateful", False):
        raise ValueError(
            f"model type {model.config.model_type!r} cannot verify a tree: its forward must take "
            "position_ids, an attention mask and a KV cache"
        )
    return name


def _close(a: Tensor, b: Tensor, *, scale: Tensor) -> bool:
    """Whether a and b differ by rounding alone, in numbers as large as those of ``scale``. Not a number is no news."""
    allowed = 8 * torch.finfo(scale.dtype).eps * scale.float().abs().max()
    return not ((a.float() - b.float()).abs() > allowed).any()


def _causal_mask(past: int, n: int, window: int | None, device: torch.device) -> Tensor:
    """bool [n, past + n]: token past + i sees the ``window`` last tokens up to itself."""
    key = torch.arange(past + n, device=device)
    query = key[past:, None]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def _stop_token_ids(model: Any) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)

"""Settings of a training run and of the text that it trains on, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddtree_lab.checks import is_count

_SHARE = "from 0 to 1"
_COUNT = "a whole number of at least 1"


@dataclass(frozen=True)
class WriterConfig:
    """Shape and sampling of self-written text. Raises ValueError naming the setting that is out of range."""

    rows: int = 1024  # written together
    length: int = 1024  # tokens of a row: conversation after conversation
    # Shortest and longest user turn, one pair drawn per conversation. The target cannot end a turn that is too short:
    # by itself it hardly ever writes one as long as a document.
    user_turns: tuple[tuple[int, int], ...] = ((1, 32), (1, 96), (1, 240), (240, 640))
    answer_cap: int = 192  # longest answer
    user_temperature: tuple[float, float] = (0.5, 0.9)  # drawn uniformly per conversation
    sampled_share: float = 0.15  # conversations whose answer is sampled instead of greedy
    answer_temperature: float = 0.8
    opener_share: float = 0.6  # conversations whose user turn starts with an opener
    bucket: int = 128  # attention reads the cache up to the next multiple of this

    def __post_init__(self) -> None:
        for name in ("rows", "length", "answer_cap", "bucket"):
            _check(name, getattr(self, name), is_count(getattr(self, name)), _COUNT)
        turns = self.user_turns
        ordered = all(is_count(low) and is_count(high) and low <= high for low, high in turns)
        _check("user_turns", turns, bool(turns) and ordered, f"one or more shortest-longest, each {_COUNT}")
        for name in ("sampled_share", "opener_share"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) <= 1, _SHARE)
        low, high = self.user_temperature
        _check("user_temperature", (low, high), 0 <= low <= high < math.inf, "two numbers >= 0 in ascending order")
        _check("answer_temperature", self.answer_temperature, 0 <= self.answer_temperature < math.inf, "at least 0")


@dataclass(frozen=True)
class TrainConfig:
    """A run. Two runs with equal settings on one machine see the same text and the same anchors.

    Raises ValueError naming the setting that is out of range.
    """

    text_tokens: int = 20_000_000  # self-written tokens, prompts and answers
    steps: int = 4000
    batch: int = 96  # conversations a step, over all processes
    anchors: int = 32  # blocks per conversation
    num_layers: int = 5
    num_features: int = 5  # layers of the target that the drafter reads
    block_size: int = 16
    learning_rate: float = 2e-3
    warmup: int = 200
    cooldown: float = 0.4  # last share of the steps, in which the learning rate falls to 0
    weight_decay: float = 0.05
    decay: float = 5.0  # of the position weights, in depths
    teacher_share: float = 0.2  # of the loss, against the target's distribution instead of its token
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("text_tokens", "steps", "batch", "anchors", "num_layers", "num_features"):
            _check(name, getattr(self, name), is_count(getattr(self, name)), _COUNT)
        _check("block_size", self.block_size, is_count(self.block_size - 1), "a whole number of at least 2")
        for name in ("warmup", "seed"):
            _check(name, getattr(self, name), is_count(getattr(self, name) + 1), "a whole number of at least 0")
        for name in ("learning_rate", "decay"):
            _check(name, getattr(self, name), 0 < getattr(self, name) < math.inf, "above 0")
        for name in ("cooldown", "teacher_share"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) <= 1, _SHARE)
        _check("weight_decay", self.weight_decay, 0 <= self.weight_decay < math.inf, "at least 0")


def _check(name: str, value: object, allowed: bool, what: str) -> None:
    if not allowed:
        raise ValueError(f"{name} must be {what}, got {value!r}")

"""Text of a run: shards of self-written conversations in a folder, and the order in which training reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ddtree_lab.progress import progress_bar
from ddtree_lab.target.dense import DenseTarget
from ddtree_lab.training.config import WriterConfig
from ddtree_lab.training.conversations import Conversations
from ddtree_lab.training.files import read_header, save_tensors
from ddtree_lab.training.writer import SelfWriter

_FORMAT = 1
_WINDOW = 64  # batches whose conversations are sorted by length together
_SHARDS_PER_SEED = 1_000_003


class TextFolder:
    """Self-written text of one target, writer and seed; shards are numbered and each appears whole."""

    def __init__(
        self, folder: Path, target: DenseTarget, writer: WriterConfig, *, openers: Sequence[str], seed: int, tokens: int
    ) -> None:
        """``tokens`` is the least that the written rows hold together."""
        self._target, self._writer, self._openers, self._seed = target, writer, openers, seed
        self._folder = folder
        self._paths = [
            folder / f"{shard:05d}.safetensors" for shard in range(-(-tokens // (writer.rows * writer.length)))
        ]

    @property
    def settings(self) -> dict[str, Any]:
        """What all shards of a folder share."""
        digest = hashlib.sha256("\n".join(self._openers).encode()).hexdigest()
        return asdict(self._writer) | {
            "format": _FORMAT,
            "target": self._target.name,
            "dtype": str(self._target.dtype).removeprefix("torch."),
            "openers_sha256": digest[:16],
            "seed": self._seed,
        }

    def write(self, *, process: int = 0, processes: int = 1, stop: Callable[[], bool] = lambda: False) -> None:
        """Write the shards of this process that are not there yet, until ``stop`` says so after one of them.

        Raises ValueError when a shard that is there has other settings, OSError when one cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._paths:
            if path.exists():
                read_header(path, settings=self.settings)
        todo = [shard for shard in range(process, len(self._paths), processes) if not self._paths[shard].exists()]
        if not todo:
            return
        writer = SelfWriter(self._target, self._writer, openers=self._openers)
        for shard in progress_bar(todo, "text", unit="shard"):
            text = writer.write(seed=self._seed * _SHARDS_PER_SEED + shard)
            tensors = {"token_ids": text.token_ids, "written": text.written, "offsets": text.offsets}
            save_tensors(self._paths[shard], tensors, settings=self.settings)
            if stop():
                break

    @property
    def complete(self) -> bool:
        return all(path.exists() for path in self._paths)

    def read(self) -> Conversations:
        """The conversations of all shards."""
        return Conversations.join([Conversations(**load_file(path)) for path in self._paths])


def batch_order(lengths: Tensor, *, batch: int, seed: int, first: int, steps: int) -> Iterator[Tensor]:
    """Conversation indices [batch] int64 for the steps from ``first`` to ``steps``: epochs of a seeded shuffle.

    Conversations of like length share a batch: each window of a shuffled epoch is sorted by length, then the batches
    are shuffled. An epoch leaves out the len(lengths) % batch conversations that fill no batch.
    """
    per_epoch = len(lengths) // batch
    epoch, order = -1, torch.empty(0, batch)
    for step in range(first, steps):
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            order = _epoch(lengths, batch, torch.Generator().manual_seed(seed + epoch))
        yield order[step % per_epoch]


def _epoch(lengths: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    """[batches, batch] int64."""
    count = len(lengths) // batch
    shuffled = torch.randperm(len(lengths), generator=generator)[: count * batch]
    windows = [window[lengths[window].argsort(stable=True)] for window in shuffled.split(_WINDOW * batch)]
    return torch.cat(windows).view(count, batch)[torch.randperm(count, generator=generator)]

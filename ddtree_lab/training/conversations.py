"""Self-written conversations of different lengths in flat tensors: written rows in, padded batches out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MULTIPLE = 16  # of a batch's length: attention kernels want aligned rows of the mask


@dataclass(frozen=True, eq=False)
class Batch:
    """B conversations, padded on the right with token 0, not written, to a multiple of 16 that holds the longest."""

    token_ids: Tensor  # [B, T] int64
    written: Tensor  # [B, T] bool


@dataclass(frozen=True, eq=False)
class Conversations:
    """C conversations, one after the other; conversation c is tokens offsets[c] to offsets[c + 1]."""

    token_ids: Tensor  # [M] int32
    written: Tensor  # [M] bool: a token of the target's answer, the end token that it chose included
    offsets: Tensor  # [C + 1] int64

    @classmethod
    def of_rows(cls, token_ids: Tensor, written: Tensor, begins: Tensor, *, fewest: int) -> Conversations:
        """Rows [R, T] cut where ``begins`` is true (column 0 is); what has under ``fewest`` written tokens is left out.

        The last conversation of a row may be cut by the row's end: it is the start of a longer one.
        """
        starts = begins.flatten().nonzero().flatten()
        lengths = torch.cat([starts, torch.tensor([begins.numel()])]).diff()
        number = torch.arange(len(starts)).repeat_interleave(lengths)
        flat = written.flatten()
        enough = torch.zeros(len(starts), dtype=torch.int64).index_add_(0, number, flat.long()) >= fewest
        kept = enough[number]
        return cls(token_ids.flatten()[kept].to(torch.int32), flat[kept], _offsets(lengths[enough]))

    @classmethod
    def join(cls, parts: Sequence[Conversations]) -> Conversations:
        """All conversations of ``parts`` in order."""
        lengths = torch.cat([part.lengths for part in parts])
        return cls(
            torch.cat([part.token_ids for part in parts]),
            torch.cat([part.written for part in parts]),
            _offsets(lengths),
        )

    @property
    def lengths(self) -> Tensor:
        """[C] int64."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def split(self, count: int) -> tuple[Conversations, Conversations]:
        """The first ``count`` conversations, and the rest."""
        at = int(self.offsets[count])
        return (
            Conversations(self.token_ids[:at], self.written[:at], self.offsets[: count + 1]),
            Conversations(self.token_ids[at:], self.written[at:], self.offsets[count:] - at),
        )

    def batch(self, indices: Tensor) -> Batch:
        """The conversations ``indices`` [B] int64."""
        starts, lengths = self.offsets[indices], self.lengths[indices]
        columns = torch.arange(-(-int(lengths.max()) // _MULTIPLE) * _MULTIPLE)
        inside = columns < lengths[:, None]
        flat = torch.where(inside, starts[:, None] + columns, 0)
        return Batch(torch.where(inside, self.token_ids[flat], 0).long(), self.written[flat] & inside)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

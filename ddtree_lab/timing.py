"""Stage times: code in, seconds by stage out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageClock:
    """Adds up wall-clock seconds by stage. On a GPU every stage waits for the device, so its time is its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = self._now()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - started

    def take(self) -> dict[str, float]:
        """The seconds since the last ``take``, by stage."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

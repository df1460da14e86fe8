"""Progress: a bar on the standard error for long work, silent when that is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def progress_bar(items: Iterable[Item], label: str, *, total: int | None = None, unit: str = "it") -> Iterator[Item]:
    """The items one by one, with a bar that counts them. ``total`` defaults to ``len(items)`` where it has one."""
    from tqdm import tqdm

    yield from tqdm(items, total=total, desc=label, unit=unit, leave=False, disable=not sys.stderr.isatty())

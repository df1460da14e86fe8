"""Plain text for people: counts with their nouns, and rows of cells in columns."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """"1 round", "3 rounds"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line per row, in columns of equal width: the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]

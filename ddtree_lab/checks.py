"""Checks of plain values from settings files and options; needs nothing that is slow to import."""

from __future__ import annotations


def is_count(value: object) -> bool:
    """Whether ``value`` is a whole number of at least 1; bools are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1

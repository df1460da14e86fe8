"""Cutting a round's tokens: tokens, stop ids and the room left -> the tokens kept and why output ends, if it does."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ddtree_lab.tree.validate import as_count


def stop_set(stop_token_ids: int | Iterable[int] | None) -> frozenset[int]:
    """Stop ids given as one int, several or None, as a set. Raises TypeError/ValueError unless they are ints >= 0."""
    if stop_token_ids is None:
        return frozenset()
    if isinstance(stop_token_ids, str) or not isinstance(stop_token_ids, Iterable):
        return frozenset((as_count("stop_token_ids", stop_token_ids),))
    return frozenset(as_count("entry of stop_token_ids", token) for token in stop_token_ids)


def cut_tokens(
    tokens: Sequence[int], stop_token_ids: int | Collection[int] | None, room: int
) -> tuple[tuple[int, ...], str | None]:
    """The tokens of a round that are kept, and "stop", "length", or None when output goes on.

    The first stop token is kept and ends output. ``room`` tokens at most are kept, and filling it ends output with
    "length"; a stop token that is the last to fit ends it with "stop".
    """
    room = as_count("room", room)
    stops = stop_set(stop_token_ids)
    fitting = tuple(tokens[:room])
    for index, token in enumerate(fitting):
        if token in stops:
            return fitting[: index + 1], "stop"
    return fitting, "length" if len(fitting) == room else None

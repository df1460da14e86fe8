"""Invariants of a draft tree: raw per-node vectors in, one ValueError that names the node, or nothing, out.

Imports no other module of the package, so that the tree type itself can call it.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

MAX_BUDGET = 4096  # a round's masks hold budget^2 values, its logits budget times the vocabulary


def as_count(name: str, value: object, *, minimum: int = 0) -> int:
    """``value`` as an int of at least ``minimum``.

    Raises TypeError when it is not an integer (bools are not), ValueError when it is too small.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer >= {minimum}, got {value!r}") from None
    if count < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {count}")
    return count


def as_budget(value: object) -> int:
    """``value`` as the drafted nodes of a round, 0 to ``MAX_BUDGET``. TypeError or ValueError, as ``as_count``."""
    budget = as_count("budget", value)
    if budget > MAX_BUDGET:
        raise ValueError(f"budget must be at most {MAX_BUDGET} drafted nodes, got {budget!r:.40}")
    return budget


def as_vector_of(name: str, value: Any, dtype: torch.dtype) -> Tensor:
    """``value`` as a CPU tensor of ``dtype``, int64 or float32.

    Raises TypeError naming the field unless it holds integers or, for float32, real numbers; bools are neither.
    """
    wanted = "integers" if dtype == torch.int64 else "real numbers"
    try:
        given = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{name} must hold {wanted} that fit {dtype}: {error}") from None
    inexact = dtype == torch.int64 and given.is_floating_point()
    if given.numel() and (inexact or given.is_complex() or given.dtype == torch.bool):
        raise TypeError(f"{name} must hold {wanted}, got {given.dtype}")
    return torch.as_tensor(value, dtype=dtype, device="cpu")


def check_parents(parents: Tensor | ArrayLike) -> NDArray[np.int64]:
    """Check that ``parents`` [N] is one tree with parents before children; return it as int64.

    Raises TypeError when the values are not integers, ValueError naming the first node at fault: a root other than
    node 0, a node that is its own parent, a parent that does not exist or stands after its child.
    """
    parents = _int_vector("parents", parents)
    if parents.size == 0:
        raise ValueError("parents is empty: a tree has at least its root, node 0")
    nodes = np.arange(parents.size)
    bad = (parents < 0) | (parents >= nodes)
    bad[0] = parents[0] != -1
    if bad.any():
        raise ValueError(_parent_fault(parents, int(bad.argmax())))
    return parents


def check_tree(
    token_ids: Tensor | ArrayLike,
    parents: Tensor | ArrayLike,
    depths: Tensor | ArrayLike,
    ranks: Tensor | ArrayLike,
    log_probs: Tensor | ArrayLike,
) -> None:
    """Check the five per-node fields [N] of a draft tree against each other. O(N log N), no Python loop.

    Raises TypeError for a field of the wrong kind of number, ValueError naming the first node at fault and what is
    wrong with it: everything of ``check_parents``, a depth that is not its parent's plus one, a negative token id or
    rank, a token repeated under one parent, a path log-probability that is NaN, -inf or above its parent's, a root
    whose depth, rank or log-probability is not 0.
    """
    parents = check_parents(parents)
    token_ids, depths, ranks = (
        _int_vector(name, value) for name, value in (("token_ids", token_ids), ("depths", depths), ("ranks", ranks))
    )
    log_probs = _float_vector("log_probs", log_probs)
    fields = {"token_ids": token_ids, "depths": depths, "ranks": ranks, "log_probs": log_probs}
    for name, value in fields.items():
        if value.size != parents.size:
            raise ValueError(f"{name} has {value.size} rows but parents has {parents.size}: one row a node")
    for name in ("depths", "ranks", "log_probs"):
        if fields[name][0] != 0:
            raise ValueError(f"node 0 is the root: its entry in {name} must be 0, got {fields[name][0]}")
    for name in ("token_ids", "ranks"):
        if (node := _first(fields[name] < 0)) is not None:
            raise ValueError(f"node {node}: its entry in {name} must be >= 0, got {fields[name][node]}")

    above = parents[1:]
    if (node := _first(depths[1:] != depths[above] + 1, offset=1)) is not None:
        raise ValueError(
            f"node {node}: depth {depths[node]}, but its parent {parents[node]} has {depths[parents[node]]}"
        )
    if (node := _first(~(log_probs > -np.inf))) is not None:
        raise ValueError(f"node {node}: path log-probability {log_probs[node]}; it must be finite")
    if (node := _first(log_probs[1:] > log_probs[above], offset=1)) is not None:
        raise ValueError(
            f"node {node}: path log-probability {log_probs[node]} is above its parent {parents[node]}'s "
            f"{log_probs[parents[node]]}"
        )
    _check_siblings(parents, token_ids)


def _check_siblings(parents: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
    order = np.lexsort((token_ids, parents))
    same = (parents[order][1:] == parents[order][:-1]) & (token_ids[order][1:] == token_ids[order][:-1])
    if same.any():
        node = int(order[1:][same].min())
        raise ValueError(f"node {node}: token {token_ids[node]} is already a child of its parent {parents[node]}")


def _parent_fault(parents: NDArray[np.int64], node: int) -> str:
    parent = int(parents[node])
    if node == 0:
        return f"node 0 is the root: its parent must be -1, got {parent}"
    if parent == -1:
        return f"node {node} is a second root: only node 0 has parent -1"
    if parent == node:
        return f"node {node} is its own parent"
    if not 0 <= parent < parents.size:
        return f"node {node}: missing parent {parent}; the tree has nodes 0 to {parents.size - 1}"
    return f"node {node}: its parent {parent} stands after it; parents precede children"


def _first(bad: NDArray[np.bool_], *, offset: int = 0) -> int | None:
    return int(bad.argmax()) + offset if bad.any() else None


def _int_vector(name: str, value: Tensor | ArrayLike) -> NDArray[np.int64]:
    array = _vector(name, value)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got {array.dtype}")
    return array.astype(np.int64, copy=False)


def _float_vector(name: str, value: Tensor | ArrayLike) -> NDArray[Any]:
    array = _vector(name, value)
    if array.size and array.dtype.kind not in "fiu":
        raise TypeError(f"{name} must hold real numbers, got {array.dtype}")
    return array


def _vector(name: str, value: Tensor | ArrayLike) -> NDArray[Any]:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, one entry a node; got shape {array.shape}")
    return array

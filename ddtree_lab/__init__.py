"""ddtree_lab: draft trees for speculative decoding, what a target accepts of them, and pictures of both.

The names below are loaded when they are first used, so that importing the package needs neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Acceptance": "types",
    "DraftTree": "types",
    "Round": "types",
    "RunResult": "types",
    "TargetView": "types",
    "ancestor_mask": "attention",
    "build_best_first": "tree",
    "build_chain": "tree",
    "build_static": "tree",
    "generate": "decode",
    "load_drafter": "draft.load",
    "load_target": "target.load",
    "load_trace": "trace",
    "positions": "attention",
    "save_trace": "trace",
    "verify_linear": "accept",
    "walk": "accept",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

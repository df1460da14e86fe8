"""Packages of the lab extra, imported where they are used: a name -> the module, or one line that says what to do."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def lab_module(name: str) -> ModuleType:
    """The module ``name``. Raises ImportError naming the extra when its package is not installed."""
    package = name.partition(".")[0]
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(f"{package} is not installed: pip install ddtree-lab[lab]", name=package) from None
    return import_module(name)

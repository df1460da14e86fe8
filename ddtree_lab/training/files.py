"""Files of a run: tensors and texts that appear whole, and the settings that a file was written with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ddtree_lab.files import replacing

SETTINGS = "settings"


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, settings: Mapping[str, Any], header: Mapping[str, str] | None = None
) -> None:
    """Replace ``path`` by a safetensors file with ``settings`` in its metadata, and ``header`` beside them.

    Raises OSError when writing fails; what stood at ``path`` before stays then.
    """
    metadata = {SETTINGS: json.dumps(settings, sort_keys=True), **(header or {})}
    with replacing(path) as temporary:
        try:
            save_file({name: value.contiguous() for name, value in tensors.items()}, temporary, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written ({error})") from error


def save_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``; what stood there before stays when writing fails."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_header(path: Path, *, settings: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a file that ``save_tensors`` wrote.

    Raises ValueError when it cannot be read or was written with other ``settings``, naming one that differs.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it to have it made again") from error
    saved, wanted = json.loads(header.get(SETTINGS, "{}")), json.loads(json.dumps(settings))
    changed = sorted(key for key in saved.keys() | wanted.keys() if saved.get(key) != wanted.get(key))
    if changed:
        key = changed[0]
        raise ValueError(
            f"{path} was written with {key} {saved.get(key)!r}, now it is {wanted.get(key)!r}: use another --out"
        )
    return header

"""A drafter's name and its target in, a ready drafter out."""

from __future__ import annotations

import re
from pathlib import Path

from ddtree_lab.data_files import data_path
from ddtree_lab.draft.dflash import DFlashDrafter
from ddtree_lab.draft.ngram import NGramDrafter
from ddtree_lab.draft.protocol import Drafter
from ddtree_lab.draft.toy import ToyDrafter
from ddtree_lab.target.protocol import Target
from ddtree_lab.target.quiet import quiet_libraries

EMBEDDED = "smollm2-135m-instruct-dflash"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def load_drafter(name_or_path: str | Path, target: Target) -> Drafter:
    """A drafter for ``target``.

    ``name_or_path`` is ``"toy"``, ``"ngram"``, ``"embedded"`` (the DFlash drafter that ships for the embedded target),
    a folder with a DFlash checkpoint, or a hub id of one such as ``"z-lab/Qwen3.6-27B-DFlash"``, of which config.json
    and *.safetensors are fetched and nothing else. Raises ValueError with one line: no such drafter, a broken
    checkpoint, or one made for another target.
    """
    name = str(name_or_path)
    if name == "toy":
        return ToyDrafter(target.vocab_size)
    if name == "ngram":
        return NGramDrafter(target.vocab_size)
    if name == "replay":
        raise ValueError("drafter 'replay' needs a continuation: construct ddtree_lab.draft.replay.ReplayDrafter")
    return DFlashDrafter.from_folder(_checkpoint_folder(name), target)


def _checkpoint_folder(name: str) -> Path:
    if name == "embedded":
        try:
            return data_path("drafters", EMBEDDED)
        except FileNotFoundError as error:
            raise ValueError(f"drafter 'embedded': {error}") from error
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if _HUB_ID.fullmatch(name):
        return _download(name)
    raise ValueError(
        f"drafter {name!r} is unknown; it must be 'toy', 'ngram', 'embedded', a folder with config.json, or a hub id "
        "such as 'z-lab/Qwen3.6-27B-DFlash'"
    )


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        with quiet_libraries():
            return Path(snapshot_download(hub_id, allow_patterns=["config.json", "*.safetensors"]))
    except Exception as error:  # the client raises a dozen unrelated classes: HTTP, validation, offline, disk
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"drafter {hub_id!r} is no local folder and cannot be fetched from the hub ({reason})"
        ) from error

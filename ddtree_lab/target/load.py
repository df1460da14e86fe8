"""Target stage: a name (embedded, random preset, local folder, hub id) -> a loaded target on a device in a dtype."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ddtree_lab.target.dense import DenseTarget, attention_windows
from ddtree_lab.target.embedded import HUB_ID, INSTALL_LINE, embedded_source
from ddtree_lab.target.protocol import Target
from ddtree_lab.target.random import PRESETS, preset_config, random_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_RANDOM = "random:"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_target(name_or_path: str, *, device: str | torch.device = "auto", dtype: str | torch.dtype = "auto") -> Target:
    """Load a target: "embedded", "random:<preset>", a local folder or a hub id.

    ``device`` "auto" is cuda when there is one, else cpu. ``dtype`` "auto" is the checkpoint's own. Weights are read
    from safetensors only and no remote code runs. ValueError, one line, for a name that cannot be loaded, an
    architecture that is not dense, an unknown device or dtype.
    """
    if not isinstance(name_or_path, str | Path) or not str(name_or_path):
        raise ValueError(f"target must be a name or a path, got {name_or_path!r}")
    name = str(name_or_path)
    place, kind = _resolve_device(device), _resolve_dtype(dtype)
    if name.startswith(_RANDOM):
        config = preset_config(name.removeprefix(_RANDOM))
        return DenseTarget(random_model(config, dtype=kind or config.dtype or torch.float32).to(place), name=name)
    with _bars_on_terminal_only():
        if name != "embedded":
            return _load_checkpoint(name, name, place, kind)
        source = embedded_source()
        try:
            return _load_checkpoint(source, name, place, kind)
        except ValueError as error:
            if source != HUB_ID:
                raise
            raise ValueError(f"target 'embedded' needs its weights, install them with: {INSTALL_LINE}") from error


def _load_checkpoint(source: str, name: str, device: torch.device, dtype: torch.dtype | None) -> DenseTarget:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = Path(source).expanduser()
    local = folder.is_dir()
    if local and not (folder / "config.json").is_file():
        raise ValueError(f"target folder {source!r} has no config.json")
    location = str(folder) if local else source
    where = {"trust_remote_code": False, "local_files_only": local}
    try:
        config = AutoConfig.from_pretrained(location, **where)
        attention_windows(config.get_text_config())  # refuse before the weights are read
        model = AutoModelForCausalLM.from_pretrained(
            location, config=config, dtype=dtype or "auto", attn_implementation="sdpa", use_safetensors=True, **where
        )
        has_tokenizer = not local or any((folder / file).is_file() for file in _TOKENIZER_FILES)
        tokenizer: Any | None = AutoTokenizer.from_pretrained(location, **where) if has_tokenizer else None
        return DenseTarget(model.to(device), name=name, tokenizer=tokenizer)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        known = f"'embedded', 'random:' with {', '.join(PRESETS)}, a local folder or a hub id"
        raise ValueError(f"cannot load target {source!r}: {reason} (targets: {known})") from error


def _resolve_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:<index>', got {device!r}") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {str(device)!r} is not there: {torch.cuda.device_count()} CUDA devices are available")
    return place


def _resolve_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """None stands for "auto"."""
    if dtype == "auto":
        return None
    kind = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if kind not in _DTYPES.values():
        raise ValueError(f"dtype must be auto, {', '.join(_DTYPES)} or one of those torch dtypes, got {dtype!r}")
    return kind


@contextlib.contextmanager
def _bars_on_terminal_only() -> Iterator[None]:
    """transformers draws its progress bars on any standard error; here on a terminal only."""
    if sys.stderr.isatty():
        yield
    else:
        with contextlib.redirect_stderr(io.StringIO()):
            yield

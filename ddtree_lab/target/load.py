"""Target stage: a name (embedded, random preset, local folder, hub id) -> a loaded target on a device in a dtype."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ddtree_lab.target.dense import DenseTarget, attention_windows
from ddtree_lab.target.embedded import HUB_ID, INSTALL_LINE, embedded_source
from ddtree_lab.target.protocol import Target
from ddtree_lab.target.random import PRESETS, preset_config, random_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_RANDOM = "random:"
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_target(name_or_path: str, *, device: str | torch.device = "auto", dtype: str | torch.dtype = "auto") -> Target:
    """Load a target: "embedded", "random:<preset>", a local folder or a hub id.

    ``device`` "auto" is cuda when there is one, else cpu. ``dtype`` "auto" is the checkpoint's own. Weights are read
    from safetensors only and no remote code runs. ValueError, one line, for a name that cannot be loaded, weights that
    are missing or do not fit the config, an architecture that is not dense, an unknown device or dtype.
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
        sizes = _weight_sizes(folder) if local else None
        if sizes:
            _check_layer_counts(json.loads((folder / "config.json").read_text(encoding="utf-8")), most=len(sizes))
        config = AutoConfig.from_pretrained(location, **where)
        attention_windows(config.get_text_config())  # refuse before the weights are read
        if sizes:
            _check_memory(config, sizes)
        with _without_load_report():
            model, report = AutoModelForCausalLM.from_pretrained(
                location,
                config=config,
                dtype=dtype or "auto",
                attn_implementation="sdpa",
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
                **where,
            )
        _check_weights(report, only_text=config.get_text_config() is config)
        has_tokenizer = not local or any((folder / file).is_file() for file in _TOKENIZER_FILES)
        tokenizer: Any | None = AutoTokenizer.from_pretrained(location, **where) if has_tokenizer else None
        return DenseTarget(model.to(device), name=name, tokenizer=tokenizer)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        known = f"'embedded', 'random:' with {', '.join(PRESETS)}, a local folder or a hub id"
        raise ValueError(f"cannot load target {source!r}: {reason} (targets: {known})") from error


def _weight_sizes(folder: Path) -> list[int]:
    """The number of elements of every tensor in the safetensors files of ``folder``, from their headers."""
    from safetensors import safe_open

    sizes = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            sizes += [math.prod(weights.get_slice(name).get_shape()) for name in weights.keys()]  # noqa: SIM118
    return sizes


def _check_layer_counts(fields: Any, *, most: int) -> None:
    """ValueError when a config.json, or a part of it, has more layers than there are weights: configs list them all."""
    for key, value in fields.items() if isinstance(fields, dict) else ():
        if key in _LAYER_COUNTS and isinstance(value, int) and value > most:
            raise ValueError(f"config.json says {key} {value}, the weights are {most} tensors")
        _check_layer_counts(value, most=most)


def _check_memory(config: Any, sizes: list[int]) -> None:
    """ValueError when the model of ``config`` is far larger than its files; nothing is allocated to find out.

    Twice as large passes: what is missing is named later. A quantized file packs at most 32 parameters in an element.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    asked, there = sum(weight.numel() for weight in model.parameters()), sum(sizes)
    if asked > there * (32 if getattr(config, "quantization_config", None) else 2):
        raise ValueError(f"config.json asks for {asked} parameters, the weights have {there}")


def _check_weights(report: Mapping[str, Any], *, only_text: bool) -> None:
    """ValueError naming a weight that ``report``, transformers' loading info, has found not to fit.

    Weights of other parts of a model that is more than text are not unexpected. Tied and derived ones never are.
    """
    if report["missing_keys"]:
        raise ValueError(f"the checkpoint lacks {min(report['missing_keys'])}")
    if report["mismatched_keys"]:
        name, found, wanted = min(report["mismatched_keys"])
        raise ValueError(f"{name} has shape {list(found)}, config.json says {list(wanted)}")
    if only_text and report["unexpected_keys"]:
        raise ValueError(f"the checkpoint has an unknown weight {min(report['unexpected_keys'])}")


def _resolve_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:<index>', got {device!r}") from None
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:<index>', got {str(device)!r}")
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
    """transformers draws progress bars on any standard error, and in a notebook as widgets; here on a terminal only."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging as switches

    if sys.stderr.isatty() or not switches.is_progress_bar_enabled():
        yield
        return
    hub_was_silent = are_progress_bars_disabled()
    switches.disable_progress_bar()
    try:
        yield
    finally:
        switches.enable_progress_bar()
        if hub_was_silent:
            disable_progress_bars()


@contextlib.contextmanager
def _without_load_report() -> Iterator[None]:
    """Leaves out transformers' table of weights that do not fit; every other warning of it is let through."""
    logger = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)

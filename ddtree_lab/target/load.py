"""Target stage: a name (embedded, random preset, local folder, hub id) -> a loaded target on a device in a dtype."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddtree_lab.files import read_bounded
from ddtree_lab.target.dense import DenseTarget, attention_windows
from ddtree_lab.target.embedded import HUB_ID, INSTALL_LINE, embedded_source
from ddtree_lab.target.protocol import Target
from ddtree_lab.target.quiet import quiet_libraries
from ddtree_lab.target.random import PRESETS, preset_config, random_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_RANDOM = "random:"
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_CONFIG_BYTES = 1 << 24
_MOST_LABELS = 1 << 16
_HUB_SECONDS = 10.0
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
    with quiet_libraries():
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
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = Path(source).expanduser()
    try:
        local = folder.is_dir()
        location = str(folder) if local else source
        sizes = _check_folder(folder) if local else None
        where = {"trust_remote_code": False, "local_files_only": local or not _hub_answers(source)}
        config = AutoConfig.from_pretrained(location, **where)
        attention_windows(config.get_text_config())  # refuse before the weights are read
        if sizes:
            _check_memory(config, sizes)
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
    except Exception as error:  # transformers meets a config it did not expect with any class at all
        known = f"'embedded', 'random:' with {', '.join(PRESETS)}, a local folder or a hub id"
        raise ValueError(f"cannot load target {source!r}: {_reason(error)} (targets: {known})") from error


def _reason(error: Exception) -> str:
    """The first line of ``error``, with the next one when the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def _hub_answers(hub_id: str) -> bool:
    """Whether the hub can be asked for the files of ``hub_id``; False when only the local cache has them.

    One request: without a network, transformers repeats each of its own for most of a minute. Raises the hub client's
    error when the files are in neither place.
    """
    import huggingface_hub

    try:
        huggingface_hub.model_info(hub_id, timeout=_HUB_SECONDS)
    except Exception:
        if isinstance(huggingface_hub.try_to_load_from_cache(hub_id, "config.json"), str):
            return False
        raise
    return True


def _check_folder(folder: Path) -> list[int]:
    """The number of elements of every tensor in a checkpoint folder that has a chance to load.

    ValueError when it holds a pipe or a device, which could be read for ever, or more layers than weights.
    """
    if not (folder / "config.json").is_file():
        raise ValueError("the folder has no config.json")
    for file in sorted(folder.iterdir()):
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise ValueError(f"{file.name} is not a regular file")
    sizes = _weight_sizes(folder)
    if not sizes:
        raise ValueError("the folder has no weights in .safetensors files")
    _check_counts(json.loads(read_bounded(folder / "config.json", _CONFIG_BYTES)), most=len(sizes))
    return sizes


def _weight_sizes(folder: Path) -> list[int]:
    """The number of elements of every tensor in the safetensors files of ``folder``, from their headers."""
    from safetensors import safe_open

    sizes = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            sizes += [math.prod(weights.get_slice(name).get_shape()) for name in weights.keys()]  # noqa: SIM118
    return sizes


def _check_counts(fields: Any, *, most: int) -> None:
    """ValueError when a config.json or a part of it has more layers than weights or too many labels: all are listed."""
    for key, value in fields.items() if isinstance(fields, dict) else ():
        if key in _LAYER_COUNTS and isinstance(value, int) and value > most:
            raise ValueError(f"config.json says {key} {value}, the weights are {most} tensors")
        if key == "num_labels" and isinstance(value, int) and value > _MOST_LABELS:  # no weight of a target bounds it
            raise ValueError(f"config.json says num_labels {value}, at most {_MOST_LABELS} are allowed")
        _check_counts(value, most=most)


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

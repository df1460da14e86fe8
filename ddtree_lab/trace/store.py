"""Trace files: RunResult <-> one ``.safetensors`` or ``.jsonl`` file. Both are lossless, versioned, and free of pickle.

``.safetensors``: the arrays of all rounds concatenated under the names of ``schema.ARRAYS``; ``rounds`` [R, 8] int64
holds each round's scalars and array lengths (``ROUND_COLUMNS``); ``stage_seconds`` [R, S] float64 is NaN where a round
lacks the stage; ``prompt_ids`` and ``output_ids`` are [L] and [T]. Integers stand as int32 when all of an array fit.
The header's metadata has one key, ``trace``: JSON with format, version, mode, stop reason, stats, meta, stage names.

``.jsonl``: the header line, then one line a round with the same names. Floats are the shortest decimals that give the
same float32 back, infinities the strings "inf" and "-inf".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree_lab.files import read_bounded, replacing
from ddtree_lab.trace.schema import (
    ARRAYS,
    MAX_ROUNDS,
    RoundScalars,
    arrays_of,
    check_draft_shape,
    check_header,
    check_result,
    header_of,
    round_from,
    scalars_of,
)
from ddtree_lab.types import Round, RunResult

SUFFIXES = (".safetensors", ".jsonl")
MAX_FILE_BYTES = 256 * 2**20
MAX_JSON_BYTES = 16 * 2**20  # one line of .jsonl, or the header of .safetensors
INT64_MAX = 2**63 - 1
ROUND_COLUMNS = (*RoundScalars._fields, "nodes", "draft_depths", "draft_width", "path", "emitted")


def save_trace(result: RunResult, path: str | Path) -> None:
    """Write a run to ``path``, whole or not at all; the suffix chooses the format.

    Raises ValueError for another suffix or a run that does not agree with itself, TypeError for stats or meta that JSON
    cannot hold, and OSError naming the file when it cannot be written.
    """
    path = Path(path)
    encode = _encode_jsonl if check_suffix(path) == ".jsonl" else _encode_safetensors
    try:
        check_result(result)
        data = encode(result)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"trace of {len(data)} bytes is beyond the limit of {MAX_FILE_BYTES}")
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"cannot write {path}: {error}") from error
    write_atomically(path, data)


def load_trace(path: str | Path) -> RunResult:
    """Read a run from ``path`` and check all of it.

    Raises ValueError naming the file and the fault (and the line of ``.jsonl``) for anything but a whole and consistent
    trace of this version, OSError when the file cannot be read.
    """
    path = Path(path)
    decode = _decode_jsonl if check_suffix(path) == ".jsonl" else _decode_safetensors
    data = read_bounded(path, MAX_FILE_BYTES)
    try:
        result = decode(data)
        check_result(result)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    return result


def check_suffix(path: str | Path) -> str:
    """The suffix of a trace file, or ValueError naming the two that exist."""
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise ValueError(f"trace file must end in {' or '.join(SUFFIXES)}, got {str(path)!r}")
    return suffix


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write ``data`` to ``path`` as ``files.replacing`` does; an OSError is raised again naming ``path``."""
    path = Path(path)
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error


def _encode_safetensors(result: RunResult) -> bytes:
    from safetensors.torch import save

    arrays = [arrays_of(round_) for round_ in result.rounds]
    stages = sorted({stage for round_ in result.rounds for stage in round_.stage_seconds})
    table = [
        [*scalars_of(round_), len(round_.tree), *round_.draft_token_ids.shape, len(a["path"]), len(a["emitted"])]
        for round_, a in zip(result.rounds, arrays, strict=True)
    ]
    seconds = [[round_.stage_seconds.get(stage, math.nan) for stage in stages] for round_ in result.rounds]
    tensors = {
        "prompt_ids": _narrow(torch.tensor(result.prompt_ids, dtype=torch.int64)),
        "output_ids": _narrow(torch.tensor(result.output_ids, dtype=torch.int64)),
        "rounds": torch.tensor(table, dtype=torch.int64).reshape(-1, len(ROUND_COLUMNS)),
        "stage_seconds": torch.tensor(seconds, dtype=torch.float64).reshape(len(result.rounds), len(stages)),
    }
    for name, spec in ARRAYS.items():
        flat = [a[name].flatten() for a in arrays]
        tensors[name] = _narrow(torch.cat(flat) if flat else torch.empty(0, dtype=spec.dtype))
    header = _dumps(header_of(result) | {"stages": stages})
    return save(tensors, metadata={"trace": header.decode()})


def _decode_safetensors(data: bytes) -> RunResult:
    from safetensors import SafetensorError
    from safetensors.torch import load

    length = int.from_bytes(data[:8], "little")
    if length > MAX_JSON_BYTES:
        raise ValueError(f"header of {length} bytes is beyond the limit of {MAX_JSON_BYTES}")
    try:
        tensors = load(data)
    except (SafetensorError, KeyError, RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"not a whole safetensors file ({error})") from error
    metadata = _loads(data[8 : 8 + length], where="header").get("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("trace"), str):
        raise ValueError("header: the metadata must hold a trace")
    header = check_header(_loads(metadata["trace"].encode(), where="header"))
    _check_names(tensors, {"prompt_ids", "output_ids", "rounds", "stage_seconds", *ARRAYS}, where="tensors")

    table = _integers_2d(tensors["rounds"], header["rounds"])
    stages = header.get("stages")
    if not (isinstance(stages, list) and all(isinstance(stage, str) for stage in stages)):
        raise ValueError("header: stages must be a list of names")
    seconds = tensors["stage_seconds"]
    if seconds.dtype != torch.float64 or seconds.shape != (len(table), len(stages)):
        raise ValueError(f"stage_seconds must be float64 [{len(table)}, {len(stages)}]")
    columns = {name: _split(name, _widen(name, tensors[name]), table) for name in ARRAYS}
    rounds = []
    for index, row in enumerate(table):
        times = {stage: value for stage, value in zip(stages, seconds[index].tolist(), strict=True) if value == value}
        arrays = {name: pieces[index] for name, pieces in columns.items()}
        rounds.append(_round_at(index, arrays, RoundScalars(*row[:3]), times))
    prompt_ids, output_ids = (_widen(name, tensors[name]).tolist() for name in ("prompt_ids", "output_ids"))
    return _result(header, prompt_ids, output_ids, rounds)


def _narrow(array: Tensor) -> Tensor:
    """int64 -> int32 when every value fits; other dtypes as they are."""
    fits = array.dtype == torch.int64 and torch.equal(array, array.to(torch.int32).to(torch.int64))
    return (array.to(torch.int32) if fits else array).contiguous()


def _widen(name: str, array: Tensor) -> Tensor:
    """The inverse of ``_narrow``; ValueError unless the array is flat and of its dtype."""
    dtype = ARRAYS[name].dtype if name in ARRAYS else torch.int64
    allowed = (torch.int32, torch.int64) if dtype == torch.int64 else (dtype,)
    if array.dtype not in allowed or array.dim() != 1:
        raise ValueError(f"{name} must be a flat array of {dtype}, got {array.dtype} {list(array.shape)}")
    return array.to(dtype)


def _integers_2d(array: Tensor, num_rounds: int) -> list[list[int]]:
    if array.dtype != torch.int64 or array.shape != (num_rounds, len(ROUND_COLUMNS)):
        raise ValueError(f"rounds must be int64 [{num_rounds}, {len(ROUND_COLUMNS)}], got {list(array.shape)}")
    if bool((array < 0).any()):
        raise ValueError(f"rounds must not be negative, got {int(array.min())}")
    return array.tolist()


def _split(name: str, flat: Tensor, table: Sequence[Sequence[int]]) -> list[Tensor]:
    """One piece a round of a concatenated array, [D, K] for the draft's. ValueError when the lengths do not add up."""
    columns = ("draft_depths", "draft_width") if ARRAYS[name].shape == "draft" else (ARRAYS[name].shape,)
    shapes = [[row[ROUND_COLUMNS.index(column)] for column in columns] for row in table]
    for shape in shapes:
        if len(shape) == 2:
            check_draft_shape(*shape)
    lengths = [math.prod(shape) for shape in shapes]
    if sum(lengths) != flat.shape[0]:
        raise ValueError(f"{name} has {flat.shape[0]} values, its rounds ask for {sum(lengths)}")
    return [piece.reshape(shape) for piece, shape in zip(flat.split(lengths), shapes, strict=True)] if lengths else []


def _encode_jsonl(result: RunResult) -> bytes:
    head = header_of(result) | {"prompt_ids": list(result.prompt_ids), "output_ids": list(result.output_ids)}
    lines = [_dumps(head)]
    for index, round_ in enumerate(result.rounds):
        line: dict[str, Any] = {"round": index, **scalars_of(round_)._asdict()}
        line["draft_shape"] = list(round_.draft_token_ids.shape)
        line["stage_seconds"] = {stage: float(seconds) for stage, seconds in round_.stage_seconds.items()}
        for name, array in arrays_of(round_).items():
            part, _, key = name.partition(".")
            values = array.tolist() if array.dtype == torch.int64 else _shortest(array)
            if key:
                line.setdefault(part, {})[key] = values
            else:
                line[part] = values
        lines.append(_dumps(line))
    return b"".join(line + b"\n" for line in lines)


def _decode_jsonl(data: bytes) -> RunResult:
    if not data.endswith(b"\n"):
        raise ValueError("cut short: the last line does not end")
    if data.count(b"\n") > MAX_ROUNDS + 1:
        raise ValueError(f"more than the limit of {MAX_ROUNDS} rounds")
    lines = data[:-1].split(b"\n")
    header = check_header(_loads(lines[0], where="line 1"))
    ids = {name: _array(header.get(name), torch.int64, name=name).tolist() for name in ("prompt_ids", "output_ids")}
    if header["rounds"] != len(lines) - 1:
        raise ValueError(f"cut short or extended: the header states {header['rounds']} rounds, found {len(lines) - 1}")
    rounds = []
    for index, line in enumerate(lines[1:]):
        where = f"line {index + 2}"
        try:
            rounds.append(_round_from_line(_loads(line, where=where), index))
        except ValueError as error:
            raise error if str(error).startswith(where) else ValueError(f"{where}: {error}") from None
    return _result(header, ids["prompt_ids"], ids["output_ids"], rounds)


def _round_from_line(line: object, index: int) -> Round:
    parts = {name.partition(".")[0] for name in ARRAYS}
    _check_names(line, {"round", *RoundScalars._fields, "draft_shape", "stage_seconds", *parts}, where="round")
    if line["round"] != index:
        raise ValueError(f"round must be {index}, got {line['round']!r:.40}")
    for part in ("tree", "target", "draft"):
        _check_names(line[part], {n.partition(".")[2] for n in ARRAYS if n.startswith(part + ".")}, where=part)
    scalars = RoundScalars(*_array([line[name] for name in RoundScalars._fields], torch.int64, name="scalars").tolist())
    depths, width = _draft_shape(line["draft_shape"])
    arrays = {}
    for name, spec in ARRAYS.items():
        part, _, key = name.partition(".")
        values = line[part][key] if key else line[part]
        if spec.shape == "draft":
            values = _flat_rows(values, depths, width, name=name)
        array = _array(values, spec.dtype, name=name)
        arrays[name] = array.reshape(depths, width) if spec.shape == "draft" else array
    return round_from(arrays, scalars, _stage_seconds(line["stage_seconds"]))


def _draft_shape(value: object) -> tuple[int, int]:
    shape = _array(value, torch.int64, name="draft_shape").tolist()
    if len(shape) != 2:
        raise ValueError(f"draft_shape must be [D, K], got {shape[:8]}")
    check_draft_shape(*shape)
    return shape[0], shape[1]


def _flat_rows(rows: object, depths: int, width: int, *, name: str) -> list[object]:
    whole = isinstance(rows, list) and len(rows) == depths
    if not whole or any(not isinstance(row, list) or len(row) != width for row in rows):
        raise ValueError(f"{name} must be {depths} rows of {width}")
    return [value for row in rows for value in row]


def _stage_seconds(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ValueError("stage_seconds must map names to numbers")
    return {str(name): _seconds(name, seconds) for name, seconds in value.items()}


def _seconds(name: str, value: object) -> float:
    if not isinstance(value, float):
        raise ValueError(f"stage_seconds[{name!r:.40}] must be a number with a fraction, got {value!r:.40}")
    return value


def _array(values: object, dtype: torch.dtype, *, name: str) -> Tensor:
    """A flat tensor from a JSON list; floats may also be "inf" or "-inf"."""
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list, got {type(values).__name__}")
    if dtype == torch.int64:
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or abs(value) > INT64_MAX:
                raise ValueError(f"{name} must hold 64-bit integers, got {value!r:.40}")
        return torch.tensor(values, dtype=dtype)
    numbers = [float(value) if isinstance(value, str) and value in ("inf", "-inf") else value for value in values]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{name} must hold numbers, got {number!r:.40}")
    try:
        wide = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
    except OverflowError as error:
        raise ValueError(f"{name}: {error}") from None
    array = wide.to(dtype)
    if not torch.equal(array.isinf(), wide.isinf()):
        raise ValueError(f"{name} holds a number beyond {dtype}")
    return array


def _shortest(array: Tensor) -> list[Any]:
    """Nested lists of the shortest decimals that round to the same float32."""
    if array.dim() > 1:
        return [_shortest(row) for row in array]
    numbers = []
    for value in array.numpy():
        short = float(str(value))
        exact = short if type(value)(short) == value else float(value)  # it goes through a double on its way back
        numbers.append(exact if math.isfinite(exact) else str(exact))
    return numbers


def _round_at(index: int, arrays: Mapping[str, Tensor], scalars: RoundScalars, times: Mapping[str, float]) -> Round:
    try:
        return round_from(arrays, scalars, times)
    except ValueError as error:
        raise ValueError(f"round {index}: {error}") from None


def _result(header: dict[str, Any], prompt_ids: list[int], output_ids: list[int], rounds: list[Round]) -> RunResult:
    return RunResult(
        mode=header["mode"],
        prompt_ids=tuple(prompt_ids),
        output_ids=output_ids,
        rounds=rounds,
        stop_reason=header["stop_reason"],
        stats=header["stats"],
        meta=header["meta"],
    )


def _check_names(value: object, names: set[str], *, where: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {type(value).__name__}")
    if value.keys() != names:
        missing, unknown = sorted(names - value.keys()), sorted(value.keys() - names)
        raise ValueError(f"{where}: missing {missing}, unknown {unknown}"[:200])


def _dumps(value: object) -> bytes:
    line = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "strict")
    if len(line) > MAX_JSON_BYTES:
        raise ValueError(f"line of {len(line)} bytes is beyond the limit of {MAX_JSON_BYTES}")
    return line


def _loads(text: bytes, *, where: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"{where}: {len(text)} bytes is beyond the limit of {MAX_JSON_BYTES}")
    try:
        return json.loads(text.decode("utf-8"), parse_constant=refuse)
    except RecursionError:
        raise ValueError(f"{where}: bad JSON (nested too deep)") from None
    except ValueError as error:
        raise ValueError(f"{where}: bad JSON ({error})") from None

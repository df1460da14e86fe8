"""Comparison: a target, a drafter and prompts -> runs of every mode -> one summary, a table, a folder of outputs."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ddtree_lab.files import read_bounded
from ddtree_lab.machine import machine_facts
from ddtree_lab.metrics import Match, compare_tokens, linear_against_walk, speed_ratio, summarise_results
from ddtree_lab.progress import progress_bar
from ddtree_lab.prompts import Prompt, to_input_ids
from ddtree_lab.rounding import measure_tolerance
from ddtree_lab.trace.store import MAX_FILE_BYTES, save_trace, write_atomically
from ddtree_lab.tree.validate import as_budget, as_count
from ddtree_lab.types import MODES, RunResult
from ddtree_lab.wording import aligned, counted

if TYPE_CHECKING:
    from ddtree_lab.draft.protocol import Drafter
    from ddtree_lab.target.protocol import Target

TREE_MODES = ("eagle_linear", "tree_walk")
OUTPUT_NAMES = ("report.html", "summary.json", "traces")
TRACE_NAME = re.compile(rf"({'|'.join(MODES)})(-\d+)?-\d{{3,}}\.safetensors")
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Setting:
    """One way of decoding: a mode and its budget (None for "ar", the drafter's horizon for "chain")."""

    mode: str
    budget: int | None


@dataclass(frozen=True, eq=False)
class Comparison:
    """Every prompt decoded in every setting."""

    prompts: tuple[Prompt, ...]
    results: Mapping[Setting, list[RunResult]]  # in the order of the prompts
    tolerance: float  # logit gap up to which a mismatch is a tie
    config: Mapping[str, Any]
    machine: Mapping[str, Any]
    label: str | None  # None for a real drafter


def run_comparison(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    modes: Sequence[str] = MODES,
    budgets: Sequence[int] = (32,),
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Comparison:
    """Decode every prompt in every mode, each prompt in all settings before the next, so that they share the machine's
    condition. A run ends at ``max_new_tokens`` or at a stop token of the target. One short warm-up run a setting comes
    first and is not counted.

    "ar" and "chain" do not depend on the budget and run once; "eagle_linear" and "tree_walk" run per budget. Prompt i
    uses seed + i in every setting. Raises ValueError, before any decoding, for an unknown mode, no prompts, a seed that
    leaves none for the last prompt, no budget for a tree mode, or a prompt that does not fit the target's context with
    its new tokens.
    """
    from ddtree_lab.decode import generate

    if not prompts:
        raise ValueError("prompts must hold at least one prompt")
    if as_count("seed", seed) > 2**64 - len(prompts):
        raise ValueError(f"seed must be at most 2**64 - {len(prompts)}, the number of prompts, got {seed}")
    settings = plan_settings(modes, budgets, horizon=drafter.horizon)
    inputs = [_fitting_ids(prompt, target, max_new_tokens) for prompt in prompts]

    def run(setting: Setting, index: int, tokens: int) -> RunResult:
        return generate(
            target,
            drafter,
            inputs[index],
            mode=setting.mode,
            budget=setting.budget or 0,
            max_new_tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed + index,
            stop_token_ids=target.stop_token_ids,
        )

    tolerance = measure_tolerance(target, inputs)
    for setting in settings:
        run(setting, 0, min(WARM_UP_TOKENS, max_new_tokens))
    results: dict[Setting, list[RunResult]] = {setting: [] for setting in settings}
    todo = [(index, setting) for index in range(len(prompts)) for setting in settings]
    for index, setting in progress_bar(todo, "comparing", unit="run") if progress else todo:
        result = run(setting, index, max_new_tokens)
        about = {"prompt_id": prompts[index].id, "prompt": prompts[index].text, "budget": setting.budget}
        results[setting].append(replace(result, meta={**result.meta, **about}))
    config = {
        "target": target.name,
        "drafter": drafter.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device.type),
        "modes": [mode for mode in MODES if mode in modes],
        "budgets": sorted(set(budgets)),
        "block_size": drafter.block_size,
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }
    return Comparison(tuple(prompts), results, tolerance, config, machine_facts(), drafter.label)


def plan_settings(modes: Sequence[str], budgets: Sequence[int], *, horizon: int) -> list[Setting]:
    """The settings to run, in the order of ``MODES`` and of rising budgets. ValueError for a mode that does not exist,
    no mode, a budget that ``as_budget`` refuses, or tree modes without a budget."""
    budgets = [as_budget(budget) for budget in budgets]
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if not modes:
        raise ValueError(f"modes must name at least one of {', '.join(MODES)}")
    if not budgets and set(modes) & set(TREE_MODES):
        raise ValueError("budgets must name at least one budget for eagle_linear and tree_walk")
    by_mode = {"ar": [None], "chain": [horizon]} | dict.fromkeys(TREE_MODES, sorted(set(budgets)))
    return [Setting(mode, budget) for mode in MODES if mode in modes for budget in by_mode[mode]]


def summarise(comparison: Comparison) -> dict[str, Any]:
    """The content of summary.json.

    ``modes[mode]`` is one entry a mode, for the tree modes that of the budget with the most tokens/s;
    ``by_budget[mode][str(budget)]`` has all of theirs. An entry is ``metrics.summarise_results`` with ``budget``,
    ``ratio_to_ar`` (of tokens/s), and ``identical_to_ar``, ``ties``, ``diverged`` (prompts; None where plain decoding
    did not run or temperature > 0). ``mismatches`` lists every tie and divergence. ``linear_against_walk[str(budget)]``
    replays EAGLE-linear on tree-walk's trees. Tokens/s are the tokens of rounds over the time of decoding, without
    prefill and recording.
    """
    matches = {setting: _matches(comparison, setting) for setting in comparison.results}
    entries = {
        setting: summarise_results(results) | {"budget": setting.budget} | _match_counts(matches[setting])
        for setting, results in comparison.results.items()
    }
    plain = entries.get(Setting("ar", None), {}).get("tokens_per_second")
    for entry in entries.values():
        entry["ratio_to_ar"] = speed_ratio(entry["tokens_per_second"], plain)
    modes: dict[str, Any] = {}
    by_budget: dict[str, dict[str, Any]] = {}
    for setting, entry in entries.items():
        if setting.mode in TREE_MODES:
            by_budget.setdefault(setting.mode, {})[str(setting.budget)] = entry
        best = modes.setdefault(setting.mode, entry)
        if (entry["tokens_per_second"] or 0.0) > (best["tokens_per_second"] or 0.0):
            modes[setting.mode] = entry
    against = {
        str(setting.budget): linear_against_walk([round_ for result in results for round_ in result.rounds])
        for setting, results in comparison.results.items()
        if setting.mode == "tree_walk"
    }
    return {
        "modes": modes,
        "by_budget": by_budget,
        "linear_against_walk": {budget: counts for budget, counts in against.items() if counts},
        "mismatches": [
            {"mode": setting.mode, "budget": setting.budget, "prompt_id": prompt.id, **asdict(match)}
            for setting, of_setting in matches.items()
            for prompt, match in zip(comparison.prompts, of_setting, strict=False)
            if match.kind != "identical"
        ],
        "tolerance": comparison.tolerance,
        "config": dict(comparison.config),
        "machine": dict(comparison.machine),
        "label": comparison.label,
    }


def format_table(summary: Mapping[str, Any]) -> str:
    """The summary as plain text: the modes, acceptance per depth, and what EAGLE-linear lost on tree-walk's trees.

    A drafter's label stands in the title and beside every row, column and sentence that it made.
    """
    config, mark = summary["config"], f" [{summary['label']}]" if summary["label"] else ""
    title = (
        f"{config['target']} with {config['drafter']}{mark}: {config['prompts']} prompts x {config['max_new_tokens']} "
        f"tokens, temperature {config['temperature']:g}, {config['dtype']} on {config['device']}"
    )
    head = ["mode", "budget", "tau", "rounds", "tokens", "tokens/s", "ratio to ar", "identical to ar"]
    rows = [
        [
            _named(mode, mark),
            _number(entry["budget"], 0),
            _number(entry["tau"], 2),
            _number(entry["rounds"], 0),
            _number(entry["tokens"], 0),
            _number(entry["tokens_per_second"], 1),
            _number(entry["ratio_to_ar"], 2),
            _identical(entry, config["prompts"]),
        ]
        for mode, best in summary["modes"].items()
        for entry in summary["by_budget"].get(mode, {"": best}).values()
    ]
    parts = [title, "", _table([head, *rows])]
    drafted = {mode: entry for mode, entry in summary["modes"].items() if entry["per_depth"]}
    if drafted:
        depths = max(len(entry["per_depth"]) for entry in drafted.values())
        head = ["depth", *(_named(f"{mode} {entry['budget']}", mark) for mode, entry in drafted.items())]
        rows = [[str(depth + 1), *(_depth_cell(entry, depth) for entry in drafted.values())] for depth in range(depths)]
        parts += ["", "Rounds that accepted each depth, of all rounds (of those that accepted the depth before)", ""]
        parts += [_table([head, *rows])]
    budget = str(summary["modes"].get("tree_walk", {}).get("budget"))
    counts = summary["linear_against_walk"].get(budget)
    if counts:
        won = f"won {counts['linear_won']}, which must not happen" if counts["linear_won"] else "never won"
        parts += [
            "",
            f"On tree-walk's own trees of budget {budget}, EAGLE-linear lost {counts['lost_rounds']} of "
            f"{counted(counts['rounds'], 'round')} and {counted(counts['tokens_lost'], 'token')}, with "
            f"{counted(counts['false_continuations'], 'false continuation')}, and {won}{mark}.",
        ]
    return "\n".join(parts)


def check_out_dir(out_dir: str | Path, *, overwrite: bool = False) -> None:
    """Raise ValueError or OSError unless ``write_outputs`` may and can write there; leaves nothing behind.

    Allowed: a folder that does not exist, an empty one, and with ``overwrite`` one that holds only outputs of a
    comparison. A mount point is none of these: it cannot be renamed.
    """
    if not str(out_dir):
        raise ValueError("out must name a folder, got ''")
    out = Path(out_dir).resolve()
    if os.path.ismount(out):
        raise ValueError(f"out {out} is a mount point, which cannot be replaced: choose a folder in it")
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder, {out} is a file")
    _refuse_filled(out, overwrite=overwrite)
    parent = next(folder for folder in out.parents if folder.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".ddtree-", dir=parent))
    except OSError as error:
        raise OSError(error.errno, f"cannot write {out}: {os.strerror(error.errno)}") from error


def write_outputs(
    comparison: Comparison,
    summary: Mapping[str, Any],
    out_dir: str | Path,
    *,
    decode_token: Callable[[int], str] = str,
    overwrite: bool = False,
) -> None:
    """Write traces/*.safetensors, summary.json and report.html to ``out_dir``, all or nothing.

    They are written to a folder beside it that is renamed at the end. Raises as ``check_out_dir``, and OSError naming
    ``out_dir`` when writing fails.
    """
    from ddtree_lab.viz.report import render_report

    check_out_dir(out_dir, overwrite=overwrite)
    out = Path(out_dir).resolve()
    staging = out.parent / f".ddtree-{secrets.token_hex(8)}.tmp"
    try:
        (staging / "traces").mkdir(parents=True)
        for setting, results in comparison.results.items():
            name = setting.mode if setting.budget is None else f"{setting.mode}-{setting.budget}"
            for index, result in enumerate(results):
                save_trace(result, staging / "traces" / f"{name}-{index:03d}.safetensors")
        text = json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomically(staging / "summary.json", f"{text}\n".encode())
        everything = [result for of_prompt in zip(*comparison.results.values(), strict=True) for result in of_prompt]
        write_atomically(staging / "report.html", render_report(dict(summary), everything, decode_token).encode())
        _put_in_place(staging, out, overwrite=overwrite)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, f"cannot write {out}: {os.strerror(error.errno)}") from error
        raise


def _put_in_place(staging: Path, out: Path, *, overwrite: bool) -> None:
    _refuse_filled(out, overwrite=overwrite)  # another run may have written there since the first check
    if not (overwrite and _is_filled(out)):
        os.rename(staging, out)  # an empty folder is replaced, a filled one refuses
        return
    old = staging.with_suffix(".old")
    os.rename(out, old)
    try:
        os.rename(staging, out)
    except BaseException:
        os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _is_filled(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _refuse_filled(out: Path, *, overwrite: bool) -> None:
    if _is_filled(out) and not (overwrite and _is_comparison(out)):
        advice = "pass --overwrite to replace it" if _is_comparison(out) else "it holds other files, choose another"
        raise ValueError(f"out {out} is not empty: {advice}")


def _is_comparison(folder: Path) -> bool:
    """Whether everything in the folder was written by ``write_outputs``, as far as names and the summary tell."""
    traces, summary = folder / "traces", folder / "summary.json"
    if sorted(os.listdir(folder)) != list(OUTPUT_NAMES) or not (traces.is_dir() and summary.is_file()):
        return False
    if not all(TRACE_NAME.fullmatch(name) for name in os.listdir(traces)):
        return False
    try:
        content = json.loads(read_bounded(summary, MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"modes", "config"} <= content.keys()


def _fitting_ids(prompt: Prompt, target: Target, max_new_tokens: int) -> Tensor:
    input_ids = to_input_ids(prompt.text, target)
    length = input_ids.shape[1]
    if length + max_new_tokens > target.context_length:
        raise ValueError(
            f"prompt {prompt.id!r} of {length} tokens and {max_new_tokens} new ones do not fit the target's context of "
            f"{target.context_length}"
        )
    return input_ids


def _matches(comparison: Comparison, setting: Setting) -> list[Match]:
    """One match a prompt, or none at all where plain decoding did not run or temperature is above 0."""
    reference = comparison.results.get(Setting("ar", None), [])
    pairs = zip(comparison.results[setting], reference, strict=False)
    matches = [compare_tokens(result, plain, comparison.tolerance) for result, plain in pairs]
    return [match for match in matches if match]


def _match_counts(matches: Sequence[Match]) -> dict[str, int | None]:
    names = {"identical_to_ar": "identical", "ties": "tie", "diverged": "diverged"}
    return {name: sum(match.kind == kind for match in matches) if matches else None for name, kind in names.items()}


def _named(mode: str, mark: str) -> str:
    return mode if mode == "ar" else mode + mark


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _identical(entry: Mapping[str, Any], prompts: int) -> str:
    if entry["identical_to_ar"] is None:
        return "-"
    parts = [f"{entry['identical_to_ar']} of {prompts}"]
    if entry["ties"]:
        parts.append(counted(entry["ties"], "tie"))
    if entry["diverged"]:
        parts.append(f"{entry['diverged']} diverged")
    return ", ".join(parts)


def _depth_cell(entry: Mapping[str, Any], depth: int) -> str:
    if depth >= len(entry["per_depth"]):
        return "-"
    return f"{entry['per_depth'][depth]:.3f} ({_number(entry['per_depth_conditional'][depth], 3)})"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = aligned(rows)
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])

"""The report of a comparison: summary and run results -> one self-contained HTML page.

Figures, chart and tables are written here; the round-by-round view is drawn in the page by ``static/report.js`` from
the JSON of ``ddtree_lab.viz.payload``. The page fetches nothing: its content security policy allows exactly its own
style sheet and script, by hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from string import Template
from typing import Any

from ddtree_lab.types import RunResult
from ddtree_lab.viz.payload import MODE_NAMES, TokenTable, drawing_payload, round_payload, run_name
from ddtree_lab.viz.stylesheet import static_text, tree_style
from ddtree_lab.viz.tokens import escape, label, script_json, visible
from ddtree_lab.viz.verdicts import Decode, RoundView, view_round

MAX_PROMPTS = 12  # prompts whose rounds can be browsed
MAX_NODES = 100_000  # nodes embedded in the page, about 5 MB
MAX_LOSSES = 200  # rows of the table of lost rounds
BROWSABLE_MODES = ("tree_walk", "eagle_linear", "chain")
_DASH = "–"


@dataclass(frozen=True)
class _Loss:
    """A round of a tree-walk run in which EAGLE-linear would have emitted fewer tokens."""

    result: int  # index into the results
    round: int
    walk: tuple[int, ...]  # tokens the round emitted
    linear: int  # how many of them EAGLE-linear emits
    lost: int


def render_report(summary: Mapping[str, Any], results: Sequence[RunResult], decode_token: Decode) -> str:
    """The whole page as text, the same bytes for the same arguments.

    ``summary`` is the content of summary.json: ``modes`` is needed, every other key may be missing. ``results`` are the
    runs it was made of, in prompt order. ``decode_token`` maps a token id to its text; that text, prompts and names may
    hold anything and are shown as text.

    Raises ValueError when ``summary`` has no ``modes``.
    """
    if not summary.get("modes"):
        raise ValueError(f"summary must have a non-empty 'modes', got the keys {sorted(summary)}")
    decode = _Remembered(decode_token)
    prompts = _prompts(results)
    chosen = _browsable(results, prompts)
    views = {
        index: [view_round(round) for round in result.rounds]
        for index, result in enumerate(results)
        if index in chosen or result.mode == "tree_walk"
    }
    style = static_text("report.css") + static_text("browse.css") + static_text("chart.css") + tree_style()
    script = static_text("tree.js") + static_text("report.js")
    title = "Draft trees: chain, EAGLE-linear and tree-walk compared"
    return Template(static_text("report.html")).substitute(
        policy=f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; "
        "base-uri 'none'; form-action 'none'",
        title=title,
        style=style,
        lead=_lead(summary, results, prompts),
        label=_label(summary.get("label")),
        comparison=_comparison(summary),
        depths=_depths(summary),
        losses=_losses(summary, results, views, prompts, chosen, decode),
        browsable=_browsable_rule(results, chosen),
        mismatches=_mismatches(summary),
        setup=_setup(summary),
        data=script_json(_payload(results, views, prompts, chosen, decode)),
        script=script,
    )


class _Remembered:
    """``decode_token`` asked once per id."""

    def __init__(self, decode_token: Decode) -> None:
        self._decode_token = decode_token
        self._texts: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decode_token(token)
        return self._texts[token]


# Prompts and the choice of what can be browsed


@dataclass(frozen=True)
class _Prompts:
    """Distinct prompts in the order of their first result."""

    number: tuple[int, ...]  # per result
    titles: tuple[str, ...]  # per prompt, made visible
    texts: tuple[str, ...]  # per prompt, made visible and laid out


def _prompts(results: Sequence[RunResult]) -> _Prompts:
    numbers: dict[object, int] = {}
    number, titles, texts = [], [], []
    for result in results:
        key = (result.meta.get("prompt_id"), result.prompt_ids)
        if key not in numbers:
            numbers[key] = len(numbers)
            name = str(result.meta.get("prompt_id", len(numbers)))
            text = str(result.meta.get("prompt", ""))
            opening = label(" ".join(text.split()), columns=48).replace("␣", " ") if text.strip() else ""
            titles.append(visible(name) + (f": {opening}" if opening else ""))
            texts.append(visible(text, laid_out=True) or "(not recorded)")
        number.append(numbers[key])
    return _Prompts(number=tuple(number), titles=tuple(titles), texts=tuple(texts))


def _browsable(results: Sequence[RunResult], prompts: _Prompts) -> dict[int, int]:
    """Result index -> its number in the page: by mode, then prompt, as long as the nodes fit."""
    candidates = [
        index
        for index, result in enumerate(results)
        if result.rounds and result.mode in BROWSABLE_MODES and prompts.number[index] < MAX_PROMPTS
    ]
    candidates.sort(key=lambda index: (BROWSABLE_MODES.index(results[index].mode), prompts.number[index], index))
    chosen: dict[int, int] = {}
    nodes = 0
    for index in candidates:
        nodes += sum(len(round.tree) for round in results[index].rounds)
        if nodes > MAX_NODES:
            break
        chosen[index] = len(chosen)
    return chosen


def _browsable_rule(results: Sequence[RunResult], chosen: Mapping[int, int]) -> str:
    total = sum(bool(result.rounds) and result.mode in BROWSABLE_MODES for result in results)
    if not total:
        return "No run with rounds was recorded."
    rule = f"{len(chosen)} of {total} recorded runs can be browsed here"
    if len(chosen) == total:
        return rule + "."
    return (
        f"{rule}: those of the first {MAX_PROMPTS} prompts, tree-walk before EAGLE-linear before chain, up to "
        f"{MAX_NODES:,} nodes in all, which keeps the page small. The traces beside this file hold every run."
    )


# Figures


def _lead(summary: Mapping[str, Any], results: Sequence[RunResult], prompts: _Prompts) -> str:
    sources = [summary, summary.get("config") or {}, *(result.meta for result in results)]
    parts = []
    for name in ("target", "drafter", "dtype"):
        value = next((source[name] for source in sources if source.get(name) not in (None, "")), None)
        if value is not None:
            parts.append(f"{name.capitalize()} <bdi>{_text(value)}</bdi>")
    if prompts.titles:
        parts.append(f"{len(prompts.titles)} prompt{'s' if len(prompts.titles) > 1 else ''}")
    return " · ".join(parts)


def _label(value: object) -> str:
    if not value:
        return ""
    return (
        f'<p class="banner" role="note"><strong><bdi>{_text(value)}</bdi></strong> — figures with this word beside '
        "them come from a drafter that is no trained model: they show how the parts work, not how well one drafts.</p>"
    )


def _rows(summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(mode, figures) per row: every budget of a mode that ran by budget, the mode's own figures otherwise."""
    rows = []
    for mode, figures in summary["modes"].items():
        budgets = (summary.get("by_budget") or {}).get(mode) or {}
        rows += [(mode, {"budget": budget, **budgets[budget]}) for budget in sorted(budgets, key=_budget_order)]
        if not budgets:
            rows.append((mode, figures))
    return rows


def _budget_order(budget: str) -> tuple[float, str]:
    return (float(budget) if budget.isdecimal() else math.inf, budget)


def _comparison(summary: Mapping[str, Any]) -> str:
    rows = _rows(summary)
    best = {
        name: max((row[name] for _, row in rows if _is_number(row.get(name))), default=None)
        for name in ("tau", "tokens_per_second", "ratio_to_ar")
    }

    def figure(row: Mapping[str, Any], name: str, digits: int) -> str:
        top = len(rows) > 1 and row.get(name) is not None and row.get(name) == best.get(name)
        return f'<td class="n{" best" if top else ""}">{_number(row.get(name), digits)}</td>'

    body = [
        f'<tr><th scope="row">{_mode(mode, summary)}</th><td class="n">{_number(row.get("budget"), 0)}</td>'
        + figure(row, "tau", 2)
        + figure(row, "rounds", 0)
        + figure(row, "tokens", 0)
        + figure(row, "tokens_per_second", 1)
        + figure(row, "ratio_to_ar", 2)
        + figure(row, "identical_to_ar", 0)
        + figure(row, "ties", 0)
        + f'<td class="n{" bad" if row.get("diverged") else ""}">{_number(row.get("diverged"), 0)}</td></tr>'
        for mode, row in rows
    ]
    heads = ("budget", "tau", "rounds", "tokens", "tokens/s", "ratio to ar", "identical to ar", "ties", "diverged")
    table = _table(["mode"], heads, body, caption="Best tau, tokens/s and ratio in bold.")
    return (
        table + '<p class="note">tau is the mean number of tokens a round emits. Identical, ties and diverged count '
        "prompts: a tie differs from plain decoding where the gap of the target's two best logits is within what "
        "rounding moves it, anything else that differs has diverged.</p>"
    )


def _depths(summary: Mapping[str, Any]) -> str:
    curves = {mode: _per_depth(figures) for mode, figures in summary["modes"].items()}
    curves = {mode: curve for mode, curve in curves.items() if curve}
    if not curves:
        return '<p class="note">No drafted round was recorded.</p>'
    depths = sorted({depth for curve in curves.values() for depth in curve})
    body = [
        f'<tr><th scope="row">{depth}</th>'
        + "".join(f'<td class="n">{_shares(*curve.get(depth, (None, None)))}</td>' for curve in curves.values())
        + "</tr>"
        for depth in depths
    ]
    caption = "Share of all rounds that accepted this depth, and in brackets of those that accepted the depth before."
    table = _table(["depth"], [_mode(mode, summary) for mode in curves], body, caption=caption, tall=True)
    return f'<div class="two"><figure class="plot">{_depth_chart(curves, depths, summary)}</figure>{table}</div>'


def _per_depth(figures: Mapping[str, Any]) -> dict[int, tuple[float | None, float | None]]:
    """depth -> (share of all rounds, share of those that reached the depth before)."""
    shares = zip_longest(figures.get("per_depth", ()), figures.get("per_depth_conditional", ()))
    return dict(enumerate(shares, start=1))


def _shares(of_all: float | None, given: float | None) -> str:
    return f'{_percent(of_all)} <span class="given">({_percent(given)})</span>'


def _depth_chart(
    curves: Mapping[str, Mapping[int, tuple[float | None, float | None]]],
    depths: Sequence[int],
    summary: Mapping[str, Any],
) -> str:
    width, height, left, right, top, bottom = 620, 300, 46, 14, 14, 64
    span = max(1, depths[-1] - 1)

    def across(depth: int) -> float:
        return round(left + 10 + (depth - 1) / span * (width - left - right - 20), 1)

    def up(share: float) -> float:
        return round(top + (1 - share) * (height - top - bottom), 1)

    parts = [
        f'<svg class="chart" role="img" aria-labelledby="chart-t" viewBox="0 0 {width} {height}">',
        '<title id="chart-t">Share of rounds that accepted at least each depth, by mode; the figures are in the table.'
        "</title>",
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - right}" y1="{up(share)}" y2="{up(share)}"/>'
            f'<text x="{left - 8}" y="{up(share) + 4}" text-anchor="end">{share:.0%}</text>'
        )
    every = -(-len(depths) // 16)
    for depth in depths[::every]:
        parts.append(f'<text x="{across(depth)}" y="{height - bottom + 18}" text-anchor="middle">{depth}</text>')
    parts.append(f'<text x="{(left + width) / 2}" y="{height - bottom + 36}" text-anchor="middle">depth</text>')
    for number, (mode, curve) in enumerate(curves.items()):
        points = [(across(depth), up(share)) for depth, (share, _) in sorted(curve.items()) if share is not None]
        name = mode if mode in MODE_NAMES else "ar"
        line = " ".join(f"{x:g},{y:g}" for x, y in points)
        x, y = left + 10 + number * 186, height - 10
        parts.append(
            f'<g class="{name}"><polyline class="line" points="{line}"/>'
            + "".join(_dot(name, *point) for point in points)
            + f'<path class="line" d="M{x} {y - 4}h34"/>{_dot(name, x + 17, y - 4)}</g>'
            + f'<text x="{x + 42}" y="{y}">{_mode(mode, summary)}</text>'
        )
    return "".join(parts) + "</svg>"


def _dot(mode: str, x: float, y: float) -> str:
    if mode == "chain":
        return f'<rect class="dot" x="{x - 3.5:g}" y="{y - 3.5:g}" width="7" height="7"/>'
    if mode == "eagle_linear":
        return f'<path class="dot" d="M{x:g} {y - 5:g}l5 8.5h-10z"/>'
    return f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="3.8"/>'


# EAGLE-linear against tree-walk


def _losses(
    summary: Mapping[str, Any],
    results: Sequence[RunResult],
    views: Mapping[int, Sequence[RoundView]],
    prompts: _Prompts,
    chosen: Mapping[int, int],
    decode: Decode,
) -> str:
    losses = [
        _Loss(index, number, round.emitted, len(round.emitted) - view.tokens_lost, view.tokens_lost)
        for index, result in enumerate(results)
        if result.mode == "tree_walk"
        for number, (round, view) in enumerate(zip(result.rounds, views[index], strict=True))
        if view.tokens_lost
    ]
    intro = (
        '<p class="note">EAGLE-linear reads the same tree as one flat sequence, depth first, and stops at the first '
        "token that differs; tree-walk moves to any child that matches. Each row below is a tree-walk round in which "
        "EAGLE-linear would have emitted fewer tokens.</p>"
    )
    parts = [intro, _linear_table(summary)]
    if not losses:
        return "".join(parts) + "<p>No recorded tree-walk round lost a token under EAGLE-linear.</p>"
    losses.sort(key=lambda loss: (-loss.lost, loss.result, loss.round))
    caption = f"{len(losses)} rounds, most tokens lost first."
    if len(losses) > MAX_LOSSES:
        caption = f"The {MAX_LOSSES} rounds that lost most, of {len(losses)}."
    caption += _mark(summary)
    body = [
        f'<tr><td class="prompt-cell"><bdi>{escape(prompts.titles[prompts.number[loss.result]])}</bdi></td>'
        f'<td class="n">{_number(results[loss.result].meta.get("budget"), 0)}</td><td class="n">{loss.round + 1}</td>'
        f'<td class="n">{loss.linear}</td><td class="n">{len(loss.walk)}</td><td class="n">{loss.lost}</td>'
        f'<td class="tokens"><bdi>{escape(_running(loss.walk[loss.linear :], decode))}</bdi></td>'
        f'<td class="open">{_link(loss, chosen)}</td></tr>'
        for loss in losses[:MAX_LOSSES]
    ]
    heads = ("budget", "round", "EAGLE-linear emits", "tree-walk emits", "tokens lost")
    parts.append(_table([], heads, body, caption=caption, tall=True, before=("prompt",), after=("lost text", "tree")))
    return "".join(parts)


def _link(loss: _Loss, chosen: Mapping[int, int]) -> str:
    if loss.result not in chosen:
        return _DASH
    where = f"round {loss.round + 1}"
    return f'<a href="#run-{chosen[loss.result]}-round-{loss.round + 1}" aria-label="Open {where} below">open</a>'


def _linear_table(summary: Mapping[str, Any]) -> str:
    by_budget = summary.get("linear_against_walk") or {}
    if not by_budget:
        return ""
    names = {
        "rounds": "rounds",
        "lost_rounds": "rounds lost by EAGLE-linear",
        "tokens_lost": "tokens lost",
        "false_continuations": "false continuations",
        "linear_won": "rounds won by EAGLE-linear",
    }
    body = [
        f'<tr><th scope="row">{_text(budget)}</th>'
        + "".join(f'<td class="n">{_number(by_budget[budget].get(name), 0)}</td>' for name in names)
        + "</tr>"
        for budget in sorted(by_budget, key=_budget_order)
    ]
    return _table(
        ["budget"], tuple(names.values()), body, caption=f"Both verifiers on the same trees, by budget{_mark(summary)}."
    )


def _mismatches(summary: Mapping[str, Any]) -> str:
    mismatches = summary.get("mismatches") or []
    if not mismatches:
        compared = [mode for mode, figures in summary["modes"].items() if figures.get("identical_to_ar") is not None]
        if not compared:
            return "<p>Not compared: plain decoding did not run, or tokens were sampled.</p>"
        return "<p>None: every run gave plain decoding's tokens.</p>"
    names = list(dict.fromkeys(name for entry in mismatches for name in entry))
    numeric = [name for name in names if all(_is_number(entry.get(name, 0)) for entry in mismatches)]
    names = [name for name in names if name not in numeric] + numeric
    body = [
        "<tr>"
        + "".join(
            f'<td class="{"n" if name in numeric else "words"}"><bdi>{_value(entry.get(name))}</bdi></td>'
            for name in names
        )
        + "</tr>"
        for entry in mismatches
    ]
    heads = [_text(name).replace("_", " ") for name in names]
    words = len(names) - len(numeric)
    caption = f"{len(mismatches)} in all, each with the logit gap where it first differs."
    return _table(heads[:words], heads[words:], body, caption=caption, tall=True)


def _setup(summary: Mapping[str, Any]) -> str:
    parts = []
    for name in ("config", "machine"):
        entries = summary.get(name) or {}
        if entries:
            rows = "".join(
                f"<dt>{_text(key).replace('_', ' ')}</dt><dd><bdi>{_value(value)}</bdi></dd>"
                for key, value in entries.items()
            )
            parts.append(f"<div><h3>{name.capitalize()}</h3><dl>{rows}</dl></div>")
    return f'<div class="two">{"".join(parts)}</div>' if parts else '<p class="note">Not recorded.</p>'


# The embedded rounds


def _payload(
    results: Sequence[RunResult],
    views: Mapping[int, Sequence[RoundView]],
    prompts: _Prompts,
    chosen: Mapping[int, int],
    decode: Decode,
) -> dict[str, Any]:
    """What report.js reads."""
    tokens = TokenTable(decode)
    runs = [
        {
            "prompt": prompts.number[index],
            "name": run_name(results[index]),
            "before": tokens.refer(_before(results[index])),
            "rounds": [
                round_payload(round, view, tokens)
                for round, view in zip(results[index].rounds, views[index], strict=True)
            ],
        }
        for index in chosen
    ]
    used = max((run["prompt"] for run in runs), default=-1) + 1
    return {
        **drawing_payload(),
        **tokens.payload(),
        "prompts": [{"title": prompts.titles[number], "text": prompts.texts[number]} for number in range(used)],
        "runs": runs,
    }


def _before(result: RunResult) -> list[int]:
    """Tokens emitted before the first round: the prefill's."""
    return result.output_ids[: len(result.output_ids) - sum(len(round.emitted) for round in result.rounds)]


# Text and numbers on their way into the page


def _running(tokens: Iterable[int], decode: Decode) -> str:
    return visible("".join(map(decode, tokens)))


def _text(value: object) -> str:
    return escape(visible(str(value), laid_out=True))


def _value(value: object) -> str:
    if value is None:
        return _DASH
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping | list | tuple):
        return _text(json.dumps(value, ensure_ascii=False, default=str))
    return _text(value)


def _mode(mode: str, summary: Mapping[str, Any]) -> str:
    return _text(MODE_NAMES.get(mode, mode) + ("" if mode == "ar" else _mark(summary)))


def _mark(summary: Mapping[str, Any]) -> str:
    """The drafter's label beside what it made; empty for a real drafter."""
    return f" [{summary['label']}]" if summary.get("label") else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: object, digits: int) -> str:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return f"{value:,.{digits}f}" if _is_number(value) else _DASH


def _percent(value: object) -> str:
    return f"{value:.1%}" if _is_number(value) else _DASH


def _table(
    row_heads: Sequence[str],
    numbers: Sequence[str],
    body: Sequence[str],
    *,
    caption: str,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
    tall: bool = False,
) -> str:
    """Heads and rows are markup already; the caption is text. ``numbers`` are the heads of right-aligned columns."""
    heads = "".join(f'<th scope="col">{head}</th>' for head in (*row_heads, *before))
    heads += "".join(f'<th scope="col" class="n">{head}</th>' for head in numbers)
    heads += "".join(f'<th scope="col">{head}</th>' for head in after)
    said, height = escape(caption), " tall" if tall else ""
    return (
        f'<div class="scroll{height}" role="region" tabindex="0" aria-label="{said}"><table><caption>{said}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _source(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"

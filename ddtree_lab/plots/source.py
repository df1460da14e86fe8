"""What a plot is made of: traces or the content of summary.json -> one entry of figures per way of decoding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_lab.checks import is_count
from ddtree_lab.compare import TREE_MODES
from ddtree_lab.metrics import calibration, summarise_results, summarise_rounds
from ddtree_lab.types import MODES, Round, RunResult
from ddtree_lab.viz.report import MODE_NAMES
from ddtree_lab.viz.tokens import label as shortened
from ddtree_lab.wording import counted

NAME_COLUMNS = 40  # character cells of a recorded name

NEEDED = (
    "budget",
    "rounds",
    "tau",
    "tokens_per_second",
    "tokens_per_round",
    "per_depth",
    "per_depth_conditional",
    "offered_nodes",
    "first_miss",
    "stage_ms",
    "calibration",
)  # of a summary's figures

Runs = Iterable[RunResult] | Iterable[Round] | Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """One mode, tree modes at one budget."""

    mode: str | None  # None for rounds without their run
    budget: int | None  # drafted nodes at most; None where it says nothing
    label: str | None  # of the drafter; None for a real one
    figures: Mapping[str, Any]  # the keys of ``metrics.summarise_results``, speed apart for rounds without their run

    @property
    def in_trees(self) -> bool:
        return self.mode in TREE_MODES

    @property
    def style(self) -> str:
        """The custom property of static/chart.css that has its colour."""
        return self.mode or "verify"

    @property
    def mode_name(self) -> str:
        """The mode with the drafter's label, which stands wherever its figures do."""
        name = MODE_NAMES[self.mode] if self.mode else "rounds"
        return f"{name} [{_shown(self.label)}]" if self.label else name

    @property
    def name(self) -> str:
        """Mode, budget and the number of rounds."""
        budget = f", budget {self.budget}" if self.in_trees else ""
        return f"{self.mode_name}{budget}, {counted(self.figures['rounds'], 'round')}"


@dataclass(frozen=True)
class Source:
    """The entries in the order of the modes and of rising budgets, and whose they are."""

    entries: tuple[Entry, ...]
    subject: str  # target and drafter, as far as recorded

    @property
    def subtitle(self) -> str:
        rounds = sum(entry.figures["rounds"] for entry in self.entries)
        return " · ".join(part for part in (self.subject, counted(rounds, "round")) if part)

    def at_budget(self, budget: int | None) -> Source:
        """Only the tree modes' entries of ``budget``, by default of the largest; the other modes as they are.

        Raises ValueError naming the budgets there are.
        """
        budgets = sorted({entry.budget for entry in self.entries if entry.in_trees})
        if budget is not None and budget not in budgets:
            raise ValueError(f"budget must be one of {', '.join(map(str, budgets)) or 'none'}, got {budget!r}")
        wanted = budgets[-1] if budget is None and budgets else budget
        kept = tuple(entry for entry in self.entries if not entry.in_trees or entry.budget == wanted)
        return Source(kept, self.subject)

    def drafted(self) -> Source:
        """Only the entries that offered drafted nodes. ValueError when there are none."""
        kept = tuple(entry for entry in self.entries if entry.figures["offered_nodes"])
        if not kept:
            raise ValueError("runs must hold a round with drafted nodes, got rounds of plain decoding alone")
        return Source(kept, self.subject)


def read_source(runs: Runs) -> Source:
    """The entries of recorded runs, of rounds, or of a comparison's summary.

    Runs are put together by mode, drafter's label and, for tree modes, budget. Rounds alone carry neither mode nor
    label and make one entry. Raises TypeError for anything else and ValueError, naming ``runs``, without a round.
    """
    if isinstance(runs, Mapping):
        source = _from_summary(runs)
    elif isinstance(runs, Iterable) and not isinstance(runs, str | bytes):
        source = _from_records(list(runs))
    else:
        raise TypeError(f"runs must be RunResults, Rounds or the content of summary.json, got {type(runs).__name__}")
    entries = [entry for entry in source.entries if entry.figures["rounds"]]
    if not entries:
        raise ValueError("runs must hold at least one round, got none")
    entries.sort(key=lambda entry: (MODES.index(entry.mode) if entry.mode else 0, entry.budget or 0, entry.label or ""))
    return Source(tuple(entries), source.subject)


def _from_summary(summary: Mapping[str, Any]) -> Source:
    if not isinstance(summary.get("modes"), Mapping):
        raise ValueError(f"runs must have 'modes' as summary.json has, got the keys {sorted(map(str, summary))}")
    unknown = [mode for mode in summary["modes"] if mode not in MODES]
    if unknown:
        raise ValueError(f"runs must name modes of {', '.join(MODES)}, got {unknown[0]!r:.40}")
    found = [
        (mode, figures)
        for mode, best in summary["modes"].items()
        for figures in (summary.get("by_budget", {}).get(mode) or {"": best}).values()
    ]
    for mode, figures in found:
        missing = [name for name in NEEDED if name not in figures]
        if missing:
            raise ValueError(f"runs must have {', '.join(missing)} for {mode} as summary.json has")
    label = summary.get("label")
    entries = [Entry(mode, figures["budget"], None if mode == "ar" else label, figures) for mode, figures in found]
    return Source(tuple(entries), _subject(summary.get("config", {}), label))


def _from_records(records: Sequence[object]) -> Source:
    if records and all(isinstance(record, Round) for record in records):
        figures = summarise_rounds(records) | {"calibration": calibration(records), "tokens_per_second": None}
        return Source((Entry(None, None, None, figures),), "")
    groups: dict[tuple[str, int | None, str | None], list[RunResult]] = {}
    for record in records:
        if not isinstance(record, RunResult):
            raise TypeError(f"runs must hold RunResults alone or Rounds alone, got {type(record).__name__}")
        budget = _budget(record) if record.mode in TREE_MODES else None
        groups.setdefault((record.mode, budget, record.meta.get("label")), []).append(record)
    entries = [Entry(*key, summarise_results(results)) for key, results in groups.items()]
    drafted = [result.meta for result in records if result.mode != "ar"] or [result.meta for result in records]
    subjects = dict.fromkeys(_subject(meta, meta.get("label")) for meta in drafted)
    return Source(tuple(entries), " / ".join(subject for subject in subjects if subject))


def _budget(result: RunResult) -> int:
    """The recorded budget, or the nodes of the largest tree where none was recorded."""
    recorded = result.meta.get("budget")
    return recorded if is_count(recorded) else max((round_.tree.budget_used for round_ in result.rounds), default=0)


def _subject(about: Mapping[str, Any], label: object) -> str:
    parts = [_shown(about["target"])] if about.get("target") else []
    if about.get("drafter"):
        parts.append(f"drafter {_shown(about['drafter'])}")
    named = " with ".join(parts)
    return f"{named} [{_shown(label)}]" if label else named


def _shown(value: object) -> str:
    return shortened(str(value), columns=NAME_COLUMNS)

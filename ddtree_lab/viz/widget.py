"""The widget: a recorded run -> its rounds' trees, browsed in a notebook and in step with Python through traits.

Verdicts and coordinates are computed here, for the round and the budget in view; ``static/widget.js`` shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

try:
    import anywidget
    from IPython.display import HTML, display
    from traitlets import Dict, Int, TraitError, default, observe, validate
except ImportError as error:
    raise ImportError(f"TreeWidget needs {error.name}: pip install ddtree-lab[lab]") from None

from ddtree_lab.trace.replay import replay_round
from ddtree_lab.types import Round, RunResult
from ddtree_lab.viz.payload import browsed_payload, drawing_payload, outcome_payload, run_name
from ddtree_lab.viz.picture import Picture, show_round
from ddtree_lab.viz.stylesheet import static_text, themed_style, tree_style
from ddtree_lab.viz.tokens import token_decoder

if TYPE_CHECKING:
    from ddtree_lab.target.protocol import Target


class TreeWidget(anywidget.AnyWidget):
    """The trees of a run, one round at a time, with both verdicts at any budget up to the recorded one.

    ``run`` is a RunResult or its rounds; tokens are shown as texts of ``target``'s tokenizer, as ids without one.
    Traits, set from either side and open to ``observe``: ``round_index`` (from 0); ``budget`` (drafted nodes kept of
    each tree as ``ddtree_lab.trace.prune`` keeps them; those of the run's largest tree by default); ``selected`` and
    ``hovered`` (a node of the round's tree, len(tree) for a bonus token that stands apart from it, or None; None after
    a step).

    A still picture is displayed above the widget: a reader without a kernel sees it, and the live widget hides it.

    Raises ValueError for a run without rounds, TypeError for what is no run, TraitError for a trait out of its range.
    """

    _esm = static_text("tree.js") + static_text("widget.js")
    _css = static_text("browse.css") + tree_style() + themed_style() + static_text("widget.css")

    round_index = Int(0).tag(sync=True)
    budget = Int(0).tag(sync=True)
    selected = Int(None, allow_none=True).tag(sync=True)
    hovered = Int(None, allow_none=True).tag(sync=True)
    _run = Dict().tag(sync=True)
    _round = Dict().tag(sync=True)
    _outcome = Dict().tag(sync=True)

    def __init__(
        self,
        run: RunResult | Sequence[Round],
        target: Target | None = None,
        *,
        round_index: int = 0,
        budget: int | None = None,
    ) -> None:
        rounds = run.rounds if isinstance(run, RunResult) else run
        if not isinstance(rounds, Sequence) or not all(isinstance(round_, Round) for round_ in rounds):
            raise TypeError(f"run must be a RunResult or a sequence of Round, got {type(run).__name__}")
        if not rounds:
            raise ValueError(f"run must hold at least one round, got {run!r:.60}")
        self._rounds, self._target, self._decode = tuple(rounds), target, token_decoder(target)
        self._largest = max(round_.tree.budget_used for round_ in rounds)
        name = run_name(run) if isinstance(run, RunResult) else ""
        super().__init__(
            round_index=round_index,
            budget=self._largest if budget is None else budget,
            _run={"rounds": len(rounds), "budget": self._largest, "name": name, **drawing_payload(pruned=True)},
        )

    def __repr__(self) -> str:
        return f"TreeWidget(round {self.round_index + 1} of {len(self._rounds)}, budget {self.budget})"

    def _ipython_display_(self) -> None:
        display(HTML(f'<div class="ddtree-still">{self.picture()._repr_html_()}</div>'))
        display(*self._repr_mimebundle_()[:1], raw=True)

    @property
    def shown_round(self) -> Round:
        """The round in view as tree-walk goes over it at the budget (``ddtree_lab.trace.replay_round``)."""
        return replay_round(self._rounds[self.round_index], self.budget)

    def picture(self) -> Picture:
        """The round in view at the budget, as a still picture."""
        title = f"Round {self.round_index + 1} of {len(self._rounds)}, budget {self.budget}"
        return show_round(self.shown_round, self._target, title=title)

    @validate("round_index", "budget", "selected", "hovered")
    def _check_range(self, proposal: dict[str, Any]) -> int | None:
        name, value = proposal["trait"].name, proposal["value"]
        of_run = {"round_index": len(self._rounds) - 1, "budget": self._largest}
        largest = of_run[name] if name in of_run else len(self._rounds[self.round_index].tree)
        if value is not None and (isinstance(value, bool) or not 0 <= value <= largest):
            raise TraitError(f"{name} must be an integer from 0 to {largest}, got {value!r}")
        return value

    @default("_round")
    def _round_in_view(self) -> dict[str, Any]:
        return browsed_payload(self._rounds, self.round_index, self._decode)

    @default("_outcome")
    def _outcome_in_view(self) -> dict[str, Any]:
        outcome = outcome_payload(self._rounds[self.round_index], self.budget, self._decode)
        return outcome | {"index": self.round_index}

    @observe("round_index")
    def _step(self, _change: object) -> None:
        with self.hold_sync():
            self.selected = self.hovered = None
            self._round, self._outcome = self._round_in_view(), self._outcome_in_view()

    @observe("budget")
    def _prune(self, _change: object) -> None:
        self._outcome = self._outcome_in_view()

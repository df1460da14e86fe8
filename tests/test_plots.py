"""Plots: every value is the metrics' own, both pictures have the same coordinates, gaps stay gaps."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace

import pytest
from samples import make_round, sample_run
from test_viz import HOSTILE

from ddtree_lab import metrics, plots
from ddtree_lab.compare import Comparison, Setting, summarise
from ddtree_lab.plots.chart import Axis, Chart, Series
from ddtree_lab.plots.look import AXES_HEIGHT, LEFT, MARKERS, frame_of
from ddtree_lab.plots.plotly_chart import chart_figure
from ddtree_lab.plots.show import show
from ddtree_lab.plots.source import NAME_COLUMNS
from ddtree_lab.plots.svg_chart import chart_svg
from ddtree_lab.prompts import Prompt
from ddtree_lab.types import MODES, RunResult
from ddtree_lab.viz.interactive import Interactive
from ddtree_lab.viz.stylesheet import read_style
from ddtree_lab.viz.tokens import escape_plotly, label

ALL = [getattr(plots, name) for name in plots.__all__]
AT_BUDGET = [plot for plot in ALL if plot not in (plots.tau_by_budget, plots.speed_by_budget)]
SETTINGS = [("ar", None), ("chain", 5), *((mode, n) for mode in ("eagle_linear", "tree_walk") for n in (4, 8, 16))]


def run_of(mode: str, budget: int | None, *, seed: int) -> RunResult:
    result = sample_run(mode, budget=budget or 0, tokens=40, seed=seed, boost=2.5)
    seconds = 0.25 + 0.01 * (budget or 0) + len(result.rounds) / 64
    result = replace(result, stats={"decode_seconds": seconds})
    return about(result, budget=budget, label=None if mode == "ar" else "toy", drafter="words", target="rule")


def runs_of() -> list[RunResult]:
    return [run_of(mode, budget, seed=seed) for seed in range(2) for mode, budget in SETTINGS]


def about(run: RunResult, **meta: object) -> RunResult:
    return replace(run, meta={**run.meta, **meta})


def summary_of(runs: list[RunResult]) -> dict[str, object]:
    results = {Setting(*key): [run for run in runs if (run.mode, run.meta["budget"]) == key] for key in SETTINGS}
    prompts = tuple(Prompt(text="Say it.", id=f"p{number}") for number in range(2))
    comparison = Comparison(prompts, results, 0.0, {"target": "rule", "drafter": "words"}, {}, "toy")
    return json.loads(json.dumps(summarise(comparison)))


def figures_of(runs: list[RunResult], mode: str, budget: int | None) -> dict[str, object]:
    return metrics.summarise_results([run for run in runs if (run.mode, run.meta["budget"]) == (mode, budget)])


def traces(shown: Interactive) -> dict[str, dict[str, object]]:
    """The named traces of the figure as plain JSON."""
    return {trace["name"]: trace for trace in json.loads(shown.figure.to_json())["data"] if "name" in trace}


def trace_of(shown: Interactive, start: str) -> dict[str, object]:
    (found,) = [trace for name, trace in traces(shown).items() if name.startswith(start)]
    return found


@pytest.fixture(scope="module")
def runs() -> list[RunResult]:
    return runs_of()


@pytest.fixture(scope="module")
def same_runs() -> list[RunResult]:
    return runs_of()


@pytest.mark.parametrize("budget", [4, 16])
@pytest.mark.parametrize("conditional", [False, True])
def test_acceptance_per_depth_is_the_metric(runs, budget: int, conditional: bool) -> None:
    shown = plots.acceptance_by_depth(runs, budget=budget, conditional=conditional)
    key = "per_depth_conditional" if conditional else "per_depth"
    assert len(traces(shown)) == 3
    for start, setting in (
        ("chain", ("chain", 5)),
        ("EAGLE-linear", ("eagle_linear", budget)),
        ("tree-walk", ("tree_walk", budget)),
    ):
        trace, figures = trace_of(shown, start), figures_of(runs, *setting)
        assert trace["y"] == figures[key]
        assert trace["x"] == [1, 2, 3, 4, 5]
        assert trace["name"].endswith(f", {figures['rounds']} rounds")


def test_the_largest_budget_is_the_default(runs) -> None:
    for plot in AT_BUDGET:
        assert plot(runs).figure == plot(runs, budget=16).figure != plot(runs, budget=4).figure


def test_tau_and_speed_by_budget_are_the_metrics(runs) -> None:
    tau, speed = plots.tau_by_budget(runs), plots.speed_by_budget(runs)
    plain = figures_of(runs, "ar", None)["tokens_per_second"]
    for shown, key in ((tau, "tau"), (speed, "tokens_per_second")):
        for start, mode in (("EAGLE-linear", "eagle_linear"), ("tree-walk", "tree_walk")):
            trace = trace_of(shown, start)
            assert trace["x"] == [4, 8, 16]
            assert trace["y"] == [figures_of(runs, mode, budget)[key] for budget in (4, 8, 16)]
        for start, setting in (("ar", ("ar", None)), ("chain", ("chain", 5))):
            assert trace_of(shown, start)["y"] == [figures_of(runs, *setting)[key]] * 3
    figures = figures_of(runs, "tree_walk", 8)
    ratio = figures["tokens_per_second"] / plain
    assert trace_of(speed, "tree-walk")["hovertext"][1] == (
        f"<b>{trace_of(speed, 'tree-walk')['name']}</b><br>tree-walk [toy], budget 8, {figures['rounds']} rounds: "
        f"{figures['tokens_per_second']:.2f}, {ratio:.2f} x ar"
    )
    left, right = speed.figure.layout.yaxis.range, speed.figure.layout.yaxis2.range
    assert [limit / plain for limit in left] == pytest.approx(right)
    assert speed.figure.layout.yaxis2.title.text == "ratio to ar (times)"
    assert "yaxis2" not in tau.figure.layout.to_plotly_json()


def test_without_plain_decoding_there_is_no_ratio(runs) -> None:
    shown = plots.speed_by_budget([run for run in runs if run.mode != "ar"])
    assert "yaxis2" not in shown.figure.layout.to_plotly_json()
    assert " x ar" not in shown.figure.to_json() and "ratio" not in shown.picture.svg


def test_a_setting_without_times_is_a_gap_in_both_pictures(runs) -> None:
    untimed = [replace(run, stats={}) if run.meta["budget"] == 8 and run.mode == "tree_walk" else run for run in runs]
    shown = plots.speed_by_budget(untimed)
    trace = trace_of(shown, "tree-walk")
    assert trace["y"][1] is None and None not in (trace["y"][0], trace["y"][2])
    assert trace["connectgaps"] is False
    assert trace["hovertext"][1].endswith("no time recorded")
    assert len(signs(shown.picture.svg, "series-3")) == 2 and len(signs(shown.picture.svg, "series-2")) == 3
    timeless = [replace(run, stats={}) for run in runs]
    with pytest.raises(ValueError, match="runs must hold runs with 'decode_seconds', got none with a time"):
        plots.speed_by_budget(timeless)


def test_depths_that_no_round_reached_are_gaps_not_zeros() -> None:
    round_ = make_round(parents=[-1, 0, 1, 2], tokens=[0, 1, 2, 3], targets=[9, 9, 9, 9], draft=[[1], [2], [3]])
    assert metrics.per_depth_conditional([round_]) == [0.0, None, None]
    shown = plots.acceptance_by_depth([round_], conditional=True)
    trace = trace_of(shown, "rounds, 1 round")
    assert trace["y"] == [0.0, None, None]
    assert trace["hovertext"][1].endswith("depth 2: no round")
    assert len(signs(shown.picture.svg, "series-0")) == 1


def test_tokens_per_round_is_the_metric_without_plain_decoding(runs) -> None:
    shown = plots.tokens_per_round(runs, budget=8)
    assert not any(name.startswith("ar") for name in traces(shown))
    for start, setting in (("chain", ("chain", 5)), ("tree-walk", ("tree_walk", 8))):
        trace, histogram = trace_of(shown, start), figures_of(runs, *setting)["tokens_per_round"]
        assert histogram[0] == 0
        assert dict(zip(trace["x"], trace["y"], strict=True)) == dict(enumerate(histogram[1:], start=1))


def test_missed_ranks_are_the_metric(runs) -> None:
    shown = plots.missed_ranks(runs, budget=8)
    labels = shown.figure.layout.xaxis.ticktext
    for start, setting in (("chain", ("chain", 5)), ("EAGLE", ("eagle_linear", 8)), ("tree-walk", ("tree_walk", 8))):
        miss = figures_of(runs, *setting)["first_miss"]
        drawn = dict(zip(labels, trace_of(shown, start)["y"], strict=True))
        apart = {
            "beyond_k": drawn.pop("beyond<br>top K"),
            "full_horizon": drawn.pop("no miss:<br>all depths"),
            "cut": drawn.pop("no miss:<br>end of text"),
        }
        assert apart == {name: miss[name] for name in apart}
        assert {rank: count for rank, count in drawn.items() if count} == miss["ranks"]
        assert sum(apart.values()) + sum(drawn.values()) == figures_of(runs, *setting)["rounds"]


def test_many_ranks_are_all_drawn_and_few_are_labelled(runs) -> None:
    summary = summary_of(runs)
    figures = summary["by_budget"]["tree_walk"]["16"]
    figures["first_miss"] = {"ranks": {"2": 40, "31": 7}, "beyond_k": 3, "full_horizon": 1, "cut": 0}
    shown = plots.missed_ranks(summary)
    trace, axes = trace_of(shown, "tree-walk"), shown.figure.layout
    assert {x: y for x, y in zip(trace["x"], trace["y"], strict=True) if y} == {2: 40, 31: 7, 37: 3, 43: 1}
    assert trace["x"][:31] == list(range(1, 32)) and trace["x"][31:] == list(axes.xaxis.tickvals[-3:])
    assert axes.xaxis.ticktext[:3] == ("1", "3", "5") and axes.xaxis.ticktext[-3:-2] == ("beyond<br>top K",)
    assert axes.yaxis.tickvals == (0, 10, 20, 30, 40)


def test_calibration_is_the_metric(runs) -> None:
    shown = plots.calibration(runs, budget=8)
    rows = figures_of(runs, "tree_walk", 8)["calibration"]
    trace = trace_of(shown, "tree-walk")
    assert trace["x"] == [row["stated"] for row in rows]
    assert trace["y"] == [row["observed"] for row in rows]
    assert f"depth {rows[3]['depth']}, rank {rows[3]['rank']}, {rows[3]['nodes']} node" in trace["hovertext"][3]
    sizes = dict(zip((row["nodes"] for row in rows), trace["marker"]["size"], strict=True))
    assert sizes[max(sizes)] > sizes[min(sizes)]
    (diagonal,) = shown.figure.layout.shapes
    assert (diagonal.x0, diagonal.y0, diagonal.x1, diagonal.y1) == (0, 0, 1, 1)


def test_stage_times_are_the_metric_and_missing_stages_are_gaps(runs) -> None:
    timed = [
        replace(
            run,
            rounds=[replace(round_, stage_seconds=stages(run.mode, index)) for index, round_ in enumerate(run.rounds)],
        )
        for run in runs
    ]
    shown = plots.stage_times(timed, budget=4)
    assert list(traces(shown)) == ["draft", "tree build", "verify", "accept"]
    settings = [("ar", None), ("chain", 5), ("eagle_linear", 4), ("tree_walk", 4)]
    medians = [figures_of(timed, *setting)["stage_ms"] for setting in settings]
    bases = [0.0] * 4
    for name, trace in traces(shown).items():
        times = [stage.get(name.replace(" ", "_"), {}).get("median") for stage in medians]
        assert trace["y"] == times
        assert trace["base"] == pytest.approx(bases)
        bases = [base + (time or 0.0) for base, time in zip(bases, times, strict=True)]
    assert trace_of(shown, "draft")["y"][0] is None and trace_of(shown, "draft")["hovertext"][0].endswith(
        "not recorded"
    )
    assert shown.figure.layout.xaxis.ticktext[3].startswith("tree-walk [toy]<br>budget 4, ")
    with pytest.raises(ValueError, match="runs must hold rounds with 'stage_seconds'"):
        plots.stage_times([replace(run, rounds=[replace(r, stage_seconds={}) for r in run.rounds]) for run in runs])


def stages(mode: str, index: int) -> dict[str, float]:
    common = {"tree_build": 0.001, "verify": 0.01 + index / 1000, "accept": 0.0005, "record": 3.0}
    return common if mode == "ar" else {"draft": 0.004, **common}


@pytest.mark.parametrize("plot", ALL)
def test_a_summary_gives_the_figure_of_its_traces(runs, plot: Callable[..., Interactive]) -> None:
    assert plot(summary_of(runs)).figure.to_json() == plot(runs).figure.to_json()
    assert plot(summary_of(runs)).picture == plot(runs).picture


@pytest.mark.parametrize("plot", ALL)
def test_titles_axes_rounds_and_labels_are_stated(runs, plot: Callable[..., Interactive]) -> None:
    shown = plot(runs)
    layout = shown.figure.layout
    assert layout.title.text and layout.yaxis.title.text
    assert layout.xaxis.title.text or plot is plots.stage_times
    rounds = re.fullmatch(r"rule with drafter words \[toy\] · (\d+) rounds", layout.title.subtitle.text)
    budgets = (4, 8, 16) if plot in (plots.tau_by_budget, plots.speed_by_budget) else (16,)
    drafted = plot in (*ALL[:3], plots.tokens_per_round)
    kept = [run for run in runs if run.meta["budget"] in (None, 5, *budgets) and not (drafted and run.mode == "ar")]
    assert rounds and int(rounds[1]) == sum(len(run.rounds) for run in kept)
    texts = [text.text for text in ElementTree.fromstring(shown.picture.svg).iter("{http://www.w3.org/2000/svg}text")]
    for text in (layout.title.text, layout.title.subtitle.text, layout.yaxis.title.text, *traces(shown)):
        assert text in texts and (text in shown.picture.alt or text == layout.yaxis.title.text)
    if plot is not plots.stage_times:
        assert all("[toy]" in name for name in traces(shown) if not name.startswith("ar"))
    else:
        assert [("[toy]" in name) for name in layout.xaxis.ticktext] == [False, True, True, True]
    assert "[toy]" not in json.dumps(plot([about(run, label=None) for run in runs])._repr_mimebundle_())


@pytest.mark.parametrize("plot", ALL)
def test_equal_runs_give_equal_bytes(runs, same_runs, plot: Callable[..., Interactive]) -> None:
    first, second = plot(runs), plot(same_runs)
    assert json.dumps(first._repr_mimebundle_()) == json.dumps(second._repr_mimebundle_())
    assert re.search(r"\d\d:\d\d|20\d\d-", first.picture.svg) is None


def test_a_label_per_drafter_makes_a_series_each(runs) -> None:
    both = [*runs, *(about(run, label="replay") for run in runs if run.mode == "tree_walk")]
    names = list(traces(plots.tau_by_budget(both)))
    assert [name.split(",")[0] for name in names] == [
        "ar (plain decoding)",
        "chain (DFlash) [toy]",
        "EAGLE-linear [toy]",
        "tree-walk [replay]",
        "tree-walk [toy]",
    ]


def test_a_run_that_does_not_know_its_budget_has_that_of_its_largest_tree() -> None:
    run = sample_run("tree_walk", budget=7)
    unknown = replace(run, meta={})
    assert trace_of(plots.tau_by_budget([unknown]), "tree-walk, ")["x"] == [7]


@pytest.mark.parametrize("plot", ALL)
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ([], ValueError, "runs must hold at least one round, got none"),
        ([replace(sample_run(), rounds=[])], ValueError, "runs must hold at least one round, got none"),
        (7, TypeError, "runs must be RunResults, Rounds or the content of summary.json, got int"),
        ("summary.json", TypeError, "runs must be RunResults, Rounds or the content of summary.json, got str"),
        ([None], TypeError, "runs must hold RunResults alone or Rounds alone, got NoneType"),
        ([sample_run(), *sample_run().rounds], TypeError, "runs must hold RunResults alone or Rounds alone, got Round"),
        ({"tree_walk": 1}, ValueError, r"runs must have 'modes' as summary.json has, got the keys \['tree_walk'\]"),
        ({"modes": {"beam": {}}}, ValueError, "runs must name modes of ar, chain, eagle_linear, tree_walk, got 'beam'"),
        ({"modes": {}}, ValueError, "runs must hold at least one round, got none"),
        ({"modes": {"chain": {"tau": 2.0}}}, ValueError, "runs must have budget, rounds, .* for chain"),
    ],
)
def test_wrong_runs_are_named(plot: Callable[..., Interactive], wrong: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        plot(wrong)


@pytest.mark.parametrize("plot", AT_BUDGET)
def test_a_budget_that_was_not_run_is_named(runs, plot: Callable[..., Interactive]) -> None:
    with pytest.raises(ValueError, match="budget must be one of 4, 8, 16, got 5"):
        plot(runs, budget=5)


def test_plain_decoding_alone_has_nothing_to_accept_and_no_budget(runs) -> None:
    plain = [run for run in runs if run.mode == "ar"]
    for plot in (plots.acceptance_by_depth, plots.calibration, plots.missed_ranks, plots.tokens_per_round):
        with pytest.raises(ValueError, match="runs must hold a round with drafted nodes"):
            plot(plain)
    for plot in (plots.tau_by_budget, plots.speed_by_budget):
        with pytest.raises(ValueError, match="runs must hold a run of eagle_linear or tree_walk"):
            plot(plain)


def test_rounds_alone_make_one_entry(runs) -> None:
    rounds = [round_ for run in runs if run.mode == "tree_walk" for round_ in run.rounds]
    assert list(traces(plots.acceptance_by_depth(iter(rounds)))) == [f"rounds, {len(rounds)} rounds"]
    assert trace_of(plots.acceptance_by_depth(rounds), "rounds")["y"] == metrics.per_depth(rounds)


@pytest.mark.parametrize("text", [*HOSTILE, "#0b5cad", 'style="stroke: #0b5cad"'])
def test_hostile_names_are_text_in_both_pictures(runs, text: str) -> None:
    run = about(runs[-1], label=f"{text} $x$ _", target=text, drafter=text)
    shown = plots.acceptance_by_depth([run])
    svg = ElementTree.fromstring(shown.picture.svg)
    assert not [node for node in svg.iter() if node.tag.endswith(("script", "image", "foreignObject"))]
    (trace,) = traces(shown).values()
    drawn = "".join("".join(node.itertext()) for node in svg.iter("{http://www.w3.org/2000/svg}text"))
    words = label(f"{text} $x$ _", columns=NAME_COLUMNS)
    assert drawn.count(f"[{words}]") == 2
    assert f"[{escape_plotly(words)}]" in trace["name"]
    assert not set("<>$") & set(trace["name"])


# One description, two pictures


def example_chart(kind: str, *, logarithmic: bool = False) -> Chart:
    x = (2.0, 4.0, 8.0, 16.0)
    series = tuple(
        Series(f"{mode} {kind}", mode, x, y, ("",) * 4, (6.0, 9.0, 12.0, 15.0) if kind == "dots" else ())
        for mode, y in (("chain", (0.5, None, 1.5, 2.0)), ("tree_walk", (1.0, 2.5, None, 0.25)))
    )
    ticks = {"ticks": x, "labels": ("2", "4", "eight\nnodes", "16")}
    return Chart(
        kind=kind,
        title="A title",
        subtitle="Below it",
        x=Axis("x (steps)", (1.0, 20.0), **ticks, logarithmic=logarithmic),
        y=Axis("y (ms)", (0.0, 5.0)),
        series=series,
        right=("half", 0.5) if kind == "lines" else None,
    )


def placed(chart: Chart, x: float, y: float) -> tuple[float, float]:
    """Where a point of the chart stands in its picture, by the frame of the axes alone."""
    frame = frame_of(chart)
    scale = math.log10 if chart.x.logarithmic else float
    low, high = map(scale, chart.x.limits)
    across = LEFT + (scale(x) - low) / (high - low) * (frame.width - LEFT - frame.right)
    down = frame.top + (1 - y / chart.y.limits[1]) * AXES_HEIGHT
    return across, down


def groups(svg: str, name: str) -> list[ElementTree.Element]:
    """The groups of a series: itself, or its bars or dots."""
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}g")
    return [group for group in found if re.fullmatch(rf"{name}(-\d+)?", group.get("id", ""))]


def signs(svg: str, name: str) -> list[tuple[float, float]]:
    """Where the signs of a series stand."""
    uses = [use for group in groups(svg, name) for use in group.iter("{http://www.w3.org/2000/svg}use")]
    return [(float(use.get("x")), float(use.get("y"))) for use in uses]


@pytest.mark.parametrize("kind", ["lines", "dots"])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_lines_and_dots_have_the_same_coordinates_in_both_pictures(kind: str, logarithmic: bool) -> None:
    chart = example_chart(kind, logarithmic=logarithmic)
    svg = chart_svg(chart)
    for index, trace in enumerate(json.loads(chart_figure(chart).to_json())["data"][:2]):
        drawn = signs(svg, f"series-{index}")
        values = [(x, y) for x, y in zip(trace["x"], trace["y"], strict=True) if y is not None]
        assert len(values) == 3
        assert drawn == [pytest.approx(placed(chart, *value), abs=0.01) for value in values]


def test_a_gap_interrupts_the_line_of_the_svg() -> None:
    (group,) = groups(chart_svg(example_chart("lines")), "series-0")
    path = next(iter(group)).get("d")
    assert re.findall("[ML]", path) == ["M", "M", "L"]


@pytest.mark.parametrize("kind", ["bars", "stack"])
def test_bars_have_the_same_coordinates_in_both_pictures(kind: str) -> None:
    chart = example_chart(kind)
    svg = chart_svg(chart)
    for index, trace in enumerate(json.loads(chart_figure(chart).to_json())["data"]):
        assert trace["type"] == "bar"
        for point, (x, y, base) in enumerate(zip(trace["x"], trace["y"], trace["base"], strict=True)):
            paths = [path.get("d") for group in groups(svg, f"series-{index}-{point}") for path in group]
            if y is None:
                assert not [path for path in paths if "L" in path]
                continue
            numbers = [float(number) for number in re.findall(r"-?[\d.]+", paths[0])]
            left, right, top, bottom = *span(numbers[::2]), *span(numbers[1::2])
            start = placed(chart, x + trace["offset"], base)
            end = placed(chart, x + trace["offset"] + trace["width"], base + y)
            assert (left, bottom, right, top) == pytest.approx((*start, *end), abs=0.01)
    if kind == "stack":
        assert trace["base"] == [0.5, 0.0, 1.5, 2.0]
    else:
        assert trace["offset"] == 0.0 and trace["width"] == pytest.approx(0.4)


def span(numbers: list[float]) -> tuple[float, float]:
    return min(numbers), max(numbers)


def test_both_pictures_have_the_colours_of_the_style_sheets() -> None:
    chart, style = example_chart("lines"), read_style("tree", "chart")
    first, second, _ = chart_figure(chart).data
    assert (first.line.color, second.line.color) == (style.light["chain"], style.light["tree_walk"])
    assert (first.line.dash, second.line.dash) == ("7px,4px", "solid")
    svg = chart_svg(chart)
    body = svg[svg.index("</style>") :]
    assert "var(--chain)" in body and "var(--tree_walk)" in body and not re.search(r"#[0-9a-f]{6}", body)
    for name in ("chain", "tree_walk", "dd-bg", "dd-ink"):
        assert style.light[name] != style.dark[name]
        assert svg.count(f"--{name}:{style.light[name]};") == svg.count(f"--{name}:{style.dark[name]};") == 1


@pytest.mark.parametrize(
    ("most", "ticks"),
    [(1, (0, 1)), (6, tuple(range(7))), (13, (0, 5, 10)), (61, (0, 20, 40, 60)), (7000, (0, 2000, 4000, 6000))],
)
def test_counts_of_rounds_have_whole_ticks(runs, most: int, ticks: tuple[int, ...]) -> None:
    summary = summary_of(runs)
    for figures in (
        summary["modes"]["chain"],
        *(summary["by_budget"][mode]["4"] for mode in ("eagle_linear", "tree_walk")),
    ):
        figures["tokens_per_round"] = [0, most]
    axis = plots.tokens_per_round(summary, budget=4).figure.layout.yaxis
    assert axis.tickvals == ticks and axis.range[1] > most


def test_every_mode_has_its_own_colour_and_sign() -> None:
    style = read_style("chart")
    for colours in (style.light, style.dark):
        assert len({colours[mode] for mode in MODES}) == len(MODES)
    assert MARKERS.keys() == set(MODES) and len(set(MARKERS.values())) == len(MODES)


def test_the_svg_is_one_element_in_pixels_with_its_right_axis_and_legend() -> None:
    chart = example_chart("lines")
    shown = show(chart)
    root = ElementTree.fromstring(shown.picture.svg)
    frame = frame_of(chart)
    assert (float(root.get("width")), float(root.get("height"))) == (frame.width, frame.height)
    assert shown.picture.width == frame.width == shown.figure.layout.width
    assert shown.figure.layout.height == frame.height
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for text in ("A title", "Below it", "half", "x (steps)", "y (ms)", "chain lines", "tree_walk lines", "nodes"):
        assert text in texts
    assert "<metadata" not in shown.picture.svg and "<!DOCTYPE" not in shown.picture.svg


def test_a_chart_in_words_has_places_and_values_and_dashes_for_gaps() -> None:
    chart = example_chart("bars")
    assert chart.in_words() == (
        "A title\nBelow it\nchain bars – 2: 0.5, 4: –, eight nodes: 1.5, 16: 2\n"
        "tree_walk bars – 2: 1, 4: 2.5, eight nodes: –, 16: 0.25"
    )
    assert "chain bars – 2: 0.5, 4: –, 8: 1.5" in replace(chart, x=Axis("x", (0.0, 20.0))).in_words()

"""The widget in a real JupyterLab: keys, pointer, traits both ways, hostile tokens, and the notebook opened again."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import pytest
from test_viz import HOSTILE, follow, fork, grow, hostile, verified

from ddtree_lab.trace import replay
from ddtree_lab.types import Round
from ddtree_lab.viz import TreeWidget, visible

pytestmark = pytest.mark.browser

HERE = Path(__file__).parent
WAIT = 60_000  # milliseconds: a limit for a broken page, not for a busy machine
THEME = "apputils:change-theme"
SIZES = (1, 2, 33, 257)
SETUP = """
import json
from pathlib import Path
from types import SimpleNamespace
from test_viz import hostile
from test_widget_browser import some_rounds
from ddtree_lab.viz import TreeWidget

target = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: hostile(ids[0])), vocab_size=10**6)
widget = TreeWidget(some_rounds(), target)
names = ["round_index", "budget", "selected", "hovered"]

def write_down(_change):
    Path("new.json").write_text(json.dumps({name: getattr(widget, name) for name in names}))
    Path("new.json").rename("state.json")

widget.observe(write_down, names)
write_down(None)
"""
RESET = "widget.round_index, widget.budget, widget.selected = 0, 256, None"
FROM_PYTHON = "widget.round_index, widget.budget = 3, 20\nwidget.selected = 4"
LONG = "from test_widget_browser import long_run; long = TreeWidget(long_run())\nlong"


def some_rounds() -> list[Round]:
    """A fork, then trees of ``SIZES`` nodes with hostile tokens."""
    rounds = [verified(fork(), [2, 9, 4, 9, 8])]
    for size in SIZES:
        tree = grow(size, vocabulary=len(HOSTILE) * 50, seed=size)
        rounds.append(verified(tree, follow(tree, [1, 0, 1])))
    return rounds


def long_run() -> list[Round]:
    """200 rounds of 257 nodes, no two neighbours alike."""
    trees = [grow(257, seed=seed) for seed in range(8)]
    return [verified(tree, follow(tree, [0, 1, 0])) for tree in trees] * 25


@dataclass(frozen=True)
class Lab:
    """A JupyterLab server of this module's own."""

    root: Path
    url: str
    token: str

    def write(self, name: str, *cells: str) -> None:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.root / name)

    def state(self, expected: Callable[[dict[str, object]], bool]) -> dict[str, object]:
        """What the kernel wrote down of the traits, once it is as expected."""
        end = time.monotonic() + WAIT / 1000
        while not expected(state := json.loads((self.root / "state.json").read_text())):
            assert time.monotonic() < end, f"the kernel's traits stayed {state}"
            time.sleep(0.02)
        return state


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    home = tmp_path_factory.mktemp("lab")
    root = home / "root"
    root.mkdir()
    quiet = home / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    places = {"SETTINGS": "JUPYTERLAB_SETTINGS_DIR", "WORKSPACES": "JUPYTERLAB_WORKSPACES_DIR"}
    places |= {name: f"JUPYTER_{name}_DIR" for name in ("CONFIG", "DATA", "RUNTIME")} | {"IPYTHON": "IPYTHONDIR"}
    python_path = os.pathsep.join([str(HERE.parent), str(HERE)])
    own = {variable: str(home / name.lower()) for name, variable in places.items()} | {"PYTHONPATH": python_path}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lab = Lab(root, f"http://127.0.0.1:{port}", secrets.token_hex(16))
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}"]
    command += [f"--IdentityProvider.token={lab.token}", "--LabApp.expose_app_in_browser=True"]
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(lab, server, home / "log")
        yield lab
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def wait_for(lab: Lab, server: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + WAIT / 1000
    while True:
        assert server.poll() is None and time.monotonic() < end, log.read_text()
        try:
            urllib.request.urlopen(f"{lab.url}/api?token={lab.token}", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)


@dataclass
class Notebook:
    """A notebook open in the browser, and what the page complained of."""

    page: object
    complaints: list[str] = field(default_factory=list)

    def command(self, name: str, **arguments: object) -> None:
        self.page.evaluate("([name, given]) => jupyterapp.commands.execute(name, given)", [name, arguments])

    def run_cell(self, index: int) -> None:
        self.page.evaluate("index => { jupyterapp.shell.currentWidget.content.activeCellIndex = index; }", index)
        self.command("notebook:run-cell")

    def widget(self, inner: str = "") -> object:
        return self.page.locator(f".ddtree-widget {inner}".strip())

    def shows_round(self, number: int) -> None:
        status = "document.querySelector('.ddtree-widget .status')?.textContent"
        self.page.wait_for_function(f"{status}?.startsWith('Round {number} ')", timeout=WAIT)


def open_notebook(browser, lab: Lab, name: str) -> Notebook:
    page = browser.new_page(viewport={"width": 1280, "height": 1100}, color_scheme="light")
    notebook = Notebook(page)
    page.on("console", lambda said: notebook.complaints.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: notebook.complaints.append(str(error)))
    page.on("dialog", lambda dialog: (notebook.complaints.append(dialog.message), dialog.dismiss()))
    page.goto(f"{lab.url}/lab/tree/{name}?token={lab.token}&reset")
    kernel = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status"
    page.wait_for_function(f"{kernel} === 'idle'", timeout=WAIT)
    page.wait_for_function("jupyterapp.shell.currentWidget.content?.widgets?.length > 0", timeout=WAIT)
    return notebook


@pytest.fixture(scope="module")
def opened(browser, lab: Lab) -> Iterator[Notebook]:
    lab.write("widget.ipynb", SETUP, "widget", RESET, FROM_PYTHON)
    notebook = open_notebook(browser, lab, "widget.ipynb")
    for cell in (0, 1):
        notebook.run_cell(cell)
    notebook.page.wait_for_selector(".ddtree-widget .node", timeout=WAIT)
    yield notebook
    notebook.page.close()
    assert notebook.complaints == []


@pytest.fixture
def notebook(opened: Notebook, lab: Lab) -> Notebook:
    """The open notebook at its first round and whole budget, with nothing pointed at."""
    opened.page.mouse.move(5, 5)
    opened.run_cell(2)
    lab.state(lambda now: now == {"round_index": 0, "budget": 256, "selected": None, "hovered": None})
    opened.shows_round(1)
    opened.widget().scroll_into_view_if_needed()
    return opened


def focused(notebook: Notebook) -> str | None:
    return notebook.page.evaluate("document.activeElement.dataset.index")


def test_buttons_slider_and_keys_step_through_the_rounds(notebook: Notebook, lab: Lab) -> None:
    notebook.widget("[aria-label='Next round']").click()
    lab.state(lambda now: now["round_index"] == 1)
    notebook.shows_round(2)
    assert notebook.widget(".tree .node").count() == SIZES[0] + 1
    for key, index in (("ArrowRight", 2), ("End", 4), ("ArrowRight", 4), ("PageUp", 3), ("Home", 0), ("PageDown", 1)):
        notebook.page.keyboard.press(key)
        lab.state(lambda now, index=index: now["round_index"] == index)
    notebook.shows_round(2)
    slider = notebook.widget("input").first
    slider.fill("5")
    notebook.shows_round(5)
    assert slider.get_attribute("aria-valuetext") == "Round 5 of 5"
    assert notebook.widget(".tree .node").count() == SIZES[3] + 1


def test_space_plays_and_pauses(notebook: Notebook, lab: Lab) -> None:
    notebook.widget("input").first.focus()
    notebook.page.keyboard.press(" ")
    lab.state(lambda now: now["round_index"] == 2)
    notebook.page.keyboard.press(" ")
    assert notebook.widget("[aria-label=Play]").count() == 1
    notebook.widget("[aria-label=Play]").click()
    notebook.widget("[aria-label=Play]").wait_for(timeout=WAIT)  # the end of the run pauses
    lab.state(lambda now: now["round_index"] == 4)


def test_the_budget_prunes_as_the_replay_does(notebook: Notebook, lab: Lab) -> None:
    notebook.widget("input").first.fill("4")
    notebook.shows_round(4)
    round_ = some_rounds()[3]
    for budget in range(SIZES[2]):
        notebook.widget("input").nth(1).fill(str(budget))
        shown = f"Round 4 of 5, {budget} of {SIZES[2] - 1} drafted nodes."
        notebook.page.wait_for_function(
            "shown => document.querySelector('.ddtree-widget .status').textContent.startsWith(shown)", arg=shown
        )
        walked, linear = (replay(round_, budget=budget, verify=verify) for verify in ("tree_walk", "eagle_linear"))
        accepted = notebook.widget(".tree .node:is(.kept, .beyond)")
        path = accepted.evaluate_all("nodes => nodes.map(node => Number(node.dataset.index))")
        assert sorted(path) == list(walked.path[1:])
        assert notebook.widget(".tree .node.kept").count() == linear.num_accepted
        tokens = [hostile(int(round_.tree.token_ids[node])) for node in walked.path[1:]] + [hostile(walked.bonus_token)]
        said = notebook.widget(".verdicts dd")
        assert said.nth(0).locator(".chip").all_text_contents() == list(map(visible, tokens))
        assert said.nth(1).locator(".chip").count() == linear.acceptance_length
        bonus = notebook.widget(".tree .node.bonus").get_attribute("aria-label")
        assert bonus.startswith(f"{visible(hostile(walked.bonus_token))}, bonus token")
        drawn_apart = notebook.widget(".tree .node").count() > SIZES[2]
        assert notebook.widget(".tree .node.pruned").count() == SIZES[2] - 1 - budget - (not drawn_apart)
    assert "later rounds would differ" in notebook.widget(".note").first.inner_text()


def test_pointing_and_selecting_reach_python(notebook: Notebook, lab: Lab) -> None:
    node = notebook.widget(".tree .node").nth(2)
    node.hover()
    lab.state(lambda now: now["hovered"] == 2)
    assert "0.1496" in notebook.widget(".details").inner_text()  # exp(-1.9), given the root
    node.click()
    lab.state(lambda now: now["selected"] == 2)
    assert node.get_attribute("aria-pressed") == "true"
    notebook.page.mouse.move(5, 5)
    lab.state(lambda now: (now["hovered"], now["selected"]) == (None, 2))
    assert notebook.widget(".details h3").inner_text() == visible(hostile(2))
    node.click()
    lab.state(lambda now: now["selected"] is None)


def test_python_moves_the_view(notebook: Notebook, lab: Lab) -> None:
    notebook.run_cell(3)
    notebook.shows_round(4)
    notebook.page.wait_for_selector(".ddtree-widget .node.chosen[data-index='4']", timeout=WAIT)
    assert notebook.widget("input").evaluate_all("inputs => inputs.map(input => input.value)") == ["4", "20"]
    assert "20 of 32 drafted nodes" in notebook.widget(".status").inner_text()


def test_keys_in_the_tree_go_from_node_to_node_with_a_visible_focus(notebook: Notebook, lab: Lab) -> None:
    notebook.widget("[aria-label='Fit the whole tree']").focus()
    notebook.page.keyboard.press("Tab")
    assert focused(notebook) == "5"  # the bonus token
    for key, index in (("Home", "0"), ("ArrowRight", "1"), ("ArrowDown", "2"), ("ArrowRight", "4"), ("End", "5")):
        notebook.page.keyboard.press(key)
        assert focused(notebook) == index
    ring = notebook.widget(".node:focus-visible .ring")
    assert ring.evaluate("ring => getComputedStyle(ring).stroke") != "none"
    notebook.page.keyboard.press("Enter")
    lab.state(lambda now: now["selected"] == 5)
    notebook.page.keyboard.press("Escape")
    lab.state(lambda now: now["selected"] is None)
    notebook.page.keyboard.press("PageDown")
    notebook.shows_round(2)
    assert focused(notebook) == "1"  # the focus stays in the tree


def test_zoom_pan_and_fit(notebook: Notebook, lab: Lab) -> None:
    notebook.widget("input").first.fill("5")
    notebook.shows_round(5)
    pane, svg = notebook.widget(".tree"), notebook.widget(".tree > svg")
    before = svg.bounding_box()["width"]
    notebook.page.keyboard.press("+")
    assert svg.bounding_box()["width"] == pytest.approx(1.25 * before, rel=0.01)
    notebook.page.keyboard.press("-")
    assert svg.bounding_box()["width"] == pytest.approx(before, rel=0.01)
    pane.evaluate("pane => pane.scrollTo(200, 300)")
    box = pane.bounding_box()
    notebook.page.mouse.move(box["x"] + 200, box["y"] + 200)
    notebook.page.mouse.down()
    notebook.page.mouse.move(box["x"] + 260, box["y"] + 280, steps=4)
    notebook.page.mouse.up()
    assert pane.evaluate("pane => [pane.scrollLeft, pane.scrollTop]") == [140, 220]
    assert lab.state(lambda now: True)["selected"] is None  # a drag selects nothing
    notebook.page.keyboard.press("0")
    assert svg.bounding_box()["height"] <= box["height"]


def test_hostile_tokens_are_text(notebook: Notebook) -> None:
    notebook.widget("input").first.fill("5")
    notebook.shows_round(5)
    shown = notebook.widget(".tree .token").all_text_contents()
    assert {"∅", "⏎", "]]>", "␣the"} <= set(shown)
    assert notebook.widget(":is(script, img, iframe)").count() == 0
    names = notebook.widget(".tree .node").evaluate_all("nodes => nodes.map(node => node.getAttribute('aria-label'))")
    for text in HOSTILE[:5]:
        assert any(name.startswith(visible(text)) for name in names)
    assert notebook.complaints == []


def test_the_round_and_its_outcome_are_announced(notebook: Notebook) -> None:
    status = notebook.widget("[role=status][aria-live=polite]")
    assert "Tree-walk accepts 2 of 4 drafted nodes" in status.inner_text()
    unnamed = "elements => elements.filter(element => !element.ariaLabel && !element.closest('label')).length"
    assert notebook.widget(":is(button, input, [role=button], [role=region])").evaluate_all(unnamed) == 0


@pytest.mark.parametrize(("theme", "is_dark"), [("JupyterLab Dark", True), ("JupyterLab Light", False)])
def test_colours_follow_jupyterlabs_theme(notebook: Notebook, theme: str, is_dark: bool) -> None:
    notebook.command(THEME, theme=theme)
    notebook.page.wait_for_function("t => document.body.dataset.jpThemeName === t", arg=theme, timeout=WAIT)
    notebook.page.wait_for_function(
        "light => document.body.dataset.jpThemeLight === light", arg=str(not is_dark).lower()
    )
    read = "(element, name) => getComputedStyle(element)[name].match(/[\\d.]+/g).slice(0, 3).map(Number)"
    paper, ink, box, token = (
        statistics.mean(notebook.widget(selector).first.evaluate(read, name))
        for selector, name in (("", "backgroundColor"), ("", "color"), (".plain .box", "fill"), (".token", "fill"))
    )
    assert (paper < 100) == (box < 100) == is_dark and (ink > 150) == (token > 150) == is_dark


def test_a_long_run_steps_without_a_pause(browser, lab: Lab, record_property) -> None:
    lab.write("long.ipynb", SETUP, LONG)
    notebook = open_notebook(browser, lab, "long.ipynb")
    for cell in (0, 1):
        notebook.run_cell(cell)
    notebook.page.wait_for_selector(".ddtree-widget .node", timeout=WAIT)
    steps = notebook.page.evaluate("""async () => {
        const status = document.querySelector('.ddtree-widget .status'), times = [];
        for (let step = 0; step < 40; step += 1) {
            const start = performance.now();
            const drawn = new Promise((done) => new MutationObserver((_, observer) => {
                observer.disconnect();
                requestAnimationFrame(() => setTimeout(done));
            }).observe(status, { childList: true }));
            document.querySelector(".ddtree-widget [aria-label='Next round']").click();
            await drawn;
            times.push(performance.now() - start);
        }
        return times;
    }""")
    notebook.page.close()
    record_property("step_milliseconds", f"median {statistics.median(steps):.0f}, largest {max(steps):.0f}")
    assert statistics.median(steps) < 5000 and notebook.complaints == []


@pytest.mark.parametrize("size", SIZES)
def test_a_round_renders_fast(browser, size: int, record_property) -> None:
    tree = grow(size)
    widget = TreeWidget([verified(tree, follow(tree, [0, 1, 0]))])
    state = json.loads(
        json.dumps(widget.get_state([name for name in widget.keys if name not in ("layout", "_esm", "_css")]))
    )
    page = browser.new_page(viewport={"width": 1000, "height": 1000})
    page.add_style_tag(content=TreeWidget._css)
    times = page.evaluate(
        """async ([script, state]) => {
        const module = URL.createObjectURL(new Blob([script], { type: 'text/javascript' }));
        const { render } = (await import(module)).default;
        const model = { get: (name) => state[name], set() {}, save_changes() {}, on() {}, off() {} }, times = [];
        for (let turn = 0; turn < 9; turn += 1) {
            const el = document.createElement('div');
            document.body.replaceChildren(el);
            const start = performance.now();
            const leave = render({ model, el });
            el.getBoundingClientRect();
            await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
            times.push(performance.now() - start);
            if (document.querySelectorAll('.node').length < state._round.tokens.length) throw Error('not drawn');
            leave();
        }
        return times;
    }""",
        [TreeWidget._esm, state],
    )
    page.close()
    record_property("render_milliseconds", f"first {times[0]:.0f}, median {statistics.median(times):.0f}")
    assert statistics.median(times) < 3000


def test_a_saved_notebook_shows_the_still_picture_when_it_is_opened_again(
    browser, notebook: Notebook, lab: Lab
) -> None:
    still = ".jp-OutputArea-child:has(img[src^='data:image/svg'])"
    assert not notebook.page.locator(still).first.is_visible()  # the live widget hides it
    notebook.command("docmanager:save")
    saved = json.loads((lab.root / "widget.ipynb").read_text())
    assert "widgets" not in saved["metadata"]
    kinds = [list(output["data"]) for output in saved["cells"][1]["outputs"]]
    assert kinds == [["text/html", "text/plain"], ["application/vnd.jupyter.widget-view+json", "text/plain"]]

    (lab.root / "again.ipynb").write_text(json.dumps(saved))
    saved["cells"][0]["source"] = "# what was not signed is not trusted"
    saved["cells"][1]["outputs"][1]["data"]["text/plain"] = "TreeWidget, not trusted"
    (lab.root / "untrusted.ipynb").write_text(json.dumps(saved))
    for name in ("again.ipynb", "untrusted.ipynb"):
        reopened = open_notebook(browser, lab, name)
        picture = reopened.page.locator(f"{still} img")
        picture.wait_for(timeout=WAIT)
        assert picture.evaluate("image => image.complete && image.naturalWidth") > 700
        assert picture.get_attribute("alt").startswith("Tree-walk accepts 2 of 4 drafted nodes")
        trusted = reopened.page.evaluate("[...jupyterapp.shell.currentWidget.content.model.cells].map(c => c.trusted)")
        assert trusted[1] is (name == "again.ipynb")
        assert reopened.complaints == []
        reopened.page.close()


def test_exported_html_shows_the_still_picture(notebook: Notebook, lab: Lab) -> None:
    notebook.command("docmanager:save")
    export = [sys.executable, "-m", "nbconvert", "--to", "html", "--stdout", lab.root / "widget.ipynb"]
    page = subprocess.run(export, capture_output=True, text=True, check=True, timeout=120).stdout
    assert len(re.findall(r'<img[^>]* src="data:image/svg\+xml;base64,', page)) == 1
    assert "TreeWidget(round 1 of 5, budget 256)" in page or "widget-view" in page

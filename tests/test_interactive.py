"""One output for every reader: the bundle, and what JupyterLab and nbconvert make of it."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from test_viz import HOSTILE, follow, fork, grow, hostile, verified

from ddtree_lab.optional import lab_module
from ddtree_lab.viz import explore_round, explore_tree, round_figure, show_round, show_tree, tree_figure
from ddtree_lab.viz.interactive import PLOTLY_MIME, Interactive

WORDS = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: hostile(ids[0])), vocab_size=10**6)
TOKEN = "a-token-of-the-test"


def example() -> Interactive:
    tree = grow(33)
    return explore_round(verified(tree, follow(tree, [1, 0, 1])), WORDS, title=HOSTILE[0])


def test_the_bundle_has_the_figure_the_picture_and_the_words() -> None:
    round_ = verified(fork(), [2, 9, 4, 9, 8])
    bundle = explore_round(round_, title="A title")._repr_mimebundle_()
    figure, picture = round_figure(round_, title="A title"), show_round(round_, title="A title")
    assert list(bundle) == [PLOTLY_MIME, "text/html", "text/plain"]
    assert {name: bundle[PLOTLY_MIME][name] for name in ("data", "layout")} == json.loads(figure.to_json())
    assert bundle["text/html"] == picture._repr_html_()
    assert bundle["text/plain"] == picture.alt


def test_a_tree_has_a_bundle_too() -> None:
    bundle = explore_tree(grow(257), WORDS)._repr_mimebundle_(include=None, exclude=None)
    assert bundle["text/html"] == show_tree(grow(257), WORDS)._repr_html_()
    assert bundle[PLOTLY_MIME]["layout"] == json.loads(tree_figure(grow(257), WORDS).to_json())["layout"]


def test_the_bundle_has_the_same_bytes_every_time() -> None:
    shown = example()
    first, second = (json.dumps(shown._repr_mimebundle_()) for _ in range(2))
    assert first == second == json.dumps(example()._repr_mimebundle_())


def test_the_picture_is_an_image_in_the_html_and_the_figure_names_no_other_place() -> None:
    bundle = example()._repr_mimebundle_()
    (data,) = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)"', bundle["text/html"])
    assert base64.b64decode(data).decode() == example().picture.svg
    assert "http" not in json.dumps(bundle[PLOTLY_MIME]) and "<script" not in json.dumps(bundle[PLOTLY_MIME])
    assert bundle[PLOTLY_MIME]["config"]["showSendToCloud"] is False


def test_without_the_lab_extra_pictures_work_and_figures_name_the_extra() -> None:
    code = """
import sys
import ddtree_lab
assert not {"plotly", "matplotlib"} & sys.modules.keys(), "imported by the package"
sys.modules |= dict.fromkeys(("plotly", "matplotlib"))
from samples import sample_run
from ddtree_lab import plots, viz
assert "plotly.graph_objects" not in sys.modules
run = sample_run()
assert viz.show_round(run.rounds[0]).svg.startswith("<svg")
for show in (lambda: viz.explore_round(run.rounds[0]), lambda: viz.tree_figure(run.rounds[0].tree),
             lambda: plots.acceptance_by_depth([run])):
    try:
        show()
    except ImportError as error:
        print(error)
"""
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder.parent), str(folder)])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["plotly is not installed: pip install ddtree-lab[lab]"] * 3


def test_a_package_that_is_there_but_broken_keeps_its_own_error(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "half_a_package.py").write_text("import a_module_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        lab_module("half_a_package")


# Readers of a saved notebook


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    """A saved notebook with one output, as a kernel leaves it; nobody has trusted it."""
    output = nbformat.v4.new_output("execute_result", example()._repr_mimebundle_(), execution_count=1)
    cell = nbformat.v4.new_code_cell("shown", execution_count=1, outputs=[output], id="shown")
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path = tmp_path / "root" / "saved.ipynb"
    path.parent.mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=metadata), path)
    return path


def test_nbconvert_takes_the_picture(notebook: Path) -> None:
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter(embed_images=True).from_filename(str(notebook))
    (data,) = re.findall(r'<img[^>]* src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert base64.b64decode(data).decode() == example().picture.svg
    assert "Plotly.newPlot" not in page and PLOTLY_MIME not in page


@contextmanager
def jupyter_lab(folder: Path, home: Path, *options: str) -> Iterator[str]:
    """The address of a JupyterLab on ``folder`` that knows nothing of the user."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    home.mkdir()
    names = ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    command += [f"--port={port}", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}", *options]
    with open(home / "log", "w") as log:
        server = subprocess.Popen(command, env=os.environ | dict.fromkeys(names, str(home)), stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    urllib.request.urlopen(f"{address}/api", timeout=5).close()
                    break
                except OSError:
                    assert server.poll() is None and time.monotonic() < deadline, (home / "log").read_text()
                    time.sleep(0.2)
            yield address
        finally:
            server.terminate()
            server.wait(timeout=30)


@pytest.fixture
def reopened(notebook: Path, tmp_path: Path) -> Callable[..., Iterator[object]]:
    """``with reopened(*options) as page``: the notebook in a JupyterLab; on leaving, nothing foreign was asked for."""

    @contextmanager
    def open_notebook(*options: str) -> Iterator[object]:
        from playwright.sync_api import sync_playwright

        names = ("chromium", "chromium-browser", "google-chrome")
        path = next((found for name in names if (found := shutil.which(name))), None)
        foreign: list[str] = []
        with jupyter_lab(notebook.parent, tmp_path / "home", *options) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.on("dialog", lambda dialog: (foreign.append(dialog.message), dialog.dismiss()))
            page.on(
                "request",
                lambda request: (
                    foreign.append(request.url) if not request.url.startswith((address, "data:", "blob:")) else None
                ),
            )
            page.goto(f"{address}/lab/tree/{notebook.name}?token={TOKEN}")
            page.wait_for_selector(".jp-OutputArea-output")
            yield page
            browser.close()
        assert foreign == []

    return open_notebook


@pytest.mark.browser
def test_jupyterlab_shows_the_figure_of_an_untrusted_notebook_without_a_network(reopened) -> None:
    with reopened() as page:
        page.wait_for_selector(".jp-OutputArea-output.js-plotly-plot .textpoint")
        assert page.locator(".gtitle").text_content() == HOSTILE[0]
        assert page.locator(".textpoint", has_text="<script>alert…").count() > 0
        assert page.locator(".jp-OutputArea-output img[src^='data:image/svg']").count() == 0


@pytest.mark.browser
def test_jupyterlab_without_plotly_shows_the_picture_of_an_untrusted_notebook(reopened, tmp_path: Path) -> None:
    nothing = tmp_path / "labextensions"
    nothing.mkdir()
    with reopened(f"--LabApp.labextensions_path={nothing}") as page:
        page.wait_for_selector(".jp-OutputArea-output img")
        drawn = page.evaluate("document.querySelector('.jp-OutputArea-output img').naturalWidth")
        assert drawn == example().picture.width
        assert page.locator(".js-plotly-plot").count() == 0

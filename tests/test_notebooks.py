"""What is stored in notebooks/. That the stored outputs are right is nbval's part, in the same pytest run.

To renew them: .venv/bin/jupyter nbconvert --to notebook --execute --inplace \\
    --ExecutePreprocessor.record_timing=False --ExecutePreprocessor.store_widget_state=False notebooks/NAME.ipynb
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ddtree_lab.trace import load_trace
from ddtree_lab.viz import load_words, words_of

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
SCRIPT_FROM_THE_NET = re.compile(r"""<(script|link|iframe)\b[^>]*\b(src|href)\s*=\s*["']?(https?:)?//""", re.IGNORECASE)
ABSOLUTE_PATH = re.compile(r"(?<![\w./:<-])(/(home|root|tmp|usr|work|mnt|opt|Users)/|[A-Z]:\\)")
PICTURE = re.compile(r'<img src="data:image/svg\+xml;base64,([\w+/=]+)"')
MAX_LINES = 15
TRACES = Path(__file__).parent.parent / "data" / "traces"


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text_of(notebook: dict) -> str:
    """Sources and outputs as they are read, without the letters that make up embedded pictures."""
    pieces = []
    for cell in notebook["cells"]:
        pieces.append("".join(cell["source"]))
        for output in cell.get("outputs", []):
            pieces += map("".join, [output.get("text", ""), *output.get("data", {}).values()])
    return PICTURE.sub("", "\n".join(pieces))


def pages_of(notebook: dict) -> list[str]:
    """The HTML of its outputs."""
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    return ["".join(output["data"]["text/html"]) for output in outputs if "text/html" in output.get("data", {})]


def pictures_of(notebook: dict) -> list[str]:
    """The SVG documents that its outputs embed as images."""
    found = [data for page in pages_of(notebook) for data in PICTURE.findall(page)]
    return [base64.b64decode(data).decode() for data in found]


def faults(notebook: dict, size: int) -> list[str]:
    """What a notebook must not be stored with."""
    cells = code_cells(notebook)
    outputs = [output for cell in cells for output in cell["outputs"]]
    text = text_of(notebook)
    checks = {
        "1 MB or more": size >= 1_000_000,
        "widget state": "widgets" in notebook["metadata"],
        "widget without nbval-ignore-output": any(
            "widget-view" in kind
            for cell in cells
            if "nbval-ignore-output" not in cell["metadata"].get("tags", [])
            for output in cell["outputs"]
            for kind in output.get("data", {})
        ),
        "cell that was not run": any(cell["execution_count"] is None for cell in cells),
        "cells not run in order": [cell["execution_count"] for cell in cells] != [*range(1, len(cells) + 1)],
        "execution times": any("execution" in cell["metadata"] for cell in cells),
        "error": any(output["output_type"] == "error" for output in outputs),
        "text on stderr": any(output.get("name") == "stderr" for output in outputs),
        "long cell": any(len("".join(cell["source"]).splitlines()) > MAX_LINES for cell in cells),
        "not one parameters cell": sum("parameters" in cell["metadata"].get("tags", []) for cell in cells) != 1,
        "script from the net": bool(SCRIPT_FROM_THE_NET.search(text)),
        "absolute path": bool(ABSOLUTE_PATH.search(text)),
    }
    return [name for name, found in checks.items() if found]


def sound() -> dict:
    cell = {"cell_type": "code", "execution_count": 1, "metadata": {"tags": ["parameters"]}, "source": ["a = 1"]}
    output = {"output_type": "display_data", "data": {"text/plain": ["data/prompts.jsonl https://example.org/a"]}}
    return {"cells": [cell | {"outputs": [output]}], "metadata": {}}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_stored_soundly(path: Path) -> None:
    assert faults(json.loads(path.read_text(encoding="utf-8")), path.stat().st_size) == []


def test_there_is_a_quickstart() -> None:
    assert "quickstart.ipynb" in [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize(
    ("fault", "changes", "output"),
    [
        ("cell that was not run", {"execution_count": None}, {}),
        ("cells not run in order", {"execution_count": 2}, {}),
        ("execution times", {"metadata": {"tags": ["parameters"], "execution": {}}}, {}),
        ("not one parameters cell", {"metadata": {}}, {}),
        ("long cell", {"source": ["a = 1\n"] * 16}, {}),
        ("error", {}, {"output_type": "error", "traceback": []}),
        ("text on stderr", {}, {"output_type": "stream", "name": "stderr", "text": ["warned"]}),
        ("absolute path", {}, {"output_type": "stream", "name": "stdout", "text": ["in /home/someone/x"]}),
        (
            "script from the net",
            {},
            {"output_type": "display_data", "data": {"text/html": ["<script src='//a.b/c.js'>"]}},
        ),
        (
            "widget without nbval-ignore-output",
            {},
            {"output_type": "display_data", "data": {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}},
        ),
    ],
)
def test_the_guard_sees_each_fault(fault: str, changes: dict, output: dict) -> None:
    notebook = sound()
    assert faults(notebook, 999_999) == []
    notebook["cells"][0].update(changes, outputs=[output] if output else [])
    assert fault in faults(notebook, 0)


def test_the_guard_sees_size_and_widget_state() -> None:
    assert faults(sound() | {"metadata": {"widgets": {}}}, 1_000_000) == ["1 MB or more", "widget state"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_stores_pictures_as_images_that_are_valid_svg(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    pictures = pictures_of(notebook)
    assert pictures
    assert all(ElementTree.fromstring(picture).tag.endswith("svg") for picture in pictures)
    assert all("<svg" not in page for page in pages_of(notebook))  # inline SVG is dropped from an untrusted notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_readme_has_a_line_for_the_notebook(path: Path) -> None:
    assert f"(notebooks/{path.name})" in (path.parent.parent / "README.md").read_text(encoding="utf-8")


def test_recorded_traces_are_small_load_and_have_texts_for_their_tokens() -> None:
    assert sum(path.stat().st_size for path in TRACES.iterdir()) < 5_000_000
    traces = [path for path in TRACES.iterdir() if path.suffix in (".safetensors", ".jsonl")]
    assert traces
    for path in traces:
        run, words = load_trace(path), load_words(path.with_suffix(".words.json"))
        assert words_of(run, words) == words
        assert f"`{path.name}`" in (TRACES / "README.md").read_text(encoding="utf-8")

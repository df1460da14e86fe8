"""The report page in a headless Chromium, opened from a file, with hostile tokens in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_viz import HOSTILE, follow, fork, grow, hostile, run_of, summary_of, verified

from ddtree_lab.viz import render_report, visible

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rounds = [verified(fork(), [2, 9, 4, 9, 8])]
    for size in (1, 2, 33, 257):
        tree = grow(size, vocabulary=len(HOSTILE) * 50, seed=size)
        rounds.append(verified(tree, follow(tree, [1, 0, 1])))
    results = [
        run_of(rounds, prompt=HOSTILE[1], prompt_id=HOSTILE[0]),
        run_of(rounds[1:], prompt="Second", prompt_id="p1"),
        run_of(rounds[:1], prompt="Second", prompt_id="p1", mode="eagle_linear"),
    ]
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_report(summary_of(label=HOSTILE[0]), results, hostile), encoding="utf-8")
    return path


@pytest.fixture
def page(browser, report: Path) -> Iterator[object]:
    """The opened report; on leaving, nothing was logged, asked, thrown or fetched."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    events: list[str] = []
    page.on("console", lambda message: events.append(message.text))
    page.on("pageerror", lambda error: events.append(str(error)))
    page.on("dialog", lambda dialog: (events.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: events.append(request.url) if request.url != report.as_uri() else None)
    page.goto(report.as_uri())
    page.wait_for_selector("#tree svg")
    yield page
    page.close()
    assert events == []


def where(page) -> str:
    return page.inner_text("#where")


def test_buttons_slider_and_arrow_keys_step_through_the_rounds(page) -> None:
    sizes = [5, 1, 2, 33, 257]
    assert where(page) == "1 / 5" and page.is_disabled("#previous")
    assert page.locator("#tree .node").count() == sizes[0] + 1
    page.click("#next")
    assert where(page) == "2 / 5"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("ArrowRight")
    assert where(page) == "3 / 5" and page.locator("#tree .node").count() == sizes[2] + 1
    page.keyboard.press("ArrowLeft")
    assert where(page) == "2 / 5"
    page.focus("#round")
    page.keyboard.press("End")
    assert where(page) == "5 / 5" and page.is_disabled("#next")
    assert page.locator("#tree .node").count() == sizes[4] + 1


def test_hostile_tokens_and_prompts_are_text(page) -> None:
    page.focus("#round")
    page.keyboard.press("End")
    shown = page.locator("#tree .token").all_text_contents()
    assert "∅" in shown and "⏎" in shown and "]]>" in shown
    assert page.locator("#tree script, #tree img, main img, header img").count() == 0
    named = page.locator("#tree .node").evaluate_all("nodes => nodes.map(node => node.getAttribute('aria-label'))")
    assert any(name.startswith(visible(HOSTILE[1])) for name in named)
    assert page.locator(".banner strong").text_content() == HOSTILE[0]
    assert page.text_content("#prompt-text") == HOSTILE[1]


def test_details_follow_focus_and_pointer(page) -> None:
    page.locator("#tree .node").nth(0).click()
    assert page.inner_text("#details h3") == visible(hostile(0))
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.index") == "1"
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.index") == "2"
    details = page.inner_text("#details")
    assert "lost by EAGLE-linear" in details and "0.1496" in details  # exp(-1.9), given the root
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "round"
    page.locator("#tree .node").nth(3).hover()
    assert page.inner_text("#details h3") == visible(hostile(3))


def test_lost_round_links_open_their_tree(page) -> None:
    page.evaluate("location.hash = '#run-0-round-4'")
    page.locator("#where", has_text="4 / 5").wait_for()
    page.locator(".open a").first.click()
    page.locator("#where", has_text="1 / 5").wait_for()


def test_accepted_path_is_scrolled_into_view(page) -> None:
    page.focus("#round")
    page.keyboard.press("End")
    pane, bonus = (page.locator(selector).bounding_box() for selector in ("#tree", "#tree .node.bonus"))
    assert pane["y"] <= bonus["y"] and bonus["y"] + bonus["height"] <= pane["y"] + pane["height"]
    assert pane["x"] <= bonus["x"] and bonus["x"] + bonus["width"] <= pane["x"] + pane["width"]
    assert page.locator("#tree svg").bounding_box()["height"] > pane["height"]
    page.check("#fit")
    assert page.locator("#tree svg").bounding_box()["height"] <= pane["height"]


def test_prompt_and_run_can_be_chosen(page) -> None:
    page.select_option("#prompt", "1")
    assert where(page) == "1 / 4"
    page.select_option("#run", label="EAGLE-linear, budget 32")
    assert where(page) == "1 / 1"
    assert "Second" in page.text_content("#prompt-text")


def test_text_so_far_grows_by_the_round(page) -> None:
    assert page.locator("#text mark").count() == 3
    before = page.text_content("#text")
    page.click("#next")
    assert page.text_content("#text").startswith(before)
    assert page.locator("#text mark.bonus").count() == 1


@pytest.mark.parametrize("width", [600, 1280])
def test_page_has_no_sideways_scroll(page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")

"""Shared fixtures. Models load on first use, once a session; all are on the CPU and in float32."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

# Time limits per example only measure how busy the machine is.
hypothesis.settings.register_profile("ddtree_lab", deadline=None)
hypothesis.settings.load_profile("ddtree_lab")

CHROMIUM_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """A headless Chromium. One a module: while it runs, nothing else in this thread may run an event loop."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)  # None: playwright's own
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def embedded_target():
    """SmolLM2-135M-Instruct. Its conversion stays in the user's cache folder, on purpose."""
    from ddtree_lab.target.load import load_target

    return load_target("embedded", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def embedded_drafter(embedded_target):
    """The drafter that ships for the embedded target."""
    from ddtree_lab.draft.load import load_drafter

    return load_drafter("embedded", embedded_target)


@pytest.fixture(scope="session")
def tiny_target():
    """A four-layer dense model with seeded random weights."""
    from ddtree_lab.target.load import load_target

    return load_target("random:tiny-dense", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def random_logits() -> Callable[..., torch.Tensor]:
    """``random_logits(D, V, seed=0)``: float32 [D, V], normal with standard deviation 2, the same for the same seed."""

    def make(*shape: int, seed: int = 0) -> torch.Tensor:
        return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    return make

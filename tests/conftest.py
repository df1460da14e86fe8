"""Shared fixtures. Models load on first use, once a session; all are on the CPU and in float32."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest
import torch

# Time limits per example only measure how busy the machine is.
hypothesis.settings.register_profile("ddtree_lab", deadline=None)
hypothesis.settings.load_profile("ddtree_lab")


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

import pytest
import torch

from ddtree_lab.rounding import measure_tolerance
from ddtree_lab.target.load import load_target


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 200, (1, length), generator=generator) for length in (20, 1, 9, 70)]


def test_coarser_numbers_have_a_wider_tolerance(prompts):
    fine, coarse = (
        measure_tolerance(load_target("random:tiny-dense", dtype=dtype), prompts) for dtype in ("float32", "bfloat16")
    )
    assert 0 < fine < 1e-4
    assert coarse > 100 * fine


def test_a_fault_in_the_tree_forward_does_not_widen_the_tolerance(prompts):
    target = load_target("random:tiny-dense", dtype="float32")
    before = measure_tolerance(target, prompts)
    target.verify = None
    assert measure_tolerance(target, prompts) == before


def test_the_tolerance_covers_what_reordered_sums_do_to_the_gap(prompts):
    target = load_target("random:tiny-dense", dtype="float32")
    state, tokens = target.new_state(), prompts[0][0]
    whole = target.prefill(target.new_state(), tokens).logits[0]
    target.prefill(state, tokens[:-1])
    step = target.prefill(state, tokens[-1:]).logits[0]
    top = whole.topk(2).indices
    moved = abs(float((whole[top[0]] - whole[top[1]]) - (step[top[0]] - step[top[1]])))
    assert moved <= measure_tolerance(target, prompts) / 2


def test_a_single_token_prompt_still_gives_a_tolerance():
    target = load_target("random:tiny-dense", dtype="float32")
    assert measure_tolerance(target, [torch.tensor([[3]])]) > 0

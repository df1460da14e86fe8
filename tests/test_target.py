"""Dense targets against transformers' own forward without a cache: masks, positions, KV rows, rounds, loading."""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import resource
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree_lab.target.cache import TreeCache
from ddtree_lab.target.dense import DenseTarget, attention_windows
from ddtree_lab.target.load import load_target
from ddtree_lab.target.quiet import quiet_libraries
from ddtree_lab.target.random import PRESETS, preset_config, random_model
from ddtree_lab.types import DraftTree

MODELS = (*PRESETS, "mistral", "qwen2", "all-sliding")
SLIDING = ("tiny-sliding", "mistral", "all-sliding")  # every window is 8
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # float32; a wrong mask or position moves logits by more than 0.1


SHAPE_FIELDS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "max_position_embeddings initializer_range bos_token_id eos_token_id pad_token_id"
)
SHAPE = {name: getattr(preset_config("tiny-dense"), name) for name in SHAPE_FIELDS.split()}


def config_of(kind):
    from transformers import MistralConfig, Qwen2Config

    if kind in PRESETS:
        return preset_config(kind)
    if kind == "mistral":
        return MistralConfig(**SHAPE, sliding_window=8)
    if kind == "qwen2":
        return Qwen2Config(**SHAPE)
    config = preset_config("tiny-sliding")
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    return config


@pytest.fixture(scope="module")
def targets():
    return {kind: DenseTarget(random_model(config_of(kind)), name=kind) for kind in MODELS}


def tree_of(token_ids, parents):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return DraftTree(token_ids, parents, depths, [0] * len(parents), [-float(depth) for depth in depths])


def random_tree(size, generator):
    parents = [-1] + [int(torch.randint(node, (1,), generator=generator)) for node in range(1, size)]
    return tree_of(torch.randperm(256, generator=generator)[:size], parents)


def tokens(n, generator):
    return torch.randint(256, (n,), generator=generator)


def path_to(tree, node):
    path = [node]
    while path[0]:
        path.insert(0, int(tree.parents[path[0]]))
    return path


@torch.no_grad()
def plain(target, token_ids):
    """transformers' own forward over a whole sequence, no cache and no mask of ours."""
    return target.model(torch.as_tensor(token_ids)[None], use_cache=False, output_hidden_states=True)


def path_logits(target, committed, tree):
    """The naive twin of verify: each node's logits from running its root-to-node path alone."""
    rows = []
    for node in range(len(tree)):
        path = tree.token_ids[path_to(tree, node)]
        rows.append(plain(target, torch.cat([committed, path])).logits[0, -1])
    return torch.stack(rows)


def started(target, prompt, layer_ids=()):
    state = target.new_state(layer_ids)
    target.prefill(state, prompt)
    return state


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("size", [1, 2, 7, 33, 64])
def test_every_node_equals_its_root_to_node_path_run_alone(targets, kind, size):
    generator = torch.Generator().manual_seed(size)
    target, prompt, tree = targets[kind], tokens(11, generator), random_tree(size, generator)
    verified = target.verify(started(target, prompt), tree)
    assert verified.logits.shape == (size, 256) and verified.hidden.shape == (size, 0)
    torch.testing.assert_close(verified.logits, path_logits(target, prompt, tree), **CLOSE)


@pytest.mark.parametrize("kind", MODELS)
def test_rounds_of_verify_and_commit_keep_equal_to_running_alone(targets, kind):
    generator = torch.Generator().manual_seed(5)
    target, committed = targets[kind], tokens(6, generator)
    state = started(target, committed)
    for size in (5, 1, 12, 9, 3):
        tree = random_tree(size, generator)
        verified = target.verify(state, tree)
        assert state.length == len(committed)
        torch.testing.assert_close(verified.logits, path_logits(target, committed, tree), **CLOSE)
        path = path_to(tree, int(torch.randint(size, (1,), generator=generator)))
        target.commit(state, path)
        committed = torch.cat([committed, tree.token_ids[path]])
        assert state.length == len(committed)


@pytest.mark.parametrize("kind", SLIDING)
def test_sliding_window_rounds_equal_plain_greedy_decoding(targets, kind):
    target, generator = targets[kind], torch.Generator().manual_seed(8)
    prompt = tokens(7, generator)
    greedy = prompt.tolist()
    for _ in range(40):
        greedy.append(int(plain(target, greedy).logits[0, -1].argmax()))
    state = target.new_state()
    output = [*prompt.tolist(), int(target.prefill(state, prompt).logits.argmax())]
    for number in range(11):
        right = greedy[len(output) : len(output) + 2]
        wrong = [token for token in range(6) if token not in right][:3]
        # nodes 2 and 5 carry the target's next two tokens, every second round the second one is wrong
        last = right[1] if number % 2 == 0 else wrong[0]
        tree = tree_of([output[-1], wrong[0], right[0], wrong[1], wrong[2], last], [-1, 0, 0, 1, 1, 2])
        choice = target.verify(state, tree).logits.argmax(-1)
        path = [0, 2, 5] if number % 2 == 0 else [0, 2]
        assert [int(choice[node]) for node in path[:-1]] == tree.token_ids[path[1:]].tolist()
        target.commit(state, path)
        output += [*tree.token_ids[path[1:]].tolist(), int(choice[path[-1]])]
    assert output == greedy[: len(output)] and len(output) > 7 + 3 * 8


def test_interleaved_requests_equal_their_solo_runs(targets):
    target = targets["tiny-dense"]
    generator = torch.Generator().manual_seed(3)
    prompts = [tokens(n, generator) for n in (4, 19, 9)]
    rounds = [[random_tree(size, generator) for _ in range(3)] for size in (3, 7, 12)]

    def run(order):
        states = [target.new_state() for _ in prompts]
        logits = {}
        for request in order:
            target.prefill(states[request], prompts[request])
        for number in range(3):
            for request in order:
                logits[request, number] = target.verify(states[request], rounds[request][number]).logits
            for request in reversed(order):
                tree = rounds[request][number]
                target.commit(states[request], path_to(tree, len(tree) - 1))
        return logits

    together = run([2, 0, 1])
    for request in range(3):
        for key, logits in run([request]).items():
            assert torch.equal(logits, together[key])


@pytest.mark.parametrize("kind", ["tiny-dense", "tiny-sliding"])
def test_a_siblings_keys_and_values_do_not_reach_other_branches(targets, kind):
    target, generator = targets[kind], torch.Generator().manual_seed(9)
    prompt, tree, sibling = tokens(10, generator), random_tree(40, generator), 3

    class Poisoned(TreeCache):
        def update(self, keys, values, layer_idx, *args, **kwargs):
            views = super().update(keys, values, layer_idx, *args, **kwargs)
            if self.length == len(prompt):
                for view in views:
                    view[:, :, self.length + sibling] = 1e4
            return views

    state, poisoned = started(target, prompt), target.new_state()
    poisoned.cache = Poisoned()
    target.prefill(poisoned, prompt)
    clean, other = target.verify(state, tree).logits, target.verify(poisoned, tree).logits
    below = [node for node in range(40) if sibling in path_to(tree, node)]
    others = [node for node in range(40) if node not in below]
    assert torch.equal(clean[others], other[others])
    assert not torch.equal(clean[below], other[below])


@pytest.mark.parametrize("kind", ["tiny-dense", "tiny-sliding", "mistral"])
def test_rejected_slots_are_never_read_again(targets, kind):
    """Rows behind the committed part become NaN after each round; the prompt makes the buffers grow on the way."""
    target, generator = targets[kind], torch.Generator().manual_seed(19)
    prompt = tokens(240, generator)
    clean, poisoned = started(target, prompt), started(target, prompt)
    for size in (9, 12, 5, 20, 1, 7):
        tree = random_tree(size, generator)
        assert torch.equal(target.verify(clean, tree).logits, target.verify(poisoned, tree).logits)
        path = path_to(tree, size - 1)
        target.commit(clean, path)
        target.commit(poisoned, path)
        for buffer in (*poisoned.cache.keys, *poisoned.cache.values):
            buffer[:, :, poisoned.length :] = float("nan")
    assert clean.cache.keys[0].shape[2] > 256


@pytest.mark.parametrize("path", [[0, 2, 3, 5], [0], [0, 1, 2], [0, 1, 4], [0, 5], [0, 3, 5, 6, 7]])
def test_compaction_equals_an_out_of_place_gather(path):
    generator = torch.Generator().manual_seed(17)
    cache, base = TreeCache(), 5
    cache.length = base
    for layer in range(2):
        cache.update(torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 0, 4), layer)
    for buffer in (*cache.keys, *cache.values):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    rows = [*range(base), *(base + node for node in path)]
    expected = [buffer[:, :, rows].clone() for buffer in (*cache.keys, *cache.values)]
    cache.compact(base, path)
    assert cache.length == len(rows)
    for buffer, gathered in zip((*cache.keys, *cache.values), expected, strict=True):
        assert torch.equal(buffer[:, :, : cache.length], gathered)


def test_a_cache_grows_by_what_was_written_and_shrinks_by_what_is_kept():
    cache = TreeCache()
    with pytest.raises(ValueError, match="rows must be from 0 to 0"):
        cache.append(1)
    cache.update(torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6, 4), 0)
    cache.append(6)
    assert cache.length == 6
    for rows in (-1, 251):
        with pytest.raises(ValueError, match=f"rows must be from 0 to 250, .* got {rows}"):
            cache.append(rows)
    for length in (-1, 7):
        with pytest.raises(ValueError, match=f"length must be from 0 to the 6 committed rows, got {length}"):
            cache.crop(length)
    cache.crop(2)
    assert cache.length == 2


@pytest.mark.parametrize("kind", MODELS)
def test_prefill_in_chunks_equals_one_plain_forward(targets, kind):
    target, prompt = targets[kind], tokens(23, torch.Generator().manual_seed(1))
    reference = plain(target, prompt)
    state, hidden = target.new_state([0, 2]), []
    for chunk in prompt.split([1, 6, 1, 15]):
        output = target.prefill(state, chunk)
        assert output.logits.shape == (1, 256)
        hidden.append(output.hidden)
    torch.testing.assert_close(output.logits[0], reference.logits[0, -1], **CLOSE)
    wanted = torch.cat([reference.hidden_states[1][0], reference.hidden_states[3][0]], dim=-1)
    torch.testing.assert_close(torch.cat(hidden), wanted, **CLOSE)


def test_hidden_states_are_the_block_outputs_of_each_nodes_path(targets):
    target, generator = targets["tiny-qwen3"], torch.Generator().manual_seed(30)
    prompt, tree = tokens(8, generator), random_tree(14, generator)
    block_outputs = []
    handle = target.model.model.layers[2].register_forward_hook(lambda *call: block_outputs.append(call[2]))
    verified = target.verify(started(target, prompt, [2, 0]), tree)
    handle.remove()
    assert verified.hidden.shape == (14, 2 * target.hidden_size)
    assert torch.equal(verified.hidden[:, : target.hidden_size], block_outputs[-1].reshape(14, -1))
    for node in range(14):
        states = plain(target, torch.cat([prompt, tree.token_ids[path_to(tree, node)]])).hidden_states
        wanted = torch.cat([states[3][0, -1], states[1][0, -1]])
        torch.testing.assert_close(verified.hidden[node], wanted, **CLOSE)


@pytest.mark.parametrize("bad", [-1, 4, None, "1"])
def test_layer_ids_that_do_not_exist_raise(targets, bad):
    with pytest.raises(ValueError, match="layer_ids must be integers from 0 to 3"):
        targets["tiny-dense"].new_state([0, bad])


def test_a_second_verify_overwrites_the_first(targets):
    target, generator = targets["tiny-sliding"], torch.Generator().manual_seed(2)
    prompt, first, second = tokens(9, generator), random_tree(20, generator), random_tree(6, generator)
    state, fresh = started(target, prompt), started(target, prompt)
    target.verify(state, first)
    assert torch.equal(target.verify(state, second).logits, target.verify(fresh, second).logits)
    for each in (state, fresh):
        target.commit(each, path_to(second, 5))
    assert torch.equal(target.verify(state, first).logits, target.verify(fresh, first).logits)


@pytest.mark.parametrize("kind", ["tiny-dense", "tiny-sliding"])
def test_rollback_forgets_tokens_and_trees(targets, kind):
    target, generator = targets[kind], torch.Generator().manual_seed(4)
    prompt, tree, after = tokens(20, generator), random_tree(5, generator), random_tree(8, generator)
    state = started(target, prompt)
    target.verify(state, tree)
    target.commit(state, path_to(tree, 4))
    target.verify(state, tree)
    target.rollback(state, 12)
    with pytest.raises(ValueError, match="commit needs a verified tree"):
        target.commit(state, [0])
    assert state.length == 12
    torch.testing.assert_close(target.verify(state, after).logits, path_logits(target, prompt[:12], after), **CLOSE)


def test_a_prefill_drops_the_uncommitted_tree(targets):
    target, generator = targets["tiny-dense"], torch.Generator().manual_seed(6)
    prompt, tree, more = tokens(5, generator), random_tree(4, generator), tokens(3, generator)
    state = started(target, prompt)
    target.verify(state, tree)
    logits = target.prefill(state, more).logits
    torch.testing.assert_close(logits[0], plain(target, torch.cat([prompt, more])).logits[0, -1], **CLOSE)
    with pytest.raises(ValueError, match="verify first"):
        target.commit(state, [0])


@pytest.mark.parametrize("path", [[], [1], [0, 3], [0, 0], [0, 1, 2], [0, 9], [0, -1], [1, 0]])
def test_commit_refuses_what_is_not_a_path_from_the_root(targets, path):
    target = targets["tiny-dense"]
    state = started(target, [1, 2, 3])
    target.verify(state, tree_of([3, 4, 5, 6], [-1, 0, 0, 1]))
    with pytest.raises(ValueError, match=r"path must go from the root \(node 0\)"):
        target.commit(state, path)
    target.commit(state, [0, 1, 3])
    with pytest.raises(ValueError, match="commit it once"):
        target.commit(state, [0])


def test_wrong_inputs_raise_one_clear_line(targets):
    target = targets["tiny-dense"]
    state = started(target, [1] * 500)
    for call, message in [
        (lambda: target.prefill(state, []), "input_ids is empty"),
        (lambda: target.prefill(state, [1] * 13), "500 committed and 13 new tokens do not fit the context"),
        (lambda: target.prefill(state, [1, 256]), "token ids must be from 0 to 255 for tiny-dense, got 256"),
        (lambda: target.prefill(state, [-3]), "got -3"),
        (lambda: target.verify(state, tree_of([1, 999], [-1, 0])), "got 999"),
        (lambda: target.rollback(state, 501), "length must be from 0 to the 500 committed tokens, got 501"),
        (lambda: target.rollback(state, -1), "got -1"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert state.length == 500
    target.prefill(state, [1] * 12)
    with pytest.raises(ValueError, match="do not fit the context"):
        target.verify(state, tree_of([1], [-1]))


def test_outputs_can_be_trained_on_and_the_head_passes_gradients(targets):
    target = targets["tiny-dense"]
    hidden = target.prefill(target.new_state([1]), [1, 2, 3]).hidden
    layer = torch.nn.Linear(target.hidden_size, target.hidden_size, bias=False)
    target.lm_head(layer(hidden)).sum().backward()
    assert layer.weight.grad.abs().sum() > 0
    assert torch.equal(target.embed(torch.tensor([[5, 7]]))[0, 1], target._embeddings.weight[7])


def test_architectures_that_are_not_dense_are_named_and_refused():
    from transformers import BloomConfig, BloomForCausalLM, MixtralConfig, Qwen3_5TextConfig

    with pytest.raises(ValueError, match="'mixtral' is a mixture of experts"):
        attention_windows(MixtralConfig())
    with pytest.raises(ValueError, match="'qwen3_5_text' has linear_attention layers"):
        attention_windows(Qwen3_5TextConfig())
    bloom = BloomConfig(vocab_size=16, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match="'bloom' cannot verify a tree"):
        DenseTarget(BloomForCausalLM(bloom), name="bloom")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("GraniteConfig", {"embedding_multiplier": 12.0}, "'granite' changes its embeddings before its first layer"),
        ("GraniteConfig", {"logits_scaling": 4.0}, "'granite' scales or caps the logits of its head"),
        ("CohereConfig", {"logit_scale": 0.0625}, "'cohere' scales or caps the logits of its head"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_whose_head_or_embedding_is_not_theirs_alone_are_refused(kind, options, message, dtype):
    import transformers

    config = getattr(transformers, kind)(**SHAPE, **options)
    with pytest.raises(ValueError, match=message) as caught:
        DenseTarget(random_model(config, dtype=dtype), name=kind)
    assert "\n" not in str(caught.value)


def test_a_model_that_caps_its_logits_is_refused():
    model = random_model(preset_config("tiny-dense"))
    forward = model.forward

    @functools.wraps(forward)
    def capped(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output

    model.forward = capped
    with pytest.raises(ValueError, match="'llama' scales or caps the logits of its head"):
        DenseTarget(model, name="capped")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["GraniteConfig", "GemmaConfig", "GPT2Config"])
def test_neutral_factors_scaled_tables_and_learned_positions_are_no_reason_to_refuse(kind, dtype):
    import transformers

    if kind == "GPT2Config":
        ends = {"bos_token_id": None, "eos_token_id": None}
        config = transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=2, n_positions=64, **ends)
    else:
        config = getattr(transformers, kind)(**SHAPE)
    assert DenseTarget(random_model(config, dtype=dtype), name=kind).vocab_size == 256


def test_presets_are_seeded_and_leave_the_global_random_state_alone():
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    first = load_target("random:tiny-sliding")
    assert torch.equal(torch.rand(3), expected)
    second = load_target("random:tiny-sliding")
    tree = random_tree(6, torch.Generator().manual_seed(0))
    assert torch.equal(first.verify(first.new_state(), tree).logits, second.verify(second.new_state(), tree).logits)
    assert (first.tokenizer, first.stop_token_ids, first.dtype) == (None, (), torch.float32)
    assert load_target("random:tiny-dense", dtype="bfloat16").dtype == torch.bfloat16


def test_a_saved_folder_loads_and_gives_the_same_logits(tmp_path, targets):
    target = targets["tiny-sliding"]
    target.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": [7, 9]}))
    loaded = load_target(str(tmp_path), device="cpu")
    tree = random_tree(9, torch.Generator().manual_seed(0))
    logits = [each.verify(started(each, [1, 2, 3]), tree).logits for each in (target, loaded)]
    assert torch.equal(*logits)
    assert (loaded.tokenizer, loaded.stop_token_ids, loaded.dtype) == (None, (7, 9), torch.float32)
    assert load_target(str(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16

    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot load target") as caught:
        load_target(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_names_that_cannot_be_loaded_raise_one_clear_line(tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no such repository\nand many more lines")

    monkeypatch.setattr("huggingface_hub.model_info", offline)
    for name, message in [
        (
            "random:tiny-hybrids",
            "random preset must be one of tiny-dense, tiny-qwen3, tiny-sliding, got 'tiny-hybrids'",
        ),
        (str(tmp_path), "has no config.json"),
        ("nobody/nothing", "cannot load target 'nobody/nothing': no such repository"),
        ("", "target must be a name or a path"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            load_target(name)
        assert "\n" not in str(caught.value)
    for options, message in [
        ({"dtype": "int8"}, "dtype must be auto, float32, bfloat16, float16"),
        ({"dtype": torch.int64}, "got torch.int64"),
        ({"device": "gpu"}, "device must be 'auto', 'cpu'"),
        ({"device": "cuda:97"}, "device 'cuda:97' is not there"),
        ({"device": "mps"}, "device must be 'auto', 'cpu', 'cuda' or 'cuda:<index>', got 'mps'"),
        ({"device": torch.device("meta")}, "got 'meta'"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            load_target("random:tiny-dense", **options)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("count", "device"), [(0, "cuda"), (0, "cuda:0"), (2, "cuda:7")])
def test_a_gpu_that_is_not_there_is_one_line(count, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ValueError, match=f"device '{device}' is not there: {count} CUDA devices are available"):
        load_target("random:tiny-dense", device=device)


@pytest.fixture
def saved(tmp_path, targets):
    targets["tiny-dense"].model.save_pretrained(tmp_path)
    return tmp_path


MISFITS = {
    "missing": (lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"), "lacks model.layers.1.mlp.up_proj"),
    "another shape": (
        lambda weights: weights.update({"model.norm.weight": torch.ones(32)}),
        r"model.norm.weight has shape \[32\], config.json says \[64\]",
    ),
    "unknown": (lambda weights: weights.update({"model.extra.weight": torch.ones(8)}), "unknown weight model.extra"),
}


@pytest.mark.parametrize(("change", "message"), MISFITS.values(), ids=MISFITS.keys())
def test_weights_that_do_not_fit_are_one_line_that_names_one(change, message, saved, caplog):
    weights = load_file(saved / "model.safetensors")
    change(weights)
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(ValueError, match=message) as caught:
            load_target(str(saved))
    finally:
        logger.removeHandler(caplog.handler)
    assert "\n" not in str(caught.value) and "LOAD REPORT" not in caplog.text


def test_tied_weights_are_not_missing(tmp_path):
    config = preset_config("tiny-dense")
    config.tie_word_embeddings = True
    random_model(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    target = load_target(str(tmp_path))
    assert target.model.lm_head.weight is target.model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 10**9}, "config.json asks for [0-9]+ parameters, the weights have [0-9]+"),
        ({"vocab_size": 10**9}, "config.json asks for"),
        ({"intermediate_size": 10**9, "quantization_config": {"quant_method": "awq"}}, "cannot load target"),
        ({"hidden_size": 10**12, "intermediate_size": 10**12}, "cannot load target"),
        ({"hidden_size": 10**30}, "cannot load target"),
        ({"num_hidden_layers": 10**9}, "config.json says num_hidden_layers 1000000000, the weights are 39 tensors"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "config.json says num_hidden_layers"),
    ],
)
def test_sizes_that_the_weights_do_not_have_are_refused_before_anything_is_allocated(changes, message, saved):
    fields = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**fields, **changes}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=message) as caught:
        load_target(str(saved))
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes


ODD_VALUES = [None, -1, 0, 1.5, True, "x", [], {}, [1], {"a": 1}, 10**30]
ODD_FIELDS = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size hidden_act dtype "
    "rope_parameters rope_theta architectures model_type id2label num_labels quantization_config layer_types "
    "rms_norm_eps max_position_embeddings pad_token_id eos_token_id auto_map tie_word_embeddings text_config"
)


@pytest.mark.parametrize("field", ODD_FIELDS.split())
def test_any_value_of_a_config_field_loads_or_is_one_line_that_names_the_target(field, saved):
    fields = json.loads((saved / "config.json").read_text())
    for value in ODD_VALUES:
        (saved / "config.json").write_text(json.dumps({**fields, field: value}))
        try:
            load_target(str(saved))
        except ValueError as error:
            assert str(error).startswith(f"cannot load target {str(saved)!r}: ") and "\n" not in str(error)


@pytest.mark.parametrize("text", ["", "[", "[]", "5", "[" * 100_000, '{"a":' * 100_000, "\0"])
def test_a_config_that_is_no_json_object_is_one_line_that_names_the_target(text, saved):
    (saved / "config.json").write_text(text)
    with pytest.raises(ValueError, match="cannot load target") as caught:
        load_target(str(saved))
    assert str(saved) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_a_pipe_or_a_device_in_a_folder_is_refused_unread(make, name, saved):
    (saved / name).unlink(missing_ok=True)
    make(saved / name)
    with pytest.raises(ValueError, match=r"not a regular file|has no config\.json"):
        load_target(str(saved))


@pytest.mark.parametrize("error", [ImportError, ZeroDivisionError, AttributeError, RecursionError, MemoryError])
def test_whatever_a_library_raises_names_the_target(error, saved, monkeypatch):
    def fail(*args, **kwargs):
        raise error("argument of type 'int' is not iterable:\n  in the config\nmore")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", fail)
    message = "cannot load target .*: argument of type 'int' is not iterable: in the config "
    with pytest.raises(ValueError, match=message) as caught:
        load_target(str(saved))
    assert "\n" not in str(caught.value)


def test_without_a_network_the_local_cache_of_the_hub_serves(saved, monkeypatch):
    from transformers import AutoConfig

    asked, read = [], AutoConfig.from_pretrained

    def refuse(hub_id, *, timeout):
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")
        raise OSError("no network")

    def cached(hub_id, **where):
        asked.append(where["local_files_only"])
        return read(str(saved), **where)

    monkeypatch.setattr("huggingface_hub.model_info", refuse)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: str(saved / "config.json"))
    monkeypatch.setattr(AutoConfig, "from_pretrained", cached)
    with pytest.raises(ValueError, match="cannot load target 'some/model'"):  # its weights are not in the cache
        load_target("some/model")
    assert asked == [True]


def test_libraries_log_nothing_while_loading_and_as_before_afterwards(caplog):
    loggers = [logging.getLogger(name) for name in ("transformers.modeling_utils", "huggingface_hub.utils._http")]
    before = [logger.getEffectiveLevel() for logger in loggers]
    with quiet_libraries():
        assert not any(logger.isEnabledFor(logging.CRITICAL) for logger in loggers)
    assert [logger.getEffectiveLevel() for logger in loggers] == before


@pytest.mark.parametrize("on_terminal", [False, True])
def test_loading_draws_bars_on_a_terminal_only_and_lets_warnings_through(on_terminal, saved, monkeypatch):
    from transformers.utils import logging as switches

    class Screen(io.StringIO):
        def isatty(self):
            return on_terminal

    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    build = DenseTarget.__init__

    def warn(*args, **kwargs):
        print("heed this", file=sys.stderr)
        build(*args, **kwargs)

    monkeypatch.setattr(DenseTarget, "__init__", warn)
    load_target(str(saved))
    assert ("Loading weights" in screen.getvalue()) == on_terminal
    assert "heed this" in screen.getvalue()
    assert switches.is_progress_bar_enabled()

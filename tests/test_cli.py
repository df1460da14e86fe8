"""The command line: what it prints, and one line and status 2 for wrong input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from samples import sample_run

from ddtree_lab.cli import BUDGET_HELP, main
from ddtree_lab.trace import load_trace, save_trace
from ddtree_lab.tree.validate import MAX_BUDGET

TINY = ["compare", "--target", "random:tiny-dense", "--drafter", "toy", "--dtype", "float32", "--device", "cpu"]
FAST = [*TINY, "--budget", "4,6", "--max-new-tokens", "8", "--prompt", "hello there"]


@pytest.fixture
def nothing_loads(monkeypatch):
    """Loading a target fails the test: the fault must be found before."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a target was loaded")

    monkeypatch.setattr("ddtree_lab.target.load.load_target", refuse)


def fault_of(capsys, argv: list[str]) -> str:
    assert main(argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("ddtree-lab: error: ") and output.err.count("\n") == 1 and output.err.endswith("\n")
    return output.err


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--budget", "-3"], "--budget: must be a whole number >= 0, got '-3'"),
        (["--budget", "many"], "--budget: must be a whole number >= 0, got 'many'"),
        (["--budget", "8,"], "--budget: must be a whole number >= 0, got ''"),
        (["--budget", "1e3"], "--budget: must be a whole number"),
        (["--budget", "4,100000"], "--budget: budget must be at most 4096 drafted nodes, got 100000"),
        (["--threads", "100000"], "--threads: must be at most "),
        (["--target", "a\udcff"], "--target: must be UTF-8"),
        (["--drafter", "a\udcff"], "--drafter: must be UTF-8"),
        (["--prompt", "a\udcff"], "argument --prompt: prompt must be text that UTF-8 can hold"),
        (["--prompts", "/dev/null"], "prompts file must end in"),
        (["--prompt", "hi", "--out", ""], "out must name a folder"),
        (["--prompt", "hi", "--out", "/proc"], "is a mount point"),
        (["--modes", "fast"], "--modes: must be all or some of ar, chain, eagle_linear, tree_walk, got 'fast'"),
        (["--modes", "ar,"], "--modes: must be all or some of"),
        (["--max-new-tokens", "-1"], "--max-new-tokens: must be a whole number >= 0"),
        (["--limit", "0"], "--limit: must be a whole number >= 1"),
        (["--threads", "0"], "--threads: must be a whole number >= 1"),
        (["--seed", "x"], "--seed: must be a whole number"),
        (["--temperature", "-1"], "temperature must be"),
        (["--temperature", "nan"], "temperature must be"),
        (["--temperature", "1", "--top-k", "0"], "top_k must be"),
        (["--temperature", "1", "--top-p", "2"], "top_p must be"),
        (["--prompt", ""], "prompt must be a text that is not empty"),
        (["--prompt", "  \n"], "prompt must be a text that is not empty"),
        (["--prompts", "missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["--prompts", ""], "prompts file must end in"),
        (["--prompts", "\x1b[2J.jsonl"], "\\x1b[2J.jsonl: No such file"),
        (["--prompts", "a.txt", "--prompt", "b"], "not allowed with"),
        (["--prompt", "hi", "--out", "/proc/1/nothing/out"], "cannot write /proc/1/nothing/out"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
@pytest.mark.usefixtures("nothing_loads")
def test_wrong_arguments_are_one_line_before_anything_loads(capsys, arguments, fault):
    assert fault in fault_of(capsys, [*TINY, *arguments])


@pytest.mark.usefixtures("nothing_loads")
def test_a_bad_json_line_is_named_by_file_and_number(capsys, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": oops}\n')
    assert f"{path}: line 2: bad JSON" in fault_of(capsys, [*TINY, "--prompts", str(path)])


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("field", ["prompt", "id", "category"])
def test_a_lone_surrogate_in_a_file_is_named_by_file_and_number(capsys, tmp_path, field):
    path = tmp_path / "p.jsonl"
    path.write_text("\n" + json.dumps({"prompt": "fine", field: "\ud800"}))
    assert f"{path}: line 2: {field} must be text" in fault_of(capsys, [*TINY, "--prompts", str(path)])


@pytest.mark.usefixtures("nothing_loads")
def test_unreadable_prompt_files_are_named(capsys, tmp_path):
    folder = tmp_path / "folder.jsonl"
    folder.mkdir()
    assert f"{folder}: Is a directory" in fault_of(capsys, [*TINY, "--prompts", str(folder)])


@pytest.mark.usefixtures("nothing_loads")
def test_a_filled_out_folder_is_refused(capsys, tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    assert "is not empty: it holds other files" in fault_of(capsys, [*TINY, "--prompt", "a", "--out", str(tmp_path)])


@pytest.mark.usefixtures("nothing_loads")
def test_a_target_without_a_shipped_drafter_needs_one(capsys):
    assert "--drafter is needed" in fault_of(capsys, ["compare", "--target", "random:tiny-dense", "--prompt", "a"])


def test_no_command_and_an_unknown_one_are_one_line(capsys):
    assert "COMMAND" in fault_of(capsys, [])
    assert "invalid choice: 'fly'" in fault_of(capsys, ["fly"])
    assert "ACTION" in fault_of(capsys, ["trace"])


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--target", "random:nothing"], "got 'nothing'"),
        (["--target", "no/such/folder/anywhere"], "no/such/folder/anywhere"),
        (["--drafter", "no drafter"], "no drafter"),
        (["--dtype", "int8"], "int8"),
        (["--device", "abacus"], "abacus"),
        (["--max-new-tokens", "100000000"], "do not fit the target's context"),
    ],
)
def test_unknown_models_and_long_prompts_are_one_line(capsys, monkeypatch, arguments, fault):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fault in fault_of(capsys, [*TINY, "--prompt", "a", *arguments])


def test_compare_prints_the_table_and_writes_the_folder(capsys, tmp_path):
    out = tmp_path / "out"
    assert main([*FAST, "--out", str(out)]) == 0
    output = capsys.readouterr()
    assert "toy" in output.out and "identical to ar" in output.out and "tree_walk [toy]" in output.out
    summary = json.loads((out / "summary.json").read_text())
    assert summary["modes"]["tree_walk"]["identical_to_ar"] == 1 and summary["config"]["budgets"] == [4, 6]
    assert len(list((out / "traces").iterdir())) == 6 and (out / "report.html").stat().st_size > 1000
    assert main([*FAST, "--out", str(out), "--overwrite"]) == 0


def test_a_full_disk_is_one_line_after_the_table(capsys, tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    assert main([*FAST, "--out", str(tmp_path / "out")]) == 2
    output = capsys.readouterr()
    assert output.err == f"ddtree-lab: error: cannot write {tmp_path / 'out'}: No space left on device\n"
    assert not os.listdir(tmp_path)


def test_standard_output_on_a_full_disk_is_one_line(tmp_path):
    save_trace(sample_run(), tmp_path / "run.jsonl")
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "ddtree_lab", "trace", "show", str(tmp_path / "run.jsonl")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert process.returncode == 2 and process.stderr == "ddtree-lab: error: No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "streams", "status"),
    [
        ("trace show run.jsonl", ">&-", 0),
        ("trace show run.jsonl", ">&- 2>&-", 0),
        ("trace show run.jsonl", "<&- >&- 2>&-", 0),
        ("trace show none.jsonl", "2>&-", 2),
        ("trace show none.jsonl", "2>/dev/full", 2),
        ("trace show run.jsonl", ">/dev/full 2>/dev/full", 2),
        ("--help", ">&-", 0),
    ],
)
def test_closed_and_full_streams_leave_the_status(tmp_path, arguments, streams, status):
    save_trace(sample_run(), tmp_path / "run.jsonl")
    command = f"{sys.executable} -m ddtree_lab {arguments} {streams}"
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    process = subprocess.run(
        ["/bin/sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == status and "Traceback" not in process.stderr


def test_a_reader_that_stops_early_is_no_error(tmp_path):
    save_trace(sample_run(), tmp_path / "run.jsonl")
    command = [sys.executable, "-m", "ddtree_lab", "trace", "show", str(tmp_path / "run.jsonl")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert (process.wait(timeout=120), process.stderr.read()) == (0, "")
    process.stderr.close()


def test_traces_are_shown_and_exported(capsys, tmp_path):
    path, other = tmp_path / "run.safetensors", tmp_path / "run.jsonl"
    result = sample_run()
    save_trace(result, path)
    assert main(["trace", "export", str(path), str(other)]) == 0
    assert load_trace(other).output_ids == result.output_ids
    assert main(["trace", "show", str(other)]) == 0
    assert f"rounds {len(result.rounds)}" in capsys.readouterr().out
    assert main(["trace", "show", str(path), "--round", "0"]) == 0
    assert "bonus" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["show", "RUN", "--round", "99"], "--round must be below"),
        (["show", "RUN", "--round", "-1"], "--round: must be a whole number >= 0"),
        (["show", "BAD"], "bad.jsonl: line 1: bad JSON"),
        (["show", "missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["export", "RUN", "out.txt"], "trace file must end in .safetensors or .jsonl, got 'out.txt'"),
        (["export", "RUN", "/proc/1/nothing.jsonl"], "cannot write /proc/1/nothing.jsonl"),
    ],
)
def test_wrong_trace_arguments_are_one_line(capsys, tmp_path, arguments, fault):
    run, bad = tmp_path / "run.jsonl", tmp_path / "bad.jsonl"
    save_trace(sample_run(), run)
    bad.write_text("{\x1b\n")
    paths = {"RUN": str(run), "BAD": str(bad)}
    assert fault in fault_of(capsys, ["trace", *(paths.get(argument, argument) for argument in arguments)])


def test_tokens_that_the_target_does_not_have_are_shown_as_numbers(capsys, tmp_path, monkeypatch):
    class Letters:
        def decode(self, tokens: list[int]) -> str:
            return "abcdefghij"[tokens[0]]

    target = SimpleNamespace(tokenizer=Letters(), vocab_size=10)
    monkeypatch.setattr("ddtree_lab.target.load.load_target", lambda _: target)
    save_trace(sample_run(), tmp_path / "run.jsonl")
    for extra in ([], ["--round", "0"]):
        assert main(["trace", "show", str(tmp_path / "run.jsonl"), "--target", "letters", *extra]) == 0
    shown = {int(token): text for token, text in re.findall(r"\b(\d+):'(\w+)'", capsys.readouterr().out)}
    assert min(shown) < 10 <= max(shown)
    assert all(text == ("abcdefghij"[token] if token < 10 else str(token)) for token, text in shown.items())


def test_unexpected_errors_keep_their_traceback(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("ddtree_lab.target.load.load_target", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(FAST)


def test_an_interrupt_is_status_130_and_quiet(capsys, monkeypatch, tmp_path):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ddtree_lab.target.load.load_target", interrupt)
    assert main([*FAST, "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr() == ("", "") and not os.listdir(tmp_path)


def test_ctrl_c_while_comparing_is_status_130_without_output_folder(tmp_path):
    code = (
        "import sys, time, ddtree_lab.cli, ddtree_lab.decode\n"
        "ddtree_lab.decode.generate = lambda *_, **__: (print('decoding', flush=True), time.sleep(60))\n"
        "sys.exit(ddtree_lab.cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *FAST, "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "decoding\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "", "") and not os.listdir(tmp_path)


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ("compare", "train-drafter", "trace"))


def test_the_help_of_the_budget_names_its_cap():
    assert f"at most {MAX_BUDGET}" in BUDGET_HELP

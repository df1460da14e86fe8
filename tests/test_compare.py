"""The comparison: its plan, its summary, its table and the folder it writes."""

from __future__ import annotations

import json
import os
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from samples import sample_run

from ddtree_lab.compare import (
    Comparison,
    Setting,
    check_out_dir,
    format_table,
    plan_settings,
    run_comparison,
    summarise,
    write_outputs,
)
from ddtree_lab.decode import generate
from ddtree_lab.draft.toy import ToyDrafter
from ddtree_lab.prompts import Prompt, read_prompts, to_input_ids
from ddtree_lab.trace import load_trace
from ddtree_lab.tree.validate import MAX_BUDGET
from ddtree_lab.types import MODES, RunResult

SETTINGS = [
    Setting("ar", None),
    Setting("chain", 5),
    Setting("eagle_linear", 8),
    Setting("eagle_linear", 12),
    Setting("tree_walk", 8),
    Setting("tree_walk", 12),
]
CONFIG = {"target": "rule", "drafter": "toy", "dtype": "float32", "device": "cpu"}


def comparison_of(settings=SETTINGS, *, label="toy", temperature=0.0, prompts=2, seconds=None) -> Comparison:
    seconds = {"ar": 2.0, "chain": 1.0} | (seconds or {})
    results = {
        setting: [
            replace(
                sample_run(setting.mode, budget=setting.budget or 0, seed=index, temperature=temperature),
                stats={"decode_seconds": seconds.get(setting, seconds.get(setting.mode, 0.5))},
            )
            for index in range(prompts)
        ]
        for setting in settings
    }
    texts = tuple(Prompt(id=f"p{index}", text="text") for index in range(prompts))
    config = CONFIG | {"prompts": prompts, "max_new_tokens": 24, "temperature": temperature}
    return Comparison(texts, results, 0.5, config, {"cpu": "x"}, label)


def changed_at(result: RunResult, position: int) -> RunResult:
    output = list(result.output_ids)
    output[position] += 1
    return replace(result, output_ids=output)


def test_ar_and_chain_run_once_and_tree_modes_per_budget():
    assert plan_settings(MODES, (12, 8, 12), horizon=5) == SETTINGS
    assert plan_settings(("tree_walk", "ar"), (0,), horizon=5) == [Setting("ar", None), Setting("tree_walk", 0)]
    assert plan_settings(("chain",), (), horizon=7) == [Setting("chain", 7)]


@pytest.mark.parametrize(
    ("modes", "budgets", "fault"),
    [
        (("ar", "fast"), (8,), "mode must be one of ar, chain, eagle_linear, tree_walk, got 'fast'"),
        ((), (8,), "modes must name"),
        (MODES, (8, -1), "budget must be an integer >= 0, got -1"),
        (("ar",), (8, 4097), "budget must be at most 4096 drafted nodes, got 4097"),
        (("tree_walk",), (10**30,), "budget must be at most 4096"),
        (MODES, (), "budgets must name"),
    ],
)
def test_a_wrong_plan_is_refused(modes, budgets, fault):
    with pytest.raises(ValueError, match=fault):
        plan_settings(modes, budgets, horizon=5)


def test_decoding_refuses_a_budget_beyond_the_cap(tiny_target):
    generate(tiny_target, None, [1], mode="ar", budget=MAX_BUDGET, max_new_tokens=1)
    for wrong in (MAX_BUDGET + 1, 2**70):
        with pytest.raises(ValueError, match=f"budget must be at most {MAX_BUDGET} drafted nodes, got {wrong}"):
            generate(tiny_target, None, [1], mode="ar", budget=wrong, max_new_tokens=1)


def test_summary_has_the_agreed_form_and_is_json():
    summary = summarise(comparison_of())
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert list(summary["modes"]) == list(MODES)
    for entry in summary["modes"].values():
        names = {"tau", "rounds", "tokens", "tokens_per_second", "identical_to_ar", "ties", "diverged", "per_depth"}
        assert names <= entry.keys()
    assert summary["modes"]["ar"]["identical_to_ar"] == 2 and summary["modes"]["ar"]["ratio_to_ar"] == 1.0
    assert summary["modes"]["chain"]["ratio_to_ar"] == pytest.approx(2.0)
    assert summary["modes"]["chain"]["budget"] == 5 and summary["modes"]["ar"]["budget"] is None
    assert list(summary["by_budget"]["tree_walk"]) == ["8", "12"]
    assert summary["linear_against_walk"]["12"]["linear_won"] == 0
    assert summary["label"] == "toy" and summary["machine"] == {"cpu": "x"}


def test_a_tree_mode_stands_for_its_fastest_budget():
    for fast, slow in ((8, 12), (12, 8)):
        summary = summarise(comparison_of(seconds={Setting("tree_walk", fast): 0.1, Setting("tree_walk", slow): 0.3}))
        assert summary["modes"]["tree_walk"] == summary["by_budget"]["tree_walk"][str(fast)]
        assert summary["modes"]["tree_walk"]["ratio_to_ar"] == pytest.approx(20)


def test_mismatches_are_counted_and_listed():
    comparison = comparison_of()
    plain = comparison.results[Setting("ar", None)]
    gaps = [float(plain[1].rounds[position - 1].target.gaps[0]) for position in range(1, 24)]
    tie = next(position for position, gap in enumerate(gaps, start=1) if gap <= 0.5)
    apart = next(position for position, gap in enumerate(gaps, start=1) if gap > 0.5)
    results = dict(comparison.results)
    for setting, position in ((Setting("tree_walk", 8), tie), (Setting("chain", 5), apart)):
        results[setting] = [results[setting][0], changed_at(results[setting][1], position)]
    summary = summarise(replace(comparison, results=results))
    walk, chain = summary["by_budget"]["tree_walk"]["8"], summary["modes"]["chain"]
    assert (walk["identical_to_ar"], walk["ties"], walk["diverged"]) == (1, 1, 0)
    assert (chain["identical_to_ar"], chain["ties"], chain["diverged"]) == (1, 0, 1)
    assert [(m["mode"], m["budget"], m["prompt_id"], m["kind"], m["position"]) for m in summary["mismatches"]] == [
        ("chain", 5, "p1", "diverged", apart),
        ("tree_walk", 8, "p1", "tie", tie),
    ]
    assert summary["mismatches"][0]["gap"] == gaps[apart - 1] and summary["mismatches"][0]["tolerance"] == 0.5
    assert "1 of 2, 1 diverged" in format_table(summary) and "1 of 2, 1 tie" in format_table(summary)


def test_without_plain_decoding_or_with_sampling_there_is_nothing_to_match():
    for comparison in (comparison_of(SETTINGS[1:]), comparison_of(temperature=0.8)):
        summary = summarise(comparison)
        for entry in summary["modes"].values():
            assert entry["identical_to_ar"] is None and entry["diverged"] is None
        assert summary["mismatches"] == []
    assert summarise(comparison_of(SETTINGS[1:]))["modes"]["chain"]["ratio_to_ar"] is None


def test_table_is_aligned_and_shows_every_budget():
    text = format_table(summarise(comparison_of()))
    table = text.split("\n\n")[1].splitlines()
    assert len({len(line) for line in table}) == 1 and len(table) == 2 + len(SETTINGS)
    assert re.split(r"  +", table[0]) == [
        "mode", "budget", "tau", "rounds", "tokens", "tokens/s", "ratio to ar", "identical to ar",
    ]  # fmt: skip
    cells = re.split(r"  +", table[2])
    assert cells[0] == "ar" and cells[2] == "1.00" and cells[-1] == "2 of 2" and cells[-2] == "1.00"
    assert "EAGLE-linear lost" in text.splitlines()[-1] and "never won" in text


def test_a_label_stands_in_the_title_and_beside_every_drafted_row():
    labelled = format_table(summarise(comparison_of()))
    assert "[toy]" in labelled.splitlines()[0] and "[toy]" in labelled.splitlines()[-1]
    rows = [line for line in labelled.splitlines() if line.startswith(("chain", "eagle", "tree", "depth"))]
    assert rows and all("[toy]" in row for row in rows)
    assert "[" not in format_table(summarise(comparison_of(label=None)))


def test_outputs_are_written_whole(tmp_path):
    comparison = comparison_of()
    summary = summarise(comparison)
    write_outputs(comparison, summary, tmp_path / "new" / "out")
    assert os.listdir(tmp_path / "new") == ["out"]
    out = tmp_path / "new" / "out"
    assert json.loads((out / "summary.json").read_text()) == summary
    assert (out / "report.html").read_text().lower().startswith("<!doctype html>")
    names = sorted(path.name for path in (out / "traces").iterdir())
    assert len(names) == 2 * len(SETTINGS) and names[0] == "ar-000.safetensors"
    loaded = load_trace(out / "traces" / "tree_walk-12-001.safetensors")
    assert loaded.output_ids == comparison.results[Setting("tree_walk", 12)][1].output_ids


def test_only_earlier_outputs_are_replaced_and_only_when_asked(tmp_path):
    comparison = comparison_of()
    summary = summarise(comparison)
    out = tmp_path / "out"
    out.mkdir()
    write_outputs(comparison, summary, out)
    with pytest.raises(ValueError, match="is not empty: pass --overwrite"):
        write_outputs(comparison, summary, out)
    smaller = comparison_of(SETTINGS[:2])
    write_outputs(smaller, summarise(smaller), out, overwrite=True)
    assert len(list((out / "traces").iterdir())) == 4 and os.listdir(tmp_path) == ["out"]
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        write_outputs(comparison, summary, out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("summary.json", b"precious"),
        ("summary.json", b'{"modes": 1}'),
        ("summary.json", b"[" * 100_000),
        ("traces/weights.safetensors", b"precious"),
        ("traces/tree_walk-8-000.jsonl", b"precious"),
    ],
)
def test_a_folder_that_only_looks_like_outputs_is_kept(tmp_path, file, content):
    comparison = comparison_of(SETTINGS[:1])
    write_outputs(comparison, summarise(comparison), tmp_path / "out")
    check_out_dir(tmp_path / "out", overwrite=True)
    (tmp_path / "out" / file).write_bytes(content)
    with pytest.raises(ValueError, match="holds other files"):
        write_outputs(comparison, summarise(comparison), tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / file).read_bytes() == content


@pytest.mark.parametrize("first_check", ["sees the other run", "is too early"])
def test_a_run_that_ended_meanwhile_is_not_replaced(tmp_path, monkeypatch, first_check):
    comparison = comparison_of(SETTINGS[:2])
    summary, out = summarise(comparison), tmp_path / "out"

    def other_run_ends(_: int) -> str:
        if not out.exists():
            (out / "traces").mkdir(parents=True)
            (out / "mine").write_text("x")
        return "t"

    if first_check == "is too early":
        monkeypatch.setattr("ddtree_lab.compare._refuse_filled", lambda *_, **__: None)
    with pytest.raises((ValueError, OSError), match=r"is not empty|Directory not empty"):
        write_outputs(comparison, summary, out, decode_token=other_run_ends)
    assert sorted(os.listdir(out)) == ["mine", "traces"] and os.listdir(tmp_path) == ["out"]


def test_no_folder_and_a_mount_point_are_refused_early(tmp_path):
    with pytest.raises(ValueError, match="out must name a folder"):
        check_out_dir("")
    for place in ("/", "/proc"):
        with pytest.raises(ValueError, match=f"out {place} is a mount point"):
            check_out_dir(place, overwrite=True)


def test_a_seed_that_runs_out_is_refused_before_decoding(tiny_target, monkeypatch):
    monkeypatch.setattr("ddtree_lab.decode.generate", None)
    prompts = [Prompt(id=str(number), text="a") for number in range(2)]
    with pytest.raises(ValueError, match=r"seed must be at most 2\*\*64 - 2"):
        run_comparison(tiny_target, ToyDrafter(tiny_target.vocab_size), prompts, seed=2**64 - 1)


@pytest.mark.parametrize("field", ["id", "text", "category"])
def test_a_prompt_that_cannot_be_written_is_refused(field):
    for wrong in ("a\ud800", "\udfffb", "\udcff"):
        with pytest.raises(ValueError, match=f"{field.replace('text', 'prompt')} must be text that UTF-8 can hold"):
            Prompt(**{"id": "1", "text": "a", field: wrong})
    assert getattr(Prompt(**{"id": "1", "text": "a", field: "\U0001f600\ud7ff\ue000"}), field)


def test_a_pipe_a_device_and_a_huge_file_are_no_prompts(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    with open(tmp_path / "big.txt", "wb") as file:
        file.truncate(2**40)
    for name, fault in (("pipe", "not a regular file"), ("zero", "not a regular file"), ("big", "larger than")):
        with pytest.raises(OSError, match=f"{fault}.*{name}.txt"):
            read_prompts(tmp_path / f"{name}.txt")


def test_a_file_and_a_place_that_cannot_be_written_are_refused_early(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="out must be a folder"):
        check_out_dir(tmp_path / "file")
    with pytest.raises(OSError, match="cannot write /proc/1/nothing/out"):
        check_out_dir("/proc/1/nothing/out")
    check_out_dir(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("filled", [False, True])
def test_a_full_disk_leaves_the_earlier_outputs_and_nothing_else(tmp_path, filled):
    comparison = comparison_of(SETTINGS[:2])
    summary = summarise(comparison)
    out = tmp_path / "out"
    if filled:
        write_outputs(comparison, summary, out)
    before = sorted(tmp_path.rglob("*"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=rf"cannot write {out}: File too large"):
            write_outputs(comparison, summary, out, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.rglob("*")) == before


def test_an_interrupt_leaves_nothing(tmp_path):
    comparison = comparison_of(SETTINGS[:2])

    def interrupt(_: int) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_outputs(comparison, summarise(comparison), tmp_path / "out", decode_token=interrupt)
    assert not os.listdir(tmp_path)


def test_every_mode_gives_plain_decodings_tokens(tiny_target):
    prompts = [Prompt(id="a", text="one two three"), Prompt(id="b", text="another prompt")]
    drafter = ToyDrafter(tiny_target.vocab_size)
    comparison = run_comparison(tiny_target, drafter, prompts, budgets=(4, 9), max_new_tokens=12, progress=False)
    assert list(comparison.results) == plan_settings(MODES, (4, 9), horizon=drafter.horizon)
    summary = summarise(comparison)
    assert summary["mismatches"] == [] and summary["modes"]["tree_walk"]["identical_to_ar"] == 2
    assert summary["label"] == "toy" and summary["config"]["budgets"] == [4, 9]
    for setting, results in comparison.results.items():
        assert [result.meta["prompt_id"] for result in results] == ["a", "b"]
        assert all(result.mode == setting.mode for result in results)
    assert summary["modes"]["tree_walk"]["tokens_per_second"] > 0


def test_sampled_comparisons_repeat_with_their_seed(tiny_target):
    def tokens(seed: int) -> list[list[int]]:
        comparison = run_comparison(
            tiny_target,
            ToyDrafter(tiny_target.vocab_size),
            [Prompt(id="a", text="one two three")],
            modes=("ar", "tree_walk"),
            budgets=(6,),
            max_new_tokens=8,
            temperature=1.0,
            top_k=20,
            seed=seed,
            progress=False,
        )
        return [result.output_ids for results in comparison.results.values() for result in results]

    assert tokens(1) == tokens(1) != tokens(2)


def test_a_prompt_beyond_the_context_is_refused_before_decoding(tiny_target, monkeypatch):
    monkeypatch.setattr(type(tiny_target), "prefill", None)
    prompts = [Prompt(id="short", text="x"), Prompt(id="long", text="x" * tiny_target.context_length)]
    with pytest.raises(ValueError, match=r"prompt 'long' of \d+ tokens and 4 new ones do not fit the target's context"):
        run_comparison(tiny_target, ToyDrafter(tiny_target.vocab_size), prompts, max_new_tokens=4, progress=False)
    with pytest.raises(ValueError, match="at least one prompt"):
        run_comparison(tiny_target, ToyDrafter(tiny_target.vocab_size), [], progress=False)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', r"line 3: bad JSON \("),
        ("p.jsonl", b'{"prompt": "a"}\n["b"]\n', 'line 2: must be an object with a "prompt"'),
        ("p.jsonl", b'{"text": "a"}\n', 'line 1: must be an object with a "prompt"'),
        ("p.jsonl", b'{"prompt": "  "}\n', "line 1: prompt must be a text that is not empty"),
        ("p.jsonl", b'{"prompt": 5}\n', "line 1: prompt must be a text that is not empty, got 5"),
        ("p.jsonl", b'{"prompt": "a", "id": [1]}\n', "line 1: id must be"),
        ("p.jsonl", b'{"prompt": "a", "id": 2}\n{"prompt": "b"}\n', "line 2: id '2' is repeated"),
        ("p.jsonl", b'{"prompt": "a", "category": 1}\n', "line 1: category must be"),
        ("p.jsonl", b'{"prompt": "a"}\n' + b"[" * 100_000 + b"\n", "line 2: bad JSON"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2: .*utf-8"),
        ("p.txt", b"a\n\xff\n", "line 2: .*utf-8"),
        ("p.txt", b" \n\n", "no prompts"),
        ("p.jsonl", b"", "no prompts"),
        ("p.csv", b"a", r"must end in \.jsonl or \.txt"),
    ],
)
def test_a_faulty_prompt_file_is_named_with_its_line(tmp_path, name, content, fault):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}.*{fault}|{fault}.*{re.escape(name)}"):
        read_prompts(tmp_path / name)


def test_prompt_files_are_read(tmp_path):
    (tmp_path / "p.txt").write_bytes("\ufeffone\r\n\n  two  \n".encode())
    assert read_prompts(tmp_path / "p.txt") == [Prompt(id="1", text="one"), Prompt(id="3", text="two")]
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "id": 7, "category": "c"}\n{"prompt": "b"}\n')
    assert read_prompts(tmp_path / "p.jsonl", limit=1) == [Prompt(id="7", text="a", category="c")]
    with pytest.raises(ValueError, match="limit must be >= 1"):
        read_prompts(tmp_path / "p.txt", limit=0)


def test_shipped_prompts_are_sixty_in_nine_categories():
    prompts = read_prompts(Path(__file__).parent.parent / "data" / "prompts.jsonl")
    assert len(prompts) == 60 and len({prompt.category for prompt in prompts}) == 9
    assert len({prompt.text for prompt in prompts}) == 60


def test_a_target_without_a_tokenizer_gets_bytes_within_its_vocabulary(tiny_target):
    ids = to_input_ids("é!", tiny_target)
    expected = [byte % tiny_target.vocab_size for byte in "é!".encode()]
    assert torch.equal(ids, torch.tensor([expected])) and ids.dtype == torch.int64


class _PlainTokenizer:
    """Characters as ids; with a template when one is given."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([1] if add_special_tokens else []), *map(ord, text)]

    def apply_chat_template(self, messages, *, add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt and not tokenize
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


def test_prompts_go_through_the_chat_template_where_there_is_one(tiny_target, monkeypatch):
    monkeypatch.setattr(tiny_target, "tokenizer", _PlainTokenizer("{{ messages }}"), raising=False)
    assert to_input_ids("hi", tiny_target).tolist() == [[*map(ord, "<user>hi<assistant>")]]
    monkeypatch.setattr(tiny_target, "tokenizer", _PlainTokenizer(None), raising=False)
    assert to_input_ids("hi", tiny_target).tolist() == [[1, *map(ord, "hi")]]

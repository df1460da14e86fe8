"""Trace files and replay."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from samples import sample_run

from ddtree_lab.accept import verify_linear, walk
from ddtree_lab.trace import load_trace, prune, replay, save_trace
from ddtree_lab.trace.schema import ARRAYS, arrays_of, scalars_of
from ddtree_lab.trace.text import describe_round, describe_run
from ddtree_lab.tree import build_best_first
from ddtree_lab.types import Acceptance, Round, RunResult

SUFFIXES = (".safetensors", ".jsonl")


def assert_same(one: RunResult, other: RunResult) -> None:
    """Bit for bit: floats are compared as integers."""
    for name in ("mode", "prompt_ids", "output_ids", "stop_reason"):
        assert getattr(one, name) == getattr(other, name), name
        assert type(getattr(one, name)) is type(getattr(other, name)), name
    assert dict(one.stats) == dict(other.stats) and dict(one.meta) == dict(other.meta)
    assert len(one.rounds) == len(other.rounds)
    for left, right in zip(one.rounds, other.rounds, strict=True):
        assert scalars_of(left) == scalars_of(right) and left.acceptance == right.acceptance
        assert dict(left.stage_seconds) == dict(right.stage_seconds)
        right_arrays = arrays_of(right)
        for name, array in arrays_of(left).items():
            bits = [a.view(torch.int32) if a.dtype == torch.float32 else a for a in (array, right_arrays[name])]
            assert bits[0].dtype == bits[1].dtype and torch.equal(*bits), name


def with_first_round(result: RunResult, first: Round) -> RunResult:
    return replace(result, rounds=[first, *result.rounds[1:]])


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("mode", ["ar", "chain", "eagle_linear", "tree_walk"])
def test_a_saved_run_loads_bit_for_bit(tmp_path, mode, suffix):
    result = sample_run(mode)
    save_trace(result, tmp_path / f"run{suffix}")
    assert_same(load_trace(tmp_path / f"run{suffix}"), result)
    assert os.listdir(tmp_path) == [f"run{suffix}"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_extreme_floats_and_large_ids_survive(tmp_path, suffix):
    result = sample_run()
    first = result.rounds[0]
    bits = torch.tensor([1, 0, 0x007FFFFF, 0x00800000, 0x3DCCCCCD, 0x7F7FFFFF, 0x7F800000], dtype=torch.int32)
    drawn = torch.rand(len(first.tree) - len(bits), generator=torch.Generator().manual_seed(3)) * 1e-20
    gaps = torch.cat([bits.view(torch.float32), drawn])
    ids = first.draft_token_ids.clone()
    ids[-1, -1] = 2**40
    target = replace(first.target, gaps=gaps, node_log_probs=-gaps)
    result = with_first_round(result, replace(first, draft_token_ids=ids, target=target))
    save_trace(result, tmp_path / f"run{suffix}")
    assert_same(load_trace(tmp_path / f"run{suffix}"), result)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_run_without_rounds_and_one_without_tokens_survive(tmp_path, suffix):
    result = sample_run()
    for output in (result.output_ids[:1], []):
        short = replace(result, rounds=[], output_ids=output)
        save_trace(short, tmp_path / f"run{suffix}")
        assert_same(load_trace(tmp_path / f"run{suffix}"), short)


def test_exporting_there_and_back_changes_no_byte(tmp_path):
    save_trace(sample_run(), tmp_path / "a.safetensors")
    save_trace(load_trace(tmp_path / "a.safetensors"), tmp_path / "b.jsonl")
    save_trace(load_trace(tmp_path / "b.jsonl"), tmp_path / "c.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()


def test_a_round_of_budget_64_takes_less_than_8_kilobytes(tmp_path):
    result = sample_run(depth=15, budget=64, width=32, tokens=60, boost=1.0)
    assert all(round_.tree.budget_used == 64 for round_ in result.rounds) and len(result.rounds) > 5
    save_trace(result, tmp_path / "run.safetensors")
    assert (tmp_path / "run.safetensors").stat().st_size / len(result.rounds) < 8192


def test_another_suffix_is_refused_before_anything_is_written(tmp_path):
    for name in ("run.pt", "run", "run.json"):
        with pytest.raises(ValueError, match=r"must end in \.safetensors or \.jsonl"):
            save_trace(sample_run(), tmp_path / name)
        with pytest.raises(ValueError, match=r"must end in \.safetensors or \.jsonl"):
            load_trace(tmp_path / name)
    assert not os.listdir(tmp_path)


def test_stats_or_meta_that_json_cannot_hold_are_refused(tmp_path):
    result = sample_run()
    with pytest.raises(TypeError, match="meta must hold JSON values, got dtype"):
        save_trace(replace(result, meta={"dtype": torch.float32}), tmp_path / "run.jsonl")
    with pytest.raises(TypeError, match="stats must have string keys, got 3"):
        save_trace(replace(result, stats={3: 1}), tmp_path / "run.jsonl")
    with pytest.raises(ValueError, match="stats must hold finite numbers"):
        save_trace(replace(result, stats={"tau": math.nan}), tmp_path / "run.safetensors")
    with pytest.raises(ValueError, match="meta must be a dict, got None"):
        save_trace(replace(result, meta=None), tmp_path / "run.jsonl")
    with pytest.raises(ValueError, match="cannot write"):
        save_trace(replace(result, meta={"prompt": "\ud800"}), tmp_path / "run.jsonl")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, suffix):
    path = tmp_path / f"run{suffix}"
    path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=f"cannot write .*run{suffix}: File too large"):
            save_trace(sample_run(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == [path.name] and path.read_bytes() == b"old"


def test_an_interrupt_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_trace(sample_run(), tmp_path / "run.jsonl")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_cut_of_a_file_is_refused_with_its_name(tmp_path, suffix):
    save_trace(sample_run(tokens=8), tmp_path / f"run{suffix}")
    whole = (tmp_path / f"run{suffix}").read_bytes()
    cut = tmp_path / f"cut{suffix}"
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"cut{suffix}: "):
            load_trace(cut)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_altered_bytes_load_or_raise_value_error_and_nothing_else(tmp_path, suffix):
    save_trace(sample_run(tokens=8), tmp_path / f"run{suffix}")
    whole = (tmp_path / f"run{suffix}").read_bytes()
    path, draw = tmp_path / f"altered{suffix}", random.Random(5)
    refused = 0
    for _ in range(400):
        data = bytearray(whole)
        place = draw.randrange(len(data)) if draw.random() < 0.5 else draw.randrange(min(len(data), 900))
        data[place : place + draw.choice((0, 1, 8))] = draw.randbytes(draw.choice((1, 4, 8)))
        path.write_bytes(data)
        try:
            load_trace(path)
        except ValueError as error:
            refused += 1
            assert f"altered{suffix}: " in str(error)
    assert refused > 200


def edit_jsonl(file: Path, line: int, changes: dict[str, object]) -> None:
    lines = file.read_text().splitlines()
    record = json.loads(lines[line - 1])
    for key, value in changes.items():
        part, _, name = key.partition("__")
        if name:
            record[part][name] = value
        else:
            record[part] = value
    lines[line - 1] = json.dumps(record)
    file.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("line", "changes", "fault"),
    [
        (1, {"format": "other"}, "not a ddtree-trace file"),
        (1, {"version": 2}, "version must be 1, got 2"),
        (1, {"mode": "fast"}, "mode must be one of"),
        (1, {"stop_reason": "tired"}, "stop_reason must be one of"),
        (1, {"rounds": 99}, "cut short"),
        (1, {"stats": []}, "stats must be a dict"),
        (1, {"prompt_ids": [1, -2]}, "prompt_ids must not be negative"),
        (1, {"output_ids": [1.5]}, "output_ids must hold 64-bit integers"),
        (2, {"round": 7}, "line 2: round must be 0"),
        (2, {"extra": 1}, "line 2: round: missing .*unknown .*extra"),
        (2, {"path": [0, 40]}, "round 0: path must start at node 0 and stay below"),
        (2, {"path": [0, -1]}, "round 0: path must not be negative"),
        (2, {"path": []}, "round 0: path must start at node 0"),
        (2, {"bonus_token": 49}, "round 0: bonus_token must be the target's token"),
        (2, {"emitted": []}, "round 0: emitted must be"),
        (2, {"false_continuations": -1}, "round 0: false_continuations out of range"),
        (2, {"past_length": 6}, "round 0: past_length must be 5"),
        (2, {"past_length": 2**70}, "line 2: scalars must hold 64-bit integers"),
        (2, {"past_length": True}, "line 2: scalars must hold 64-bit integers"),
        (2, {"draft_shape": [-1, 8]}, "line 2: draft_shape must be"),
        (2, {"draft_shape": [2**60, 8]}, "line 2: draft_shape must be"),
        (2, {"draft_shape": [5, 7]}, "line 2: draft.token_ids must be 5 rows of 7"),
        (2, {"stage_seconds": {"draft": "soon"}}, "line 2: stage_seconds"),
        (2, {"stage_seconds": {"draft": -1.0}}, "round 0: stage_seconds"),
        (2, {"tree__parents": [-1, 0]}, "line 2: "),
        (2, {"tree__token_ids": "abc"}, "line 2: tree.token_ids must be a list"),
        (2, {"target__gaps": [1.0]}, "round 0: target.gaps must have shape"),
        (2, {"draft__log_probs": [["nan"] * 8] * 5}, "line 2: draft.log_probs must hold numbers"),
        (2, {"draft__log_probs": [["inf"] * 8] * 5}, "round 0: draft.log_probs must not be above 0"),
        (2, {"draft__log_probs": [[-2.0, -1.0, *[-3.0] * 6]] * 5}, "round 0: draft.log_probs must fall"),
        (2, {"draft__token_ids": [[49] * 8] * 5}, "round 0: node .* is not the draft's of its depth and rank"),
        (2, {"target__log_probs": [0.5] * 13}, "round 0: target.log_probs must not be above 0"),
        (2, {"target__node_log_probs": [0.5] * 13}, "round 0: target.node_log_probs must not be above 0"),
        (2, {"target__node_ranks": [1] * 13}, "round 0: target.node_ranks must be 0 at the root"),
        (2, {"draft_shape": [2**31, 0]}, "line 2: draft_shape must be"),
        (2, {"draft_shape": [5, 0]}, "line 2: draft_shape must be"),
        (2, {"draft_shape": [5, 33]}, "line 2: draft_shape must be"),
        (2, {"draft_shape": [4097, 8]}, "line 2: draft_shape must be"),
        (1, {"version": True}, "version must be 1, got True"),
        (1, {"version": 1.0}, "version must be 1, got 1.0"),
        (1, {"rounds": True}, "rounds must be 0 to 131072, got True"),
        (1, {"rounds": 2**17 + 1}, "rounds must be 0 to 131072, got 131073"),
        (1, {"rounds": -1}, "rounds must be 0 to 131072"),
        (2, {"draft__log_probs": [[-1e300] * 8] * 5}, "line 2: draft.log_probs holds a number beyond"),
        (2, {"draft__log_probs": [[-(10**400)] * 8] * 5}, "line 2: draft.log_probs: "),
    ],
)
def test_a_faulty_field_is_named(tmp_path, line, changes, fault):
    path = tmp_path / "run.jsonl"
    save_trace(sample_run(), path)
    edit_jsonl(path, line, changes)
    with pytest.raises(ValueError, match=rf"run\.jsonl: .*{fault}"):
        load_trace(path)


def test_bad_json_is_named_by_its_line(tmp_path):
    path = tmp_path / "run.jsonl"
    save_trace(sample_run(), path)
    lines = path.read_bytes().splitlines()
    bad = [b"{", b"NaN", b"\xff\xfe", b"[" * 200_000, b"9" * 10_000, b'{"a":' * 3000 + b"1" + b"}" * 3000]
    for text in bad:
        path.write_bytes(b"\n".join([*lines[:2], text, *lines[3:]]) + b"\n")
        with pytest.raises(ValueError, match=r"run\.jsonl: line 3: "):
            load_trace(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_path_that_leaves_the_tree_or_the_target_is_refused(tmp_path, suffix):
    result = next(r for r in map(lambda seed: sample_run(seed=seed), range(20)) if len(r.rounds[0].acceptance.path) > 2)
    first = result.rounds[0]
    path = first.acceptance.path
    skipping = replace(first.acceptance, path=(path[0], *path[2:]))
    with pytest.raises(ValueError, match=r"round 0: path: node .* is not a child of node 0"):
        save_trace(with_first_round(result, replace(first, acceptance=skipping)), tmp_path / f"r{suffix}")
    other = first.target.token_ids.clone()
    other[0] = (other[0] + 1) % 50
    changed = replace(first, target=replace(first.target, token_ids=other))
    with pytest.raises(ValueError, match=r"round 0: path: node .* is not the target's token after node 0"):
        save_trace(with_first_round(result, changed), tmp_path / f"r{suffix}")
    assert not os.listdir(tmp_path)


def test_rounds_that_do_not_follow_one_another_are_refused(tmp_path):
    result = sample_run()
    for rounds in (result.rounds[1:], result.rounds[:-1], result.rounds[::-1]):
        with pytest.raises(ValueError, match=r"past_length|rounds emit|differ from output_ids|emitted is cut"):
            save_trace(replace(result, rounds=rounds), tmp_path / "run.jsonl")


def test_lengths_that_do_not_add_up_are_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    save_trace(sample_run(), path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    for column, value in ((3, 2**62), (3, -5), (4, 2**62), (4, 2**31), (5, 33), (5, 0), (6, 1000), (7, -1), (3, 1)):
        tensors = load_file(path)
        tensors["rounds"][0, column] = value
        save_file(tensors, tmp_path / "bad.safetensors", metadata=metadata)
        with pytest.raises(ValueError, match=r"bad\.safetensors: "):
            load_trace(tmp_path / "bad.safetensors")


def test_a_draft_without_columns_is_refused_before_it_takes_memory(tmp_path):
    path = tmp_path / "run.safetensors"
    save_trace(sample_run(), path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["rounds"][:, 4], tensors["rounds"][:, 5] = 2**31, 0
    tensors |= {name: tensors[name][:0].clone() for name in ("draft.token_ids", "draft.log_probs")}
    save_file(tensors, tmp_path / "bad.safetensors", metadata=metadata)
    with pytest.raises(ValueError, match=r"bad\.safetensors: draft_shape must be"):
        load_trace(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("metadata", [None, {}, {"trace": "null"}, {"trace": "[]"}, {"trace": '{"version": true}'}])
def test_metadata_that_is_no_trace_is_refused(tmp_path, metadata):
    path = tmp_path / "run.safetensors"
    save_trace(sample_run(), path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length]) | {"__metadata__": metadata}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
    with pytest.raises(ValueError, match=r"run\.safetensors: (header: the metadata|not a ddtree-trace)"):
        load_trace(path)


def test_more_lines_than_rounds_may_be_are_not_split(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"\n" * 2**18)
    with pytest.raises(ValueError, match="more than the limit of 131072 rounds"):
        load_trace(path)


def test_missing_or_mistyped_arrays_are_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    save_trace(sample_run(), path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    for name in [*ARRAYS, "rounds", "stage_seconds", "prompt_ids", "output_ids"]:
        for change in (None, lambda array: array.to(torch.float16), lambda array: array.reshape(1, *array.shape)):
            tensors = load_file(path)
            array = tensors.pop(name)
            tensors |= {name: change(array)} if change else {}
            save_file(tensors, tmp_path / "bad.safetensors", metadata=metadata)
            with pytest.raises(ValueError, match=r"bad\.safetensors: "):
                load_trace(tmp_path / "bad.safetensors")


def test_a_hostile_safetensors_header_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"

    def write(header: bytes, length: int | None = None) -> None:
        path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)

    nested = json.dumps({"__metadata__": {"trace": "[" * 100_000}}).encode()
    for header, length in ((b"{}", None), (b"{}", 2**63), (b"[" * 5000, None), (nested, None), (b"null", None)):
        write(header, length)
        with pytest.raises(ValueError, match=r"run\.safetensors: "):
            load_trace(path)


def test_a_folder_a_device_and_a_huge_file_are_not_read(tmp_path, monkeypatch):
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(OSError):
        load_trace(tmp_path / "d.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("zero", "pipe"):
        with pytest.raises(OSError, match="not a regular file"):
            load_trace(tmp_path / f"{name}.jsonl")
    with open(tmp_path / "big.safetensors", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="larger than"):
        load_trace(tmp_path / "big.safetensors")


def test_pruning_gives_the_tree_of_the_smaller_budget(random_logits):
    logits = random_logits(6, 40)
    tree = build_best_first(logits, 30, root_token=9)
    for budget in (0, 1, 7, 29, 30, 31):
        assert prune(tree, budget) == build_best_first(logits, min(budget, 30), root_token=9)
    for budget in (-1, 1.5, True, "3"):
        with pytest.raises((ValueError, TypeError), match="budget must be"):
            prune(tree, budget)


def test_replay_repeats_the_recorded_verification():
    for mode in ("tree_walk", "eagle_linear"):
        for round_ in sample_run(mode, tokens=60).rounds:
            assert replay(round_, verify=mode) == round_.acceptance
    with pytest.raises(ValueError, match="verify must be one of"):
        replay(round_, verify="dfs")


def test_replay_with_a_smaller_budget_is_the_walk_of_the_pruned_tree():
    for round_ in sample_run(tokens=60).rounds:
        for budget in (0, 3, 8):
            tree = prune(round_, budget)
            targets = round_.target.token_ids[: len(tree)]
            assert replay(round_, budget=budget) == walk(tree, targets)
            assert replay(round_, budget=budget, verify="eagle_linear") == verify_linear(tree, targets)


def test_text_of_a_trace_lets_no_control_character_through():
    result = replace(sample_run(), meta={"ta\x1brget": "evil\x1b[2J\u202e"})
    text = describe_run(result, token_text=lambda token: "\x1b]0;owned\x07\u202e\n")
    text += describe_round(result.rounds[0], token_text=lambda token: "\x9b31m\r")
    assert all(char.isprintable() or char == "\n" for char in text)
    assert text.count("\n") < 40 and "\\x1b" in text


def test_text_of_a_round_shows_every_node_once_and_stars_the_path():
    round_ = next(r for r in sample_run(tokens=60).rounds if len(r.acceptance.path) > 2)
    lines = describe_round(round_).splitlines()[1 : 1 + len(round_.tree)]
    assert sorted(int(line[1:5]) for line in lines) == list(range(len(round_.tree)))
    assert {int(line[1:5]) for line in lines if line[0] == "*"} == set(round_.acceptance.path)


def test_a_path_that_stops_early_is_refused(tmp_path):
    result = sample_run()
    index = next(i for i, round_ in enumerate(result.rounds) if round_.acceptance.num_accepted)
    round_ = result.rounds[index]
    node = round_.acceptance.path[0]
    short = replace(
        round_, acceptance=Acceptance((0,), int(round_.target.token_ids[node])), emitted=round_.emitted[:1]
    )
    broken = replace(result, rounds=[*result.rounds[:index], short])
    with pytest.raises(ValueError, match="path must be"):
        save_trace(broken, tmp_path / "run.jsonl")

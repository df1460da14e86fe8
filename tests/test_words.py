"""Texts kept beside a trace stand in for the target in pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import sample_run
from test_rich_reprs import WORDS

from ddtree_lab.viz import Words, load_words, most_lost, save_words, show_round, words_of


def test_pictures_of_a_run_are_the_same_with_its_words_as_with_the_target(tmp_path: Path) -> None:
    run = sample_run("tree_walk")
    save_words(words_of(run, WORDS), tmp_path / "run.words.json")
    words = load_words(tmp_path / "run.words.json")
    assert words == words_of(run, WORDS)
    round_ = run.rounds[most_lost(run.rounds)]
    assert show_round(round_, words) == show_round(round_, WORDS) != show_round(round_)


def test_a_token_without_a_text_is_its_id() -> None:
    words = Words({1: "one "})
    assert words.decode([1, 0]) == "one 0"
    assert (words.vocab_size, Words({}).vocab_size) == (2, 0)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"1": 2}', b'{"one": "text"}', b"\xff", b"[" * 100_000])
def test_another_file_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.json: "):
        load_words(tmp_path / "x.json")

"""Texts of a run's tokens, kept beside its trace: what pictures ask of a target, without the model.

The file is JSON: {"<token id>": "<text>"}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_lab.files import read_bounded
from ddtree_lab.trace.store import write_atomically
from ddtree_lab.types import RunResult
from ddtree_lab.viz.tokens import token_decoder

if TYPE_CHECKING:
    from ddtree_lab.target.protocol import Target

MAX_FILE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Words:
    """Stands in for a target where token texts are all that is wanted of it. A token without a text is its id."""

    texts: Mapping[int, str]

    @property
    def vocab_size(self) -> int:
        """One more than the largest id with a text."""
        return max(self.texts, default=-1) + 1

    @property
    def tokenizer(self) -> Words:
        """What decodes: the words themselves."""
        return self

    def decode(self, token_ids: Sequence[int]) -> str:
        """The texts of ``token_ids``, joined."""
        return "".join(self.texts.get(token, str(token)) for token in token_ids)


def words_of(result: RunResult, target: Target) -> Words:
    """The texts by ``target``'s tokenizer of every token that ``result`` holds."""
    decode, tokens = token_decoder(target), {*result.prompt_ids, *result.output_ids}
    for round_ in result.rounds:
        for ids in (round_.tree.token_ids, round_.target.token_ids, round_.draft_token_ids.flatten()):
            tokens.update(ids.tolist())
    return Words({token: decode(token) for token in sorted(tokens)})


def save_words(words: Words, path: str | Path) -> None:
    """Write the texts to ``path``, whole or not at all. Raises OSError naming the file when it cannot be written."""
    write_atomically(path, json.dumps(dict(words.texts), ensure_ascii=False, indent=0).encode() + b"\n")


def load_words(path: str | Path) -> Words:
    """Read what ``save_words`` wrote. Raises ValueError naming the file when it is anything else, OSError when it
    cannot be read."""
    try:
        texts = json.loads(read_bounded(Path(path), MAX_FILE_BYTES))
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise ValueError("must be one object of token ids and texts")
        return Words({int(token): text for token, text in texts.items()})
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error

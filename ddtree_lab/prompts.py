"""Prompts: a file of prompts or a literal one -> Prompt records -> token ids for a target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddtree_lab.files import read_bounded

if TYPE_CHECKING:
    from ddtree_lab.target.protocol import Target

SUFFIXES = (".jsonl", ".txt")
MAX_FILE_BYTES = 256 * 2**20
MAX_ID_LENGTH = 1000  # characters


@dataclass(frozen=True)
class Prompt:
    """One user message. ValueError for an empty one, a long id, or text that cannot be written as UTF-8."""

    id: str  # unique within its file; the line number when the file gives none
    text: str
    category: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise ValueError(f"prompt must be a text that is not empty, got {self.text!r:.40}")
        for name, value in (("id", self.id), ("prompt", self.text), ("category", self.category or "")):
            if not isinstance(value, str) or any("\ud800" <= char <= "\udfff" for char in value):
                raise ValueError(f"{name} must be text that UTF-8 can hold, got {value!r:.40}")
        if len(self.id) > MAX_ID_LENGTH:
            raise ValueError(f"id must have at most {MAX_ID_LENGTH} characters, got {len(self.id)}")


def read_prompts(path: str | Path, *, limit: int | None = None) -> list[Prompt]:
    """The prompts of a ``.jsonl`` file ({"prompt": text, optional "id" and "category"} a line) or of a ``.txt`` file
    (one a line), at most ``limit``. Blank lines are skipped.

    All lines are checked, also those beyond the limit. Raises ValueError naming the file, and the line where there is
    one, for bad JSON, a missing or empty prompt, a repeated id, text that is not UTF-8, no prompts, or a file that is
    not regular or beyond ``MAX_FILE_BYTES``; OSError when the file cannot be read.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be >= 1, got {limit}")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"prompts file must end in {' or '.join(SUFFIXES)}, got {str(path)!r}")
    parse = _from_json if path.suffix == ".jsonl" else _from_text
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(read_bounded(path, MAX_FILE_BYTES).split(b"\n"), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            prompt = parse(text, number) if text.strip() else None
            if prompt and prompt.id in prompts:
                raise ValueError(f"id {prompt.id!r:.40} is repeated")
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
        if prompt:
            prompts[prompt.id] = prompt
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return list(prompts.values())[:limit]


def to_input_ids(prompt: str, target: Target) -> Tensor:
    """Token ids [1, L] int64 of a prompt.

    One user turn of the chat template with its generation prompt where the tokenizer has a template, the plain text
    otherwise. A target without a tokenizer (random weights) gets the UTF-8 bytes modulo its vocabulary. Raises
    ValueError when nothing is left.
    """
    tokenizer = target.tokenizer
    if tokenizer is None:
        ids = [byte % target.vocab_size for byte in prompt.encode()]
    elif getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError(f"prompt must give at least one token, got {prompt!r:.40}")
    return torch.tensor([ids], dtype=torch.int64)


def _from_text(line: str, number: int) -> Prompt:
    return Prompt(id=str(number), text=line.strip())


def _from_json(line: str, number: int) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"bad JSON ({error})") from None
    if not isinstance(record, dict) or "prompt" not in record:
        raise ValueError('must be an object with a "prompt"')
    identifier, category = record.get("id", number), record.get("category")
    if isinstance(identifier, bool) or not isinstance(identifier, int | str):
        raise ValueError(f"id must be a text or a whole number, got {identifier!r:.40}")
    if category is not None and not isinstance(category, str):
        raise ValueError(f"category must be a text, got {category!r:.40}")
    return Prompt(id=str(identifier), text=record["prompt"], category=category)

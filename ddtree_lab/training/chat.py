"""A tokenizer's chat template, cut into the pieces that surround a conversation's turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MARKS = ("\u2983user-one\u2984", "\u2983answer-one\u2984", "\u2983user-two\u2984")


@dataclass(frozen=True)
class ChatFrame:
    """Token ids between turns, special tokens included."""

    prefix: tuple[int, ...]  # before the first user turn
    user_end: tuple[int, ...]  # from the end of a user turn to the start of the answer
    answer_end: tuple[int, ...]  # from the end of an answer to the start of the next user turn

    @classmethod
    def of(cls, tokenizer: Any) -> ChatFrame:
        """Raises ValueError when the tokenizer has no chat template or its template alters the turns."""
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise ValueError("the target's tokenizer has no chat template; self-written text needs one")
        turns = [
            {"role": role, "content": mark} for role, mark in zip(("user", "assistant", "user"), _MARKS, strict=True)
        ]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        pieces = []
        for mark in _MARKS:
            piece, found, text = text.partition(mark)
            if not found:
                raise ValueError("the target's chat template does not repeat its turns literally")
            pieces.append(tuple(tokenizer.encode(piece, add_special_tokens=False)))
        return cls(prefix=pieces[0], user_end=pieces[1], answer_end=pieces[2])

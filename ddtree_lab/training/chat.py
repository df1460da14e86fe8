"""A tokenizer's chat template: the pieces that surround a conversation's turns, and a token that text never holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddtree_lab.target.dense import DenseTarget

_MARKS = ("\u2983user-one\u2984", "\u2983answer-one\u2984", "\u2983user-two\u2984")


@dataclass(frozen=True)
class ChatFrame:
    """Token ids between turns, special tokens included."""

    prefix: tuple[int, ...]  # before the first user turn
    user_end: tuple[int, ...]  # from the end of a user turn to the start of the answer
    answer_end: tuple[int, ...]  # from the end of an answer to the start of the next user turn; may be empty

    @classmethod
    def of(cls, tokenizer: Any) -> ChatFrame:
        """Raises ValueError when the tokenizer has no chat template or its template does not keep turns apart."""
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
        prefix, user_end, answer_end = pieces
        if not prefix or not user_end:
            raise ValueError("the target's chat template has no text before or after a user turn")
        return cls(prefix, user_end, answer_end)


def default_mask_token(target: DenseTarget) -> int:
    """The special token with the largest id that text does not hold: no template, stop or unknown word uses it.

    Raises ValueError when the tokenizer has none.
    """
    tokenizer = target.tokenizer
    frame = ChatFrame.of(tokenizer)
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    used = {*target.stop_token_ids, *frame.prefix, *frame.user_end, *frame.answer_end, tokenizer.unk_token_id}
    free = [index for index in special | set(tokenizer.all_special_ids) if index not in used]
    inside = [index for index in free if index < target.vocab_size]
    if not inside:
        raise ValueError("--mask-token-id is needed: the target's tokenizer has no unused special token")
    return max(inside)

"""A tiny target with a chat template, whose answers end by themselves now and then."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from ddtree_lab.target.dense import DenseTarget
from ddtree_lab.target.random import preset_config, random_model

VOCAB = 256
START, END, MASK = 0, 1, 2
TEMPLATE = (
    "{% for m in messages %}{{ '<start> ' + m['role'] + ' ' + m['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start> assistant ' }}{% endif %}"
)
OPENERS = ("w10 w11 w12", "w20")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: <start>, <end>, <mask>, user, assistant and w5 to w255."""
    words = ["<start>", "<end>", "<mask>", "user", "assistant", *(f"w{index}" for index in range(5, VOCAB))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="w5"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<start>", "<end>", "<mask>"], unk_token="w5"
    )
    fast.chat_template = TEMPLATE
    return fast


def tiny_chat_target(preset: str = "tiny-dense", *, end_weight: float = 1.6) -> DenseTarget:
    """``end_weight`` scales the head's row of the end token: above 1 it is more often the most probable one."""
    model = random_model(preset_config(preset))
    with torch.no_grad():
        model.get_output_embeddings().weight[END] *= end_weight
    return DenseTarget(model, name=f"{preset} that chats", tokenizer=tiny_tokenizer())


def easy_chat_target() -> DenseTarget:
    """It says a few words only, each hanging on little more than the one before: a drafter learns that at once."""
    model = random_model(preset_config("tiny-dense"))
    with torch.no_grad():
        model.get_input_embeddings().weight *= 8
        head = model.get_output_embeddings().weight
        head[[token for token in range(VOCAB) if token != END and not 5 <= token < 12]] = 0
    return DenseTarget(model, name="easy", tokenizer=tiny_tokenizer())

"""Self-written text: what a row holds, against plain greedy decoding without a cache."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from training_samples import END, MASK, OPENERS, tiny_chat_target, tiny_tokenizer

from ddtree_lab.training.chat import ChatFrame, default_mask_token
from ddtree_lab.training.config import WriterConfig
from ddtree_lab.training.conversations import Conversations
from ddtree_lab.training.step_attention import grouped_attention, using_grouped_attention
from ddtree_lab.training.writer import SelfWriter

GREEDY = WriterConfig(
    rows=6,
    length=90,
    user_turns=((1, 4),),
    answer_cap=11,
    user_temperature=(0.0, 0.0),
    sampled_share=0.0,
    opener_share=0.7,
    bucket=16,
)
SAMPLED = replace(
    GREEDY,
    user_turns=((1, 3), (1, 7), (5, 9)),
    user_temperature=(0.8, 1.2),
    sampled_share=0.5,
    answer_temperature=1.0,
    bucket=64,
)


@pytest.fixture(scope="module", params=["tiny-dense", "tiny-sliding"])
def target(request):
    return tiny_chat_target(request.param)


@pytest.fixture(scope="module")
def dense():
    return tiny_chat_target()


def naive_conversation(target, start: list[int], config: WriterConfig) -> tuple[list[int], list[bool]]:
    """Tokens and which of them are the answer's, each by one forward over all before it."""
    frame = ChatFrame.of(target.tokenizer)

    ((shortest, longest),) = config.user_turns

    def following(tokens: list[int], *, no_end: bool = False) -> int:
        logits = target.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        if no_end:
            logits[END] = -torch.inf
        return int(logits.argmax())

    tokens, turn = list(start), 0
    while turn < longest and (token := following(tokens, no_end=turn < shortest)) != END:
        tokens.append(token)
        turn += 1
    tokens += frame.user_end
    written = [False] * len(tokens)
    for _ in range(config.answer_cap):
        tokens.append(following(tokens))
        written.append(True)
        if tokens[-1] == END:
            break
    return tokens, written


def texts(conversations: Conversations) -> list[tuple[list[int], list[bool]]]:
    bounds = conversations.offsets.tolist()
    return [(conversations.token_ids[a:b].tolist(), conversations.written[a:b].tolist()) for a, b in pairwise(bounds)]


@pytest.mark.parametrize("user_turn", [(1, 4), (6, 9)])
def test_every_greedy_conversation_equals_plain_decoding_of_its_own_start(target, user_turn):
    config = replace(GREEDY, user_turns=(user_turn,), length=128)
    frame = ChatFrame.of(target.tokenizer)
    starts = [[*frame.prefix, *target.tokenizer.encode(text, add_special_tokens=False)] for text in ("", *OPENERS)]
    expected = [naive_conversation(target, start, config) for start in starts]
    found = texts(SelfWriter(target, config, openers=OPENERS).write(seed=3))
    seen = set()
    for tokens, written in found:
        same = [i for i, whole in enumerate(expected) if (tokens, written) == whole]
        cut = [i for i, (t, w) in enumerate(expected) if t[: len(tokens)] == tokens and w[: len(tokens)] == written]
        assert cut
        seen |= set(same)
    assert seen == {0, 1, 2}
    complete = sum((tokens, written) in expected for tokens, written in found)
    assert len(found) - complete <= GREEDY.rows < complete


def test_answers_that_end_by_themselves_keep_their_end_token_and_others_stop_at_the_cap(dense):
    found = texts(SelfWriter(dense, replace(SAMPLED, rows=24), openers=OPENERS).write(seed=1))
    answers = [[t for t, own in zip(tokens, written, strict=True) if own] for tokens, written in found]
    natural = [answer for answer in answers if answer[-1] == END]
    capped = [answer for answer in answers if len(answer) == SAMPLED.answer_cap and answer[-1] != END]
    assert natural and capped
    assert all(END not in answer[:-1] for answer in answers)
    assert all(2 <= len(answer) <= SAMPLED.answer_cap for answer in answers)


def test_a_row_is_full_and_its_conversations_have_the_template_around_the_user_turn(dense):
    writer = SelfWriter(dense, SAMPLED, openers=OPENERS)
    found = texts(writer.write(seed=2))
    frame = ChatFrame.of(dense.tokenizer)
    openings = [tuple(dense.tokenizer.encode(text, add_special_tokens=False)) for text in OPENERS]
    for tokens, written in found:
        user = tuple(tokens[: written.index(True)])
        assert user[: len(frame.prefix)] == frame.prefix
        assert user[-len(frame.user_end) :] == frame.user_end
        turn = user[len(frame.prefix) : -len(frame.user_end)]
        opening = next((opening for opening in openings if turn[: len(opening)] == opening), ())
        assert turn and len(turn) - len(opening) <= 9
        assert all(written[written.index(True) :])
    assert sum(len(tokens) for tokens, _ in found) > 0.7 * SAMPLED.rows * SAMPLED.length


def test_seeds_repeat_and_differ(dense):
    writer = SelfWriter(dense, SAMPLED, openers=OPENERS)
    first, other, again = (texts(writer.write(seed=seed)) for seed in (5, 6, 5))
    fresh = texts(SelfWriter(dense, SAMPLED, openers=OPENERS).write(seed=5))
    assert first == again == fresh
    assert first != other


def test_a_row_does_not_depend_on_the_others(dense, monkeypatch):
    writer = SelfWriter(dense, SAMPLED, openers=OPENERS)
    writer.write(seed=7)
    before = writer._state.token_ids.clone()
    draw = writer._draw_tables

    def changed(seed: int):
        tables = draw(seed)
        tables["start"][0] = 1 + tables["start"][0] % 3
        tables["temperature"][0] = 0.0
        return tables

    monkeypatch.setattr(writer, "_draw_tables", changed)
    writer.write(seed=7)
    assert not torch.equal(writer._state.token_ids[0], before[0])
    assert torch.equal(writer._state.token_ids[1:], before[1:])


def test_draws_follow_the_temperature():
    torch.manual_seed(0)
    logits = torch.tensor([1.0, 0.0, -1.0, -3.0])
    for temperature in (0.5, 1.0):
        drawn = SelfWriter._draw(logits.expand(200_000, -1), torch.full((200_000,), temperature))
        shares = torch.bincount(drawn, minlength=4) / 200_000
        torch.testing.assert_close(shares, (logits / temperature).softmax(-1), atol=0.005, rtol=0)
    assert (SelfWriter._draw(logits.expand(100, -1), torch.zeros(100)) == 0).all()


@pytest.mark.parametrize("heads, groups, count", [(4, 2, 1), (9, 3, 1), (4, 4, 3), (6, 1, 2)])
def test_grouped_attention_equals_attention_with_repeated_keys(heads, groups, count):
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(3, heads, count, 8, generator=generator)
    key, value = torch.randn(2, 3, groups, 12, 8, generator=generator)
    mask = torch.where(torch.rand(3, 1, 1, 12, generator=generator) < 0.3, torch.finfo(torch.float32).min, 0.0)
    found, _ = grouped_attention(None, query, key, value, mask)
    keys, values = (x.repeat_interleave(heads // groups, dim=1) for x in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_the_model_has_its_own_attention_back_after_an_error(dense):
    before = dense.model.config._attn_implementation
    with pytest.raises(KeyError), using_grouped_attention(dense.model):
        assert dense.model.config._attn_implementation != before
        raise KeyError
    assert dense.model.config._attn_implementation == before


def test_the_chat_frame_and_the_mask_token_of_a_tokenizer(dense):
    frame = ChatFrame.of(tiny_tokenizer())
    assert frame == ChatFrame(prefix=(0, 3), user_end=(1, 0, 4), answer_end=(1, 0, 3))
    assert default_mask_token(dense) == MASK


def test_a_tokenizer_without_a_usable_template_is_refused(tiny_target):
    with pytest.raises(ValueError, match="no chat template"):
        SelfWriter(tiny_target, GREEDY)
    with pytest.raises(ValueError, match="no chat template"):
        default_mask_token(tiny_target)
    upper = tiny_tokenizer()
    upper.chat_template = upper.chat_template.replace("m['content']", "m['content'] | upper")
    with pytest.raises(ValueError, match="literally"):
        ChatFrame.of(upper)


@pytest.mark.parametrize("length", [10, 513])
def test_a_row_must_hold_a_conversation_and_fit_the_context(dense, length):
    with pytest.raises(ValueError, match=f"length must be from 11 .* to 512 .*, got {length}"):
        SelfWriter(dense, replace(GREEDY, length=length), openers=OPENERS)


@pytest.mark.parametrize(
    "name, value",
    [
        ("rows", 0),
        ("length", -1),
        ("answer_cap", 0),
        ("user_turns", ()),
        ("user_turns", ((4, 3),)),
        ("user_turns", ((0, 3),)),
        ("sampled_share", 1.5),
        ("opener_share", float("nan")),
        ("user_temperature", (1.0, 0.5)),
        ("answer_temperature", -1.0),
    ],
)
def test_writer_settings_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        WriterConfig(**{name: value})

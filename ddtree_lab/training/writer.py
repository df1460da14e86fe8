"""Self-written text: a target and its chat template in, conversations that the target wrote out.

A row is a fixed number of tokens. In it the target samples a user turn after the template's empty user turn (or after a
short opener), then answers, greedily or by sampling; when the answer ends, the row goes on with another conversation
that sees nothing of the ones before. All rows advance together, one token a step, so a step is a fixed set of tensor
operations: on a GPU it is captured in one CUDA graph per length bucket and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ddtree_lab.attention.formats import to_additive
from ddtree_lab.progress import progress_bar
from ddtree_lab.target.dense import DenseTarget
from ddtree_lab.training.chat import ChatFrame
from ddtree_lab.training.config import WriterConfig
from ddtree_lab.training.conversations import Conversations
from ddtree_lab.training.step_attention import ColumnCache, using_grouped_attention

USER, ANSWER = 0, 1
FEWEST_WRITTEN = 2  # a root and the token after it


@dataclass(frozen=True, eq=False)
class _Pieces:
    """The template's pieces in one tensor; piece 0 ends the user's turn, the others start a conversation."""

    tokens: Tensor  # [P] int64
    begins: Tensor  # [pieces] int64: index into tokens
    ends: Tensor  # [pieces] int64

    @classmethod
    def of(cls, pieces: Sequence[tuple[int, ...]], device: torch.device) -> _Pieces:
        lengths = torch.tensor([len(piece) for piece in pieces])
        ends = lengths.cumsum(0)
        tokens = torch.tensor([token for piece in pieces for token in piece])
        return cls(tokens.to(device), (ends - lengths).to(device), ends.to(device))


@dataclass(frozen=True, eq=False)
class _State:
    """Everything that a step reads and updates in place. The tables have a column for each conversation of a row."""

    token_ids: Tensor  # [R, T] int64
    written: Tensor  # [R, T] bool
    begins: Tensor  # [R, T] bool: a conversation's first token
    column: Tensor  # [1] int64: the last token in place
    first: Tensor  # [R] int64: column where the row's conversation begins
    conversation: Tensor  # [R] int64: its number in the row
    fresh: Tensor  # [R] bool: the next token begins a conversation
    phase: Tensor  # [R] int64: USER or ANSWER
    turn_length: Tensor  # [R] int64: tokens that the target drew in this turn
    cursor: Tensor  # [R] int64: next token of the template ...
    cursor_end: Tensor  # [R] int64: ... up to here
    start: Tensor  # table [R, C] int64: piece that starts the conversation
    shortest: Tensor  # table [R, C] int64: tokens of the user turn before it may end
    cap: Tensor  # table [R, C, 2] int64: longest user turn and answer
    temperature: Tensor  # table [R, C, 2] float32: of the user turn and the answer


class SelfWriter:
    """Writes batches of conversations with one target."""

    def __init__(self, target: DenseTarget, config: WriterConfig, *, openers: Sequence[str] = ()) -> None:
        """Raises ValueError for a target without a chat template and for a row length that does not fit."""
        self._target, self._config = target, config
        frame = ChatFrame.of(target.tokenizer)
        openings = [tuple(target.tokenizer.encode(opener, add_special_tokens=False)) for opener in openers]
        starts = [frame.prefix, *(frame.prefix + opening for opening in openings)]
        self._most_conversations = _most_conversations(target, config, frame, starts)
        self._num_starts = len(starts)
        self._pieces = _Pieces.of([frame.user_end, *starts], target.device)
        self._stops = _stops(frame, target).to(target.device)
        self._user_ends = self._stops[USER].nonzero().flatten()
        self._state = self._initial_state(seed=0)
        self._cache = ColumnCache(self._state.column, capacity=config.length)
        self._graphs = self._capture() if target.device.type == "cuda" else {}

    def write(self, *, seed: int) -> Conversations:
        """The conversations of one batch of rows. The seed is also set as torch's own, which draws the tokens."""
        torch.manual_seed(seed)
        self._reset(seed)
        steps = progress_bar(range(self._config.length - 1), "writing", unit="token")
        with using_grouped_attention(self._target.model):
            for column in steps:
                bucket = self._bucket_of(column)
                if self._graphs:
                    self._graphs[bucket].replay()
                else:
                    self._step(bucket)
        state = self._state
        return Conversations.of_rows(
            state.token_ids.cpu(), state.written.cpu(), state.begins.cpu(), fewest=FEWEST_WRITTEN
        )

    def _bucket_of(self, column: int) -> int:
        bucket = self._config.bucket
        return min((column // bucket + 1) * bucket, self._config.length)

    def _reset(self, seed: int) -> None:
        initial = self._initial_state(seed)
        for field in fields(_State):
            getattr(self._state, field.name).copy_(getattr(initial, field.name))

    def _initial_state(self, seed: int) -> _State:
        """Every row at the first token of its first conversation, with the tables drawn from ``seed``."""
        config, device = self._config, self._target.device
        rows, columns = config.rows, config.length
        tables = {name: table.to(device) for name, table in self._draw_tables(seed).items()}

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        token_ids, begins = zeros(rows, columns), zeros(rows, columns, dtype=torch.bool)
        start = tables["start"][:, 0]
        cursor = self._pieces.begins[start]
        token_ids[:, 0] = self._pieces.tokens[cursor]
        begins[:, 0] = True
        return _State(
            token_ids=token_ids,
            written=zeros(rows, columns, dtype=torch.bool),
            begins=begins,
            column=zeros(1),
            first=zeros(rows),
            conversation=zeros(rows),
            fresh=zeros(rows, dtype=torch.bool),
            phase=torch.full((rows,), USER, device=device),
            turn_length=zeros(rows),
            cursor=cursor + 1,
            cursor_end=self._pieces.ends[start],
            **tables,
        )

    def _draw_tables(self, seed: int) -> dict[str, Tensor]:
        """The tables of ``_State`` by name, on the CPU."""
        config, shape = self._config, (self._config.rows, self._most_conversations)
        generator = torch.Generator().manual_seed(seed)

        def uniform() -> Tensor:
            return torch.rand(shape, generator=generator)

        def below(count: int) -> Tensor:
            return torch.randint(count, shape, generator=generator)

        opened = uniform() < (config.opener_share if self._num_starts > 1 else 0.0)
        start = torch.where(opened, 2 + below(max(1, self._num_starts - 1)), 1)
        shortest, longest = torch.tensor(config.user_turns)[below(len(config.user_turns))].unbind(-1)
        low, high = config.user_temperature
        user_temperature = low + (high - low) * uniform()
        answer_temperature = (uniform() < config.sampled_share) * config.answer_temperature
        return {
            "start": start,
            "shortest": shortest,
            "cap": torch.stack([longest, torch.full(shape, config.answer_cap)], dim=-1),
            "temperature": torch.stack([user_temperature, answer_temperature], dim=-1),
        }

    @torch.inference_mode()
    def _step(self, bucket: int) -> None:
        """Read the token at the column, write the next one. Every tensor of the state is updated in place."""
        state, pieces, rows = self._state, self._pieces, self._config.rows
        at_conversation = state.conversation[:, None]
        shortest = state.shortest.gather(1, at_conversation)[:, 0]
        logits = self._logits(bucket)
        self._forbid_end(logits, (state.phase == USER) & (state.turn_length < shortest))
        drawn = self._draw(logits, self._of_turn(state.temperature))

        forced = state.cursor < state.cursor_end
        at_stop = self._stops[state.phase, drawn]
        at_cap = state.turn_length >= self._of_turn(state.cap)
        user_ends = ~forced & (state.phase == USER) & (at_stop | at_cap)
        answers = ~forced & (state.phase == ANSWER)
        answer_ends = answers & (at_stop | (state.turn_length + 1 >= self._of_turn(state.cap)))
        token = torch.where(forced, pieces.tokens[state.cursor.clamp(max=len(pieces.tokens) - 1)], drawn)
        token = torch.where(user_ends, pieces.tokens[0], token)

        state.column.add_(1)
        here = state.column.expand(rows, 1)
        state.token_ids.scatter_(1, here, token[:, None])
        state.written.scatter_(1, here, answers[:, None])
        state.begins.scatter_(1, here, state.fresh[:, None])
        state.first.copy_(torch.where(state.fresh, state.column, state.first))

        state.conversation.add_(answer_ends)
        state.fresh.copy_(answer_ends)
        state.phase.copy_(torch.where(user_ends, ANSWER, torch.where(answer_ends, USER, state.phase)))
        state.turn_length.copy_(torch.where(user_ends | answer_ends, 0, state.turn_length + ~forced))
        following = state.start.gather(1, at_conversation)[:, 0]
        cursor = torch.where(user_ends, 1, state.cursor + forced)
        cursor_end = torch.where(user_ends, pieces.ends[0], state.cursor_end)
        state.cursor.copy_(torch.where(answer_ends, pieces.begins[following], cursor))
        state.cursor_end.copy_(torch.where(answer_ends, pieces.ends[following], cursor_end))

    def _logits(self, bucket: int) -> Tensor:
        """[R, V] float32 after the token at the column."""
        state = self._state
        self._cache.visible = bucket
        output = self._target.model(
            input_ids=state.token_ids.gather(1, state.column.expand(self._config.rows, 1)),
            position_ids=(state.column - state.first)[:, None],
            attention_mask=self._mask(bucket),
            use_cache=True,
            **{self._target.cache_argument: self._cache},
        )
        return output.logits[:, -1].float()

    def _mask(self, bucket: int) -> Tensor | dict[str, Tensor]:
        """Additive masks [R, 1, 1, bucket] as the model takes them: the row's conversation up to the column."""
        state = self._state
        columns = torch.arange(bucket, device=state.column.device)
        seen = (columns <= state.column) & (columns >= state.first[:, None])
        masks = {}
        for kind, window in self._target.windows.items():
            near = seen if window is None else seen & (state.column - columns < window)
            masks[kind] = to_additive(near, self._target.dtype)[:, None, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _forbid_end(self, logits: Tensor, rows: Tensor) -> None:
        """Take the tokens that end a user turn out of logits [R, V] in ``rows`` [R] bool, in place."""
        ends = logits.index_select(1, self._user_ends).masked_fill(rows[:, None], -torch.inf)
        logits.index_copy_(1, self._user_ends, ends)

    def _of_turn(self, table: Tensor) -> Tensor:
        """[R] of a table [R, C, 2], for each row's conversation and phase."""
        index = 2 * self._state.conversation + self._state.phase
        return table.flatten(1).gather(1, index[:, None])[:, 0]

    @staticmethod
    def _draw(logits: Tensor, temperature: Tensor) -> Tensor:
        """[R] int64 from logits [R, V]: the argmax at temperature 0, else a sample (Gumbel noise)."""
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_()
        return (logits - noise * temperature[:, None]).argmax(-1)

    def _capture(self) -> dict[int, torch.cuda.CUDAGraph]:
        graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        with using_grouped_attention(self._target.model):
            for bucket in sorted({self._bucket_of(column) for column in range(self._config.length - 1)}):
                self._reset(seed=0)
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self._step(bucket)
                torch.cuda.current_stream().wait_stream(stream)
                graphs[bucket] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[bucket], pool=pool):
                    self._step(bucket)
        return graphs


def _most_conversations(
    target: DenseTarget, config: WriterConfig, frame: ChatFrame, starts: Sequence[tuple[int, ...]]
) -> int:
    """An upper bound of the conversations that a row begins; ValueError when a row cannot hold one."""
    user_turn = max(shortest for shortest, _longest in config.user_turns)
    longest = max(map(len, starts)) + user_turn + len(frame.user_end) + FEWEST_WRITTEN
    if not longest <= config.length <= target.context_length:
        raise ValueError(
            f"length must be from {longest} (template, longest opener, shortest long user turn, start of an answer) "
            f"to {target.context_length} (the context of {target.name}), got {config.length}"
        )
    shortest = min(map(len, starts)) + 1 + len(frame.user_end) + 1
    return config.length // shortest + 2


def _stops(frame: ChatFrame, target: DenseTarget) -> Tensor:
    """Bool [2, V]: the tokens that end a user turn and an answer."""
    stops = torch.zeros(2, target.vocab_size, dtype=torch.bool)
    stops[:, list(target.stop_token_ids)] = True
    stops[USER, frame.user_end[0]] = True
    stops[ANSWER, list(frame.answer_end[:1])] = True
    return stops

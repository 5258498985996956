"""The draft's side of a call: its context, its blocks, and the distributions its tokens were drawn from."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..calibration import apply_calibration
from ..sampling import draw

_FIELDS = ("temperature", "shift")
_MOST_WAITING = 64  # rounds without a draft whose states are held back


@dataclass
class DraftRound:
    """
    A drafted block of R rows; some of them may hold a copy in its place, which may be longer.

    Attributes:
        tokens (`torch.LongTensor` of shape `(R, K)`): Target ids.
        confidence (`torch.Tensor` of shape `(R, K)`, *optional*): Conditional acceptance probabilities (eq. 7).
        q (`torch.Tensor` of shape `(R, K, V_draft)`, *optional*): The distribution each token was drawn from.
        q_drawn (`torch.Tensor` of shape `(R, K)`, *optional*): Its value at the drawn token.
        copied (`torch.BoolTensor` of shape `(R,)`, *optional*): Rows whose tokens are copies; the above but for
            `tokens` and `q_drawn` says nothing of them.
    """

    tokens: torch.Tensor
    confidence: torch.Tensor | None = None
    q: torch.Tensor | None = None
    q_drawn: torch.Tensor | None = None
    copied: torch.Tensor | None = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "DraftRound":
        """The same round with every tensor passed through `function`."""
        parts = (self.tokens, self.confidence, self.q, self.q_drawn, self.copied)
        return DraftRound(*(None if part is None else function(part) for part in parts))


@dataclass
class RowContext:
    """A row's context: per draft layer its keys and values, `(length, H_kv, D)` each."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]

    def __len__(self) -> int:
        return self.layers[0][0].shape[0]


@dataclass
class DraftContext:
    """
    What the draft knew when a call ended; it stays with the target's cache for the next turn.

    Attributes:
        draft (`weakref.ref`): The draft it belongs to.
        slots (`int`): Length that the target's cache had. It is worthless once somebody else has changed that.
        rows (`list[RowContext]`): One per row.
    """

    draft: weakref.ref
    slots: int
    rows: list[RowContext]


class BlockSampler:
    """Draws each slot from softmax(warp(logits)) and keeps that distribution: it is q, exactly."""

    def __init__(self, warp: Callable[[torch.Tensor], torch.Tensor]):
        self.warp = warp
        self.q: list[torch.Tensor] = []
        self.q_drawn: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor, slot: int) -> torch.Tensor:
        q = self.warp(logits.float()).softmax(dim=-1)
        ids = draw(q)
        self.q.append(q)
        self.q_drawn.append(q.gather(-1, ids[:, None]).squeeze(-1))
        return ids


class Drafter:
    """
    Feeds the draft with the target's hidden states and lets it propose blocks.

    Args:
        draft (`DSparkDraftModel`): The draft; never modified.
        shared: What the draft borrows from the target.
        rows (`int`): Rows R at the start.
        capacity (`int`): Context slots to allocate at first.
        warp (`Callable`, *optional*): Position-wise warpers of the call; None drafts greedily.
    """

    def __init__(self, draft, shared, rows: int, capacity: int, warp: Callable | None):
        self.draft, self.shared, self.warp = draft, shared, warp
        self.device = draft.fc.weight.device
        self.cache = draft.new_cache(rows, slots=capacity)
        self.target_ids = draft.draft_to_target
        self.first_position = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.longest = 0  # host upper bound of the context lengths
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def read_prompt(self, padding: torch.Tensor | None, start: int, earlier: "DraftContext | None" = None):
        """
        A sink for the prompt's hidden states, chunk by chunk.

        Args:
            padding (`torch.BoolTensor` of shape `(R, P)`, *optional*): False where the prompt is padded.
            start (`int`): Column of the first new token; an earlier turn cached what comes before it.
            earlier (`DraftContext`, *optional*): The draft's context of that turn. Without it the draft sees the new
                tokens only, since their predecessors' hidden states are gone.
        """
        rows = self.cache.num_rows
        column = start
        if padding is not None:
            order = padding.to(self.device).long().cumsum(-1) - 1  # number of real tokens before each column
        before = order[:, start - 1] + 1 if padding is not None and start else self.first_position + start
        if earlier is not None and all(len(row) <= count for row, count in zip(earlier.rows, before.tolist())):
            self._restore(earlier)
        # a row that ended early may lack its very last token; its context goes on at the right position all the same
        self.first_position = before - self.cache.lengths

        def sink(states: torch.Tensor) -> None:
            nonlocal column
            width = states.shape[1]
            if padding is None:
                row = torch.arange(rows, device=self.device).repeat_interleave(width)
                position = torch.arange(column, column + width, device=self.device).repeat(rows)
                flat, lengths = states.flatten(0, 1), self.cache.lengths + width
            else:
                real = padding[:, column : column + width].to(self.device)
                row, offset = real.nonzero(as_tuple=True)
                position = order[row, column + offset]
                flat, lengths = states[row, offset], self.cache.lengths + real.sum(-1)
            column += width
            self.longest = column
            self.cache.reserve(self.longest + self.draft.config.block_size)
            slot = position - self.first_position[row]
            self.draft.extend_context(flat, position, self.cache, row, slot, lengths=lengths)

        return sink

    def _restore(self, earlier: "DraftContext") -> None:
        self.cache.reserve(max(map(len, earlier.rows)))
        for row, context in enumerate(earlier.rows):
            for layer, (keys, values) in enumerate(context.layers):
                self.cache.keys[layer][row, : len(context)] = keys.to(self.device)
                self.cache.values[layer][row, : len(context)] = values.to(self.device)
        self.cache.lengths = torch.tensor([len(row) for row in earlier.rows], device=self.device)

    def row_context(self, row: int, length: int) -> "RowContext":
        """A copy of the first `length` context tokens of a row."""
        self.flush()
        pairs = zip(self.cache.keys, self.cache.values)
        return RowContext([(keys[row, :length].clone(), values[row, :length].clone()) for keys, values in pairs])

    def extend(self, states: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, kept: torch.Tensor, width: int):
        """
        Appends the verified tokens' hidden states to the context.

        All of them are written; those of rejected tokens lie behind the new length and are overwritten later.

        Args:
            states (`torch.Tensor` of shape `(N, T * H)`): Hidden states of the N verified tokens.
            rows, offsets (`torch.LongTensor` of shape `(N,)`): Where they belong.
            kept (`torch.LongTensor` of shape `(R,)`): Tokens that stay, anchor included.
            width (`int`): Most tokens verified in a row.
        """
        rows, offsets = rows.to(self.device), offsets.to(self.device)
        slots = self.cache.lengths[rows] + offsets
        self._waiting.append((states, rows, slots))
        self.cache.lengths = self.cache.lengths + kept.to(self.device)
        self.longest += width
        # one token per row is all kept, so its slots are never written twice and can wait for the next draft
        if width > 1 or len(self._waiting) >= _MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Brings the draft's context up to date."""
        if not self._waiting:
            return
        self.cache.reserve(self.longest + self.draft.config.block_size)
        # a block of several tokens per row comes last, and alone: its rejected tokens lie on slots of no other
        states, rows, slots = (torch.cat(parts) for parts in zip(*self._waiting))
        self._waiting.clear()
        positions = slots + self.first_position[rows]
        self.draft.extend_context(states, positions, self.cache, rows, slots, lengths=self.cache.lengths)

    def draft_round(self, anchors: torch.Tensor, num_tokens: int) -> DraftRound:
        """One draft forward for all rows: `num_tokens` tokens behind each anchor `(R,)`."""
        self.flush()
        sampler = BlockSampler(self.warp) if self.warp is not None else None
        width = self.draft.config.block_size
        positions = (self.cache.lengths + self.first_position)[:, None] + torch.arange(width, device=self.device)
        block = self.draft.draft_block(
            None,
            anchors.to(self.device),
            positions,
            cache=self.cache,
            sampler=sampler,
            shared=self.shared,
            num_tokens=num_tokens,
            kv_length=self.longest + width,
        )
        confidence = block.confidence_logits
        if confidence is not None:
            confidence = self._calibrated(confidence.float()).sigmoid()
        q = q_drawn = None
        if sampler is not None:
            q, q_drawn = torch.stack(sampler.q, dim=1), torch.stack(sampler.q_drawn, dim=1)
        return DraftRound(block.tokens, confidence, q, q_drawn).map(lambda part: part.to(anchors.device))

    def _calibrated(self, logits: torch.Tensor) -> torch.Tensor:
        """Confidence logits `(R, K)` with the draft's saved temperatures and shifts (order kept)."""
        saved = self.draft.config.confidence_calibration
        if saved is None:
            return logits
        return apply_calibration(logits, *(saved.get(name) and saved[name][: logits.shape[1]] for name in _FIELDS))

    def q_at(self, drafted: DraftRound, slots: torch.Tensor, size: int) -> torch.Tensor:
        """What each row's token at `slots` `(R,)` was drawn from, over `size` target ids."""
        row = torch.arange(slots.shape[0], device=slots.device)
        if drafted.q is not None:
            drawn = drafted.q[row, slots.clamp_max(drafted.q.shape[1] - 1)]
            q = self.in_target_vocabulary(drawn, size)
        if drafted.copied is None:
            return q
        tokens = drafted.tokens[row, slots]
        certain = drafted.q_drawn.new_zeros(slots.shape[0], size).scatter_(1, tokens[:, None], 1.0)
        return certain if drafted.q is None else torch.where(drafted.copied[:, None], certain, q)

    def in_target_vocabulary(self, q: torch.Tensor, size: int) -> torch.Tensor:
        """Spreads draft-vocabulary probabilities `(R, V_draft)` over `size` target ids."""
        if self.target_ids is None:
            return torch.nn.functional.pad(q, (0, size - q.shape[-1]))
        return q.new_zeros(q.shape[0], size).index_copy_(1, self.target_ids.to(q.device), q)

    def keep(self, rows: torch.Tensor) -> None:
        """Keeps the rows in `rows`, in that order."""
        self.flush()
        rows = rows.to(self.device)
        self.cache.keep(rows)
        self.first_position = self.first_position[rows]

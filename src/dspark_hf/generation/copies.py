"""Copied blocks in the decoding loop: which rows copy, which are drafted, and the two side by side in one round.

What copying and drafting are worth is known from finished rounds and from the committed text alone. So the choice
between them never looks at the tokens of this round's draft, and sampling stays exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..copying import Copy, CopyRecord, DraftRecord, net_gain
from ..ops import on_device
from .drafter import DraftRound


@dataclass
class Offer:
    """
    The copies of a coming round.

    Attributes:
        copies (`list[Copy | None]`): One for each of the R rows that has any.
        confidence (`list[list[float]]`): Chance of each copied token, given that those before it are right.
        copying (`list[float]`): Seconds that each row's copy saves.
        drafting (`list[float]`): Seconds that drafted tokens save for it, the draft's own time not counted.
    """

    copies: list[Copy | None]
    confidence: list[list[float]]
    copying: list[float]
    drafting: list[float]

    @property
    def gain_of_drafting(self) -> float:
        """Seconds that a draft saves where it is better than copying, over all rows."""
        return sum(max(0.0, draft - copy) for draft, copy in zip(self.drafting, self.copying))

    def taken(self, drafted: bool) -> list[Copy | None]:
        """The copies that save time and, beside a draft, more than that does."""
        better = [copy > 0 and (not drafted or copy >= draft) for copy, draft in zip(self.copying, self.drafting)]
        return [copy if good else None for copy, good in zip(self.copies, better)]

    def merge(self, taken: list[Copy | None], confidence, width: int, limits: list[int]):
        """
        Confidences of a round in which some rows copy.

        Args:
            taken (`list[Copy | None]`): The copies chosen.
            confidence (`list[list[float]]`, *optional*): Of the drafted block, `[R][width]`.
            width (`int`): Tokens drafted per row; 0 without a draft.
            limits (`list[int]`): Most tokens to verify of each row.

        Returns:
            Confidences `[R][K]`, 0 behind a row's proposal, and the limits that follow from it.
        """
        most = max(width, max(len(copy.tokens) for copy in taken if copy is not None))
        rows = [self.confidence[slot] if copy else confidence[slot] if width else [] for slot, copy in enumerate(taken)]
        return [row + [0.0] * (most - len(row)) for row in rows], [min(*pair) for pair in zip(limits, map(len, rows))]


class CopyChoice:
    """
    Weighs copies against drafts.

    Args:
        sampled (`bool`): Whether tokens are sampled.
    """

    def __init__(self, sampled: bool):
        self.record, self.drafts = CopyRecord(sampled), DraftRecord()
        self._steps = self._tokens = 2.0  # of past rounds: plain steps taken, tokens a row that they brought

    def offer(self, copies: list[Copy | None], values: Sequence[float], ready: list[bool], plain, slot) -> Offer | None:
        """
        Args:
            copies (`list[Copy | None]`): What each of the R rows could copy.
            values (`Sequence[float]`): What a token of each row is worth (`row_values`).
            ready (`list[bool]`): Whether a row may be drafted for.
            plain (`float`): Seconds of a plain step, by rows on the target.
            slot (`float`): Seconds that verifying one token more takes.
        """
        if not any(copies):
            return None
        token = plain * self._steps / self._tokens
        confidence = [self.record.confidence(copy) if copy else [] for copy in copies]
        copying = [net_gain(row, token * value, slot) for row, value in zip(confidence, values)]
        kept, verified = self.drafts.kept * token, self.drafts.verified * slot
        drafting = [max(0.0, kept * value - verified) if open else 0.0 for value, open in zip(values, ready)]
        return Offer(copies, confidence, copying, drafting)

    def observe(self, taken: list[Copy | None], lengths: list[int], accepted: list[int], drafted: list[int]) -> None:
        """
        Takes in what became of a round's proposals.

        Args:
            taken (`list[Copy | None]`): The copies verified; may be empty.
            lengths, accepted (`list[int]`): Tokens verified and kept of each row.
            drafted (`list[int]`): Rows, by their place in the round, that were drafted for.
        """
        for copy, length, kept in zip(taken, lengths, accepted):
            if copy is not None:
                self.record.update(copy, length, kept)
        if drafted:
            rows = len(drafted)
            self.drafts.update(sum(lengths[at] for at in drafted) / rows, sum(accepted[at] for at in drafted) / rows)

    def keep_pace(self, steps: float, tokens: float) -> None:
        """Takes in a round that lasted `steps` plain steps and brought each row `tokens` tokens on average."""
        self._steps, self._tokens = 0.9 * self._steps + steps, 0.9 * self._tokens + tokens


def unpadded(input_ids: torch.Tensor, padding: torch.Tensor | None) -> list[list[int]]:
    """
    The tokens of each prompt.

    Args:
        input_ids (`torch.LongTensor` of shape `(batch, P)`): Padded prompts.
        padding (`torch.BoolTensor` of shape `(batch, C)`, *optional*): False where padded; may begin before them.
    """
    rows = input_ids.tolist()
    if padding is None:
        return rows
    real = padding[:, padding.shape[1] - input_ids.shape[1] :].tolist()
    return [[token for token, keep in zip(*row) if keep] for row in zip(rows, real)]


def with_copies(drafted: DraftRound | None, taken: list[Copy | None], device: torch.device) -> DraftRound:
    """A round's block with the copies in their rows' place; a copied token is drawn with probability 1."""
    width = max(len(copy.tokens) for copy in taken if copy is not None)
    width = width if drafted is None else max(width, drafted.tokens.shape[1])
    copied = on_device([copy is not None for copy in taken], device)
    rows = [copy.tokens if copy is not None else [] for copy in taken]
    tokens = on_device([row + [0] * (width - len(row)) for row in rows], device)
    if drafted is None:
        return DraftRound(tokens, q_drawn=torch.ones(tokens.shape, device=device), copied=copied)

    def widened(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else torch.nn.functional.pad(part, (0, width - part.shape[1]))

    tokens = torch.where(copied[:, None], tokens, widened(drafted.tokens))
    q_drawn = None if drafted.q_drawn is None else widened(drafted.q_drawn).masked_fill(copied[:, None], 1.0)
    return DraftRound(tokens, drafted.confidence, drafted.q, q_drawn, copied)


__all__ = ["CopyChoice", "Offer", "unpadded", "with_copies"]

"""How many slots of a block are worth drafting.

The head drafts a block slot by slot, over its whole vocabulary each time, so at high load a block costs a noticeable
share of a step: at 16 rows a seven-token draft may take twice as long as one of two tokens. Slots that Algorithm 1
then leaves out were drafted for nothing. How far a block reaches is therefore learnt from finished rounds: a slot is
drafted as long as what verifying it saved, in seconds and over all rows, exceeds what drafting it costs. One slot
beyond the last that pays is drafted as well, to notice when more would.

Exact under sampling: it looks at finished rounds only.
"""

from collections.abc import Sequence

_SPARE = 1


class DraftWidth:
    """The number of slots to draft in the coming round.

    Args:
        most (`int`): slots of a block, K.
        decay (`float`): weight that older rounds keep, per round.

    Attributes:
        tokens (`int`): slots to draft, 1 to K.
    """

    def __init__(self, most: int, decay: float = 0.7):
        self.most, self.decay, self.tokens = most, decay, most
        self._savings: list[float | None] = [None] * most

    def observe(self, savings: Sequence[float], slot_seconds: float) -> None:
        """Take in a drafted round.

        Args:
            savings ([K' <= K]): seconds that verifying each drafted slot saved, summed over the rows.
            slot_seconds (`float`): cost of drafting one slot more.
        """
        for slot, saved in enumerate(savings):
            before = self._savings[slot]
            self._savings[slot] = saved if before is None else self.decay * before + (1.0 - self.decay) * saved
        pays = [saved is not None and saved > slot_seconds for saved in self._savings[: len(savings)]]
        last = max((slot + 1 for slot, paid in enumerate(pays) if paid), default=0)
        self.tokens = min(self.most, last + _SPARE)


__all__ = ["DraftWidth"]

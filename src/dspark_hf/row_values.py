"""What a token of each row is worth to a batch that ends with its slowest row.

A server that refills its batch wants tokens per second, whoever they belong to; so does Algorithm 1 (DSpark, arXiv
2607.05147, section 3.2). One `generate()` call is not refilled. Let a step of R rows take `shared + own * R` seconds.
Rows that still need n_1, n_2, ... tokens are finished, decoded plainly, after

    shared * max(n_r) + own * sum(n_r)    seconds,

so a token saves `own` in any row, and `shared` only where the last row to finish gets it. Rows whose drafts fail set
the pace; tokens for the others make them wait. With many rows that turns a draft which brings more tokens per second
into a longer call.

`row_values` says it in weights for Algorithm 1, 1 on average: what a row must still do, divided by its pace so far,
tells which rows are likely to finish last, and the uncertainty of the rest decides how sharply they stand out.
`banked_steps` counts what a round really brought, by the formula above; summed over a call that is the time saved
against plain decoding. Neither looks at the tokens of the round to come.
"""

import math
from collections.abc import Sequence

# Tokens that a row is assumed to need at most: a distant limit says nothing about where an answer ends.
HORIZON = 256
# Spread of what rows will still have gained on one another, per square root of a token to go.
SPREAD = 0.7


def step_shares(plain_one: float, plain_all: float, rows: int) -> tuple[float, float]:
    """`shared` and `own` seconds of a plain step: what it takes whatever the rows, and for each of them.

    Args:
        plain_one, plain_all (`float`): seconds of a plain step of one row and of all `rows` rows.
        rows (`int`): R.
    """
    own = max(0.0, plain_all - plain_one) / max(1, rows - 1)
    return plain_all - own * rows, own


def row_values(remaining: Sequence[int], pace: Sequence[float], shared: float, own: float) -> list[float]:
    """Value of a token of each row, 1 on average over the rows.

    Args:
        remaining ([R]): tokens that each row may still get.
        pace ([R]): tokens per drafted round, positive.
        shared, own (`float`): see `step_shares`.
    """
    rows = len(remaining)
    most = max(remaining)
    mean = sum(pace) / rows
    left = [max(0, count - most + min(most, HORIZON)) * mean / speed for count, speed in zip(remaining, pace)]
    last = max(left)
    spread = max(1.0, SPREAD * math.sqrt(last))
    odds = [math.exp((count - last) / spread) for count in left]
    total = sum(odds)
    return [rows * (own + shared * chance / total) / (shared + own * rows) for chance in odds]


def banked_steps(remaining: Sequence[int], committed: Sequence[int], shared: float, own: float) -> float:
    """Plain steps that a round saved for sure: those that plain decoding would have needed to get as far.

    Args:
        remaining ([R]): tokens that each row might still get before the round.
        committed ([R]): tokens that it got.
        shared, own (`float`): see `step_shares`.
    """
    rows = len(remaining)
    ahead = max(remaining) - max(count - got for count, got in zip(remaining, committed))
    return (shared * ahead + own * sum(committed)) / (shared + own * rows)


class RowPace:
    """Tokens per drafted round of each row, averaged over past rounds and drawn towards the mean of all.

    Args:
        prior (`float`): rounds that the mean is worth.
        decay (`float`): weight that older rounds keep, per round.
    """

    def __init__(self, prior: float = 6.0, decay: float = 0.95):
        self.prior, self.decay = prior, decay
        self._seen: dict[int, tuple[float, float]] = {}

    def update(self, rows: Sequence[int], committed: Sequence[int]) -> None:
        """Take in a drafted round: tokens that each row got."""
        for row, got in zip(rows, committed):
            tokens, rounds = self._seen.get(row, (0.0, 0.0))
            self._seen[row] = (self.decay * tokens + got, self.decay * rounds + 1.0)

    def of(self, rows: Sequence[int]) -> list[float]:
        """Pace of each row; 1 or more."""
        seen = [self._seen.get(row, (0.0, 0.0)) for row in rows]
        mean = (sum(tokens for tokens, _ in seen) + 2.0) / (sum(rounds for _, rounds in seen) + 2.0)
        return [(tokens + self.prior * mean) / (rounds + self.prior) for tokens, rounds in seen]

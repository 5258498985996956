"""When to draft at all: the never-slower rule of the scheduler (DSpark, arXiv 2607.05147, sections 3.2 and 5.2).

Algorithm 1 shortens what is verified, but the draft itself has been paid for by then. A draft that does not fit the
text, or a batch that already fills the machine, is slower with speculation than without, however short the lengths. So
every round starts with a question that only the past may answer: is drafting worth it *now*?

`DraftGate` answers it from the *gain* of drafted rounds, in plain decoding steps:

    gain = tokens committed per row - round seconds / plain step seconds

(a plain step commits one token per row in one step, so 0 is break-even). Gains are noisy: a draft that wins by a
quarter loses every other round. The gate therefore keeps an account. Gains and losses go in, credit is capped, and the
gate closes when the account is overdrawn by `allowance` steps *and* the best estimate of the next gain is negative.
So a useless draft costs a bounded number of steps, and a good one is not shut out by bad luck. A draft that is sure of
itself and wrong again and again gets less of the allowance (`trust`): bad luck does not look like that. Promises may
stay good while nothing is gained, as in a batch whose slowest row accepts nothing: an account overdrawn by `patience`
closes the gate whatever the estimate. A closed gate pauses, then lets a single round through as a probe; each losing
probe doubles the pause up to a cap. One gate serves a batch and one each row: a row whose drafts keep failing should
not pay because its neighbors accept.

`AcceptanceTracker` remembers how often each slot was accepted. It stands in for confidence scores where a draft has no
head for them, and tells a closed gate whether a changed load is worth an early probe (`DraftGate.wake`).

Exact under sampling: both look at finished rounds only, and whatever the answer, the next token comes from the target.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Below this share of kept promises a draft does not know its own text: bad luck alone seldom looks like it.
_TRUSTED = 0.25


@dataclass
class DraftGate:
    """Open or closed for drafting, from the gains of past rounds.

    Usage, once per round: `if gate.is_open:` draft, verify and `gate.observe(...)`; else decode plainly and
    `gate.skip()`. The state may outlive a call: what was learnt about a draft holds for the next prompt too.

    Attributes:
        allowance (`float`): plain steps that drafting may lose before the gate closes. With the defaults a useless
            draft loses 1 to 2 % over 256 tokens, probes included. Half as much is allowed after each reopening.
        patience (`float`): plain steps that drafting may lose however good the estimate. Half as much after each time.
        credit (`float`): plain steps of past gains that count against later losses at most.
        decay (`float`): weight that older rounds keep in the estimate, per round; 0.95 averages over about twenty.
        first_pause, max_pause (`int`): rounds of the first pause and of the longest.
        backoff (`float`): factor by which a losing probe lengthens the pause.
        settle (`int`): drafted rounds in a row after which an open gate that is not in debt forgets its past closings.
        drafted_rounds, skipped_rounds, closings (`int`): counts since the start.
        account (`float`): current account, in plain steps.
    """

    allowance: float = 2.0
    patience: float = math.inf
    credit: float = 4.0
    decay: float = 0.95
    first_pause: int = 4
    max_pause: int = 128
    backoff: float = 2.0
    settle: int = 16

    drafted_rounds: int = 0
    skipped_rounds: int = 0
    closings: int = 0
    account: float = 0.0

    def __post_init__(self):
        if not 0.0 < self.decay < 1.0:
            raise ValueError(f"decay must lie between 0 and 1, got {self.decay}.")
        if not 1 <= self.first_pause <= self.max_pause:
            raise ValueError(f"need 1 <= first_pause <= max_pause, got {self.first_pause} and {self.max_pause}.")
        if self.backoff < 1.0:
            raise ValueError(f"backoff must be at least 1, got {self.backoff}.")
        if self.allowance < 0.0 or self.credit < 0.0:
            raise ValueError(f"allowance and credit must not be negative, got {self.allowance} and {self.credit}.")
        if self.patience < self.allowance:
            raise ValueError(f"patience must be at least allowance, {self.allowance}, got {self.patience}.")
        self._streak = 0  # drafted rounds since the gate opened
        self._pause = 0  # rounds left until the next probe
        self._next_pause = self.first_pause
        self._tolerance, self._patience = self.allowance, self.patience
        self._probing = False
        # Fading sums over drafted rounds: rounds, relative seconds, extra tokens promised and realised.
        self._weight = self._seconds = 0.0
        self._promised = self._realised = 1.0  # one token of good faith, which fades too
        self._outlook = None  # fast mean of the promises alone

    @property
    def is_open(self) -> bool:
        """Whether to draft in the coming round."""
        return self._pause == 0

    @property
    def is_probing(self) -> bool:
        """Whether the coming round is the probe after a pause."""
        return self._probing

    @property
    def pause(self) -> int:
        """Rounds left until the next probe."""
        return self._pause

    @property
    def share_without_draft(self) -> float:
        """Share of rounds without a draft since the start, 0 to 1."""
        rounds = self.drafted_rounds + self.skipped_rounds
        return self.skipped_rounds / rounds if rounds else 0.0

    @property
    def reliability(self) -> float:
        """Extra tokens realised per extra token promised, averaged over past rounds; 1 before anything was seen."""
        return self._realised / self._promised if self._promised > 0.0 else 1.0

    @property
    def trust(self) -> float:
        """Share of the allowance that a losing draft gets: less where it keeps little of what it promises, 0 to 1."""
        return min(1.0, self.reliability / _TRUSTED)

    @property
    def expected_gain(self) -> float:
        """Estimated gain of the next drafted round, in plain steps: what was promised lately times its reliability."""
        if self._outlook is None:
            return 0.0
        return 1.0 + self._outlook * self.reliability - self._seconds / self._weight

    def observe(
        self,
        tokens_per_row: float,
        relative_seconds: float,
        predicted_tokens: float | None = None,
        banked_tokens: float | None = None,
    ) -> None:
        """Take in a drafted round.

        Args:
            tokens_per_row (`float`): tokens committed, bonus included, divided by the rows.
            relative_seconds (`float`): duration of the round, draft included, in plain steps of the same rows.
            predicted_tokens (`float`, *optional*): what the confidences promised in place of `tokens_per_row`. It is
                less noisy than the accept counts, and believed as far as it was right before.
            banked_tokens (`float`, *optional*): what the account is credited with, where that is not `tokens_per_row`.
        """
        self.drafted_rounds += 1
        self._streak += 1
        banked = tokens_per_row if banked_tokens is None else banked_tokens
        self.account = min(self.credit, self.account + banked - relative_seconds)
        # Without a prediction every round promises the same, and `reliability` becomes the mean of what was realised.
        promised = 1.0 if predicted_tokens is None else max(predicted_tokens - 1.0, 0.0)
        self._outlook = promised if self._outlook is None else 0.7 * self._outlook + 0.3 * promised
        self._weight = self.decay * self._weight + 1.0
        self._seconds = self.decay * self._seconds + relative_seconds
        self._promised = self.decay * self._promised + promised
        self._realised = self.decay * self._realised + max(tokens_per_row - 1.0, 0.0)
        losing = self.expected_gain < 0.0
        if self._pause:
            return  # drafted ahead, before the round that closed the gate was over: nothing new to decide
        if self._probing:
            self._probing = False
            if losing:
                self._close()
            else:
                # Reopened on less: the gate has been wrong about this draft before.
                self._tolerance = max(0.5 * self._tolerance, 0.1 * self.allowance)
                self.account, self._streak = self._tolerance - self.allowance, 0
        elif self.account < -(self.allowance * self.trust if losing else self._patience):
            if not losing:
                self._patience = max(0.5 * self._patience, self.allowance)
            self._close()
        elif self._streak >= self.settle and self.account >= 0.0:
            self._next_pause, self._tolerance, self._patience = self.first_pause, self.allowance, self.patience

    def skip(self, rounds: int = 1) -> None:
        """Take in rounds that were decoded plainly; the pause runs down."""
        self.skipped_rounds += rounds
        if self._pause:
            self._pause = max(0, self._pause - rounds)
            self._probing = self._pause == 0

    def wake(self) -> None:
        """End the pause: the load has changed and the last known acceptance would pay now."""
        if self._pause:
            self._pause = 0
            self._probing = True

    def close(self) -> None:
        """Close by prediction, without a drafted round: at this load not even a good draft would pay."""
        if self.is_open:
            self._close()

    def _close(self) -> None:
        self.closings += 1
        # A probe that loses more than half a step must be rarer for the same loss.
        self._pause = min(self.max_pause, round(self._next_pause * max(1.0, -2.0 * self.expected_gain)))
        self._next_pause = min(self.max_pause, max(self._next_pause + 1, int(self._next_pause * self.backoff)))
        # What came before the pause counts as two rounds beside the probe, so that one good probe can reopen.
        fade = min(1.0, 2.0 / self._weight) if self._weight else 1.0
        self._weight, self._seconds = self._weight * fade, self._seconds * fade
        self._promised, self._realised = self._promised * fade, self._realised * fade
        self._probing, self._streak = False, 0


class AcceptanceTracker:
    """Acceptance of each slot given that the slots before it were accepted, averaged over past rounds.

    Args:
        num_slots (`int`): K.
        prior (`float`): acceptance assumed before anything was seen.
        prior_weight (`float`): tries that the prior is worth; it fades like old rounds do.
        decay (`float`): weight that older rounds keep, per round.
    """

    def __init__(self, num_slots: int, *, prior: float = 0.7, prior_weight: float = 2.0, decay: float = 0.97):
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}.")
        if not 0.0 <= prior <= 1.0:
            raise ValueError(f"prior must lie between 0 and 1, got {prior}.")
        self.decay = decay
        # lists: for so few numbers they are faster than tensors
        self._tries = [prior_weight] * num_slots
        self._hits = [prior_weight * prior] * num_slots

    def update(self, accepted: Tensor | Sequence[int], lengths: Tensor | Sequence[int]) -> None:
        """Take in a round.

        Args:
            accepted ([R]): accepted drafts per row.
            lengths ([R]): verified drafts per row.
        """
        slots = len(self._tries)
        tries, hits = [0] * slots, [0] * slots
        for kept, length in zip(map(int, accepted), map(int, lengths)):
            for slot in range(min(length, kept + 1, slots)):
                tries[slot] += 1
                hits[slot] += slot < kept
        for slot in range(slots):
            if tries[slot]:  # a slot that nobody tried keeps what is known of it
                self._tries[slot] = self.decay * self._tries[slot] + tries[slot]
                self._hits[slot] = self.decay * self._hits[slot] + hits[slot]

    @property
    def conditional(self) -> Tensor:
        """[K], float64: acceptance of a slot after the slots before it were accepted."""
        return torch.tensor([hits / tries for hits, tries in zip(self._hits, self._tries)], dtype=torch.float64)

    def confidence(self, num_rows: int) -> Tensor:
        """[R, K], float64: `conditional` for every row, in place of scores from a confidence head."""
        return self.conditional.expand(num_rows, -1)

    def survival(self, num_rows: int) -> Tensor:
        """[R, K], float64: its running product."""
        return self.conditional.cumprod(0).expand(num_rows, -1)


def time_saved(tokens: float, rows: int, seconds: float, plain_seconds: float) -> float:
    """Seconds that plain decoding would have needed beyond those spent; negative where the round lost.

    Args:
        tokens (`float`): tokens committed over all rows.
        rows (`int`): R.
        seconds (`float`): duration of the round, draft included.
        plain_seconds (`float`): duration of one plain step of the same rows.
    """
    return tokens / rows * plain_seconds - seconds


def row_costs(lengths: Sequence[int], extra_seconds: float, rate: float) -> list[float]:
    """Relative seconds of each row for its own gate: what its verified slots cost, in tokens.

    A row would get its one token without them, hence the leading 1. Beyond that it pays its share of what verification
    took longer than a plain step, at the rate of plain decoding. In `DraftGate.observe` it stands beside 1 + the
    accepted drafts of the row. The draft is not a row's to pay: it takes as long whether the row uses it or not.

    Args:
        lengths ([R]): drafts that were verified.
        extra_seconds (`float`): of the verification beyond a plain step.
        rate (`float`): tokens per second of plain decoding, over all rows.
    """
    per_slot = extra_seconds / max(1, sum(lengths))
    return [1.0 + rate * per_slot * length for length in lengths]

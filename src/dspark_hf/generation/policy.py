"""How much to draft and to verify in each round of a call (paper section 3.2).

Two decisions, kept apart because they may use different things. *Whether to draft* looks at finished rounds and at
the load. *How much of a drafted block to verify* looks at this block's confidences, each of which has seen the tokens
before its slot and none behind. Neither ever looks at the token it decides about, so sampling stays exact (paper
appendix A).

Both are functions of the call's own history and of a cost table, never of the clock, so that a seed gives the same
output twice.
"""

from dataclasses import dataclass, field

import torch

from ..copying import Copy
from ..draft_gate import AcceptanceTracker, DraftGate, row_costs
from ..draft_width import DraftWidth
from ..row_values import RowPace, banked_steps, row_values, step_shares
from ..scheduling import (
    Fill,
    Payoff,
    Schedule,
    budget_lengths,
    confidence_lengths,
    predict,
    schedule,
    speculation_pays,
    survival,
    throughput_round,
)
from ..throughput import CONTEXT_STEP, ThroughputProfile
from .copies import CopyChoice
from .settings import Settings

# A stale budget replaces the early stop where the cost curve is so jagged that stopping early loses this much.
_JAGGED = 1.01
# Drafting must be predicted to win by this share before a paused gate is woken, and the load fallen to this one.
_WAKE_MARGIN, _WAKE_LOAD = 0.02, 0.75


@dataclass
class Plan:
    """Verify lengths of a round and what was predicted for it; the predictions are None where nothing is measured."""

    lengths: list[int]
    expected_tokens: float | None = None
    seconds: float | None = None
    plain_seconds: float | None = None
    # Rows that copy, where any does, and the confidences of all proposals, `[R][K]`.
    copies: list[Copy | None] = field(default_factory=list)
    confidence: list[list[float]] | None = None


class ConstantPolicy:
    """Drafts in every round; verifies all of it, or what a threshold on the confidences leaves."""

    def __init__(self, settings: Settings):
        self.settings = settings

    @property
    def draft_tokens(self) -> int:
        """Most tokens to draft in the coming round."""
        return self.settings.num_tokens

    @property
    def copy_tokens(self) -> int:
        """Most tokens to copy for a row; 0 for rules that do not weigh copies against drafts."""
        return 0

    def wants_draft(self, rows: list[int], context: int, load: int) -> bool:
        """Whether the coming round is drafted; a threshold of 1 would verify nothing of it."""
        return self.settings.schedule == "constant" or self.settings.threshold < 1

    def plan(self, rows, confidence, width: int, limits: list[int], context: int, load: int) -> Plan:
        """
        Args:
            rows (`list[int]`): Running rows.
            confidence (`list[list[float]]`, *optional*): Conditional acceptance probabilities `[R][K]`.
            width (`int`): Tokens drafted per row, 0 in a round without a draft.
            limits (`list[int]`): Most tokens each row may verify.
            context (`int`): Longest cached context.
            load (`int`): Rows of other calls.
        """
        if not width:
            return Plan([0] * len(rows))
        if self.settings.schedule == "constant" or confidence is None:
            return Plan([max(0, min(width, limit)) for limit in limits])
        scores = torch.tensor(confidence, dtype=torch.float64)
        result = schedule(self.settings.schedule, scores, threshold=self.settings.threshold, limit=limits)
        return Plan(result.lengths.tolist(), result.expected_tokens)

    def observe(self, rows: list[int], plan: Plan, accepted: list[int], committed: int, drafted: bool) -> None:
        """Takes in a finished round; nothing to learn here."""


class ThroughputPolicy(ConstantPolicy):
    """
    Algorithm 1 on a measured cost table, and no draft at all where plain decoding is predicted to be faster.

    Tokens of different rows count by what they are worth to a call that ends with its slowest row (`row_values`). One
    gate watches the batch and one each row, since a row whose drafts keep failing should not pay for a batch that
    accepts. All of it starts anew with every call.

    Args:
        settings (`Settings`): The call's knobs.
        profile (`ThroughputProfile`): What a step costs.
        width (`int`): Tokens drafted per round.
        rows (`int`): Rows of the call.
        fill (`Fill`): Tokens that a step is filled up to; what there is room for is verified too.
        sampled (`bool`): Whether tokens are sampled.
    """

    def __init__(
        self, settings: Settings, profile: ThroughputProfile, width: int, rows: int, fill: Fill = int, sampled=False
    ):
        super().__init__(settings)
        self.profile, self.width, self.fill = profile, width, fill
        # The gains of many rows vary less than those of one, so that fewer steps tell as much, and a probe costs more.
        many = {"allowance": 0.25 + 2.5 / rows, "patience": 2.0, "credit": 1.0, "first_pause": min(16, 4 * rows)}
        self.gate = DraftGate(**many) if rows > 1 else DraftGate()
        self.row_gates = [DraftGate() for _ in range(rows)] if rows > 1 else None
        self.tracker, self.pace, self.reach = AcceptanceTracker(width), RowPace(), DraftWidth(width)
        self._situation: tuple[int, int, int] | None = None  # rows, load, context in steps of the cost table
        self._closed_at = 0  # rows, those of other calls included, when the gate closed
        self._hopeless = False  # whether not even a perfect draft would pay
        self._budget: int | None = None  # of older rounds, where the cost curve is jagged
        self._round: _Round | None = None  # in progress
        self._shares: dict[tuple[int, int], tuple[float, float]] = {}  # `step_shares` by rows and context
        self.choice, self._offer = CopyChoice(sampled), None

    @property
    def draft_tokens(self) -> int:
        """As in [`ConstantPolicy`]; the slots that lately were worth drafting."""
        return self.reach.tokens

    @property
    def copy_tokens(self) -> int:
        """As in [`ConstantPolicy`]."""
        return self.settings.copy_tokens

    def _cost(self, rows: int, context: int, load: int) -> torch.Tensor:
        most = max(self.width, self.settings.copy_tokens)
        return self.profile.cost_table(rows * (1 + most) + load, rows + load, context)

    def _values(self, rows: list[int], limits: list[int], context: int) -> tuple[list[float], tuple[float, float]]:
        """What a token of each row is worth, and the shares of a step that it follows from."""
        if self.row_gates is None:
            return [1.0], (1.0, 0.0)
        key = (len(rows), context // CONTEXT_STEP)
        if key not in self._shares:
            one, all_rows = (self.profile.plain_seconds(count, context) for count in (1, len(rows)))
            self._shares[key] = step_shares(one, all_rows, len(rows))
        return row_values([limit + 1 for limit in limits], self.pace.of(rows), *self._shares[key]), self._shares[key]

    def offer(self, rows: list[int], copies: list[Copy | None], limits: list[int], context: int, load: int) -> None:
        """What each row could copy in the coming round; before it is drafted and planned."""
        self._offer = None
        if any(copies):
            cost, running = self._cost(len(rows), context, load), len(rows) + load
            plain, slot = float(cost[running]), float(cost[-1] - cost[running]) / (len(cost) - 1 - running)
            ready = [self._is_open(row) for row in rows]
            values = self._values(rows, limits, context)[0]
            self._offer = self.choice.offer(copies, values, ready, plain / running, slot)

    def wants_draft(self, rows: list[int], context: int, load: int) -> bool:
        """Whether the coming round is drafted; looks at finished rounds and the load only."""
        situation = (len(rows), load, context // CONTEXT_STEP)
        if self._situation != situation:
            if self._situation is None or self._situation[:2] != situation[:2]:
                self._budget = None
            self._situation = situation
            self._weigh(len(rows), context, load)
        if self._hopeless or not super().wants_draft(rows, context, load):
            return False
        if self._round is not None and self.gate.is_probing:
            return False  # asked ahead, during a probe: its outcome decides
        if self.row_gates is not None and not any(self.row_gates[row].is_open for row in rows):
            return False
        if self._round is not None and self._round.copies_do:
            return False  # asked ahead, where drafting beside copies does not pay: the next round decides
        if self._copies_do(len(rows)):
            return False
        return self.gate.is_open

    def _weigh(self, rows: int, context: int, load: int) -> None:
        """After a change of load: wake the gate if what was accepted would pay now, rest it if nothing would."""
        cost, draft = self._cost(rows, context, load), self.profile.draft_seconds(rows)
        arguments = {"draft_seconds": draft, "load_rows": load}
        perfect = torch.ones(rows, self.width, dtype=torch.float64)
        self._hopeless = not speculation_pays(perfect, cost, **arguments).pays
        if self._hopeless or self.gate.is_open or rows + load > _WAKE_LOAD * self._closed_at:
            return
        self._closed_at = rows + load
        if speculation_pays(self.tracker.survival(rows), cost, margin=_WAKE_MARGIN, **arguments).pays:
            self.gate.wake()

    def plan(self, rows, confidence, width: int, limits: list[int], context: int, load: int) -> Plan:
        """As in [`ConstantPolicy`]."""
        cost, running = self._cost(len(rows), context, load), len(rows) + load
        plain = float(cost[running])
        now = self._round = _Round([limit + 1 for limit in limits], self._copies_do(len(rows)))
        offer, self._offer = self._offer, None
        if offer is not None and any(copies := offer.taken(width > 0)):
            now.copies = copies
        if not width and not now.copies:
            return Plan([0] * len(rows), float(len(rows)), plain, plain)
        now.values, now.shares = self._values(rows, limits, context)
        copied = [copy is not None for copy in now.copies] or [False] * len(rows)
        now.own = [slot for slot, row in enumerate(rows) if not copied[slot] and self._is_open(row)]
        limits = [limit if copied[slot] or slot in now.own else 0 for slot, limit in enumerate(limits)]
        if now.copies:
            confidence, limits = offer.merge(now.copies, confidence, width, limits)
        else:
            limits = [min(limit, width) for limit in limits]
        draft = self.profile.draft_seconds(len(rows), width) if width else 0.0
        scores = torch.tensor(confidence, dtype=torch.float64)
        if self.settings.threshold > 0:
            # a cut at slot k uses scores up to k only, so it may narrow what the others choose from
            limits = confidence_lengths(scores, self.settings.threshold, limits)
        arguments = {"cost": cost, "draft_seconds": draft, "load_rows": load}
        alive = survival(scores)
        worth = alive
        if self.row_gates is not None:
            worth = alive * torch.tensor(now.values, dtype=torch.float64)[:, None]
        result, outlook = throughput_round(worth, limit=limits, fill=self.fill, **arguments)
        stale, self._budget = self._budget, self._next_budget(result, outlook)
        if stale is not None:
            stale = stale and self.fill(len(rows) + stale) - len(rows)
            result = predict(worth, budget_lengths(worth, stale, limits), **arguments)
        lengths, alive = result.lengths.tolist(), alive.tolist()
        verified = sum(lengths)
        now.slot_seconds = float(cost[running + verified] - cost[running]) / max(1, verified)
        now.copy_seconds = now.slot_seconds * sum(length for length, copy in zip(lengths, copied) if copy)
        price = min(plain / running, result.seconds / result.expected_tokens)
        self._price_slots(now, alive, lengths, width, price)
        expected = len(rows) + sum(sum(row[:length]) for row, length in zip(alive, lengths))
        return Plan(lengths, expected, result.seconds, plain, now.copies, confidence if now.copies else None)

    @staticmethod
    def _price_slots(now: "_Round", alive: list[list[float]], lengths: list[int], width: int, price: float) -> None:
        """What the drafted slots promise, and the seconds that verifying each saves: its tokens less their cost."""
        now.savings, promised = [0.0] * width, 0.0
        for slot in now.own:
            value = now.values[slot]
            for place in range(lengths[slot]):
                worth = value * alive[slot][place]
                promised += worth
                now.savings[place] += worth * price - now.slot_seconds
        now.promised = 1.0 + promised / len(alive)

    def _copies_do(self, rows: int) -> bool:
        """Whether the rows' copies leave too little for a draft to save."""
        return self._offer is not None and self._offer.gain_of_drafting <= self.profile.draft_seconds(rows)

    def _is_open(self, row: int) -> bool:
        return self.row_gates is None or self.row_gates[row].is_open

    @staticmethod
    def _next_budget(result: Schedule, outlook: Payoff) -> int | None:
        """The budget for the round after this one; None where stopping early is as good."""
        return outlook.budget if outlook.theta > _JAGGED * result.theta else None

    def observe(self, rows: list[int], plan: Plan, accepted: list[int], committed: int, drafted: bool) -> None:
        """
        Takes in a finished round.

        Args:
            rows (`list[int]`): Rows that took part.
            plan (`Plan`): What was planned for it.
            accepted (`list[int]`): Drafted tokens that each row kept.
            committed (`int`): Tokens added over all rows.
            drafted (`bool`): Whether there was a draft.
        """
        now, self._round = self._round, None
        self.choice.observe(now.copies, plan.lengths, accepted, now.own if drafted else [])
        self.choice.keep_pace(plan.seconds / plan.plain_seconds, committed / len(rows))
        if self.row_gates is not None and (drafted or now.copies):
            self.pace.update(rows, [1 + kept for kept in accepted])
        copied = [copy is not None for copy in now.copies] or [False] * len(rows)
        if not drafted or all(copied):
            self.gate.skip()
            for row in rows if self.row_gates is not None else ():
                self.row_gates[row].skip()
            return
        count, was_open = len(rows), self.gate.is_open
        got = [1 + kept for kept in accepted]
        anyway = [1 + kept if copy else 1 for copy, kept in zip(copied, accepted)]  # without the draft
        accepted = [0 if copy else kept for copy, kept in zip(copied, accepted)]
        lengths = [0 if copy else length for copy, length in zip(copied, plan.lengths)]
        self.tracker.update(accepted, lengths)
        whole, one = (self.profile.draft_seconds(count, tokens) for tokens in (self.width, 1))
        self.reach.observe(now.savings, (whole - one) / max(1, self.width - 1))
        relative = (plan.seconds - now.copy_seconds) / plan.plain_seconds
        if self.row_gates is None:
            self.gate.observe(float(committed), relative, now.promised)
        else:
            worth = 1.0 + sum(value * kept for value, kept in zip(now.values, accepted)) / count
            banked, without = (banked_steps(now.remaining, tokens, *now.shares) for tokens in (got, anyway))
            self.gate.observe(worth, relative, now.promised, 1.0 + banked - without)
            self._observe_rows(rows, plan, lengths, accepted, now)
        if was_open and not self.gate.is_open:
            self._closed_at = sum(self._situation[:2])

    def _observe_rows(self, rows, plan: Plan, lengths: list[int], accepted: list[int], now: "_Round") -> None:
        """Each row's gate weighs what its drafted slots brought against what they cost; the draft is the batch's."""
        rate = sum(self._situation[:2]) / plan.plain_seconds
        costs = row_costs(lengths, now.slot_seconds * sum(lengths), rate)
        for slot, (row, kept, value, cost) in enumerate(zip(rows, accepted, now.values, costs)):
            gate = self.row_gates[row]
            if slot in now.own:
                gate.observe(1 + value * kept, cost)
            else:
                gate.skip()


@dataclass
class _Round:
    """What was known when the round in progress was planned: see `row_values`."""

    remaining: list[int]
    copies_do: bool  # whether a draft would not have paid beside them
    copies: list[Copy | None] = field(default_factory=list)
    own: list[int] = field(default_factory=list)  # rows, by their place, that verify what was drafted for them
    values: list[float] | None = None
    shares: tuple[float, float] = (1.0, 0.0)
    promised: float = 1.0
    slot_seconds: float = 0.0
    copy_seconds: float = 0.0
    savings: list[float] = field(default_factory=list)

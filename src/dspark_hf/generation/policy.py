"""How much to draft and to verify in each round of a call (paper section 3.2).

Two decisions, kept apart because they may use different things. *Whether to draft* looks at finished rounds and at
the load. *How much of a drafted block to verify* looks at this block's confidences, each of which has seen the tokens
before its slot and none behind. Neither ever looks at the token it decides about, so sampling stays exact (paper
appendix A).

Both are functions of the call's own history and of a cost table, never of the clock, so that a seed gives the same
output twice.
"""

import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass

import torch

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
from .settings import Settings

# A stale budget replaces the early stop where the cost curve is so jagged that stopping early loses this much.
_JAGGED = 1.01
# Drafting must be predicted to win by this share before a paused gate is woken, and the load fallen to this one.
_WAKE_MARGIN, _WAKE_LOAD = 0.02, 0.75


class Load:
    """Rows that the other running `generate()` calls of this process decode on a target, with a draft or without."""

    def __init__(self):
        self._lock = threading.Lock()
        self._targets: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    @contextmanager
    def call(self, target):
        """Registers a call of this thread; yields a function that sets its running rows and returns the others'."""
        token, thread = object(), threading.get_ident()
        with self._lock:
            running = self._targets.setdefault(target, _Running())
            if not running.calls:
                running.hook = target.register_forward_pre_hook(running.see, with_kwargs=True)
            running.calls[token] = 0
            outer = running.call_of_thread.get(thread)
            running.call_of_thread[thread] = token
        asked = [running.clock] * 2

        def update(rows: int) -> int:
            running.calls[token] = rows
            running.clock += 1
            since = asked.pop(0)
            asked.append(running.clock)
            return sum(list(running.calls.values())) - rows + running.rows_without_draft(since)

        try:
            yield update
        finally:
            with self._lock:
                del running.calls[token]
                running.call_of_thread[thread] = outer
                if outer is None:
                    del running.call_of_thread[thread]
                if not running.calls:
                    running.hook.remove()


class _Running:
    """What runs on one target. The clock counts the rounds of all registered calls."""

    def __init__(self):
        self.calls: dict[object, int] = {}  # rows of each registered call
        self.call_of_thread: dict[int, object] = {}
        self.others: dict[int, tuple[int, int]] = {}  # thread: rows of its last forward, and when that was
        self.clock = 0
        self.hook = None

    def see(self, module, args, kwargs) -> None:
        """Before each forward of the target: calls that are not registered show themselves by it."""
        inputs = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
        inputs = args[0] if inputs is None and args else inputs
        if inputs is None:
            return
        thread = threading.get_ident()
        token = self.call_of_thread.get(thread)
        if token is None:
            self.others[thread] = (inputs.shape[0], self.clock)
        elif self.calls[token] == 0:
            self.calls[token] = inputs.shape[0]  # still at its prompt

    def rows_without_draft(self, since: int) -> int:
        """Rows of threads that have used the target since then; the rest are forgotten."""
        for thread, (_, seen) in list(self.others.items()):
            if seen < since:
                self.others.pop(thread, None)
        return sum(rows for rows, _ in list(self.others.values()))


LOAD = Load()


@dataclass
class Plan:
    """Verify lengths of a round and what was predicted for it; the predictions are None where nothing is measured."""

    lengths: list[int]
    expected_tokens: float | None = None
    seconds: float | None = None
    plain_seconds: float | None = None


class ConstantPolicy:
    """Drafts in every round; verifies all of it, or what a threshold on the confidences leaves."""

    def __init__(self, settings: Settings):
        self.settings = settings

    @property
    def draft_tokens(self) -> int:
        """Most tokens to draft in the coming round."""
        return self.settings.num_tokens

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
    """

    def __init__(self, settings: Settings, profile: ThroughputProfile, width: int, rows: int, fill: Fill = int):
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

    @property
    def draft_tokens(self) -> int:
        """As in [`ConstantPolicy`]; the slots that lately were worth drafting."""
        return self.reach.tokens

    def _cost(self, rows: int, context: int, load: int) -> torch.Tensor:
        return self.profile.cost_table(rows * (1 + self.width) + load, rows + load, context)

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
        cost = self._cost(len(rows), context, load)
        plain = float(cost[len(rows) + load])
        self._round = _Round(remaining=[limit + 1 for limit in limits])
        if not width:
            return Plan([0] * len(rows), float(len(rows)), plain, plain)
        limits = [min(limit, width) for limit in limits]
        if self.row_gates is not None:
            limits = [limit if self.row_gates[row].is_open else 0 for row, limit in zip(rows, limits)]
            self._round.shares = step_shares(
                self.profile.plain_seconds(1, context), self.profile.plain_seconds(len(rows), context), len(rows)
            )
            self._round.values = row_values(self._round.remaining, self.pace.of(rows), *self._round.shares)
        draft = self.profile.draft_seconds(len(rows), width)
        if self.settings.threshold > 0:
            # a cut at slot k uses scores up to k only, so it may narrow what the others choose from
            limits = confidence_lengths(torch.tensor(confidence), self.settings.threshold, limits)
        arguments = {"cost": cost, "draft_seconds": draft, "load_rows": load}
        alive = survival(torch.tensor(confidence, dtype=torch.float64))
        worth = alive
        if self.row_gates is not None:
            worth = alive * torch.tensor(self._round.values, dtype=torch.float64)[:, None]
        result, outlook = throughput_round(worth, limit=limits, fill=self.fill, **arguments)
        stale, self._budget = self._budget, self._next_budget(result, outlook)
        if stale is not None:
            stale = stale and self.fill(len(rows) + stale) - len(rows)
            result = predict(worth, budget_lengths(worth, stale, limits), **arguments)
        self._round.promised = result.expected_tokens / len(rows)
        kept = torch.arange(width) < result.lengths[:, None]
        self._round.draft_seconds = draft
        self._round.savings = self._savings(worth, kept, cost, result, len(rows) + load)
        return Plan(result.lengths.tolist(), len(rows) + float((alive * kept).sum()), result.seconds, plain)

    @staticmethod
    def _savings(worth: torch.Tensor, kept: torch.Tensor, cost: torch.Tensor, result: Schedule, rows: int) -> list:
        """Seconds that verifying each slot saves, over all rows: its tokens at today's price, less their cost."""
        verified = int(kept.sum())
        if not verified:
            return [0.0] * kept.shape[1]
        price = min(float(cost[rows]) / rows, result.seconds / result.expected_tokens)
        step = float(cost[rows + verified] - cost[rows]) / verified
        return (kept * (worth * price - step)).sum(0).tolist()

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
        if not drafted:
            self.gate.skip()
            for row in rows if self.row_gates is not None else ():
                self.row_gates[row].skip()
            return
        count, was_open = len(rows), self.gate.is_open
        self.tracker.update(accepted, plan.lengths)
        whole, one = (self.profile.draft_seconds(count, tokens) for tokens in (self.width, 1))
        self.reach.observe(now.savings, (whole - one) / max(1, self.width - 1))
        relative = plan.seconds / plan.plain_seconds
        if self.row_gates is None:
            self.gate.observe(float(committed), relative, now.promised)
        else:
            got = [1 + kept for kept in accepted]
            self.pace.update(rows, got)
            worth = 1.0 + sum(value * kept for value, kept in zip(now.values, accepted)) / count
            self.gate.observe(worth, relative, now.promised, banked_steps(now.remaining, got, *now.shares))
            self._observe_rows(rows, plan, accepted, now.values, now.draft_seconds)
        if was_open and not self.gate.is_open:
            self._closed_at = sum(self._situation[:2])

    def _observe_rows(self, rows, plan: Plan, accepted: list[int], values: list[float], draft_seconds: float) -> None:
        """Each row's gate weighs what its verified slots brought against what they cost; the draft is the batch's."""
        extra = plan.seconds - draft_seconds - plan.plain_seconds
        rate = sum(self._situation[:2]) / plan.plain_seconds
        costs = row_costs(plan.lengths, extra, rate)
        for row, kept, value, cost in zip(rows, accepted, values, costs):
            gate = self.row_gates[row]
            if gate.is_open:
                gate.observe(1 + value * kept, cost)
            else:
                gate.skip()


@dataclass
class _Round:
    """What was known when the round in progress was planned: see `row_values`."""

    remaining: list[int]
    values: list[float] | None = None
    shares: tuple[float, float] = (1.0, 0.0)
    promised: float = 1.0
    draft_seconds: float = 0.0
    savings: list[float] = ()

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
from ..scheduling import (
    Schedule,
    budget_lengths,
    confidence_lengths,
    predict,
    schedule,
    speculation_pays,
    survival,
    throughput_lengths,
)
from ..throughput import CONTEXT_STEP, ThroughputProfile
from .settings import Settings

# A stale budget replaces the early stop where the cost curve is so jagged that stopping early loses this much.
_JAGGED = 1.01
# Drafting must be predicted to win by this share before a paused gate is woken.
_WAKE_MARGIN = 0.02


class Load:
    """Rows that each running call of this process decodes on a target."""

    def __init__(self):
        self._lock = threading.Lock()
        self._rows: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    @contextmanager
    def call(self, target):
        """Registers a call; yields a function that sets its running rows and returns those of the other calls."""
        token = object()
        with self._lock:
            calls = self._rows.setdefault(target, {})
            calls[token] = 0

        def update(rows: int) -> int:
            calls[token] = rows
            return sum(list(calls.values())) - rows

        try:
            yield update
        finally:
            with self._lock:
                calls.pop(token, None)


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

    One gate watches the batch and one each row, since a row whose drafts keep failing should not pay for a batch that
    accepts. They start anew with every call.

    Args:
        settings (`Settings`): The call's knobs.
        profile (`ThroughputProfile`): What a step costs.
        width (`int`): Tokens drafted per round.
        rows (`int`): Rows of the call.
    """

    def __init__(self, settings: Settings, profile: ThroughputProfile, width: int, rows: int):
        super().__init__(settings)
        self.profile, self.width = profile, width
        self.gate = DraftGate()
        self.row_gates = [DraftGate() for _ in range(rows)] if rows > 1 else None
        self.tracker = AcceptanceTracker(width)
        self._situation: tuple[int, int, int] | None = None  # rows, load, context in steps of the cost table
        self._hopeless = False  # whether not even a perfect draft would pay
        self._budget: int | None = None  # of older rounds, where the cost curve is jagged
        self._planned = False  # whether the round in progress has its plan

    def _cost(self, rows: int, context: int, load: int) -> torch.Tensor:
        total = rows + load
        return self.profile.cost_table(rows * (1 + self.width) + load, total, context)

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
        if self._planned and self.gate.is_probing:
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
        if not self._hopeless and not self.gate.is_open:
            known = self.tracker.survival(rows)
            if speculation_pays(known, cost, margin=_WAKE_MARGIN, **arguments).pays:
                self.gate.wake()

    def plan(self, rows, confidence, width: int, limits: list[int], context: int, load: int) -> Plan:
        """As in [`ConstantPolicy`]."""
        self._planned = True
        cost = self._cost(len(rows), context, load)
        plain = float(cost[len(rows) + load])
        if not width:
            return Plan([0] * len(rows), float(len(rows)), plain, plain)
        limits = [min(limit, width) for limit in limits]
        if self.row_gates is not None:
            limits = [limit if self.row_gates[row].is_open else 0 for row, limit in zip(rows, limits)]
        draft = self.profile.draft_seconds(len(rows))
        scores = torch.tensor(confidence, dtype=torch.float64)
        if self.settings.threshold > 0:
            # a cut at slot k uses scores up to k only, so it may narrow what the others choose from
            limits = confidence_lengths(torch.tensor(confidence), self.settings.threshold, limits)
        arguments = {"cost": cost, "draft_seconds": draft, "load_rows": load}
        alive = survival(scores)
        result = throughput_lengths(alive, limit=limits, **arguments)
        stale, self._budget = self._budget, self._next_budget(alive, result, limits, arguments)
        if stale is not None:
            result = predict(alive, budget_lengths(alive, stale, limits), **arguments)
        return Plan(result.lengths.tolist(), result.expected_tokens, result.seconds, plain)

    @staticmethod
    def _next_budget(alive, result: Schedule, limits: list[int], arguments: dict) -> int | None:
        """The budget for the round after this one; None where stopping early is as good."""
        pays = speculation_pays(alive, limit=limits, **arguments)
        if pays.theta <= _JAGGED * result.theta:
            return None
        return pays.budget

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
        self._planned = False
        if not drafted:
            self.gate.skip()
            for row in rows if self.row_gates is not None else ():
                self.row_gates[row].skip()
            return
        count = len(rows)
        self.tracker.update(accepted, plan.lengths)
        self.gate.observe(committed / count, plan.seconds / plan.plain_seconds, plan.expected_tokens / count)
        if self.row_gates is None:
            return
        load = 0 if self._situation is None else self._situation[1]
        draft, drafting = self.profile.draft_seconds(count), sum(self.row_gates[row].is_open for row in rows)
        extra = plan.seconds - draft - plan.plain_seconds
        costs = row_costs(plan.lengths, max(1, drafting), draft, extra, (count + load) / plan.plain_seconds)
        for row, kept, cost in zip(rows, accepted, costs):
            gate = self.row_gates[row]
            if gate.is_open:
                gate.observe(1 + kept, cost)
            else:
                gate.skip()
